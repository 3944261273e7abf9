"""The differences of two runs: in their configs, and in their results."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts_core.config.schema import leaves
from rollouts_core.observe.run_list import find_run
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.store.manifest import ArtifactId
from rollouts_core.store.store import Store


@dataclass(frozen=True)
class Changed:
    """A value that two runs do not share; None where one of them has none."""

    part: str
    """config, stage or result."""
    name: str
    one: Any
    other: Any


def compare_runs(store: Store, one: str, other: str) -> list[Changed]:
    """Raises `BadInput` when a run is not found."""
    records = [find_run(store.home, name) for name in (one, other)]
    configs = [dict(leaves(json.loads(_config(store.home, record).read_text()))) for record in records]
    stages = [{stage.name: f"{stage.state} {(stage.key or '')[:16]}".strip() for stage in r.stages} for r in records]
    results = [dict(_results(store, record)) for record in records]
    return [
        *_changed("config", *configs),
        *_changed("stage", *stages),
        *_changed("result", *results),
    ]


def _results(store: Store, record: RunRecord) -> Iterator[tuple[str, float]]:
    for accuracy in record.accuracies:
        yield f"accuracy {accuracy.point}", accuracy.accuracy
    for stage in record.stages:
        artifact = ArtifactId(stage.name, stage.key or "")
        summary = store.manifest(artifact).provenance.summary if stage.key and store.has(artifact) else {}
        for name, value in summary.items():
            yield f"{stage.name} {name}", value


def _changed(part: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Changed]:
    for name in [*one, *(name for name in other if name not in one)]:
        if one.get(name) != other.get(name):
            yield Changed(part, name, one.get(name), other.get(name))


def _config(home: Path, record: RunRecord) -> Path:
    return home / "runs" / record.run_id / "config.json"
