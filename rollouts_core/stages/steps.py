"""What SFT and DPO do around their loops: resume, log, save checkpoints, and leave `policy/` and `metrics.jsonl`."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

from rollouts_core.stages.specs import DPOSpec, SFTSpec
from rollouts_core.stages.work import Work
from rollouts_core.training.backend import LossFunction, Metrics, TrainStep
from rollouts_core.training.checkpoint import Checkpoints, last_checkpoint
from rollouts_core.training.fsdp import FSDPTrainingBackend, create_backend
from rollouts_core.training.inspection import keeping_nonfinite
from rollouts_core.training.models import save_policy
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend
from rollouts_core.training.schedule import create_scheduler

Backend = FSDPTrainingBackend | PyTorchTrainingBackend


def make_policy(
    work: Work,
    backend: Backend,
    model: Any,
    tokenizer: Any,
    spec: SFTSpec | DPOSpec,
    steps_from: Callable[[int], Iterator[TrainStep]],
) -> Metrics:
    """Take the steps that lack, from the last checkpoint on; leave `policy/` and `metrics.jsonl`.

    Gives the last step's metrics.
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
            if step.step % training.checkpoint_every == 0 and not last:
                checkpoints.begin(step.step, backend.save)
    if spec.backend.lora is not None:
        backend.save_adapter(work.out / "adapter")
    save_policy(model, tokenizer, work.out / "policy", backend.get_weights().result())
    shutil.copyfile(work.scratch / "metrics.jsonl", work.out / "metrics.jsonl")
    return metrics


def backend_of(model: Any, loss: LossFunction, spec: SFTSpec | DPOSpec, ranks: Any) -> Backend:
    training = spec.training
    optimization = Optimization(
        training.learning_rate,
        training.optimizer,
        training.weight_decay,
        training.max_grad_norm,
        create_scheduler(training.schedule, training.warmup_steps, training.steps),
    )
    return create_backend(
        model,
        loss,
        optimization,
        ranks,
        activation_checkpointing=spec.backend.activation_checkpointing,
        lora=spec.backend.lora,
    )
