"""The runs of a store, found without reading all their records.

Decision: records are remembered (see `store.remembered`), and read again when their file or object has changed. Whether
a run that calls itself running lives is asked each time.
"""

import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rollouts_core.errors import BadInput
from rollouts_core.observe.run_records import RunRecord, decode_record, is_record
from rollouts_core.store.locks import is_held
from rollouts_core.store.objects import Objects
from rollouts_core.store.remembered import Row, bring_up_to_date, remembered, stamp_of
from rollouts_core.store.store import Store

HERE, SHARED = "here", "shared"


def list_runs(home: Path, most: int | None = None) -> list[RunRecord]:
    """The runs of this home, the latest first, at most so many."""
    query = "SELECT record FROM runs WHERE place = ? ORDER BY started_at DESC LIMIT ?"
    with _runs(home) as memory:
        rows = memory.execute(query, (HERE, -1 if most is None else most)).fetchall()
    return [_as_it_is(home, decode_record(content)) for (content,) in rows]


def all_runs(store: Store) -> list[RunRecord]:
    """The runs of this home and, with a remote store, those that other machines recorded there; the latest first."""
    here = list_runs(store.home)
    if store.url is None:
        return here
    with _runs(store.home, store) as memory:
        rows = memory.execute("SELECT record FROM runs WHERE place = ?", (SHARED,)).fetchall()
    known = {record.run_id for record in here}
    others = [record for (content,) in rows if (record := decode_record(content)).run_id not in known]
    return sorted(here + others, key=lambda record: record.started_at, reverse=True)


def unreadable_runs(store: Store) -> list[str]:
    """Files and objects that stand for runs, here and in a shared store, and are no records."""
    with _runs(store.home, store) as memory:
        known = {name for (name,) in memory.execute("SELECT name FROM runs WHERE place IN (?, ?)", (HERE, SHARED))}
    there = store.objects.stamps("runs") if store.url is not None else {}
    return sorted({*_stamps(store.home / "runs"), *there} - known)


def runs_with(store: Store, keys: Collection[str]) -> dict[str, list[str]]:
    """For each key, the ids of all runs whose plan has an artifact of it, the latest first."""
    query = "SELECT name FROM runs WHERE instr(record, CAST(? AS BLOB)) ORDER BY started_at DESC"
    with _runs(store.home, store) as memory:
        found = {key: memory.execute(query, (key,)).fetchall() for key in keys}
    return {key: list(dict.fromkeys(_run_id(name) for (name,) in rows)) for key, rows in found.items()}


def find_run(home: Path, run_id: str, shared: Store | None = None) -> RunRecord:
    """The run of that id, or the only one whose id begins so; of a `shared` store as well.

    Raises `BadInput` when there is none or several.
    """
    content = _record(home / "runs", run_id)
    if content is not None:
        return _as_it_is(home, decode_record(content))
    with _runs(home, shared) as memory:
        here, there = _beginning(memory, HERE, run_id), _beginning(memory, SHARED, f"runs/{run_id}") if shared else {}
    found = {**there, **here}
    if len(found) == 1:
        ((name, content),) = found.items()
        return _as_it_is(home, decode_record(content)) if name in here else decode_record(content)
    if found:
        raise BadInput(f"{run_id} begins the id of {len(found)} runs: {', '.join(list(found)[:5])}")
    raise BadInput(f"no run {run_id} in the store {home}; `rollouts runs` lists them")


def runs_beginning(store: Store, text: str) -> list[str]:
    """The ids of all runs that begin so, here and in a shared store."""
    with _runs(store.home, store) as memory:
        return list({**_beginning(memory, HERE, text), **_beginning(memory, SHARED, f"runs/{text}")})


def run_of_flow(home: Path, flow_run_id: str) -> RunRecord | None:
    """The run that a flow run of Prefect's has begun."""
    with _runs(home) as memory:
        rows = memory.execute("SELECT record FROM runs WHERE place = ? AND flow_run_id = ?", (HERE, flow_run_id))
        found = rows.fetchone()
    return _as_it_is(home, decode_record(found[0])) if found else None


@contextmanager
def _runs(home: Path, shared: Store | None = None) -> Iterator[sqlite3.Connection]:
    """The memory, with the runs of the home as they are now, and those of a shared store."""

    def look(memory: sqlite3.Connection) -> None:
        bring_up_to_date(memory, "runs", HERE, _stamps(home / "runs"), partial(_records, home / "runs"), _columns)
        if shared is not None and shared.url is not None:
            read = partial(_shared, shared.objects)
            bring_up_to_date(memory, "runs", SHARED, shared.objects.stamps("runs"), read, _columns)

    with remembered(home, look) as memory:
        yield memory


def _beginning(memory: sqlite3.Connection, place: str, text: str) -> dict[str, bytes]:
    """Run id to record."""
    query = "SELECT name, record FROM runs WHERE place = ? AND name BETWEEN ? AND ? ORDER BY started_at DESC"
    return {_run_id(name): record for name, record in memory.execute(query, (place, text, text + "\U0010ffff"))}


def _stamps(runs: Path) -> dict[str, str]:
    found = {}
    for directory in runs.iterdir() if runs.is_dir() else ():
        with suppress(OSError):
            found[directory.name] = stamp_of((directory / "run.json").stat())
    return found


def _records(runs: Path, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    return ((name, content) for name in names if (content := _record(runs, name)) is not None)


def _record(runs: Path, name: str) -> bytes | None:
    """The record in the directory `name` below `runs`; None if there is none, or if `name` is another path."""
    if Path(name).name != name:
        return None
    with suppress(OSError):
        content = (runs / name / "run.json").read_bytes()
        return content if is_record(content) else None
    return None


def _shared(objects: Objects, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    return (found for found in objects.read_many(list(names)).items() if is_record(found[1]))


def _run_id(name: str) -> str:
    """The run's id in the name of a directory here, or of a shared store's object."""
    return name.removeprefix("runs/").removesuffix(".json")


def _columns(content: bytes) -> Row:
    record = decode_record(content)
    return record.flow_run_id, record.started_at, content


def _as_it_is(home: Path, record: RunRecord) -> RunRecord:
    lost = record.state == "Running" and not is_held(home / "runs" / record.run_id / "lock")
    return replace(record, state="Lost") if lost else record
