"""The gate of a machine whose servers a trainer on another machine uses: one port of the loopback, reached over SSH.

`admitted.pub` in the job's directory has the public keys of who may come through, a line each.

Decision: servers get a new port with each start, and a key of SSH can be restricted to one port. So everything goes
through one port: requests to a replica, questions about replicas, complaints, and new weights. A client says in one
line of JSON what it wants:

    {"to": NAME, "start": N}    the connection is the replica's, for as long as that start of it lives
    {"do": ...}                 answered by a line of JSON; more lines may follow

    look                        the replicas; asking keeps the job attended
    restart                     asks for a new start of a replica
    held, put, settle           new weights (see `weight_files`); the bytes follow a `put`, or their changes do. With
                                `on` they are passed on to other machines (see `relay`), whose answers come with ours
    alive                       nothing
"""

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.host import admission, weight_files
from infra.host.files import add_record, write_json
from infra.host.keeping import HANDED
from infra.host.links import LINE
from infra.host.relay import Onward
from rollouts_core.errors import MISSHAPEN
from rollouts_core.weight_changes import changed

LOOK_SECONDS = 1.0
HELLO_SECONDS = 20.0
IDLE_SECONDS = 120.0
NO_WAYS: Mapping[str, int] = {}
THREADS = 8
PIECE = 2**18
WINDOW = 2**22
"""Bytes that are read ahead."""


class Gate:
    """The gate of the servers in a directory: it accepts the requests that a trainer may make."""

    def __init__(
        self, directory: Path, memory: Path, look: Callable[[], dict[str, Any]], ways: Mapping[str, int] = NO_WAYS
    ) -> None:
        """`look`: what is told of the servers. `memory`: where new weights lie. `ways`: the port here that leads to the
        gate of each machine that weights are passed on to."""
        self._directory, self._memory, self._look, self._ways = directory, memory, look, ways
        self._busy: dict[str, asyncio.Lock] = {}

    async def open(self, port: int) -> asyncio.Server:
        """Listen on a port of the loopback, on another one where it is taken."""
        try:
            return await asyncio.start_server(self._serve, "127.0.0.1", port, limit=WINDOW)
        except OSError:
            return await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=WINDOW)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = Onward(self._ways)
        try:
            asked = await _line(reader, HELLO_SECONDS)
            if "to" in asked:
                await self._hand_over(asked, reader, writer)
                return
            while True:
                await onward.say(asked)
                answer = await self._answer(asked, reader, onward)
                if asked.get("on"):
                    answer = {**answer, "on": await onward.answers()}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
                asked = await _line(reader, IDLE_SECONDS)
        except (*MISSHAPEN, OSError, EOFError, TimeoutError, asyncio.CancelledError):
            return  # asyncio's server logs a complaint about a task that ends as cancelled
        finally:
            onward.close()
            writer.close()

    async def _hand_over(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there = {entry["name"]: entry for entry in self._look()["replicas"]}.get(asked["to"])
        if there is None or there["starts"] != asked["start"] or there["state"] == "down":
            return
        port = int(there["url"].rpartition(":")[2])
        await splice(reader, writer, *await asyncio.open_connection("127.0.0.1", port))

    async def _answer(self, asked: dict[str, Any], reader: asyncio.StreamReader, onward: Onward) -> dict[str, Any]:
        match asked["do"]:
            case "look":
                with suppress(OSError):
                    os.utime(self._directory / "attended")
                return {**self._look(), "reaches": sorted(self._ways)}
            case "alive":
                return {}
            case "restart":
                complaints = self._directory / "restarts"
                complaints.mkdir(exist_ok=True)
                told = {"url": asked["url"], "reason": asked["reason"]}
                (complaints / weight_files.plain(asked["name"])).write_text(json.dumps(told))
                return {}
            case "held":
                version = int(asked["version"])
                files, before = weight_files.held(self._memory, version), weight_files.before(self._memory, version)
                return {"files": files, "before": before}
            case "put":
                return await self._put(asked, reader, onward)
            case "settle":
                return {"problem": weight_files.settle(self._memory, int(asked["version"]), asked["files"])}
        return {"problem": f"{asked['do']!r} is not known here"}

    async def _put(self, asked: dict[str, Any], reader: asyncio.StreamReader, onward: Onward) -> dict[str, Any]:
        """Receive a file of weights. Two transfers of the same file do not mix: the later one waits."""
        version, name = int(asked["version"]), weight_files.plain(asked["name"])
        async with self._busy.setdefault(name, asyncio.Lock()):
            with weight_files.arriving(self._memory, version, name) as file:
                if "changes" in asked:
                    await _take_changes(file, asked["changes"], reader, onward)
                else:
                    await _take_whole(file, int(asked["size"]), reader, onward)
                return {"problem": file.keep(asked["sha256"])}


async def _take_whole(file: weight_files.File, size: int, reader: asyncio.StreamReader, onward: Onward) -> None:
    while size:
        async with asyncio.timeout(IDLE_SECONDS):
            piece = await reader.read(min(size, WINDOW))
        if not piece:
            raise EOFError
        file.take(piece)
        await onward.write(piece)
        size -= len(piece)


async def _take_changes(
    file: weight_files.File, sizes: Sequence[int], reader: asyncio.StreamReader, onward: Onward
) -> None:
    """Make pieces of the new file from the changes, several at the same time, and write them in order."""
    making: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(THREADS) as threads:
        for size in sizes:
            async with asyncio.timeout(IDLE_SECONDS):
                change = await reader.readexactly(int(size))
            await onward.write(change)
            making.append(threads.submit(changed, file.next_before(), change))
            if len(making) > THREADS:
                file.take(await asyncio.wrap_future(making.popleft()))
        for made in making:
            file.take(await asyncio.wrap_future(made))


async def keep_gate(directory: Path, gate: Gate) -> None:
    """Keep the gate open for a job, and the keys that were handed to the job, a line each, good for it."""
    place = directory / "gate.json"
    server = await gate.open(json.loads(place.read_text())["port"] if place.exists() else 0)
    port = server.sockets[0].getsockname()[1]
    write_json(place, {"port": port})
    try:
        async with server:
            admitted, until = "", 0.0
            while True:
                key = handed.read_text() if (handed := directory / HANDED).exists() else ""
                if admitted and not key:
                    admission.dismiss(directory)
                    admitted = ""
                if key and (key != admitted or time.monotonic() > until):
                    admission.admit(directory, key.splitlines(), port)
                    if key != admitted:
                        add_record(directory / "metrics.jsonl", {"gate": port, "admitted": key})
                    admitted, until = key, time.monotonic() + admission.RENEW_SECONDS
                await asyncio.sleep(LOOK_SECONDS)
    finally:
        admission.dismiss(directory)


async def splice(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Join two connections until the far one has said all, or the near one is gone."""
    outward = asyncio.create_task(_carry(reader, far_writer))
    inward = asyncio.create_task(_carry(far_reader, writer))
    try:
        await asyncio.wait((outward, inward), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (outward, inward):
            task.cancel()
        far_writer.close()
        writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()


async def _line(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any]:
    """Raises EOFError at the end, ValueError for what is none."""
    async with asyncio.timeout(seconds):
        line = await reader.readline()
    if not line:
        raise EOFError
    if len(line) > LINE:
        raise ValueError
    found: dict[str, Any] = json.loads(line)
    return found
