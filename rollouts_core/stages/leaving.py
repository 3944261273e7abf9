"""Checkpoints when they are due, and when the job is asked to leave its machine."""

from collections.abc import Callable
from pathlib import Path

from rollouts_core.errors import AskedToLeave
from rollouts_core.stages.workspace import Work
from rollouts_core.training.backend import TrainFuture
from rollouts_core.training.checkpoint import Checkpoints


def checkpoint_or_leave(
    work: Work, checkpoints: Checkpoints, step: int, is_due: bool, save: Callable[[Path], TrainFuture[None]]
) -> None:
    """Begin the checkpoint of a step that is not the last. Raises `AskedToLeave` where this is the last one here."""
    leaves = work.session.is_asked_to_leave()
    if is_due or leaves:
        checkpoints.begin(step, save)
    if leaves:
        raise AskedToLeave(f"asked to leave: a checkpoint of step {step} is kept")
