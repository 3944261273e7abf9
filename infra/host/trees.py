"""Directories of files known by their digests, moved between machines in stretches. Both ends use this.

    entries    (path, size, sha256) of every file
    stretch    (index of the file, offset, length): what travels as one piece

Where a tree is received:

    files/          as far as they have come
    entries.json    what they are to become
    done            a line "index offset" for each stretch of a large file that is there
    digests         a line "index sha256 time" for each file that came in order, hashed on its way

Decision: a small file is there when it has its size; a large one is noted stretch by stretch, so several streams fill
it at once and a broken transfer goes on where it stopped. Neither is believed: nothing is moved into place before every
file's digest is right. Two that send the same tree write the same bytes to the same places.
"""

import ctypes
import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Entry = tuple[str, int, str]
Stretch = tuple[int, int, int]

STRETCH = 8 * 2**20
PIECE = 2**17
TAKEN = 2**20
HEADER = struct.Struct(">IQI")
END = 0xFFFFFFFF
LARGEST = 2**44
"""Bytes of a file. What is said to be larger is a mistake, and a list of its stretches would fill the memory."""
SYNC_FILE_RANGE_WRITE = 2
_c = ctypes.CDLL(None)
BATCH = 256
STEPS_NOWHERE = frozenset(("", ".", ".."))
"""No part of a path inside a directory."""
HASHERS = min(8, os.cpu_count() or 1)


class BadTree(Exception):
    """Entries that name files outside their directory, or frames that do not belong to them."""


def refuse_bad_names(entries: Sequence[Entry]) -> None:
    """Raises `BadTree` for a name that would leave the directory, come twice, or be no file's."""
    seen = set()
    for entry in entries if isinstance(entries, list | tuple) else [entries]:
        match entry:
            case [str(path), int(size), str(sha256)]:
                pass
            case _:
                raise BadTree(f"{entry!r} is not the path, size and digest of a file")
        if "\0" in path or not STEPS_NOWHERE.isdisjoint(path.split("/")) or not _is_encodable(path):
            raise BadTree(f"{path!r} does not name a file inside a directory")
        if path in seen or not 0 <= size <= LARGEST or len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise BadTree(f"{path!r} comes twice, or with a size or digest that no file has")
        seen.add(path)


def begin(incoming: Path, entries: Sequence[Entry], known: Mapping[str, Path]) -> list[Stretch]:
    """Prepare to receive a tree; the stretches that are missing. `known`: digests of files that are here already."""
    refuse_bad_names(entries)
    files = incoming / "files"
    for folder in {path.rpartition("/")[0] for path, _, _ in entries} | {""}:
        (files / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = incoming / f"entries.json.{os.getpid()}"
    unfinished.write_text(json.dumps(entries))
    unfinished.replace(incoming / "entries.json")
    done = _done(incoming)
    missing: list[Stretch] = []
    for index, (path, size, sha256) in enumerate(entries):
        there = _size(f"{files}/{path}")
        starts = range(0, size, STRETCH) or [0]
        if there < 0 and sha256 in known and _link(known[sha256], files / path):
            done |= {(index, at) for at in starts}
            continue
        if size <= STRETCH and there != size:
            missing.append((index, 0, size))
        elif size > STRETCH:
            missing += [(index, at, min(STRETCH, size - at)) for at in starts if (index, at) not in done]
    _note(incoming, done)
    return missing


def frames(root: Path, entries: Sequence[Entry], stretches: Sequence[Stretch]) -> Iterator[bytes]:
    """The stretches of the files below `root`, as they travel."""
    for index, offset, length in stretches:
        yield HEADER.pack(index, offset, length)
        with open(root / entries[index][0], "rb", buffering=0) as file:
            file.seek(offset)
            while length:
                piece = file.read(min(PIECE, length))
                if not piece:
                    raise BadTree(f"{entries[index][0]} is shorter than {entries[index][1]:,} bytes")
                length -= len(piece)
                yield piece
    yield HEADER.pack(END, 0, 0)


def receive(incoming: Path, entries: Sequence[Entry], read: Callable[[int], bytes]) -> None:
    """Write frames to their places until they end. `read(n)` gives 1 to n bytes, and none when the other side is gone.

    Raises `BadTree` for a frame outside the tree, EOFError when they stop before their end.
    """
    read = _buffered(read)
    files = f"{incoming}/files"
    hashing, small = _Hashing(-1), list[str]()
    done = os.open(incoming / "done", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while True:
            index, offset, length = HEADER.unpack(_exactly(read, HEADER.size))
            if index == END:
                return
            if index >= len(entries) or offset + length > entries[index][1]:
                raise BadTree("a frame does not belong to this tree")
            hashing = hashing.from_here(index, offset)
            written = _write_stretch(f"{files}/{entries[index][0]}", offset, length, read, hashing)
            digest = [f"{index} {hashing.sha256.hexdigest()} {written}\n"] if hashing.at == entries[index][1] else []
            if entries[index][1] <= STRETCH:
                small += digest
                continue
            os.write(done, f"{index} {offset}\n".encode())
            _note_digests(incoming, digest)
    finally:
        os.close(done)
        _note_digests(incoming, small)


def finish(incoming: Path, entries: Sequence[Entry]) -> list[str]:
    """Compare every file with its digest; those that differ are removed, and named. Then the tree is whole."""
    digests = _noted_digests(incoming, entries)
    unknown = [index for index in range(len(entries)) if index not in digests]
    batches = [unknown[start : start + BATCH] for start in range(0, len(unknown), BATCH)]
    with ThreadPoolExecutor(HASHERS) as pool:
        for found in pool.map(lambda batch: {i: _digest(f"{incoming}/files/{entries[i][0]}") for i in batch}, batches):
            digests |= found
    wrong = [index for index, entry in enumerate(entries) if digests[index] != entry[2]]
    for index in wrong:
        (incoming / "files" / entries[index][0]).unlink(missing_ok=True)
    (incoming / "digests").unlink(missing_ok=True)
    if wrong:
        _note(incoming, {(index, at) for index, at in _done(incoming) if index not in wrong})
        return [entries[index][0] for index in wrong]
    for note in ("done", "entries.json"):
        (incoming / note).unlink(missing_ok=True)
    return []


def tree_name(entries: Sequence[Entry]) -> str:
    """A name that follows from the content."""
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()[:16]


def _is_encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


class _Hashing:
    """The digest of a file whose stretches come in order, taken while they are in memory."""

    def __init__(self, index: int, at: int = 0) -> None:
        self.index, self.at = index, at
        self.sha256 = hashlib.sha256()

    def from_here(self, index: int, offset: int) -> "_Hashing":
        """Itself where it goes on, another where it does not."""
        return self if (index, offset) == (self.index, self.at) else _Hashing(index, 0 if offset == 0 else -1)

    def take(self, data: memoryview) -> None:
        if self.at >= 0:
            self.sha256.update(data)
            self.at += len(data)


def _write_stretch(path: str, offset: int, length: int, read: Callable[[int], bytes], hashing: _Hashing) -> int:
    """Returns when the file was written to, in nanoseconds."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_nlink > 1:
            raise BadTree(f"{path} is here already: nothing is written to it")
        while length:
            piece = read(min(TAKEN, length))
            if not piece:
                raise EOFError("the other side is gone")
            view = memoryview(piece)
            hashing.take(view)
            length -= len(piece)
            while view:
                written = os.pwrite(descriptor, view, offset)
                offset += written
                view = view[written:]
        if offset > STRETCH // 2:
            _write_back(descriptor)
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _write_back(descriptor: int) -> None:
    """Let the disk begin now with what is to be flushed in the end anyway (Linux)."""
    if sys.platform == "linux":
        _c.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE)


def _buffered(read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """The same, asking for much at once: small files come by the dozen."""
    rest = memoryview(b"")

    def take(count: int) -> bytes:
        nonlocal rest
        if not rest:
            rest = memoryview(read(TAKEN))
        taken, rest = rest[:count], rest[count:]
        return taken  # type: ignore[return-value]

    return take


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = read(count - len(data))
        if not piece:
            raise EOFError("the other side is gone")
        data += piece
    return data


def _link(known: Path, path: Path) -> bool:
    try:
        os.link(known, path)
    except OSError:
        return False
    return True


def _note(incoming: Path, done: set[tuple[int, int]]) -> None:
    unfinished = incoming / f"done.{os.getpid()}"
    unfinished.write_text("".join(f"{index} {at}\n" for index, at in sorted(done)))
    unfinished.replace(incoming / "done")


def _done(incoming: Path) -> set[tuple[int, int]]:
    try:
        lines = (incoming / "done").read_text().splitlines()
    except FileNotFoundError:
        return set()
    found = [line.split() for line in lines]
    return {
        (int(line[0]), int(line[1])) for line in found if len(line) == 2 and line[0].isdigit() and line[1].isdigit()
    }


def _digest(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def _note_digests(incoming: Path, lines: Sequence[str]) -> None:
    if lines:
        with open(incoming / "digests", "a") as notes:
            notes.write("".join(lines))


def _noted_digests(incoming: Path, entries: Sequence[Entry]) -> dict[int, str]:
    """Digests of files that one process has received whole and in order, and that were not written to since."""
    try:
        lines = [line.split() for line in (incoming / "digests").read_text().splitlines()]
    except FileNotFoundError:
        return {}
    noted = {int(line[0]): (line[1], line[2]) for line in lines if len(line) == 3 and line[0].isdigit()}
    return {index: digest for index, (digest, at) in noted.items() if _written_at(incoming, entries[index][0]) == at}


def _written_at(incoming: Path, path: str) -> str:
    try:
        return str(os.stat(f"{incoming}/files/{path}").st_mtime_ns)
    except OSError:
        return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
