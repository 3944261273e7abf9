"""New weights for replicas on other machines: sent once to each machine, in buckets, while its replicas generate.

Decision: a bucket is gathered once and sent to all machines at the same time, while the next one is gathered. So no
more than two are in this process's memory, and the slowest link sets the pace. A machine that takes nothing for a while
is left behind; it catches up as a newcomer does, with the buckets that it lacks.

Decision: both ends compute each bucket's digest. What was damaged on its way is never loaded.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from anyio import to_thread
from safetensors.torch import save

from rollouts_core.errors import EngineUnavailable
from rollouts_core.inference.http import JsonClient
from rollouts_core.inference.members import Problems
from rollouts_core.inference.replicas import EngineMachine, Fleet, Replica
from rollouts_core.inference.transports import (
    INDEX,
    Brought,
    Weights,
    buckets,
    file_name,
    index_text,
    load_checkpoint,
)
from rollouts_core.inference.weights import shapes_of

PARTS = 8
MOST_BYTES = 2**28
"""A bucket is one of about eight parts: sending begins while most of the weights are still to be gathered, and what
breaks off costs little."""
PIECE = 2**20
SILENCE_SECONDS = 20.0
"""A machine that takes nothing for so long is left behind."""
AGAIN_SECONDS = 1.0
BROKEN = (OSError, ValueError, TimeoutError, anyio.BrokenResourceError, anyio.EndOfStream)


class MachineTransport:
    """Fits `FileTransport`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._http = JsonClient()
        self.brought: Mapping[str, Brought] = {}

    async def bring(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        began = time.perf_counter()
        senders = {name: _Sender(self._fleet, name, version) for name in {replica.machine for replica in replicas}}
        try:
            await self._send_all(list(senders.values()), weights)
        finally:
            for sender in senders.values():
                await sender.aclose()
        self.brought = {
            name: Brought(sender.sent, sender.ended - began) for name, sender in senders.items() if not sender.problem
        }
        problems = {replica.name: senders[replica.machine].problem for replica in replicas}
        return {name: EngineUnavailable(problem) for name, problem in problems.items() if problem}

    async def swap(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        return await load_checkpoint(self._http, replicas, partial(self.place, version=version), version)

    def place(self, replica: Replica, version: int) -> Path:
        return self._fleet.ready().machines[replica.machine].memory / f"version-{version}"

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _send_all(self, senders: "Sequence[_Sender]", weights: Weights) -> None:
        pieces = enumerate(buckets(weights, bucket_bytes(weights)))
        files: dict[str, str] = {}
        index: dict[str, str] = {}
        bucket = await to_thread.run_sync(_packed, pieces)
        while bucket is not None and any(not sender.problem for sender in senders):
            files[bucket.name] = bucket.digest
            index |= dict.fromkeys(bucket.weights, bucket.name)
            following: list[_Bucket | None] = []
            async with anyio.create_task_group() as group:
                for sender in senders:
                    group.start_soon(sender.give, bucket)
                group.start_soon(_pack_next, pieces, following)
            (bucket,) = following
        text = index_text(index).encode()
        last = _Bucket(INDEX, (), text, hashlib.sha256(text).hexdigest())
        async with anyio.create_task_group() as group:
            for sender in senders:
                group.start_soon(sender.finish, last, files | {INDEX: last.digest})


def bucket_bytes(weights: Weights) -> int:
    """The limit of a bucket of these weights, taken to be float32."""
    whole = 4 * sum(math.prod(shape) for shape in shapes_of(weights).values())
    return min(MOST_BYTES, whole // PARTS)


class _Bucket:
    """A file of weights."""

    def __init__(self, name: str, weights: Sequence[str], data: bytes, digest: str) -> None:
        self.name, self.weights, self.data, self.digest = name, tuple(weights), data, digest


def _packed(pieces: Any) -> _Bucket | None:
    """The next bucket; None behind the last."""
    number, weights = next(pieces, (0, None))
    if weights is None:
        return None
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    return _Bucket(file_name(number), list(weights), data, hashlib.sha256(data).hexdigest())


async def _pack_next(pieces: Any, into: "list[_Bucket | None]") -> None:
    into.append(await to_thread.run_sync(_packed, pieces))


class _Sender:
    """The sending of one version to one machine."""

    def __init__(self, fleet: Fleet, machine: str, version: int) -> None:
        self._fleet, self._machine, self._version = fleet, machine, version
        self._stream: anyio.abc.SocketStream | None = None
        self._held: dict[str, str] = {}
        """What is there already: digests by name."""
        self._said = b""
        self.sent, self.ended = 0, 0.0
        self.problem = ""
        """Why the machine was left behind."""

    async def give(self, bucket: _Bucket) -> None:
        """See to it that the machine has the bucket, or be left behind."""
        await self._until_done(partial(self._give, bucket))

    async def finish(self, index: _Bucket, files: Mapping[str, str]) -> None:
        """The last file, and all together is a version."""
        await self._until_done(partial(self._give, index))
        await self._until_done(partial(self._ask, {"do": "settle", "files": dict(files)}))
        self.ended = time.perf_counter()

    async def aclose(self) -> None:
        stream, self._stream, self._said = self._stream, None, b""
        if stream is not None:
            with suppress(*BROKEN), anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def _until_done(self, action: Any) -> None:
        """Try again over a new connection, for as long as something gets on now and then."""
        end = time.monotonic() + SILENCE_SECONDS
        while not self.problem:
            before = self.sent
            try:
                if self._stream is None:
                    await self._connect()
                await action()
                return
            except BROKEN as error:
                await self.aclose()
                if self.sent > before:
                    end = time.monotonic() + SILENCE_SECONDS
                if time.monotonic() > end:
                    self.problem = f"{self._machine} takes no weights: {str(error) or type(error).__name__}"
                await anyio.sleep(AGAIN_SECONDS)

    async def _connect(self) -> None:
        machine = self._here()
        with anyio.fail_after(SILENCE_SECONDS):
            self._stream = await anyio.connect_tcp("127.0.0.1", machine.port)
        held = await self._ask({"do": "held"})
        self._held = held["files"]

    def _here(self) -> EngineMachine:
        machine = self._fleet.ready().machines.get(self._machine)
        if machine is None or not machine.port:
            raise OSError("it is not connected")
        return machine

    async def _give(self, bucket: _Bucket) -> None:
        if self._held.get(bucket.name) == bucket.digest:
            return
        await self._say({"do": "put", "name": bucket.name, "size": len(bucket.data), "sha256": bucket.digest})
        view = memoryview(bucket.data)
        for start in range(0, len(view), PIECE):
            await self._write(bytes(view[start : start + PIECE]))
            self.sent += min(PIECE, len(view) - start)
        await self._heard()

    async def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        await self._say(asked)
        return await self._heard()

    async def _say(self, asked: Mapping[str, Any]) -> None:
        await self._write(json.dumps({**asked, "version": self._version}).encode() + b"\n")

    async def _write(self, data: bytes) -> None:
        assert self._stream is not None, "it is connected first"
        with anyio.fail_after(SILENCE_SECONDS):
            await self._stream.send(data)

    async def _heard(self) -> dict[str, Any]:
        assert self._stream is not None, "it is connected first"
        with anyio.fail_after(SILENCE_SECONDS):
            while b"\n" not in self._said:
                self._said += await self._stream.receive()
        line, _, self._said = self._said.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("problem"):
            raise ValueError(answer["problem"])
        return answer
