"""What is around every task: what is retried, what is announced, what is recorded."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.states import Failed

from infra.errors import JobFailed
from infra.jobs.session import MachineSession
from infra.machines.local import LocalMachine
from rollouts_core.config import PipelineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import RunLog, open_run
from rollouts_core.stages.plan import plan
from rollouts_core.store.local import LocalStore
from tasks import (
    bootstrap,
    evaluate,
    provision,
    report,
    rl,
    serve,
    sft,
    sync,
    tokenize,
    tokenize_parts,
)
from tasks.events import Event, StageChanged, logger
from tasks.run import recording
from tasks.stage_task import ArtifactRef, make, recorded, retry_mends
from tests.rollouts_core.stages.test_explain import publish


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (JobFailed("killed", (), mendable=True), True),
        (JobFailed("bad data", (), mendable=False), False),
        (BadInput("no such file"), False),
        (ValueError("a fault in our code"), False),
    ],
)
def test_only_what_a_retry_can_mend_is_retried(error: Exception, again: bool) -> None:
    state = Failed(data=error)
    assert retry_mends(None, None, state) is again  # type: ignore[arg-type]


def test_every_task_has_a_timeout_and_jobs_are_retried_with_backoff_and_jitter() -> None:
    jobs = [tokenize.tokenize_task, tokenize_parts.tokenize_part, sft.sft, rl.rl, evaluate.evaluate]
    light = [bootstrap.bootstrap, provision.provision_task, serve.serve_task, sync.sync, report.report]
    for task in [*jobs, *light]:
        assert task.timeout_seconds
    for task in jobs:
        assert task.retries == 2
        assert task.retry_delay_seconds == [2.0, 4.0]
        assert task.retry_jitter_factor
        assert task.retry_condition_fn is retry_mends
    assert not any(task.retries for task in light)


@pytest.fixture
def run(pipeline_config: PipelineConfig, tmp_path: Path) -> RunLog:
    return open_run(LocalStore(tmp_path), pipeline_config, [("sft", "k")], None)


@pytest.fixture
def announced() -> Iterator[list[Event]]:
    events: list[Event] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            events.append(record.__dict__["event"])

    collector = Collector()
    logger.addHandler(collector)
    yield events
    logger.removeHandler(collector)


def states(events: list[Event]) -> list[str]:
    return [event.state for event in events if isinstance(event, StageChanged)]


def test_a_stage_is_recorded_and_announced(run: RunLog, announced: list[Event]) -> None:
    with recorded(run, "sft", "k") as outcome:
        assert run.record.stages[0].state == "Running"
        outcome.state = "Cached"
    assert run.record.stages[0].state == "Cached"
    assert states(announced) == ["Running", "Cached"]


def test_the_wrong_artifact_is_not_taken(pipeline_config: PipelineConfig, run: RunLog, tmp_path: Path) -> None:
    stages = plan(pipeline_config)
    session = MachineSession(LocalMachine(LocalStore(tmp_path)), LocalStore(tmp_path), pipeline_config.machine, run)
    assert stages.sft is not None
    with pytest.raises(ValueError, match="sft is not made from rl-1"):
        make(stages.sft, [stages.sft], session, ArtifactRef(stages.rl[0].artifact))


@pytest.mark.parametrize(("error", "state"), [(ValueError(), "Failed"), (KeyboardInterrupt(), "Cancelled")])
def test_a_stage_that_ends_badly(run: RunLog, announced: list[Event], error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), recorded(run, "sft", "k"):
        raise error
    assert run.record.stages[0].state == state
    assert states(announced) == ["Running", state]


def test_a_retry_does_not_discard_again_what_the_run_has_refreshed(
    pipeline_config: PipelineConfig, tmp_path: Path
) -> None:
    store, stages = LocalStore(tmp_path), plan(pipeline_config)
    publish(store, stages.tokenize)
    with pytest.raises(RuntimeError), recording(pipeline_config, stages, store, "flow", ["tokenize"]) as run:
        assert not store.has(stages.tokenize.artifact)
        assert run.record.refreshed == tuple(stage.name for stage in stages.stages)
        publish(store, stages.tokenize)
        raise RuntimeError
    with recording(pipeline_config, stages, store, "flow", ["tokenize"]):
        assert store.has(stages.tokenize.artifact)
