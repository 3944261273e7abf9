"""A training under way: its steps one after another, and its result when it ends or is left early.

Decision: it is an iterator. The caller decides what happens between steps, and may stop. Engine, threads and files are
closed when the training ends, is closed, or is garbage-collected. If an exception in a notebook's cell still holds a
training, that is closed when the next training begins.

Decision: with a directory it can be resumed: the same call continues after the last checkpoint. Arguments that would
give another result are refused then.
"""

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import numpy as np

from rollouts_core.config.schema import leaves
from rollouts_core.errors import BadInput
from rollouts_core.library.models import LanguageModel
from rollouts_core.library.progress import Bar, bar_of
from rollouts_core.training.backend import Metrics, TrainFuture
from rollouts_core.training.checkpoint import Checkpoints, last_checkpoint
from rollouts_core.training.configured import Backend

BEGUN_WITH = "training.json"


class Step(Protocol):
    """The result of a step; see `TrainStep` and `RLStep`."""

    @property
    def step(self) -> int: ...

    @property
    def metrics(self) -> Metrics: ...


StepT = TypeVar("StepT", bound=Step)
_open: "WeakSet[Training[Any]]" = WeakSet()


class Training(Iterator[StepT], Generic[StepT]):
    """A training under way. Iterate over it to get its steps. Also a context manager, which closes it."""

    def __init__(
        self, policy: LanguageModel, backend: Backend, steps: Generator[StepT, None, None], total: int, shown: str
    ) -> None:
        """`shown`: the metric beside the progress bar; empty: no bar."""
        _let_go_of_those_left()
        self.policy = policy
        """The model, which is trained in place, and its tokenizer."""
        self.backend = backend
        self._steps, self._total, self._shown = steps, total, shown
        self._bar: Bar | None = None
        self._ended = False
        _open.add(self)

    def __iter__(self) -> "Training[StepT]":
        if self._ended:
            raise BadInput("this training has ended: call the function again for another")
        return self

    def __next__(self) -> StepT:
        try:
            step = next(self._steps)
        except BaseException:
            self._end()
            raise
        if self._shown:
            self._show(step)
        return step

    def run(self) -> Metrics:
        """Take all steps that are left; the last one's metrics, none where there was no step left."""
        metrics: Metrics = {}
        for step in self:
            metrics = step.metrics
        return metrics

    def save(self, directory: str | Path) -> None:
        """The policy as it is now, as a Hugging Face model directory."""
        self.policy.save(directory)

    def close(self) -> None:
        """End it where it is: engine, threads and files are closed."""
        self._steps.close()
        self._end()

    def __enter__(self) -> "Training[StepT]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, step: StepT) -> None:
        self._bar = self._bar or bar_of(self._total)
        value = step.metrics.get(self._shown)
        self._bar.move(step.step, "" if value is None else f"{self._shown} {value:.4g}")

    def _end(self) -> None:
        self._ended = True
        _open.discard(self)
        if self._bar is not None:
            self._bar.end()
            self._bar = None


def begin(directory: Path | None, told: Mapping[str, Any]) -> tuple[int, Path | None]:
    """The step behind which a training goes on, and its checkpoint; 0 and None for one that begins.

    `told`: what decides its result. Raises `BadInput` with all that differs from what the directory was begun with.
    """
    if directory is None:
        return 0, None
    directory.mkdir(parents=True, exist_ok=True)
    path, now = directory / BEGUN_WITH, json.loads(json.dumps(told, default=str))
    if path.exists():
        before, here = dict(leaves(json.loads(path.read_text()))), dict(leaves(now))
        differing = [name for name in {**before, **here} if before.get(name) != here.get(name)]
        if differing:
            problems = [f"{name}: it was begun with {before.get(name)!r}, not {here.get(name)!r}" for name in differing]
            raise BadInput(problems, f"directory {directory}")
        return last_checkpoint(directory / "checkpoints") or (0, None)
    path.write_text(json.dumps(now, indent=1))
    return 0, None


def digest_of(sequences: Iterable[Any]) -> str:
    """A digest of tokens, so that a directory continues only with the same data."""
    digest = hashlib.sha256()
    for tokens in sequences:
        digest.update(np.asarray(tokens, np.int64).tobytes() + b"|")
    return digest.hexdigest()[:16]


def model_digest(model: Any, weights: bool = False) -> str:
    """A digest of a model's parameters: names and shapes, and of their `weights` where a reference is made of them."""
    digest = hashlib.sha256()
    for name, value in model.named_parameters():
        digest.update(f"{name} {tuple(value.shape)}".encode())
        if weights:
            digest.update(value.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def with_checkpoints(
    steps: Iterator[StepT],
    directory: Path | None,
    every: int,
    total: int,
    save: Callable[[Path], TrainFuture[None]],
    covered: Callable[[int], object] = lambda step: None,
) -> Generator[StepT, None, None]:
    """The same steps, with a checkpoint after every so many, and after the last. `covered` hears of what is on disk."""
    if directory is None:
        yield from steps
        return
    with Checkpoints(directory / "checkpoints") as checkpoints:
        for step in steps:
            if step.step % every == 0 or step.step == total:
                checkpoints.begin(step.step, save)
            if (complete := checkpoints.completed()) is not None:
                covered(complete)
            yield step


def _let_go_of_those_left() -> None:
    """An exception that ended a loop holds that loop's variables, and so its training, until the next exception."""
    left = getattr(sys, "last_traceback", None)
    if left is not None and len(_open):
        traceback.clear_frames(left)
