"""Results that a run copies back: policy, metrics, samples, to `outputs/<run>/`; and the artifacts in its config."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from infra.jobs.session import MachineSession
from rollouts_core.config import ResultsConfig
from rollouts_core.observe.provenance import made_of, write_made
from rollouts_core.rollout.record_files import append_record
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.stage import Stage
from rollouts_core.store.fetch import fetch
from rollouts_core.store.manifest import ArtifactId


def bring_home(
    plan: Plan, final: ArtifactId | None, session: MachineSession, wanted: ResultsConfig, outputs: Path
) -> Path:
    """Copy the run's results, the policy from its final artifact, where it has trained one, verified on the way.

    They are gathered under a temporary name and moved into place whole.
    """
    for stage in plan.stages:
        if stage.kind in wanted.artifacts and not session.store.has(stage.artifact):
            session.machine.keep(stage.artifact)
    gathering = outputs.with_name(f".{outputs.name}.unfinished")
    shutil.rmtree(gathering, ignore_errors=True)
    gathering.mkdir(parents=True)
    if wanted.policy and final:
        _fetch(session, final, gathering, "policy/")
    if plan.sft:
        _join([plan.sft], session, "metrics.jsonl", gathering / "sft_metrics.jsonl")
    if plan.dpo:
        _join([plan.dpo], session, "metrics.jsonl", gathering / "dpo_metrics.jsonl")
    if plan.rl:
        _join(plan.rl, session, "metrics.jsonl", gathering / "rl_metrics.jsonl")
        for stage in plan.rl:
            _fetch(session, stage.artifact, gathering / ".rollouts", "rollouts")
            append_record(gathering, gathering / ".rollouts")
            shutil.rmtree(gathering / ".rollouts")
    (gathering / "evaluation").mkdir()
    for stage in plan.evaluate:
        point = stage.name.removeprefix("evaluate-")
        _join([stage], session, "samples.jsonl", gathering / "evaluation" / f"{point}.jsonl")
        _join([stage], session, "accuracy.json", gathering / "evaluation" / f"{point}.json")
    write_made(gathering, [made_of(stage, session.manifest(stage.artifact)) for stage in plan.stages])
    shutil.rmtree(outputs, ignore_errors=True)
    gathering.rename(outputs)
    return outputs


def fetch_file(session: MachineSession, artifact: ArtifactId, name: str, target: Path) -> Path:
    """Copy a file of an artifact, on whichever machine that is, into `target`."""
    _fetch(session, artifact, target, name)
    return target / name


def _join(stages: Sequence[Stage], session: MachineSession, name: str, target: Path) -> None:
    fetched = target.with_name(f".{target.name}.parts")
    with target.open("wb") as joined:
        for stage in stages:
            joined.write(fetch_file(session, stage.artifact, name, fetched).read_bytes())
            shutil.rmtree(fetched)


def _fetch(session: MachineSession, artifact: ArtifactId, target: Path, below: str) -> None:
    if session.store.has(artifact):
        fetch(session.store, artifact, target, below)
    else:
        session.machine.fetch(artifact, target, below)
