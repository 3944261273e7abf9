"""Metrics for TensorBoard and Weights & Biases, beside the files of the run, which are always written.

Both packages are optional, and imported only where a config asks for them. Neither needs the network: TensorBoard reads
files, and W&B's offline mode writes what `wandb sync` sends later.
"""

import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rollouts_core.config import TrackingConfig
from rollouts_core.errors import BadInput
from rollouts_core.metrics.loggers import MetricsLogger

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def check_tracking(config: TrackingConfig) -> None:
    """Raises `BadInput` where a package that is asked for is not installed."""
    wanted = [name for name in PACKAGES if getattr(config, name)]
    missing = [name for name in wanted if importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        raise BadInput([f"tracking.{name}: needs the package {PACKAGES[name]}: pip install it" for name in missing])


@contextmanager
def trackers(
    config: TrackingConfig, directory: Path, run_id: str, told: Mapping[str, Any]
) -> Iterator[dict[str, MetricsLogger]]:
    """The trackers that the config asks for, by name; they are closed at the end. `told`: the run's config, as data."""
    with ExitStack() as closing:
        found: dict[str, MetricsLogger] = {}
        if config.tensorboard:
            found["tensorboard"] = closing.enter_context(_tensorboard(directory / "tensorboard" / run_id))
        if config.wandb:
            found["wandb"] = closing.enter_context(_wandb(config, directory, run_id, told))
        yield found


class TensorBoardLogger:
    """Scalars as TensorBoard reads them; names keep their slashes, which group them there."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


class WandbLogger:
    """Metrics to W&B. Each training counts its own steps: the axis of `sft/loss` is `sft/step`."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._defined: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        trainings = {name.split("/")[0] for name in metrics}
        for training in trainings - self._defined:
            self._run.define_metric(f"{training}/*", step_metric=f"{training}/step")
        self._defined |= trainings
        self._run.log({**metrics, **{f"{training}/step": step for training in trainings}})


@contextmanager
def _tensorboard(directory: Path) -> Iterator[TensorBoardLogger]:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(directory))
    try:
        yield TensorBoardLogger(writer)
    finally:
        writer.close()


@contextmanager
def _wandb(config: TrackingConfig, directory: Path, run_id: str, told: Mapping[str, Any]) -> Iterator[WandbLogger]:
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
    run = wandb.init(
        project=config.wandb,
        name=run_id,
        mode=config.wandb_mode,
        dir=str(directory),
        config=dict(told),
        settings=settings,
    )
    try:
        yield WandbLogger(run)
    finally:
        run.finish()
