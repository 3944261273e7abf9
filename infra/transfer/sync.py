"""Transfers of trees of files, to and from a host: only what the other side lacks, in several streams, verified before
it counts.

Decision: streams go through plain channels (`infra.host.trees` writes and reads them), large ones each on its own
connection. SFTP waits for an answer to every piece, which costs half the speed. The number of streams follows from the
link's delay; on a short link more than one only slow each other down.

Decision: a broken transfer is started again, and sends only what is still missing. It fails if it makes no progress,
not if it is interrupted.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import paramiko

from infra.connection.openssh import Stream
from infra.connection.remote import Remote
from infra.errors import MachineError, Unreachable
from infra.host import trees
from infra.host.ssh_client import SILENCE_SECONDS
from infra.host.trees import Entry, Stretch

MAX_STREAMS = 8
SERVER_WINDOW = 2 * 2**20
FAST_BYTES_PER_SECOND = 200e6
STREAM_BYTES = 32 * 2**20
"""Less than this is not worth another stream."""
VERIFY_SECONDS = 1800.0
MAX_ATTEMPTS_WITHOUT_PROGRESS = 20
MAX_CROSSINGS = 2


def send_tree(
    remote: Remote, shelf: str, name: str, root: Path, entries: Sequence[Entry], manifest: str | None = None
) -> int:
    """See to it that a host has a tree. Returns how many bytes were sent.

    Two that send the same tree meet in one place there; who comes second may find it gone, and the tree there.

    Raises `Unreachable` when the host stays away, `MachineError` when it can't keep the tree.
    """
    sent, before, stuck, damages, crossed = 0, -1, 0, 0, 0
    asked: dict[str, Any] = {"shelf": shelf, "name": name, "entries": list(entries)}
    while stuck < MAX_ATTEMPTS_WITHOUT_PROGRESS:
        offered = remote.call("offer", VERIFY_SECONDS, **asked)
        if offered["there"]:
            return sent
        missing = [(int(index), int(at), int(length)) for index, at, length in offered["missing"]]
        left = _bytes(missing)
        stuck = stuck + 1 if left == before else 0
        before = left
        try:
            _in_streams(remote, missing, partial(_send, remote, offered["incoming"], root, entries))
            sent += left
            damaged = remote.call("settle", VERIFY_SECONDS, **asked, manifest=manifest)
        except Unreachable:
            continue
        except MachineError:
            crossed += 1
            if crossed > MAX_CROSSINGS:
                raise
            continue
        if damaged:
            damages += 1
            if damages > 1:
                raise MachineError(f"{remote.name}: {damaged[0]} arrives damaged: {root / damaged[0]} has changed")
        else:
            return sent
    raise MachineError(f"{remote.name}: sending {name} makes no progress")


def fetch_tree(remote: Remote, place: str, entries: Sequence[Entry], incoming: Path) -> int:
    """Fetch files below a directory of a host's work directory into `incoming/files`. Returns how many bytes came.

    Raises `MachineError` when what comes is not what the entries say, `Unreachable` when the host stays away.
    """
    fetched, before, stuck, damages = 0, -1, 0, 0
    while stuck < MAX_ATTEMPTS_WITHOUT_PROGRESS:
        missing = trees.begin(incoming, entries, {})
        left = _bytes(missing)
        stuck = stuck + 1 if left == before and missing else 0
        before = left
        try:
            _in_streams(remote, missing, partial(_fetch, remote, place, incoming, entries))
        except Unreachable:
            remote.call("artifacts", names=[])
            continue
        fetched += left
        damaged = trees.finish(incoming, entries)
        if not damaged:
            return fetched
        damages += 1
        if damages > 1:
            raise MachineError(f"{remote.name}: {place}/{damaged[0]} is not what its manifest says")
    raise MachineError(f"{remote.name}: fetching {place} makes no progress")


def streams_for(remote: Remote) -> int:
    """The number of streams for the link's delay: an SSH server allows each `SERVER_WINDOW` bytes under way."""
    began = time.monotonic()
    remote.call("artifacts", names=[])
    delay = time.monotonic() - began
    return max(1, min(MAX_STREAMS, math.ceil(delay * FAST_BYTES_PER_SECOND / SERVER_WINDOW)))


def _in_streams(remote: Remote, stretches: Sequence[Stretch], move: Callable[[list[Stretch]], None]) -> None:
    """Move all stretches in parallel streams. The first failure is raised when all streams have ended."""
    if not stretches:
        return
    worth = _bytes(stretches) // STREAM_BYTES
    count = min(streams_for(remote), worth) if worth > 1 else 1
    with ThreadPoolExecutor(count) as pool:
        moving = [pool.submit(move, list(stretches[first::count])) for first in range(count)]
    for stream in moving:
        stream.result()


def _send(remote: Remote, incoming: str, root: Path, entries: Sequence[Entry], part: list[Stretch]) -> None:
    with remote.channel("receive", remote.work, incoming, alone=_bytes(part) > STREAM_BYTES) as channel:
        try:
            gathered = bytearray()
            for piece in trees.frames(root, entries, part):
                if gathered and len(gathered) + len(piece) > trees.PIECE:
                    channel.sendall(bytes(gathered))
                    gathered.clear()
                if len(piece) == trees.PIECE:
                    channel.sendall(piece)
                else:
                    gathered += piece
            channel.sendall(bytes(gathered))
            channel.shutdown_write()
            answer = _answer(channel)
        except (OSError, EOFError, paramiko.SSHException) as error:
            said = _answer_or_none(channel)
            if said is None:
                raise Unreachable(f"{remote.name}: {str(error) or type(error).__name__}") from None
            answer = said
    if "error" in answer:
        raise remote.failure(answer)


def _fetch(remote: Remote, place: str, incoming: Path, entries: Sequence[Entry], part: list[Stretch]) -> None:
    with remote.channel("send", remote.work, place, alone=_bytes(part) > STREAM_BYTES) as channel:
        try:
            channel.sendall(json.dumps({"entries": list(entries), "stretches": part}).encode())
            channel.shutdown_write()
            trees.receive(incoming, entries, channel.recv)
        except (OSError, EOFError, paramiko.SSHException) as error:
            if isinstance(error, OSError) and error.filename:
                raise  # this side's disk
            said = _stderr(channel)
            if said:
                raise remote.failure(said) from None
            raise Unreachable(f"{remote.name}: {str(error) or type(error).__name__}") from None
        except trees.BadTree as error:
            raise MachineError(f"{remote.name}: {error}") from None


def _answer(channel: Stream) -> dict[str, object]:
    channel.settimeout(SILENCE_SECONDS * 3)
    data = b""
    while piece := channel.recv(65536):
        data += piece
    try:
        answer: dict[str, object] = json.loads(data)
    except ValueError:
        raise EOFError("the connection ended before the answer") from None
    return answer


def _answer_or_none(channel: Stream) -> dict[str, object] | None:
    """The answer that the other side sent before it hung up; None if it sent none."""
    try:
        channel.settimeout(1.0)
        return _answer(channel)
    except (OSError, EOFError, paramiko.SSHException):
        return None


def _stderr(channel: Stream) -> dict[str, object] | None:
    try:
        channel.settimeout(1.0)
        answer = json.loads(channel.recv_stderr(65536))
    except (TimeoutError, OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and "error" in answer else None


def _bytes(stretches: Sequence[Stretch]) -> int:
    return sum(length for _, _, length in stretches)
