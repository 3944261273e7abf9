"""A SQLite file in the home that remembers what was read, so that costs do not grow with the number of artifacts.

Decision: this is a memory and may be out of date. Each use first compares names and stamps with what is there now,
reads what is new and drops what is gone. The file may be deleted at any time. A file that is damaged, or of another
version, is made again; if none can be written, it is made in memory.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

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
AT_ONCE = 500
"""Rows that are read, and then written, together."""
Row = tuple[object, ...]
T = TypeVar("T")


Update = Callable[[sqlite3.Connection], object]


@contextmanager
def remembered(home: Path, update: Update = lambda memory: None) -> Iterator[sqlite3.Connection]:
    """The memory of a home, with the tables of `SCHEMA`, once `update` has brought it up to date.

    Where the file can't be locked, read or written, that is done in memory. Raises `StoreError` where the file turns
    out to be damaged later.
    """
    with closing(_up_to_date(home / FILE, update)) as connection:
        try:
            yield connection
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            (home / FILE).unlink(missing_ok=True)
            raise StoreError(f"{home / FILE} was damaged ({error}) and is deleted: give the command again") from None


def forget(home: Path) -> None:
    """Forget everything: the next reader reads it again."""
    with remembered(home) as memory, memory:
        for table in ("artifacts", "marks"):
            memory.execute(f"DELETE FROM {table}")


def bring_up_to_date(
    memory: sqlite3.Connection,
    table: str,
    place: str,
    stamps: Mapping[str, str],
    read: Callable[[Collection[str]], Iterable[tuple[str, T]]],
    columns: Callable[[T], Row],
    *,
    whole: bool = True,
) -> None:
    """Make the table's rows of a place those of `stamps`, by name.

    `read` gives what is at names that are new or have another stamp; what can't be read is left out. `columns` makes of
    each the columns behind the stamp, while the table is locked: reading may take long, and others ask as well. Unless
    `stamps` are the `whole` of the place, what they do not name stays.
    """
    known = dict(memory.execute(f"SELECT name, stamp FROM {table} WHERE place = ?", (place,)))
    fresh = [name for name, stamp in stamps.items() if known.get(name) != stamp]
    gone = [name for name in known if name not in stamps] if whole else []
    for begin in range(0, max(len(gone), len(fresh)), AT_ONCE):
        left, part = gone[begin : begin + AT_ONCE], fresh[begin : begin + AT_ONCE]
        there = list(read(part)) if part else []
        with memory:
            memory.execute("BEGIN IMMEDIATE")
            memory.executemany(
                f"DELETE FROM {table} WHERE place = ? AND name = ?", ((place, name) for name in [*left, *part])
            )
            rows = [(place, name, stamps[name], *columns(found)) for name, found in there]
            if rows:
                memory.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def stamps_in(directory: Path) -> dict[str, str]:
    """Name to stamp of all that stands in a directory; nothing where there is none. What goes meanwhile is left out."""
    found = {}
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found[entry.name] = stamp_of(entry.stat())
    return found


def stamp_of(status: os.stat_result) -> str:
    """Changes when the file or directory is replaced or rewritten."""
    return f"{status.st_ino} {status.st_mtime_ns}"


def _up_to_date(path: Path, update: Update) -> sqlite3.Connection:
    """The updated database; in memory if the disk is nearly full, so that `gc` works then."""
    with suppress(OSError):
        if shutil.disk_usage(path.parent).free < MIN_FREE_BYTES:
            return _updated(":memory:", update)
    with suppress(sqlite3.OperationalError, OSError):
        try:
            return _updated(path, update)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # damaged
            path.unlink(missing_ok=True)
            return _updated(path, update)
    return _updated(":memory:", update)


def _updated(place: Path | str, update: Update) -> sqlite3.Connection:
    connection = sqlite3.connect(place, timeout=BUSY_SECONDS)
    try:
        _make_tables(connection)
        connection.execute("PRAGMA synchronous = OFF")
        update(connection)
        return connection
    except BaseException:
        connection.close()
        raise


def _make_tables(connection: sqlite3.Connection) -> None:
    """Make today's tables, unless they exist. Of two that come at once, the second finds the first one's."""
    if connection.execute("PRAGMA user_version").fetchone() == (VERSION,):
        return
    with connection:
        connection.execute("BEGIN EXCLUSIVE")
        if connection.execute("PRAGMA user_version").fetchone() == (VERSION,):
            return
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            connection.execute(f"DROP TABLE {name}")
        for statement in SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
