"""What travels between the trainer's side and agents: requests and their answers, trees of files, and new weights."""

import asyncio
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.from_thread

from infra.connection.remote import Remote
from infra.host import trees
from infra.host.agent import LENGTH
from infra.host.gate import Gate
from infra.inventory import Host
from rollouts_core.inference import machine_transport
from rollouts_core.weight_changes import change
from tests.fuzz.changes import changed, changed_bytes
from tests.fuzz.target import Read, Target, function, in_event_loop

DIGEST = hashlib.sha256(b"abc").hexdigest()
ENTRIES: list[Any] = [["a/b", 3, DIGEST], ["c", 0, hashlib.sha256(b"").hexdigest()], ["d", 3, DIGEST]]
CALLS: list[dict[str, Any]] = [
    {"call": "facts", "arguments": {}},
    {"call": "watch", "arguments": {"job": "j", "log": 0, "metrics": 0, "wait": 0.0}},
    {"call": "attempt", "arguments": {"job": "j"}},
    {"call": "cancel", "arguments": {"job": "j", "asked_by": "me"}},
    {"call": "hand", "arguments": {"job": "j", "name": "n", "content": "{}"}},
    {"call": "drain", "arguments": {"who": "me", "undo": True}},
    {"call": "note_run", "arguments": {"run": "r", "name": "n", "token": "t", "needs": ["sft-1"]}},
    {"call": "noted_runs", "arguments": {}},
    {"call": "collect", "arguments": {"kept": [], "kept_runs": [], "other_runs": ["r"], "dry_run": True}},
    {"call": "checksums_here", "arguments": {"job": "j"}},
    {"call": "place", "arguments": {"job": "j"}},
    {"call": "keep", "arguments": {"job": "j", "label": "l", "key": "k", "seconds": 1.0}},
    {"call": "take_over", "arguments": {"old": "j", "job": "k", "lease": "l", "token": "t", "who": "me"}},
    {"call": "acquire", "arguments": {"ask": {
        "token": "t", "gpus": 1, "among": [0, 1], "who": "me", "jobs": ["j"], "label": None}}},
    {"call": "renew", "arguments": {"lease": None, "token": "t"}},
    {"call": "release", "arguments": {"token": "t", "for_good": False}},
    {"call": "artifact", "arguments": {"name": "sft-1"}},
    {"call": "artifacts", "arguments": {"names": ["sft-1"]}},
    {"call": "discard", "arguments": {"names": ["sft-1"]}},
    {"call": "built", "arguments": {"key": "k"}},
    {"call": "offer", "arguments": {"shelf": "inputs", "name": "n", "entries": ENTRIES}},
    {"call": "settle", "arguments": {"shelf": "inputs", "name": "n", "entries": ENTRIES, "manifest": None}},
]  # fmt: skip
"""Those that start, end, or run what they are told are left out."""
ANSWER: dict[str, Any] = {"value": [], "error": "failed", "message": "no"}
SHARD = b"0123456789abcdef" * 4
NEXT = b"0123456789abcdeg" * 4
SAID: list[dict[str, Any]] = [
    {"do": "look"}, {"do": "alive"}, {"do": "held", "version": 1}, {"to": "x", "start": 1},
    {"do": "restart", "url": "u", "reason": "r", "name": "n"},
    {"do": "put", "version": 1, "name": "w", "size": len(SHARD), "sha256": hashlib.sha256(SHARD).hexdigest()},
    {"do": "put", "version": 2, "name": "w", "changes": [len(change(SHARD, NEXT))],
     "sha256": hashlib.sha256(NEXT).hexdigest()},
    {"do": "settle", "version": 1, "files": {"w": hashlib.sha256(SHARD).hexdigest()}, "on": {}},
]  # fmt: skip
HEARD: dict[str, Any] = {
    "files": {"w": DIGEST}, "before": {"w": DIGEST}, "problem": "",
    "on": {"b": {"files": {"w": DIGEST}, "before": {}, "on": {}}, "c": {"problem": "away", "lost": True}},
}  # fmt: skip


def _tree(draw: random.Random) -> tuple[list[Any], bytes]:
    frames = b"".join(trees.HEADER.pack(index, 0, size) + b"abc"[:size] for index, (_, size, _) in enumerate(ENTRIES))
    entries = changed(ENTRIES, draw) if draw.random() < 0.3 else ENTRIES
    return entries, changed_bytes(frames + trees.HEADER.pack(trees.END, 0, 0), draw)


def _receive(given: tuple[list[Any], bytes]) -> None:
    entries, data = given
    with tempfile.TemporaryDirectory() as folder:
        incoming = Path(folder) / "incoming"
        rest = [data[start : start + 7] for start in range(0, len(data), 7)]
        with contextlib.suppress(trees.BadTree, EOFError, OSError):
            trees.begin(incoming, entries, {})
            trees.receive(incoming, entries, lambda count: rest.pop(0) if rest else b"")
            if not trees.finish(incoming, entries):
                assert all(
                    hashlib.sha256((incoming / "files" / path).read_bytes()).hexdigest() == digest
                    for path, _, digest in entries
                ), "a file that is not what it should be"
        assert [path.name for path in Path(folder).iterdir()] in ([], ["incoming"]), "a file outside"


@contextmanager
def _agent() -> Iterator[Read]:
    """A real agent's process; it is to answer, and to live on."""
    with tempfile.TemporaryDirectory() as folder:
        work, beside = Path(folder) / "work", Path(folder) / "beside"
        work.mkdir()
        beside.write_text("untouched")
        command = [sys.executable, "-c", "import sys; from infra.host.agent import main; main(sys.argv[1:])"]
        with tempfile.TemporaryFile() as told:

            def started() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    [*command, "serve", str(work)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told
                )

            process = started()

            def read(content: bytes) -> None:
                nonlocal process
                assert process.stdin and process.stdout
                process.stdin.write(LENGTH.pack(len(content)) + content)
                process.stdin.flush()
                header = process.stdout.read(LENGTH.size)
                if len(header) < LENGTH.size:
                    process.wait(30)
                    process = started()
                    told.seek(0)
                    said = told.read().decode(errors="replace")
                    told.truncate(0)
                    raise AssertionError(f"the agent ended: {said[-3000:]}")
                answer = json.loads(process.stdout.read(*LENGTH.unpack(header)))
                assert "value" in answer or str(answer["message"]).strip(), "no message"
                names = sorted(path.name for path in Path(folder).iterdir())
                assert names == ["beside", "work"] and beside.read_text() == "untouched", f"outside: {names}"

            try:
                yield read
            finally:
                process.kill()
                process.wait()


class _Channel:
    """Of a connection: what the other side answers."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def settimeout(self, seconds: float) -> None: ...

    def sendall(self, data: bytes) -> None: ...

    def recv(self, count: int) -> bytes:
        piece, self._data = self._data[:count], self._data[count:]
        return piece


def _hear(data: bytes) -> None:
    remote = Remote("gpu1", Host(host="127.0.0.1"), 0.0)
    remote._channel = _Channel(data)  # type: ignore[assignment]
    remote._ask("busy", {}, 1.0)


def _framed(data: Any, draw: random.Random) -> bytes:
    content = json.dumps(changed(data, draw) if draw.random() < 0.7 else data).encode()
    content = changed_bytes(content, draw) if draw.random() < 0.5 else content
    return (
        changed_bytes(LENGTH.pack(len(content)), draw) + content
        if draw.random() < 0.1
        else LENGTH.pack(len(content)) + content
    )


def _asked(draw: random.Random) -> bytes:
    content = json.dumps(changed(draw.choice(CALLS), draw)).encode()
    return changed_bytes(content, draw) if draw.random() < 0.3 else content


def _weights(draw: random.Random) -> bytes:
    said = []
    for _ in range(draw.randint(1, 4)):
        message = draw.choice(SAID)
        behind = b"" if message.get("do") != "put" else change(SHARD, NEXT) if "changes" in message else SHARD
        message = changed(message, draw) if draw.random() < 0.5 else message
        said.append(json.dumps(message).encode() + b"\n" + behind)
    return changed_bytes(b"".join(said), draw) if draw.random() < 0.5 else b"".join(said)


@asynccontextmanager
async def _open_gate() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(repr(context)))
    with tempfile.TemporaryDirectory() as folder:
        memory = Path(folder) / "memory"
        memory.mkdir()
        (Path(folder) / "job").mkdir()
        server = await Gate(Path(folder) / "job", memory, lambda: {"replicas": []}).open(0)
        port = server.sockets[0].getsockname()[1]

        async def read(data: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(OSError):
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(30):
                    for line in (await reader.read()).splitlines():
                        json.loads(line)
            writer.close()
            await asyncio.sleep(0)
            if complaints:
                raise AssertionError(complaints.pop())
            assert sorted(path.name for path in Path(folder).iterdir()) == ["job", "memory"], "a file outside"

        async with server:
            yield read


class _Stream:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def receive(self) -> bytes:
        if not self._data:
            raise anyio.EndOfStream
        data, self._data = self._data, b""
        return data

    async def send(self, data: bytes) -> None: ...


@contextmanager
def _sender() -> Iterator[Read]:
    """What a machine with servers answers to the trainer."""

    async def read(data: bytes) -> None:
        sender = machine_transport._Sender(None, "a", {"b": {}, "c": {}}, 1)  # type: ignore[arg-type]
        sender._stream = _Stream(data)  # type: ignore[assignment]
        with contextlib.suppress(*machine_transport.BROKEN):
            machine_transport._of_all(await sender._ask({"do": "held"}), "files")

    with anyio.from_thread.start_blocking_portal() as portal:
        yield partial(portal.call, read)


def _line(draw: random.Random) -> bytes:
    data = json.dumps(changed(HEARD, draw)).encode()
    return (changed_bytes(data, draw) if draw.random() < 0.3 else data) + b"\n"


TARGETS: dict[str, Target] = {
    "tree": function(_tree, _receive),
    "agent": Target(_asked, _agent),
    "host": function(partial(_framed, ANSWER), _hear),
    "gate": Target(_weights, partial(in_event_loop, _open_gate)),
    "sender": Target(_line, _sender),
}
