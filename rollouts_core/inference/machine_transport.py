"""New weights for replicas on other machines: sent once to each machine, in buckets, while its replicas generate.

Decision: a bucket is gathered once and sent to all machines at the same time, while the next bucket is gathered and the
answers to the one before arrive. So at most three are in this process's memory, and the slowest link sets the pace. A
machine that takes nothing for a while is left out. It catches up as a newcomer does, with the buckets that it lacks.

Decision: if machines pass weights on to others (`reaches`), the trainer sends only to the first machine of each tree. A
bucket that all machines of a tree have is not sent; one that any of them lacks is sent to all.

Decision: both ends compute each bucket's digest. Damaged buckets are never loaded.

Decision: for bfloat16 weights, only the changes are sent if that is faster than sending everything (`weight_changes`).
Which is faster depends on the link, the step's size and the processors. So both are tried, and the last time of each
decides.
"""

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import torch
from anyio import to_thread
from safetensors.torch import save

from rollouts_core.errors import EngineUnavailable, MalformedAnswer
from rollouts_core.inference.http import JsonClient
from rollouts_core.inference.members import Problems
from rollouts_core.inference.reading import json_in, reading
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
from rollouts_core.memory import free_bytes
from rollouts_core.weight_changes import change, pieces

PARTS = 8
MOST_BYTES = 2**28
"""A bucket is one of about eight parts: sending begins while most of the weights are still to be gathered, and what
breaks off costs little."""
SILENCE_SECONDS = 20.0
"""A machine that takes nothing for so long is left behind."""
AGAIN_SECONDS = 1.0
MOST_ATTEMPTS = 10
"""The number of attempts in a row without a bucket that arrives."""
TRY_AGAIN = 8
"""Versions, until the way of sending that was slower is tried once more."""
KEPT_SHARE = 2
"""The version before is kept where it takes at most one part in so many of the memory that is free."""
Tree = dict[str, Any]
"""Machines by name, each with the tree of those below it."""
BROKEN = (OSError, MalformedAnswer, ValueError, TimeoutError, anyio.BrokenResourceError, anyio.EndOfStream)


class MachineTransport:
    """Fits `FileTransport`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._http = JsonClient()
        self._changes = _Changes()
        self.brought: Mapping[str, Brought] = {}

    async def bring(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        began = time.perf_counter()
        self._changes.begin(version, whole_bytes(weights))
        machines = {replica.machine for replica in replicas}
        reaches = {name: machine.reaches for name, machine in self._fleet.ready().machines.items()}
        senders = [_Sender(self._fleet, name, below, version) for name, below in trees(machines, reaches).items()]
        try:
            await self._send_all(senders, weights)
        finally:
            for sender in senders:
                await sender.aclose()
        problems = {name: problem for sender in senders for name, problem in sender.problems().items()}
        self.brought = {
            name: Brought(sender.sent, sender.ended - began)
            for sender in senders
            for name in sender.machines
            if name not in problems
        }
        self._changes.sent(time.perf_counter() - began)
        return {
            replica.name: EngineUnavailable(problems[replica.machine])
            for replica in replicas
            if replica.machine in problems
        }

    async def swap(self, replicas: Sequence[Replica], weights: Weights, version: int) -> Problems:
        return await load_checkpoint(self._http, replicas, partial(self.place, version=version), version)

    def place(self, replica: Replica, version: int) -> Path:
        return self._fleet.ready().machines[replica.machine].memory / f"version-{version}"

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _send_all(self, senders: "Sequence[_Sender]", weights: Weights) -> None:
        packing = self._packed(weights)
        files: dict[str, str] = {}
        index: dict[str, str] = {}
        bucket = await to_thread.run_sync(next, packing, None)
        while bucket is not None and any(not sender.problem for sender in senders):
            files[bucket.name] = bucket.digest
            index |= dict.fromkeys(bucket.weights, bucket.name)
            following: list[_Bucket | None] = []
            async with anyio.create_task_group() as group:
                for sender in senders:
                    group.start_soon(sender.give, bucket)
                group.start_soon(_pack_next, packing, following)
            (bucket,) = following
        text = index_text(index).encode()
        last = _Bucket(INDEX, (), text, hashlib.sha256(text).hexdigest())
        async with anyio.create_task_group() as group:
            for sender in senders:
                group.start_soon(sender.finish, last, files | {INDEX: last.digest})

    def _packed(self, weights: Weights) -> "Iterator[_Bucket]":
        for number, bucket in enumerate(buckets(weights, bucket_bytes(weights))):
            data = save({name: tensor.detach().cpu().contiguous() for name, tensor in bucket.items()})
            half = all(tensor.itemsize == 2 for tensor in bucket.values())
            packed = _Bucket(file_name(number), tuple(bucket), data, hashlib.sha256(data).hexdigest())
            yield self._changes.added(packed) if half else packed


def trees(machines: Collection[str], reaches: Mapping[str, Sequence[str]]) -> dict[str, Tree]:
    """The machines that are sent to from here, and what each passes on: to whom, and who passes it on from there."""
    passed = {name for machine in machines for name in reaches.get(machine, ()) if name in machines}
    first = sorted(set(machines) - passed)
    seen = set(first)

    def below(machine: str) -> Tree:
        new = [name for name in reaches.get(machine, ()) if name in machines and name not in seen]
        seen.update(new)
        return {name: below(name) for name in new}

    found = {name: below(name) for name in first}
    while lonely := sorted(set(machines) - seen):  # two machines that pass weights on to each other
        seen.add(lonely[0])
        found[lonely[0]] = below(lonely[0])
    return found


def names_in(tree: Tree) -> Iterator[str]:
    for name, below in tree.items():
        yield name
        yield from names_in(below)


def bucket_bytes(weights: Weights) -> int:
    """The limit of a bucket of these weights."""
    return min(MOST_BYTES, whole_bytes(weights) // PARTS)


def whole_bytes(weights: Weights) -> int:
    """Bytes of these weights as float32."""
    return 4 * sum(math.prod(shape) for shape in shapes_of(weights).values())


@dataclass(frozen=True)
class _Bucket:
    """A file of weights."""

    name: str
    weights: tuple[str, ...]
    data: bytes
    digest: str
    before: str = ""
    """The digest of the file that `changes` are of; empty where there are none."""
    changes: tuple[bytes, ...] = ()
    """The changes of each piece."""


class _Changes:
    """The version that was sent last, and whether it is worth while to send what has changed since."""

    def __init__(self) -> None:
        self._before: dict[str, _Bucket] = {}
        self._version, self._number, self._is_new = -1, 0, False
        self._keeps = self._used = False
        self._seconds: dict[bool, float] = {}
        """Seconds that the last version took that was sent by its changes (True), and the last that was sent whole."""

    def begin(self, version: int, size: int) -> None:
        """A version of about so many bytes is sent now. Whoever joins gets it once more, and gets it whole."""
        self._is_new, self._used = version != self._version, False
        self._version, self._number = version, self._number + self._is_new
        kept = sum(len(bucket.data) for bucket in self._before.values())
        has_room = KEPT_SHARE * size <= kept + free_bytes(torch.device("cpu"))
        self._keeps = has_room and self._pay(self._number + 1)

    def added(self, bucket: _Bucket) -> _Bucket:
        """The bucket with its changes since the last version, if sending these is worth while. Remembers it for the
        next."""
        before = self._before.pop(bucket.name, None)
        if self._keeps:
            self._before[bucket.name] = bucket
        if not self._is_new or not self._pay(self._number) or before is None or len(before.data) != len(bucket.data):
            return bucket
        self._used = True
        with ThreadPoolExecutor() as threads:
            changes = tuple(threads.map(change, pieces(before.data), pieces(bucket.data)))
        return replace(bucket, before=before.digest, changes=changes)

    def sent(self, seconds: float) -> None:
        """The version was."""
        if self._is_new:
            self._seconds[self._used] = seconds

    def _pay(self, number: int) -> bool:
        if len(self._seconds) < 2:
            return True
        is_faster = self._seconds[True] <= self._seconds[False]
        return is_faster != (number % TRY_AGAIN == 0)


async def _pack_next(packing: "Iterator[_Bucket]", into: "list[_Bucket | None]") -> None:
    into.append(await to_thread.run_sync(next, packing, None))


class _Sender:
    """The sending of one version to one machine, and from there to those below it."""

    def __init__(self, fleet: Fleet, machine: str, below: Tree, version: int) -> None:
        self._fleet, self._machine, self._below, self._version = fleet, machine, below, version
        self.machines = (machine, *names_in(below))
        self._lost: dict[str, str] = {}
        """Machines below that are sent nothing any more, and why."""
        self._stream: anyio.abc.SocketStream | None = None
        self._held: dict[str, str] = {}
        """The buckets that all machines have already: digests by name."""
        self._before: dict[str, str] = {}
        """The same of other versions."""
        self._unheard: deque[_Bucket] = deque()
        """Sent, and not answered yet."""
        self._said = b""
        self.sent, self.ended = 0, 0.0
        self.problem = ""
        """Why the machine was left behind."""

    def problems(self) -> dict[str, str]:
        """The reasons why machines did not get the weights, by name."""
        return dict.fromkeys(self.machines, self.problem) if self.problem else self._lost

    async def give(self, bucket: _Bucket) -> None:
        """See to it that the machine has the bucket before, and send this one; or be left behind."""
        await self._until_done(partial(self._give, bucket))

    async def finish(self, index: _Bucket, files: Mapping[str, str]) -> None:
        """The last file, and all together is a version."""
        await self._until_done(partial(self._give, index))
        await self._until_done(partial(self._hear_of_all_but, 0))
        await self._until_done(partial(self._ask, {"do": "settle", "files": dict(files)}))
        self.ended = time.perf_counter()

    async def aclose(self) -> None:
        stream, self._stream, self._said = self._stream, None, b""
        if stream is not None:
            with suppress(*BROKEN), anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def _until_done(self, action: Any) -> None:
        """Try again over a new connection, for as long as something gets on now and then."""
        end, heard, attempts = time.monotonic() + SILENCE_SECONDS, len(self._held), 0
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
                heard, attempts = len(self._held), attempts + 1 if len(self._held) == heard else 0
                if time.monotonic() > end or attempts > MOST_ATTEMPTS:
                    self.problem = f"{self._machine} takes no weights: {str(error) or type(error).__name__}"
                await anyio.sleep(AGAIN_SECONDS)

    async def _connect(self) -> None:
        machine = self._here()
        with anyio.fail_after(SILENCE_SECONDS):
            self._stream = await anyio.connect_tcp("127.0.0.1", machine.port)
        held = await self._ask({"do": "held"})
        self._held, self._before = _of_all(held, "files"), {}
        for bucket in self._unheard:
            if self._held.get(bucket.name) != bucket.digest:
                await self._put(bucket)
                await self._heard()
                self._held[bucket.name] = bucket.digest
        self._unheard.clear()
        self._before = _of_all(held, "before")

    def _here(self) -> EngineMachine:
        machine = self._fleet.ready().machines.get(self._machine)
        if machine is None or not machine.port:
            raise OSError("it is not connected")
        return machine

    async def _give(self, bucket: _Bucket) -> None:
        if self._held.get(bucket.name) == bucket.digest:
            return
        await self._put(bucket)
        self._unheard.append(bucket)
        await self._hear_of_all_but(1)

    async def _hear_of_all_but(self, count: int) -> None:
        while len(self._unheard) > count:
            await self._heard()
            bucket = self._unheard.popleft()
            self._held[bucket.name] = bucket.digest

    async def _put(self, bucket: _Bucket) -> None:
        """Send a bucket: its changes, if the machine has the version that they are relative to; else all of it."""
        put = {"do": "put", "name": bucket.name, "sha256": bucket.digest}
        if bucket.before and self._before.get(bucket.name) == bucket.before:
            await self._say({**put, "changes": [len(piece) for piece in bucket.changes]})
            await self._write_all(bucket.changes)
        else:
            await self._say({**put, "size": len(bucket.data)})
            await self._write_all(pieces(bucket.data))

    async def _write_all(self, parts: Iterable[bytes]) -> None:
        for part in parts:
            await self._write(part)
            self.sent += len(part)

    async def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        await self._say(asked)
        return await self._heard()

    async def _say(self, asked: Mapping[str, Any]) -> None:
        said = {**asked, "version": self._version} | ({"on": self._below} if self._below else {})
        await self._write(json.dumps(said).encode() + b"\n")

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
        answer: dict[str, Any] = json_in(line, self._machine)
        with reading(self._machine, answer):
            own = answer.get("problem")
            lost = {name: str(told["problem"]) for name, told in _told_below(answer) if told.get("lost")}
            problem = next((told["problem"] for _, told in _told_below(answer) if told.get("problem")), "")
        if own:
            raise ValueError(own)
        self._leave_out(lost)
        if problem and not lost:
            raise ValueError(problem)
        return answer

    def _leave_out(self, lost: Mapping[str, str]) -> None:
        """Leave these machines out, with all machines below them in the tree."""
        for name in list(names_in(self._below)):
            if name in lost:
                gone, self._below = _without(self._below, name)
                self._lost |= dict.fromkeys((name, *names_in(gone)), f"{name} takes no weights: {lost[name]}")


def _told_below(answer: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The answers of the machines that weights were passed on to, by name."""
    for name, told in answer.get("on", {}).items():
        yield name, told
        yield from _told_below(told)


def _of_all(answer: dict[str, Any], field: str) -> dict[str, str]:
    """The digests in `field` that all machines agree on, those that are lost left out."""
    with reading("a machine with servers", answer):
        there = [answer[field], *(told[field] for _, told in _told_below(answer) if field in told)]
        return {name: digest for name, digest in there[0].items() if all(other.get(name) == digest for other in there)}


def _without(tree: Tree, name: str) -> tuple[Tree, Tree]:
    """The tree below the name, and the rest of the tree without the name and what is below it."""
    gone: Tree = dict(tree.get(name, {}))
    kept: Tree = {}
    for other, below in tree.items():
        if other != name:
            further, kept[other] = _without(below, name)
            gone |= further
    return gone, kept
