"""Replays of a run's RL, from what it kept: training without an engine, or generation without training.

Decision: a replay uses the parts of the RL stage itself, with another source of batches, so it cannot drift from that.
It publishes nothing.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.errors import BadInput
from rollouts_core.inference.registry import embedded_engine
from rollouts_core.inference.weights import stored
from rollouts_core.metrics.loggers import JSONLLogger, read_jsonl
from rollouts_core.rollout.kept import KeptRollouts, file_of, write_batch
from rollouts_core.rollout.source import generating
from rollouts_core.stages.acting import acting_of
from rollouts_core.stages.backends import backend_of, recipe_for
from rollouts_core.stages.policies import first_policy, start, trained_origin
from rollouts_core.stages.rl import (
    buffer_of,
    manager_for,
    prompts_of,
    reference_for,
)
from rollouts_core.stages.specs import RLSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.workspace import Session, StageLog, Work, open_session
from rollouts_core.store.store import Store
from rollouts_core.training.configured import rl_loop
from rollouts_core.training.models import seed_torch
from rollouts_core.training.rl import run_rl_training

COMPARED = ("policy_loss", "grad_norm", "entropy", "sampling/sampling_logp_difference/mean")


@dataclass(frozen=True)
class ReplayedStep:
    """A metric by its name: what the run recorded, and what came out now."""

    step: int
    recorded: dict[str, float]
    replayed: dict[str, float]

    @property
    def is_same(self) -> bool:
        return self.recorded == self.replayed


def replay(segment: Stage, store: Store, scratch: Path, device: str) -> Iterator[ReplayedStep]:
    """Train the segment's steps from its kept batches. Raises `BadInput` when it kept none."""
    spec = segment.spec
    assert isinstance(spec, RLSpec), "a segment is RL's"
    if not store.has(segment.artifact):
        raise BadInput(f"{segment.name} ({segment.artifact.directory}) is not in this store")
    directory = store.open(segment.artifact)
    if not (directory / "batches").is_dir():
        raise BadInput(f"{segment.name} kept no batches: run with rl.rollouts.keep_batches=true")
    recorded = {record["step"]: record for record in read_jsonl(directory / "metrics.jsonl")}
    with open_session() as session:
        work = _work(segment, store, scratch, device, session)
        tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
        seed_torch(spec.seed, "rl")
        model = start(work, trained_origin(work, spec, tokenizer))
        recipe = recipe_for(segment)
        backend = backend_of(segment, model)
        reference = reference_for(work, spec, tokenizer, backend)
        if spec.start > 0:
            backend.load(work.inputs["policy"] / "state")
        kept = KeptRollouts(directory / "batches")
        for step in run_rl_training(backend, kept, rl_loop(spec.training, recipe, spec.stop), reference, spec.start):
            then = recorded[step.step]
            names = [name for name in COMPARED if name in then]
            yield ReplayedStep(
                step.step, {name: then[name] for name in names}, {name: step.metrics[name] for name in names}
            )


def generate_again(segment: Stage, store: Store, steps: int, out: Path, device: str) -> Iterator[tuple[Path, float]]:
    """Generate the batches of the segment's first steps from the policy it begins with, and train on none of them.

    Yields each batch's file and mean reward. The embedded engine generates, whatever engine the run used.
    """
    spec = segment.spec
    assert isinstance(spec, RLSpec), "a segment is RL's"
    with open_session() as session:
        work = _work(segment, store, out, device, session)
        tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
        seed_torch(spec.seed, "rl")
        model = first_policy(work, spec, tokenizer)
        engine = embedded_engine(spec.engine, model, tokenizer, spec.max_length)
        acting = acting_of(segment, spec.environment, tokenizer, spec.max_length)
        make_manager = partial(manager_for, work, spec, tokenizer, buffer_of(prompts_of(work), spec), None, acting)
        with generating(lambda: engine, make_manager, same_thread=True) as rollouts:
            version = 0
            if spec.start > 0:
                state = work.inputs["policy"] / "state"
                rollouts.restore(json.loads((state / "rollouts.json").read_text()))
                version = json.loads((state / "training.json").read_text())["weight_version"]
            rollouts.publish(stored(model), version)
            for step in range(spec.start + 1, min(spec.start + steps, spec.stop) + 1):
                samples = list(rollouts.next_batch(step).samples)
                write_batch(out / file_of(step), samples)
                yield out / file_of(step), sum(sample.reward or 0.0 for sample in samples) / len(samples)


def _work(segment: Stage, store: Store, scratch: Path, device: str, session: Session) -> Work:
    inputs = {role: store.open(artifact) for role, artifact in segment.inputs.items()}
    scratch.mkdir(parents=True, exist_ok=True)
    log = StageLog(segment.name, scratch / "metrics.jsonl", JSONLLogger(scratch / "followed.jsonl"))
    return Work(segment, inputs, scratch, scratch, log, device, session, store)
