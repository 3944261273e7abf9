"""A trainer's way to servers on other machines: `pool DIRECTORY`, a job beside the trainer's. Standard library only.

`machines.json` names the machines; whoever looks after the pool writes it anew when one joins or leaves.
`servers.json` tells the trainer which replicas answer, as `servers` does for those of its own machine: each has a port
of the loopback here, new with each start. A file in `restarts/` asks for a new start of one.

Decision: a link is a process of OpenSSH's client that leads to one port of a machine's loopback (`gate` there). The key
is made here, for this job, and never leaves it. A link that breaks is made again; until then its replicas can't be
used.

Decision: the pool belongs to the trainer and does not depend on the orchestrator, which may end and start again.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.host import links
from infra.host.files import add_record, write_json
from infra.host.gate import WINDOW, splice
from infra.host.links import Machine

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 10.0
AGAIN_SECONDS = 2.0


@dataclass
class Link:
    """The state of a machine, and the ports here that lead to it."""

    machine: Machine
    port: int = 0
    """A port here that leads to the machine's gate. 0: there is no connection."""
    told: dict[str, Any] = field(default_factory=dict)
    doors: dict[tuple[str, int], asyncio.Server] = field(default_factory=dict)
    """The ports that lead to each start of a replica."""
    problem: str = "it is being connected"
    asked: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)

    def replicas(self) -> list[dict[str, Any]]:
        """The replicas as the trainer is told: without a connection none can be reached."""
        found = []
        for entry in self.told.get("replicas", []):
            door = self.doors.get((entry["name"], entry["starts"]))
            if door is not None:
                port = door.sockets[0].getsockname()[1]
                state = entry["state"] if self.port else "away"
                name, url = f"{self.machine.name}:{entry['name']}", f"http://127.0.0.1:{port}"
                found.append({**entry, "name": name, "url": url, "state": state, "machine": self.machine.name})
        return found


def main(directory: Path) -> int:
    """Keep the links until this process is ended."""
    if missing := [program for program in ("ssh", "ssh-keygen") if shutil.which(program) is None]:
        message = f"{' and '.join(missing)} is not here: servers on other machines are reached by OpenSSH's client"
        write_json(directory / "failure.json", {"stage": "serve", "message": message})
        return 1
    links.tell_key(directory)
    spec = json.loads((directory / "spec.json").read_text())
    with suppress(asyncio.CancelledError):
        asyncio.run(_keep_links(directory, spec))
    (directory / links.KEY).unlink(missing_ok=True)
    return 0


async def _keep_links(directory: Path, spec: dict[str, Any]) -> None:
    """Run a task for each machine that is named in the file now."""
    loop, whole = asyncio.get_running_loop(), asyncio.current_task()
    assert whole is not None, "run by asyncio.run"
    loop.add_signal_handler(signal.SIGTERM, whole.cancel)
    kept: dict[Machine, tuple[Link, asyncio.Task[None]]] = {}
    said = ""
    async with asyncio.TaskGroup() as group:
        while True:
            named = links.machines_in(directory / "machines.json")
            for machine in kept.keys() - named:
                link, task = kept.pop(machine)
                task.cancel()
                print(f"[{machine.name}] has left", flush=True)
            for machine in named - kept.keys():
                link = Link(machine)
                kept[machine] = (link, group.create_task(_keep(link, directory)))
            _pass_complaints(directory / "restarts", [link for link, _ in kept.values()])
            said = _tell(directory, spec, [link for link, _ in kept.values()], said)
            await asyncio.sleep(LOOK_SECONDS)


async def _keep(link: Link, directory: Path) -> None:
    """Connect again and again, and look what is there."""
    try:
        while True:
            async with links.link(link.machine, directory) as linked:
                try:
                    await _converse(link, linked.port)
                except (OSError, EOFError, ValueError, TimeoutError) as error:
                    reason = f"{type(error).__name__}: {error}"
                finally:
                    link.port = 0
            if (problem := linked.said or reason) != link.problem:
                print(f"[{link.machine.name}] is not reached: {problem}", flush=True)
            link.problem = problem
            await asyncio.sleep(AGAIN_SECONDS)
    finally:
        for door in link.doors.values():
            door.close()


async def _converse(link: Link, port: int) -> None:
    """Look at the machine until it does not answer any more, which raises."""
    reader, writer = await links.entered(port)
    try:
        while True:
            link.told = await _asked(reader, writer, {"do": "look"})
            if not link.port:
                print(f"[{link.machine.name}] is reached", flush=True)
                link.problem = ""
            link.port = port
            await _open_doors(link)
            await asyncio.sleep(LOOK_SECONDS)
            while not link.asked.empty():
                await _asked(reader, writer, link.asked.get_nowait())
    finally:
        writer.close()


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(ANSWER_SECONDS):
        writer.write(json.dumps(asked).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
    if not line:
        raise EOFError("its servers are not there")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _open_doors(link: Link) -> None:
    """A port here for each start of a replica there; those of earlier starts are closed."""
    there = {(entry["name"], entry["starts"]) for entry in link.told["replicas"]}
    for start in link.doors.keys() - there:
        link.doors.pop(start).close()
    for start in there - link.doors.keys():

        async def enter(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, start: tuple[str, int] = start
        ) -> None:
            await _lead(link, start, reader, writer)

        link.doors[start] = await asyncio.start_server(enter, "127.0.0.1", 0, limit=WINDOW)


async def _lead(link: Link, start: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        if not link.port:
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", link.port, limit=WINDOW)
        hello = {"to": start[0], "start": start[1]}
        far_writer.write(json.dumps(hello).encode() + b"\n")
        await splice(reader, writer, far_reader, far_writer)
    except (OSError, asyncio.CancelledError):
        return
    finally:
        writer.close()


def _pass_complaints(directory: Path, links: list[Link]) -> None:
    """Pass the trainer's complaints about a replica on to the replica's machine."""
    if not directory.exists():
        return
    for link in links:
        urls = {entry["name"]: entry["url"] for entry in link.told.get("replicas", [])}
        for entry in link.replicas():
            file = directory / entry["name"]
            if not file.exists():
                continue
            said = json.loads(file.read_text())
            file.unlink()
            if said.get("url") == entry["url"]:
                name = entry["name"].partition(":")[2]
                link.asked.put_nowait(
                    {"do": "restart", "name": name, "url": urls[name], "reason": str(said.get("reason", ""))}
                )


def _tell(directory: Path, spec: dict[str, Any], links: list[Link], said: str) -> str:
    """Write what there is, where that has changed; returns it."""
    replicas = [entry for link in links for entry in link.replicas()]
    machines = [
        {
            "name": link.machine.name, "address": link.machine.host, "port": link.port, "problem": link.problem,
            "memory": link.told.get("memory"), "reaches": link.told.get("reaches", []),
        }
        for link in links
    ]  # fmt: skip
    told = {"replicas": replicas, "router": None, "memory": spec["memory"], "machines": machines}
    if (text := json.dumps(told)) == said:
        return said
    write_json(directory / "servers.json", told)
    ready = sum(entry["state"] == "ready" for entry in replicas)
    states = [{**entry, "url": None} for entry in replicas]
    add_record(directory / "metrics.jsonl", {"ready": ready, "of": len(replicas), "replicas": states})
    return text


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(Path(sys.argv[1])))
