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
from rollouts_core.observe.run_records import RunRecord, decode_record
from rollouts_core.store.locks import is_held
from rollouts_core.store.objects import Objects
from rollouts_core.store.remembered import Row, bring_up_to_date, remembered, stamp_of
from rollouts_core.store.store import Store

HERE, SHARED = "here", "shared"


def list_runs(home: Path) -> list[RunRecord]:
    """All runs, the latest first."""
    with _runs(home) as memory:
        rows = memory.execute("SELECT record FROM runs WHERE place = ? ORDER BY started_at DESC", (HERE,)).fetchall()
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


def runs_with(store: Store, keys: Collection[str]) -> dict[str, list[str]]:
    """By each key, the ids of all runs whose plan has an artifact of it, the latest first."""
    query = "SELECT name FROM runs WHERE instr(record, CAST(? AS BLOB)) ORDER BY started_at DESC"
    with _runs(store.home, store) as memory:
        found = {key: memory.execute(query, (key,)).fetchall() for key in keys}
    return {key: list(dict.fromkeys(_run_id(name) for (name,) in rows)) for key, rows in found.items()}


def find_run(home: Path, run_id: str) -> RunRecord:
    """The run of that id, or the only one whose id begins so. Raises `BadInput` when there is none or several."""
    with _runs(home) as memory:
        found = _beginning(memory, run_id)
    exact = [content for name, content in found if name == run_id]
    if exact or len(found) == 1:
        return _as_it_is(home, decode_record(exact[0] if exact else found[0][1]))
    if found:
        raise BadInput(f"{run_id} begins the id of {len(found)} runs: {', '.join(name for name, _ in found[:5])}")
    raise BadInput(f"no run {run_id} in the store {home}; `rollouts runs` lists them")


def runs_beginning(home: Path, text: str) -> list[str]:
    """The ids of the runs that begin so."""
    with _runs(home) as memory:
        return [name for name, _ in _beginning(memory, text)]


def run_of_flow(home: Path, flow_run_id: str) -> RunRecord | None:
    """The run that a flow run of Prefect's has begun."""
    with _runs(home) as memory:
        rows = memory.execute("SELECT record FROM runs WHERE place = ? AND flow_run_id = ?", (HERE, flow_run_id))
        found = rows.fetchone()
    return _as_it_is(home, decode_record(found[0])) if found else None


@contextmanager
def _runs(home: Path, shared: Store | None = None) -> Iterator[sqlite3.Connection]:
    """The memory, with the runs of the home as they are now, and those of a shared store."""
    with remembered(home) as memory:
        bring_up_to_date(memory, "runs", HERE, _stamps(home / "runs"), partial(_records, home / "runs"))
        if shared is not None and shared.url is not None:
            read = partial(_shared, shared.objects)
            bring_up_to_date(memory, "runs", SHARED, shared.objects.stamps("runs"), read)
        yield memory


def _beginning(memory: sqlite3.Connection, text: str) -> list[tuple[str, bytes]]:
    rows = memory.execute(
        "SELECT name, record FROM runs WHERE place = ? AND name BETWEEN ? AND ? ORDER BY started_at DESC",
        (HERE, text, text + "\U0010ffff"),
    )
    return rows.fetchall()


def _stamps(runs: Path) -> dict[str, str]:
    found = {}
    for directory in runs.iterdir() if runs.is_dir() else ():
        with suppress(OSError):
            found[directory.name] = stamp_of((directory / "run.json").stat())
    return found


def _records(runs: Path, names: Collection[str]) -> Iterator[tuple[str, Row]]:
    for name in names:
        with suppress(OSError, ValueError):
            yield name, _columns((runs / name / "run.json").read_bytes())


def _shared(objects: Objects, names: Collection[str]) -> Iterator[tuple[str, Row]]:
    for name, content in objects.read_many(list(names)).items():
        with suppress(ValueError):
            yield name, _columns(content)


def _run_id(name: str) -> str:
    """Of a directory's name here, or of a shared store's object."""
    return name.removeprefix("runs/").removesuffix(".json")


def _columns(content: bytes) -> Row:
    record = decode_record(content)
    return record.flow_run_id, record.started_at, content


def _as_it_is(home: Path, record: RunRecord) -> RunRecord:
    lost = record.state == "Running" and not is_held(home / "runs" / record.run_id / "lock")
    return replace(record, state="Lost") if lost else record
