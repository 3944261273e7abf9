"""Around every stage's task: its state in the run's record, the cache, the job, and what Prefect shows of it."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from httpx import HTTPError
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_run_logger
from prefect.runtime import task_run
from prefect.states import Completed
from prefect.tasks import Task, exponential_backoff

from infra.errors import JobFailed
from infra.jobs.follow import LogLine
from infra.jobs.session import Glimpse, MachineSession, Progress, Serving
from infra.jobs.stage_job import make_in_job, was_found
from rollouts_core.errors import RolloutsError, StoreUnavailable
from rollouts_core.observe.replica_table import replica_rows
from rollouts_core.observe.run_records import StageState
from rollouts_core.observe.runs import RunLog
from rollouts_core.stages.explain import explain_stage
from rollouts_core.stages.stage import Stage
from rollouts_core.store.manifest import ArtifactId
from tasks.events import StageChanged, StageLine, StageProgress, StageRollouts, announce
from tasks.showing import show_failure, show_stage

PROGRESS_SECONDS = 2.0
"""Prefect's progress bars are moved at most this often."""
TABLE_SECONDS = 10.0
"""The table of replicas is written anew at most this often."""


def retry_mends(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether to try again: only after a job was killed or a store did not answer. Bad input stays bad."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StoreUnavailable) or (isinstance(error, JobFailed) and error.mendable)


JOB_TASK: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": exponential_backoff(backoff_factor=2),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": retry_mends,
    "timeout_seconds": 30 * 24 * 3600,
    "persist_result": False,
}
"""For tasks that wait for a job, whose own limit is `machine.time_limit_hours`; this timeout stands behind it."""

LIGHT_TASK: dict[str, Any] = {"timeout_seconds": 900, "persist_result": False}
"""For tasks that do their work here, in seconds."""


WAITING_TASK: dict[str, Any] = {"timeout_seconds": 30 * 24 * 3600, "persist_result": False}
"""For tasks that wait for a machine, whose own limits are the config's; this timeout stands behind them."""


@dataclass(frozen=True)
class ArtifactRef:
    """A reference to an artifact, passed between tasks."""

    artifact: ArtifactId


@dataclass
class Outcome:
    state: StageState = "Completed"


@contextmanager
def recorded(run: RunLog, name: str, key: str | None = None) -> Iterator[Outcome]:
    """Note a stage's start, end and time in the run's record, and announce them."""
    began = time.monotonic()
    outcome = Outcome()
    run.stage(name, key, "Running")
    announce(StageChanged(name, "Running"))
    try:
        yield outcome
    except Exception:
        outcome.state = "Failed"
        raise
    except BaseException:
        outcome.state = "Cancelled"
        raise
    finally:
        seconds = time.monotonic() - began
        run.stage(name, key, outcome.state, seconds)
        announce(StageChanged(name, outcome.state, seconds))


def make(stage: Stage, chain: Sequence[Stage], session: MachineSession, *inputs: ArtifactRef | None) -> ArtifactRef:
    """The stage's artifact: found in the store (state `Cached`), or made by the job of its chain.

    `inputs` is what the flow hands on from earlier tasks. Raises ValueError when the stage is not made from that.
    """
    for ref in inputs:
        if ref is not None and ref.artifact not in stage.inputs.values():
            raise ValueError(
                f"{stage.name} is not made from {ref.artifact.directory}: the flow hands on the wrong artifact"
            )
    with recorded(session.run, stage.name, stage.key) as outcome, _failure_shown(stage):
        if was_found(stage, chain, session):
            outcome.state = "Cached"
            return cached(stage.artifact)
        made_beside = session.has(stage.artifact)
        for reason in [] if made_beside else _why(stage, session):
            say(stage.name, f"to run: {reason}")
        bar, table = _ProgressBar(stage.name), _ReplicaTable(stage.name)
        for event in make_in_job(stage, chain, session):
            match event:
                case LogLine(text):
                    say(stage.name, text)
                case Progress(name, done, total, metrics, step):
                    bar.move(done, total)
                    table.stepped(metrics)
                    announce(StageProgress(name, done, total, metrics, step))
                case Serving(replicas):
                    table.changed(replicas)
                case Glimpse(name, step, rollouts):
                    announce(StageRollouts(name, step, rollouts))
        _show(stage, session)
    return ArtifactRef(stage.artifact)


def _why(stage: Stage, session: MachineSession) -> list[str]:
    planned = {entry.key: entry for entry in session.run.record.stages if entry.key}
    own = {key: entry.name for key, entry in planned.items()}
    made = {key: name for key, name in own.items() if planned[key].state == "Completed"}
    return explain_stage(stage, session.store, own, made).lines()


def run_name() -> str:
    """A task run's name, for people: `arithmetic · rl 3/4`."""
    given = task_run.parameters
    session, stage = given.get("machine"), given.get("stage")
    run = session.run if isinstance(session, MachineSession) else given.get("run")
    config = run.record.name if isinstance(run, RunLog) else "run"
    if not isinstance(stage, Stage):
        return f"{config} · {task_run.task_name}"
    kind, _, rest = stage.name.partition("-")
    of = f"/{len(given['segments'])}" if "segments" in given else ""
    return f"{config} · {kind} {rest}{of}".rstrip()


@contextmanager
def _failure_shown(stage: Stage) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        with suppress(HTTPError):  # the task's state says it anyway
            show_failure(stage.name, error)
        raise


def _show(stage: Stage, session: MachineSession) -> None:
    """A stage that was made is made, whether or not Prefect takes its pictures."""
    try:
        show_stage(stage, session)
    except (HTTPError, OSError, RolloutsError) as error:
        say(stage.name, f"its metrics are not shown in Prefect's UI: {error}")


def say(stage: str, text: str) -> None:
    """A line of a stage, for Prefect's log and for whoever listens here."""
    get_run_logger().info(text)
    announce(StageLine(stage, text))


def cached(artifact: ArtifactId) -> ArtifactRef:
    """The state that Prefect shows as `Cached`, typed as what the caller of a task that returns it gets: its data."""
    ref = ArtifactRef(artifact)
    message = f"{artifact.directory} was in the store"
    return Completed(name="Cached", message=message, data=ref)  # type: ignore[return-value]


class _ProgressBar:
    """A stage's progress bar in Prefect, made when there is first something to show."""

    def __init__(self, stage: str) -> None:
        self._key = f"{stage}-progress"
        self._id: UUID | None = None
        self._moved = 0.0

    def move(self, done: int, total: int) -> None:
        if done < total and time.monotonic() - self._moved < PROGRESS_SECONDS:
            return
        self._moved = time.monotonic()
        percent = 100.0 * done / max(1, total)
        if self._id is None:
            created = create_progress_artifact(percent, key=self._key, description=f"{done} of {total}")
            assert isinstance(created, UUID), "called without an event loop, it returns the id itself"
            self._id = created
        else:
            update_progress_artifact(self._id, percent, description=f"{done} of {total}")


class _ReplicaTable:
    """The table of a stage's replicas in Prefect. It is created when there are replicas, then updated."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._id: UUID | None = None
        self._replicas: Sequence[Mapping[str, Any]] = ()
        self._metrics: Mapping[str, float] = {}
        self._written = -TABLE_SECONDS

    def changed(self, replicas: Sequence[Mapping[str, Any]]) -> None:
        self._replicas = replicas
        self._write()

    def stepped(self, metrics: Mapping[str, float]) -> None:
        self._metrics = metrics
        if self._replicas and time.monotonic() - self._written >= TABLE_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        rows = replica_rows(self._replicas, self._metrics)
        with suppress(HTTPError):
            if self._id is None:
                description = f"{self._stage}: which replicas generate"
                created = create_table_artifact(rows, key=f"{self._stage}-replicas", description=description)
                assert isinstance(created, UUID), "called without an event loop, it returns the id itself"
                self._id = created
            else:
                get_client(sync_client=True).update_artifact(self._id, ArtifactUpdate(data=json.dumps(rows)))
