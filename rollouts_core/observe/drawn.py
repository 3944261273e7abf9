"""The plots of a run, drawn once: they follow from the run's artifacts, so they are an artifact themselves."""

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rollouts_core.observe.report import draw_plots
from rollouts_core.observe.runs import AccuracyRecord
from rollouts_core.store.fingerprint import installed_versions, source_digest
from rollouts_core.store.keys import key_of
from rollouts_core.store.making import making
from rollouts_core.store.manifest import ArtifactId, Provenance
from rollouts_core.store.store import Store

PLOTS = "plots.json"
DEADLINE = 300.0


def plots_artifact(stage_keys: Sequence[str]) -> ArtifactId:
    """Its key follows from those of the stages, and from the code that draws."""
    return ArtifactId("report", key_of({"stages": list(stage_keys), "code": _code()}))


def plots_of(stage_keys: Sequence[str], accuracies: Sequence[AccuracyRecord], results: Path, store: Store) -> list[str]:
    """SVG plots of what lies in a run's results."""
    artifact = plots_artifact(stage_keys)
    started, began = datetime.now(UTC), time.perf_counter()
    with making(store, artifact, DEADLINE) as place:
        if place is not None:
            (place.out / PLOTS).write_text(json.dumps(draw_plots(accuracies, results)))
            place.publish(
                Provenance(
                    version=1,
                    spec={"stages": list(stage_keys)},
                    inputs={},
                    external={},
                    code=_code(),
                    git_commit=None,
                    libraries=installed_versions(["matplotlib"]),
                    host={},
                    started_at=started.isoformat(timespec="seconds"),
                    seconds=round(time.perf_counter() - began, 3),
                    summary={},
                )
            )
    plots: list[str] = json.loads((store.open(artifact) / PLOTS).read_text())
    return plots


def _code() -> dict[str, str]:
    return {name: source_digest(f"rollouts_core.observe.{name}") for name in ("plots", "report")}
