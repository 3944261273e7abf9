"""The record of a run: one directory below the store's `runs/`, with `run.json`, `config.json` and `events.jsonl`.

`run.json` is replaced whole at every change, so that a reader, at whatever moment, sees a run as it last was. A retry
of the same flow run goes on in the same record. With a remote store, the record is written there as well: whoever
clears that store up sees what the runs of all machines need.
"""

import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import save_config
from rollouts_core.endings import Endings
from rollouts_core.errors import StoreUnavailable
from rollouts_core.metrics.loggers import JSONLLogger
from rollouts_core.observe.run_list import run_of_flow
from rollouts_core.observe.run_records import (
    AccuracyRecord,
    JobRecord,
    RunRecord,
    RunState,
    StageRecord,
    StageState,
    encode_record,
)
from rollouts_core.store.locks import born, try_lock
from rollouts_core.store.objects import Objects
from rollouts_core.store.store import Store

TOUCH_SECONDS = 3600.0


class RunLog:
    """Writes one run's record, holds its lock while it lives, and knows what must be ended with it (`endings`).

    Everybody else reads the file.

    Stages that run at once may tell it from several threads.
    """

    def __init__(self, directory: Path, record: RunRecord, shared: Objects | None) -> None:
        """`shared`: where a remote store keeps the records of all machines."""
        self.directory = directory
        self.record = record
        self.endings = Endings()
        self._shared = shared
        self._began = time.monotonic() - record.seconds
        self._changing = threading.RLock()
        self._events = JSONLLogger(directory / "events.jsonl")
        self._lock = (directory / "lock").open("w")
        try_lock(self._lock.fileno())
        self._write()
        self._share()

    @property
    def run_id(self) -> str:
        return self.record.run_id

    def stage(self, name: str, key: str | None, state: StageState, seconds: float = 0.0) -> None:
        """Note a stage's new state; stages stand in the order they were planned or first seen."""
        noted = StageRecord(name, key, state, round(seconds, 3))
        with self._changing:
            stages = self.record.stages
            if any(stage.name == name for stage in stages):
                stages = tuple(noted if stage.name == name else stage for stage in stages)
            else:
                stages = (*stages, noted)
            self._change({"stage": name, "state": state}, stages=stages)

    def result(self, accuracies: Sequence[AccuracyRecord], report: Path) -> None:
        self._change({"report": str(report)}, accuracies=tuple(accuracies), report=str(report))

    def refreshing(self, stages: Sequence[str]) -> None:
        self._change({"refreshed": list(stages)}, refreshed=tuple(stages))

    def job(self, stage: str, machine: str, job: str, log: int | None) -> None:
        """Note the job that makes a stage, before it is asked for and when it runs; each attempt of it once."""
        noted, asked_for = JobRecord(stage, machine, job, log), JobRecord(stage, machine, job, None)
        with self._changing:
            if noted not in self.record.jobs:
                others = tuple(known for known in self.record.jobs if known != asked_for)
                self._change({"job": job, "machine": machine}, jobs=(*others, noted))

    def discarded(self, machine: str) -> None:
        self._change({"discarded_on": machine}, discarded_on=(*self.record.discarded_on, machine))

    def touch(self) -> None:
        """Say now and then that the run goes on."""
        if time.monotonic() - self._written > TOUCH_SECONDS:
            self._change({"run": "goes on"})

    def end(self, state: RunState, error: str | None = None) -> None:
        self._change({"run": state}, state=state, error=error)
        self._lock.close()

    def _change(self, event: dict[str, Any], **changes: Any) -> None:
        with self._changing:
            seconds = round(time.monotonic() - self._began, 3)
            self.record = replace(self.record, seconds=seconds, updated_at=_now(), **changes)
            self._events.log({"at": _now(), **event}, len(self.record.stages))
            self._write()
            with suppress(StoreUnavailable):  # it was told at the beginning what the run needs
                self._share()

    def _write(self) -> None:
        unfinished = self.directory / f"run.json.{os.getpid()}"
        unfinished.write_bytes(encode_record(self.record, indent=1))
        unfinished.replace(self.directory / "run.json")
        self._written = time.monotonic()

    def _share(self) -> None:
        if self._shared is not None:
            self._shared.write(f"runs/{self.run_id}.json", encode_record(self.record))


def open_run(
    store: Store, config: PipelineConfig, planned: Sequence[tuple[str, str | None]], flow_run_id: str | None
) -> RunLog:
    """A new record with the planned stages (name and key), or the record that this flow run began before."""
    runs, shared = store.home / "runs", store.objects if store.url else None
    if flow_run_id is not None and (before := run_of_flow(store.home, flow_run_id)):
        again = replace(before, state="Running", error=None, process=this_process())
        return RunLog(runs / before.run_id, again, shared)
    run_id = new_run_id(config.name)
    directory = runs / run_id
    directory.mkdir(parents=True)
    save_config(config, directory / "config.json")
    stages = tuple(StageRecord(name, key) for name, key in planned)
    record = RunRecord(run_id, config.name, "Running", _now(), 0.0, flow_run_id, stages, process=this_process())
    return RunLog(directory, record, shared)


def new_run_id(name: str) -> str:
    """An id of its own for each run, also where many of the same config begin in one second, on several machines."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def this_process() -> tuple[int, str]:
    return os.getpid(), born(os.getpid())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
