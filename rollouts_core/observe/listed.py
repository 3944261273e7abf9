"""Runs as lists show them: state, accuracies and a small curve of each.

Decision: a curve is read from the run's metrics once, and remembered until they change (see `store.remembered`).
"""

import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollouts_core.metrics.loggers import read_jsonl
from rollouts_core.metrics.sparkline import means
from rollouts_core.observe.run_list import list_runs
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.store.remembered import Row, bring_up_to_date, remembered, stamp_of

POINTS = 40
CURVES = {"rl": "reward", "dpo": "rewards/accuracies", "sft": "loss"}
"""The metric to draw for a run, by its last training."""


@dataclass(frozen=True)
class Listed:
    record: RunRecord
    curve: str
    """The name of the curve's metric; empty if there is no curve."""
    values: tuple[float, ...]


def listed_runs(home: Path, outputs: Path, most: int | None = None) -> list[Listed]:
    """The latest first, at most so many. `outputs`: where runs have their results, below their ids."""
    records = list_runs(home, most)
    stamps = {record.run_id: stamp for record in records if (stamp := _stamp(outputs / record.run_id))}
    place = str(outputs.resolve())

    def look(memory: sqlite3.Connection) -> None:
        bring_up_to_date(memory, "curves", place, stamps, partial(_read, outputs), tuple, whole=False)

    with remembered(home, look) as memory:
        rows = memory.execute("SELECT name, curve, points FROM curves WHERE place = ?", (place,)).fetchall()
    curves: Mapping[str, tuple[str, str]] = {name: (curve, points) for name, curve, points in rows}
    found = []
    for record in records:
        curve, points = curves.get(record.run_id, ("", "[]"))
        found.append(Listed(record, curve, tuple(json.loads(points))))
    return found


def _stamp(results: Path) -> str:
    """A stamp of the metrics that are drawn; empty where there are none."""
    for training in CURVES:
        path = results / f"{training}_metrics.jsonl"
        if path.is_file():
            return f"{training} {stamp_of(path.stat())} {path.stat().st_size}"
    return ""


def _read(outputs: Path, names: Collection[str]) -> Iterator[tuple[str, Row]]:
    for name in names:
        for training, metric in CURVES.items():
            path = outputs / name / f"{training}_metrics.jsonl"
            if path.is_file():
                values = [record[metric] for record in read_jsonl(path) if metric in record]
                yield name, (f"{training} {metric}", json.dumps(means(values, POINTS)))
                break
