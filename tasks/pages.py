"""The pages of a run while it goes on: its report, and the list of all runs.

Decision: they are drawn from the run's events, which come from its machine anyway. So they also follow runs on other
machines. The metrics of events are in files of the results, which the run's own results replace at its end.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import to_data
from rollouts_core.metrics.loggers import JSONLLogger
from rollouts_core.observe.index_page import write_index
from rollouts_core.observe.report import write_report
from rollouts_core.observe.run_records import seconds_so_far
from rollouts_core.observe.runs import RunLog
from rollouts_core.observe.viewer import Viewer
from rollouts_core.store.store import Store
from tasks.events import StageChanged, StageProgress, StageRollouts, logger

WRITE_SECONDS = 10.0
SHARE = 0.05
"""Largest share of the time that goes into writing."""
TRAININGS = ("sft", "dpo", "rl")


@contextmanager
def listing(store: Store, outputs: Path) -> Iterator[None]:
    """The list of all runs is written when the run inside has ended, however it ends."""
    try:
        yield
    finally:
        write_list(store, outputs)


def write_list(store: Store, outputs: Path) -> None:
    """Warns where it can't be written."""
    _or_warn("outputs/index.html", lambda: write_index(store.home, outputs))


@contextmanager
def pages(config: PipelineConfig, run: RunLog, store: Store, outputs: Path) -> Iterator[None]:
    """Written now and then while the run goes on inside, until its own report is there."""
    handler = _Pages(config, run, store, outputs)
    logger.addHandler(handler)
    try:
        handler.write(live=True)
        yield
    finally:
        logger.removeHandler(handler)
        handler.write(live=False)


class _Pages(logging.Handler):
    """Pages that can't be written are told of once, and left alone from then on: the run goes on without them."""

    def __init__(self, config: PipelineConfig, run: RunLog, store: Store, outputs: Path) -> None:
        super().__init__()
        self._config, self._run, self._store, self._outputs = to_data(config), run, store, outputs
        self._results = outputs / run.run_id
        self._loggers: dict[str, JSONLLogger] = {}
        self._viewer = Viewer(self._results, run.run_id)
        self._told: dict[str, int] = {}
        """Up to which step; an attempt after a kill tells some steps again."""
        self._next = 0.0
        shutil.rmtree(self._results, ignore_errors=True)  # of an earlier attempt, which announced the same steps

    def emit(self, record: logging.LogRecord) -> None:
        event = record.__dict__.get("event")
        if isinstance(event, StageChanged | StageProgress | StageRollouts):
            self._do(lambda: self._take(event))

    def write(self, live: bool) -> None:
        self._do(lambda: self._write(live))

    def _do(self, work: Callable[[], object]) -> None:
        """Do work for the run's pages; nothing once the run has its own report."""
        if self._run.record.report is None and not _or_warn("the run's pages", work):
            logger.removeHandler(self)

    def _take(self, event: StageChanged | StageProgress | StageRollouts) -> None:
        match event:
            case StageProgress(name, metrics=metrics, step=step) if metrics and self._is_new("metrics", name, step):
                self._keep(name.partition("-")[0], event)
            case StageRollouts(name, step, rollouts) if self._is_new("rollouts", name, step):
                for rollout in rollouts:
                    self._viewer.add({"step": step, **rollout})
        if time.monotonic() > self._next:
            self._write(live=True)

    def _is_new(self, what: str, stage: str, step: int) -> bool:
        training = f"{what} {stage.partition('-')[0]}"
        known = self._told.get(training, 0)
        self._told[training] = max(known, step)
        return step > known

    def _keep(self, training: str, event: StageProgress) -> None:
        if training not in TRAININGS:
            return
        if training not in self._loggers:
            self._loggers[training] = JSONLLogger(self._results / f"{training}_metrics.jsonl")
        self._loggers[training].log(event.metrics, event.step)

    def _write(self, live: bool) -> None:
        begun = time.monotonic()
        self._results.mkdir(parents=True, exist_ok=True)
        self._viewer.write(live)
        record = replace(self._run.record, seconds=seconds_so_far(self._run.record))
        write_report(record, self._results, self._config, [], [], live=live)
        write_index(self._store.home, self._outputs)
        ended = time.monotonic()
        self._next = ended + max(WRITE_SECONDS, (ended - begun) / SHARE)


def _or_warn(what: str, work: Callable[[], object]) -> bool:
    """Whether it was done."""
    try:
        work()
    except Exception as error:
        logging.getLogger("rollouts.machines").warning("%s can't be written: %s", what, error)
        return False
    return True
