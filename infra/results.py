"""What a run brings home: policy, metrics, samples, below `outputs/<run>/`."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rollouts_core.stages.plan import Plan
from rollouts_core.stages.stage import Stage
from rollouts_core.store.fetch import fetch
from rollouts_core.store.manifest import ArtifactId
from rollouts_core.store.store import Store


def bring_home(plan: Plan, final: ArtifactId, store: Store, outputs: Path) -> Path:
    """Copy the run's results, the policy from its final artifact, verified on the way.

    They are gathered under a temporary name and moved into place whole.
    """
    gathering = outputs.with_name(f".{outputs.name}.unfinished")
    shutil.rmtree(gathering, ignore_errors=True)
    gathering.mkdir(parents=True)
    fetch(store, final, gathering, "policy/")
    if plan.sft:
        _join([plan.sft], store, "metrics.jsonl", gathering / "sft_metrics.jsonl")
    if plan.rl:
        _join(plan.rl, store, "metrics.jsonl", gathering / "rl_metrics.jsonl")
        _join(plan.rl, store, "rollouts.jsonl", gathering / "rollouts.jsonl")
    (gathering / "evaluation").mkdir()
    for stage in plan.evaluate:
        point = stage.name.removeprefix("evaluate-")
        _join([stage], store, "samples.jsonl", gathering / "evaluation" / f"{point}.jsonl")
        _join([stage], store, "accuracy.json", gathering / "evaluation" / f"{point}.json")
    shutil.rmtree(outputs, ignore_errors=True)
    gathering.rename(outputs)
    return outputs


def _join(stages: Sequence[Stage], store: Store, name: str, target: Path) -> None:
    with target.open("wb") as joined:
        for stage in stages:
            joined.write((store.open(stage.artifact) / name).read_bytes())
