"""A run's events, sent to TensorBoard and W&B while they happen."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import to_data
from rollouts_core.metrics.loggers import MetricsLogger
from rollouts_core.observe.trackers import trackers
from tasks.events import StageProgress, logger


@contextmanager
def tracking(config: PipelineConfig, run_id: str, outputs: Path) -> Iterator[None]:
    """Metrics of stages that are trained inside go to what `config.tracking` asks for, below `outputs`."""
    with trackers(config.tracking, outputs, run_id, to_data(config)) as found:
        handler = _Passing(found)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)


class _Passing(logging.Handler):
    """A tracker that fails is told of once, and left alone from then on: training goes on without it."""

    def __init__(self, to: Mapping[str, MetricsLogger]) -> None:
        super().__init__()
        self._to = dict(to)

    def emit(self, record: logging.LogRecord) -> None:
        match record.__dict__.get("event"):
            case StageProgress(stage, _, _, metrics, step) if metrics:
                named = {f"{stage.partition('-')[0]}/{name}": float(value) for name, value in metrics.items()}
                for name in list(self._to):
                    self._pass(name, named, step)

    def _pass(self, name: str, metrics: Mapping[str, float], step: int) -> None:
        try:
            self._to[name].log(metrics, step)
        except Exception as error:
            del self._to[name]
            logging.getLogger("rollouts.machines").warning("%s gets no more metrics: %s", name, error)
