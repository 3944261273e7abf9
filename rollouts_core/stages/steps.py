"""The work of SFT and DPO around their loops: check, resume, log, save, and write `policy/` and `metrics.jsonl`."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

from rollouts_core.data.prompts import check_vocabulary
from rollouts_core.stages.backends import stage_backend
from rollouts_core.stages.leaving import checkpoint_or_leave
from rollouts_core.stages.specs import DPOSpec, SFTSpec
from rollouts_core.stages.workspace import Work
from rollouts_core.training.backend import Metrics, TrainStep
from rollouts_core.training.checkpoint import Checkpoints, last_checkpoint
from rollouts_core.training.configured import Backend
from rollouts_core.training.exporting import save_policy
from rollouts_core.training.inspection import keeping_nonfinite
from rollouts_core.training.models import check_context, seed_torch
from rollouts_core.training.origins import Origin


def begin(work: Work, spec: SFTSpec | DPOSpec, model: Any, origin: Origin, largest: int) -> Backend:
    """The backend that trains the model. `largest`: token of the data. Raises `BadInput` where the model can't take
    these tokens, or so many."""
    check_vocabulary(largest, model.config.vocab_size)
    check_context(model, spec.max_length)
    backend = stage_backend(work, model, origin)
    seed_torch(spec.seed, work.stage.kind)
    return backend


def make_policy(
    work: Work,
    backend: Backend,
    model: Any,
    tokenizer: Any,
    spec: SFTSpec | DPOSpec,
    steps_from: Callable[[int], Iterator[TrainStep]],
) -> Metrics:
    """Take the steps that lack, from the last checkpoint on; leave `policy/` and `metrics.jsonl`.

    Gives the last step's metrics. Raises `AskedToLeave` behind a checkpoint.
    """
    start, training = 0, spec.training
    if found := last_checkpoint(work.scratch / "checkpoints"):
        start, directory = found
        backend.load(directory)
        print(f"resuming after step {start}")
    work.log.covers(0, training.steps, start)
    metrics: Metrics = {}
    with Checkpoints(work.scratch / "checkpoints") as checkpoints:
        for step in keeping_nonfinite(steps_from(start), work.scratch / "nonfinite"):
            metrics = step.metrics
            last = step.step == training.steps
            if step.step % training.log_every == 0 or last:
                work.log.log(metrics, step.step)
            if not last:
                is_due = step.step % training.checkpoint_every == 0
                checkpoint_or_leave(work, checkpoints, step.step, is_due, backend.save)
    if spec.backend.lora is not None:
        backend.save_adapter(work.out / "adapter")
    save_policy(model, tokenizer, work.out / "policy", backend.get_weights().result())
    shutil.copyfile(work.scratch / "metrics.jsonl", work.out / "metrics.jsonl")
    return metrics
