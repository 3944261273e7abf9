"""What was read before, in one SQLite file of the home, so that costs do not grow with all that was ever made.

Decision: it is a memory, not a truth. Whoever asks it first compares names and stamps with what is there now, reads
what is new and drops what is gone. It may be deleted at any time. A file that is damaged, or of another version, is
made anew; where none can be written, it is made in memory.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rollouts_core.errors import StoreError

FILE = "index.sqlite"
VERSION = 2
BUSY_SECONDS = 30.0
MIN_FREE_BYTES = 64 * 2**20
SCHEMA = """
CREATE TABLE artifacts (
    place TEXT, name TEXT, stamp TEXT, stage TEXT, kind TEXT, key TEXT, started_at TEXT, seconds REAL, size INTEGER,
    node TEXT, device TEXT, work REAL, inputs TEXT, features BLOB, PRIMARY KEY (place, name));
CREATE INDEX artifacts_by_kind ON artifacts (kind);
CREATE INDEX artifacts_by_key ON artifacts (key);
CREATE TABLE features (kind TEXT, name TEXT, position INTEGER, PRIMARY KEY (kind, name));
CREATE TABLE runs (
    place TEXT, name TEXT, stamp TEXT, flow_run_id TEXT, started_at TEXT, record BLOB, PRIMARY KEY (place, name));
CREATE INDEX runs_by_flow_run ON runs (flow_run_id);
CREATE TABLE curves (place TEXT, name TEXT, stamp TEXT, curve TEXT, points TEXT, PRIMARY KEY (place, name));
CREATE TABLE marks (place TEXT PRIMARY KEY, mark TEXT);
"""
Row = tuple[object, ...]


@contextmanager
def remembered(home: Path) -> Iterator[sqlite3.Connection]:
    """The memory of a home, with the tables of `SCHEMA`. Raises `StoreError` where it turns out to be damaged."""
    with closing(_opened(home / FILE)) as connection:
        try:
            yield connection
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            (home / FILE).unlink(missing_ok=True)
            raise StoreError(f"{home / FILE} was damaged ({error}) and is deleted: give the command again") from None


def forget(home: Path) -> None:
    """Have everything read anew by whoever asks next."""
    with remembered(home) as memory, memory:
        for table in ("artifacts", "marks"):
            memory.execute(f"DELETE FROM {table}")


def bring_up_to_date(
    memory: sqlite3.Connection,
    table: str,
    place: str,
    stamps: Mapping[str, str],
    read: Callable[[Collection[str]], Iterable[tuple[str, Row]]],
    *,
    whole: bool = True,
) -> None:
    """Make the table's rows of a place those of `stamps`, by name.

    `read` gives names that are new or have another stamp with the columns behind the stamp; those that can't be read
    are left out. Unless `stamps` are the `whole` of the place, what they do not name stays.
    """
    known = dict(memory.execute(f"SELECT name, stamp FROM {table} WHERE place = ?", (place,)))
    fresh = [name for name, stamp in stamps.items() if known.get(name) != stamp]
    gone = [name for name in known if name not in stamps] if whole else []
    if not fresh and not gone:
        return
    rows = [(place, name, stamps[name], *columns) for name, columns in read(fresh)] if fresh else []
    with memory:
        memory.executemany(f"DELETE FROM {table} WHERE place = ? AND name = ?", ((place, n) for n in [*gone, *fresh]))
        if rows:
            memory.executemany(f"REPLACE INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def stamp_of(status: os.stat_result) -> str:
    """Changes when the file or directory is replaced or rewritten."""
    return f"{status.st_ino} {status.st_mtime_ns}"


def _opened(path: Path) -> sqlite3.Connection:
    """In memory as well where the disk is all but full: `gc` is wanted then most of all."""
    with suppress(OSError):
        if shutil.disk_usage(path.parent).free < MIN_FREE_BYTES:
            return _checked(sqlite3.connect(":memory:"))
    for attempt in ("as it is", "made anew"):
        try:
            if attempt == "made anew":
                path.unlink(missing_ok=True)
            return _checked(sqlite3.connect(path, timeout=BUSY_SECONDS))
        except (sqlite3.DatabaseError, OSError):
            continue
    return _checked(sqlite3.connect(":memory:"))


def _checked(connection: sqlite3.Connection) -> sqlite3.Connection:
    """With the tables of today. Raises `sqlite3.DatabaseError` where it can't have them."""
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            _make(connection)
        connection.execute("PRAGMA synchronous = OFF")
        return connection
    except sqlite3.DatabaseError:
        connection.close()
        raise


def _make(connection: sqlite3.Connection) -> None:
    """Alone: of two that come at once, the second finds the first one's tables."""
    with connection:
        connection.execute("BEGIN EXCLUSIVE")
        if connection.execute("PRAGMA user_version").fetchone() == (VERSION,):
            return
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            connection.execute(f"DROP TABLE {name}")
        for statement in SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
