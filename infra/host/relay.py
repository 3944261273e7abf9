"""A relay of new weights from a machine with servers to further machines. Standard library only.

    onward.json   in the job's directory: the machines that this one passes weights on to

Decision: bytes are passed on while they come, not after them, so a tree of machines takes about as long as one link.
The slowest machine below sets the pace. A machine that takes nothing any more is left out, and the sender is told so.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.host.links import LINE, Machine, entered, link, machines_in, tell_key

ONWARD = "onward.json"
LOOK_SECONDS = 1.0
AGAIN_SECONDS = 2.0
SILENCE_SECONDS = 10.0
"""A machine that takes nothing, or says nothing, for so long is left out."""
BROKEN = (OSError, EOFError, ValueError, TimeoutError)


async def keep_ways(directory: Path, ways: dict[str, int]) -> None:
    """Keep links to the machines that the job is told of; `ways` has the port here of each that stands."""
    kept: dict[Machine, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            named = machines_in(directory / ONWARD)
            if named and not (directory / "key").exists():
                await asyncio.to_thread(tell_key, directory)
            for machine in kept.keys() - named:
                kept.pop(machine).cancel()
            for machine in named - kept.keys():
                kept[machine] = group.create_task(_keep_way(machine, directory, ways))
            await asyncio.sleep(LOOK_SECONDS)


async def _keep_way(machine: Machine, directory: Path, ways: dict[str, int]) -> None:
    while True:
        with suppress(*BROKEN):
            async with link(machine, directory) as linked:
                try:
                    reader, writer = await entered(linked.port)
                    ways[machine.name] = linked.port
                    while await _looked(reader, writer):
                        await asyncio.sleep(LOOK_SECONDS)
                finally:
                    ways.pop(machine.name, None)
        await asyncio.sleep(AGAIN_SECONDS)


async def _looked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    async with asyncio.timeout(SILENCE_SECONDS):
        writer.write(b'{"do": "alive"}\n')
        await writer.drain()
        return bool(await reader.readline())


class Onward:
    """The messages of a connection that are passed on. `on` of a message: the next machines by name, each with the
    machines after it."""

    def __init__(self, ways: Mapping[str, int]) -> None:
        self._ways = ways
        self._there: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._lost: dict[str, str] = {}
        self._now: list[str] = []
        """The machines that the current message goes to."""

    async def say(self, asked: Mapping[str, Any]) -> None:
        """Pass a message on; its bytes, if it has some, are to follow."""
        self._now = list(asked.get("on", {}))
        for name in self._now:
            await self._write_to(name, json.dumps({**asked, "on": asked["on"][name]}).encode() + b"\n")

    async def write(self, data: bytes) -> None:
        for name in self._now:
            await self._write_to(name, data)

    async def answers(self) -> dict[str, dict[str, Any]]:
        """The answer of each machine; a `problem` for those that were lost."""
        return {name: await self._answer_of(name) for name in self._now}

    def close(self) -> None:
        for _, writer in self._there.values():
            writer.close()

    async def _write_to(self, name: str, data: bytes) -> None:
        if name in self._lost:
            return
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                if name not in self._there:
                    if name not in self._ways:
                        raise OSError("it is not connected")
                    self._there[name] = await entered(self._ways[name], LINE)
                self._there[name][1].write(data)
                await self._there[name][1].drain()
        except BROKEN as error:
            self._lost[name] = str(error) or type(error).__name__

    async def _answer_of(self, name: str) -> dict[str, Any]:
        if name not in self._lost:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    line = await self._there[name][0].readline()
                answer: dict[str, Any] = json.loads(line)
                return answer
            except BROKEN as error:
                self._lost[name] = str(error) or type(error).__name__
        return {"problem": self._lost[name], "lost": True}
