"""SHA-256 of files, in parallel, and remembered, so that what has not changed is not read twice.

Decision: a digest is remembered under the file's path, device, inode, size, modification and change time. A file that
was modified within the last two seconds is not remembered: a second write in the same tick of the file system's clock
would go unseen. The memory lies in the user's cache directory; where that can't be written, files are read again.
"""

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rollouts_core.store.transfer import file_digest, in_parallel

SETTLED_SECONDS = 2.0
BUSY_SECONDS = 5.0


def digests(paths: Sequence[Path]) -> list[str]:
    """The digest of each file, from its bytes."""
    return in_parallel(file_digest, paths, [path.stat().st_size for path in paths])


def known_digests(paths: Sequence[Path]) -> list[str]:
    """The digest of each file, remembered where the file has not changed since it was last read."""
    with _memory() as memory:
        if memory is None:
            return digests(paths)
        states = {path: _state(path) for path in paths}
        found = {path: digest for path, state in states.items() if (digest := _recall(memory, path, state))}
        unknown = [path for path in states if path not in found]
        found |= zip(unknown, digests(unknown), strict=True)
        settled = [path for path in unknown if _is_settled(path) and _state(path) == states[path]]
        with suppress(sqlite3.Error), memory:
            rows = [(str(path), states[path], found[path]) for path in settled]
            memory.executemany("REPLACE INTO digests VALUES (?, ?, ?)", rows)
        return [found[path] for path in paths]


def recalled(kind: str) -> dict[str, str]:
    """All remembered texts of a kind, by name."""
    with _memory() as memory, suppress(sqlite3.Error):
        if memory is not None:
            return dict(memory.execute("SELECT name, text FROM texts WHERE kind = ?", (kind,)))
    return {}


def remember(kind: str, texts: Mapping[str, str]) -> None:
    """Add texts to those that `recalled` returns; does nothing if the user's cache directory can't be written."""
    with _memory() as memory, suppress(sqlite3.Error):
        if memory is not None:
            with memory:
                rows = [(kind, name, text) for name, text in texts.items()]
                memory.executemany("REPLACE INTO texts VALUES (?, ?, ?)", rows)


@contextmanager
def _memory() -> Iterator[sqlite3.Connection | None]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollouts"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(cache / "digests.sqlite", timeout=BUSY_SECONDS)
        connection.execute("CREATE TABLE IF NOT EXISTS digests (path TEXT PRIMARY KEY, state TEXT, digest TEXT)")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS texts (kind TEXT, name TEXT, text TEXT, PRIMARY KEY (kind, name))"
        )
    except (OSError, sqlite3.Error, RuntimeError):
        yield None
        return
    with closing(connection):
        yield connection


def _recall(memory: sqlite3.Connection, path: Path, state: str) -> str:
    with suppress(sqlite3.Error):
        row = memory.execute("SELECT digest FROM digests WHERE path = ? AND state = ?", (str(path), state)).fetchone()
        return row[0] if row else ""
    return ""


def _state(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _is_settled(path: Path) -> bool:
    status = path.stat()
    return time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_SECONDS
