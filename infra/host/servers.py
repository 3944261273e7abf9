"""Keeps inference servers alive: `servers DIRECTORY`, run as a job. Standard library only.

`spec.json` names the replicas' commands and the router's, with `{port}` where a port belongs. `servers.json` tells
everybody on this machine which replicas answer, and where; a file in `restarts/` asks for a new start of one.

Decision: a server gets a free port of the loopback for each start, so its address says which start it is. A server that
ends, does not answer in time, or is complained about is killed with all its processes and started again. After
`restarts` starts in a row without an answer, the whole job ends, with that server's last lines.

Decision: where the trainer is on another machine (`gate` in the spec), it comes through one port (see `gate`), with a
key that this job lets in (see `admission`). A machine that is drained is left (see `draining`).

Decision: a probe of a replica needs an answer of its scheduler, and not only of its web server, and is answered even
while generation is paused for new weights.
"""

import asyncio
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.host.draining import Drained, until_drained
from infra.host.files import add_record, write_json
from infra.host.gate import Gate, keep_gate
from infra.host.relay import keep_ways
from infra.host.system import end_with_parent, free_port
from rollouts_core.loopback import opened
from rollouts_core.network import interface_variables
from rollouts_core.store.locks import try_lock

LAST_LINES = 25
LINE = 400
LOOK_SECONDS = 1.0
START_LOOK_SECONDS = 0.5
READY_SECONDS = 10.0
GRACE = 3.0


class ServersFailed(Exception):
    """A server does not come up. Says so to a person."""


class Server:
    """A server: its state, and its last lines."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.entry = entry
        self.name: str = entry["name"]
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.state, self.url, self.starts, self.since = "starting", "", 0, time.time()

    def told(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "url": self.url,
            "state": self.state,
            "starts": self.starts,
            "since": self.since,
        }


def main(directory: Path) -> int:
    """Keep the servers until this process is ended. Returns an exit status only when they do not come up."""
    end_with_parent()
    spec = json.loads((directory / "spec.json").read_text())
    memory: Path | None = None
    status = 1
    try:
        memory = _memory(spec.get("memory"))
        with suppress(asyncio.CancelledError):  # it is asked to end
            asyncio.run(_keep_all(directory, spec))
    except* Drained:
        print("[serve] this machine is drained: its servers have ended", flush=True)
        status = 0
    except* ServersFailed as group:
        error = group.exceptions[0]
        print(f"[serve] failed: {error}", file=sys.stderr, flush=True)
        write_json(directory / "failure.json", {"stage": "serve", "message": str(error)})
    finally:
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)
    return status


async def _keep_all(directory: Path, spec: dict[str, Any]) -> None:
    replicas = [Server(entry) for entry in spec["replicas"]]
    router = Server(spec["router"]) if spec.get("router") else None
    servers = [*replicas, *([router] if router else [])]
    shutil.rmtree(directory / "restarts", ignore_errors=True)

    def told() -> dict[str, Any]:
        return {
            "replicas": [replica.told() for replica in replicas],
            "router": router.url if router and router.state == "ready" else None,
            "memory": spec.get("memory"),
        }

    def tell() -> None:
        ready = sum(server.state == "ready" for server in servers)
        states = [{**replica.told(), "url": None} for replica in replicas]
        add_record(directory / "metrics.jsonl", {"ready": ready, "of": len(servers), "replicas": states})
        write_json(directory / "servers.json", told())

    tell()
    loop, whole = asyncio.get_running_loop(), asyncio.current_task()
    assert whole is not None, "run by asyncio.run"
    loop.add_signal_handler(signal.SIGTERM, whole.cancel)
    async with asyncio.TaskGroup() as group:
        for server in servers:
            group.create_task(_keep(server, spec, directory / "restarts" / server.name, tell))
        if spec.get("gate"):
            ways: dict[str, int] = {}
            group.create_task(keep_ways(directory, ways))
            group.create_task(keep_gate(directory, Gate(directory, Path(spec["memory"]), told, ways)))
            group.create_task(until_drained(Path(spec["gate"]["drained"]), replicas, tell))


async def _keep(server: Server, spec: dict[str, Any], complaint: Path, tell: Any) -> None:
    """Start it again and again. Raises `ServersFailed` when it never comes to answer."""
    failures = 0
    while True:
        server.state, server.starts, server.url = "starting", server.starts + 1, f"http://127.0.0.1:{free_port()}"
        server.lines.clear()
        tell()
        process = await _start(server, interface_variables(spec["network"]) if spec.get("network") else {})
        reading = asyncio.create_task(_read_lines(server, process))
        try:
            reason = await _until_ready(server, process, spec["start_seconds"])
            if not reason:
                failures, server.state, server.since = 0, "ready", time.time()
                _say(server, f"answers at {server.url}")
                tell()
                reason = await _until_bad(server, process, spec["hang_seconds"], complaint)
            else:
                failures += 1
        finally:
            server.state = "down"
            tell()
            await _kill(process)
            await reading
        _say(server, f"{reason}; start {server.starts}")
        if failures >= spec["restarts"]:
            last = "".join(f"\n  {line}" for line in server.lines)
            raise ServersFailed(f"{server.name} {reason}, {failures} times in a row. Its last lines:{last}")


async def _start(server: Server, network: dict[str, str]) -> asyncio.subprocess.Process:
    port = server.url.rpartition(":")[2]
    ports = {"{port}": port, "{other_port}": str(free_port())}
    command = [ports.get(part, part) for part in server.entry["command"]]
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **server.entry["environment"], **network, **_visible(server.entry["devices"])},
        start_new_session=True,
        preexec_fn=end_with_parent,
        limit=2**20,
    )


async def _until_ready(server: Server, process: asyncio.subprocess.Process, seconds: float) -> str:
    """Wait until the server answers. Returns the problem if it does not; otherwise an empty text."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.returncode is not None:
            return f"ended with exit status {process.returncode} before it answered"
        if await asyncio.to_thread(answers, server.url + server.entry["ready"], min(READY_SECONDS, seconds)):
            return ""
        await asyncio.sleep(START_LOOK_SECONDS)
    return f"did not answer within {seconds:g} s"


async def _until_bad(server: Server, process: asyncio.subprocess.Process, patience: float, complaint: Path) -> str:
    """Wait until the server must be started again, and return the reason."""
    heard = time.monotonic()
    while True:
        try:
            await asyncio.wait_for(process.wait(), LOOK_SECONDS)
            return f"ended with exit status {process.returncode}"
        except TimeoutError:
            pass
        if reason := _complained(complaint, server.url):
            return f"is not to be trusted ({reason})"
        if await asyncio.to_thread(answers, server.url + server.entry["probe"], patience):
            heard = time.monotonic()
        elif time.monotonic() - heard > patience:
            return f"has not answered for {patience:g} s"


async def _read_lines(server: Server, process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None, "started with a pipe"
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a line without end
            continue
        if not line:
            return
        text = line.decode(errors="replace").rstrip()
        if text:
            server.lines.append(text[:LINE])
            _say(server, text[:LINE])


async def _kill(process: asyncio.subprocess.Process) -> None:
    """TERM, then KILL, to all of its group."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        try:
            await asyncio.wait_for(process.wait(), GRACE)
        except TimeoutError:
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def answering(directory: Path) -> dict[str, int] | None:
    """How many of a job's servers answer, `ready`, `of` how many; None where it keeps none."""
    try:
        replicas = json.loads((directory / "servers.json").read_text())["replicas"]
    except (OSError, ValueError):
        return None
    return {"ready": sum(replica["state"] == "ready" for replica in replicas), "of": len(replicas)}


def answers(url: str, seconds: float) -> bool:
    """Whether a GET of it is answered well in time."""
    try:
        with opened(url, seconds) as answer:
            return answer.status == 200
    except OSError:
        return False


def _visible(places: list[int]) -> dict[str, str]:
    """The environment variable with the leased GPUs that a server is to see."""
    leased = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(leased[place] for place in places)} if places else {}


def _complained(file: Path, url: str) -> str:
    """The complaint about this start of the server; complaints about earlier starts are dropped."""
    try:
        said = json.loads(file.read_text())
        file.unlink()
    except (OSError, ValueError):
        return ""
    return str(said.get("reason", "no reason given")) if said.get("url") == url else ""


def _memory(path: str | None) -> Path | None:
    """Make the directory for weights on their way, ours while we live; those of dead owners go."""
    if path is None:
        return None
    place = Path(path)
    for old in place.parent.glob(f"{place.name.partition('.')[0]}.*"):
        if _is_abandoned(old):
            shutil.rmtree(old, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ServersFailed(f"{place} is another user's, or others may write there: remove it")
    lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    if not try_lock(lock):
        raise ServersFailed(f"{place} is in use by other servers")
    return place


def _is_abandoned(place: Path) -> bool:
    try:
        lock = os.open(place / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        return try_lock(lock)
    finally:
        os.close(lock)


def _say(server: Server, text: str) -> None:
    print(f"[{server.name}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
