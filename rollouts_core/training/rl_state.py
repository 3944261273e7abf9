"""The state that RL resumes from: the backend's state, and the position of its rollouts."""

import json
from pathlib import Path
from typing import Any, Protocol

from rollouts_core.training.backend import TrainFuture, TrainingBackend

ROLLOUTS = "rollouts.json"


class Resumable(Protocol):
    """Rollouts that can be gone on with; see `rollout.source`."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


def save_rl(backend: TrainingBackend, rollouts: Resumable, directory: Path) -> TrainFuture[None]:
    """The same as `TrainingBackend.save`, with the state of the rollouts."""
    (directory / ROLLOUTS).write_text(json.dumps(rollouts.state()))
    return backend.save(directory)


def load_rl(backend: TrainingBackend, rollouts: Resumable, directory: Path) -> None:
    """Take up what `save_rl` wrote."""
    backend.load(directory)
    rollouts.restore(json.loads((directory / ROLLOUTS).read_text()))
