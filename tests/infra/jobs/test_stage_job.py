"""Stages made by jobs: followed, cancelled, killed, and taken up again."""

import json
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from infra.errors import JobFailed, Unreachable
from infra.jobs.follow import LogLine
from infra.jobs.session import MachineSession, Progress, cancel_job
from infra.jobs.stage_job import make_in_job
from infra.machines.local import LocalMachine
from infra.machines.machine import Machine, Offsets
from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import from_data
from rollouts_core.errors import StoreUnavailable
from rollouts_core.observe.runs import open_run
from rollouts_core.stages.plan import Plan, plan
from rollouts_core.store.leases import Holder, live_leases
from rollouts_core.store.local import LocalStore
from rollouts_core.store.manifest import ArtifactId
from tests.conftest import job_process


@pytest.fixture
def session(pipeline_config: PipelineConfig, tmp_path: Path) -> MachineSession:
    store = LocalStore(tmp_path / "store")
    run = open_run(store, pipeline_config, [], None)
    return MachineSession(LocalMachine(store), store, pipeline_config.machine, run)


@pytest.fixture
def stages(pipeline_config: PipelineConfig) -> Plan:
    return plan(pipeline_config)


def test_a_chain_shares_one_process_and_each_stage_gets_its_own_progress(stages: Plan, session: MachineSession) -> None:
    assert stages.sft is not None
    for stage in (stages.tokenize, stages.sft):
        list(make_in_job(stage, [stage], session))
    events = {stage.name: list(make_in_job(stage, stages.rl, session)) for stage in stages.rl}
    assert all(session.store.has(stage.artifact) for stage in stages.rl)
    (job,) = [path for path in (session.store.home / "jobs").iterdir() if path.name.startswith("rl")]
    lines = [event.text for found in events.values() for event in found if isinstance(event, LogLine)]
    assert lines == (job / "log").read_text().splitlines()
    progress = [event for found in events.values() for event in found if isinstance(event, Progress)]
    assert [(event.stage, event.done, event.total) for event in progress] == [
        (stage.name, done, 2) for stage in stages.rl for done in (1, 2)
    ]
    assert "reward" in progress[0].metrics


def test_bad_data_is_not_mendable_and_named(
    session: MachineSession, small_config: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "1"}]}\n{"mess')
    small_config["data"]["prompts"]["path"] = str(path)
    stage = plan(from_data(small_config)).tokenize
    with pytest.raises(JobFailed, match=rf"{re.escape(str(path))}:2: not valid JSON") as caught:
        list(make_in_job(stage, [stage], session))
    assert not caught.value.mendable


def test_whoever_stops_waiting_ends_the_job(stages: Plan, session: MachineSession) -> None:
    assert stages.sft is not None
    list(make_in_job(stages.tokenize, [stages.tokenize], session))
    events = make_in_job(stages.sft, [stages.sft], session)
    next(events)
    events.close()
    assert session.machine.watch(stages.sft.artifact.directory, Offsets(), 0.0).status.reason == "cancelled"
    assert not session.store.has(stages.sft.artifact)


@pytest.mark.slow
def test_a_killed_job_is_mendable_and_goes_on_from_its_checkpoint_to_the_same_bits(
    small_config: dict[str, Any], session: MachineSession, tmp_path: Path
) -> None:
    small_config["sft"]["steps"] = 800
    stages = plan(from_data(small_config))
    assert stages.sft is not None
    stage = stages.sft
    list(make_in_job(stages.tokenize, [stages.tokenize], session))
    other = tmp_path / "other"
    elsewhere = replace(session, store=LocalStore(other), machine=LocalMachine(LocalStore(other)), cursors={})
    for undisturbed in (stages.tokenize, stage):
        list(make_in_job(undisturbed, [undisturbed], elsewhere))

    def kill_the_job() -> None:
        """Once, when the first checkpoint is there."""
        killed = False
        for event in make_in_job(stage, [stage], session):
            checkpoints = session.store.home / "work" / f"{stage.artifact.directory}.1" / "checkpoints"
            if not killed and isinstance(event, Progress) and list(checkpoints.glob("step-*")):
                killed = True
                os.kill(job_process(session.store.home / "jobs" / stage.artifact.directory), signal.SIGKILL)

    with pytest.raises(JobFailed, match="killed by signal 9") as caught:
        kill_the_job()
    assert caught.value.mendable
    lines = [event.text for event in make_in_job(stage, [stage], session) if isinstance(event, LogLine)]
    assert any(line.startswith("resuming after step") for line in lines)
    files = [s.store.open(stage.artifact) / "policy" / "model.safetensors" for s in (session, elsewhere)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_a_job_that_lost_its_lease_ends_at_once_and_a_retry_mends_it(stages: Plan, session: MachineSession) -> None:
    assert stages.sft is not None
    stage = replace(stages.sft, spec=replace(stages.sft.spec, training=replace(stages.sft.spec.training, steps=10**6)))
    list(make_in_job(stages.tokenize, [stages.tokenize], session))
    lease = f"leases/{stage.artifact.directory}"
    successor = Holder("another", "elsewhere", "another kernel", 1, "1", "2026-01-01T00:00:00+00:00")

    def take_over() -> None:
        taken = False
        for event in make_in_job(stage, [stage], session):
            if not taken and isinstance(event, Progress):
                session.store.objects.write(f"{lease}/00000002.json", json.dumps(asdict(successor)).encode())
                taken = True

    with pytest.raises(JobFailed, match="taken over by another process") as caught:
        take_over()
    assert caught.value.mendable
    assert live_leases(session.store.objects) == {stage.artifact.directory: successor}


def test_a_store_that_does_not_answer_while_a_job_runs_is_asked_again(
    stages: Plan, session: MachineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([StoreUnavailable("gone"), StoreUnavailable("gone")])
    has = LocalStore.has

    def unsteady(self: LocalStore, artifact: ArtifactId) -> bool:
        if begun and (error := next(answers, None)):
            raise error
        return has(self, artifact)

    begun: list[object] = []
    monkeypatch.setattr(LocalStore, "has", unsteady)
    for event in make_in_job(stages.tokenize, [stages.tokenize], session):
        begun.append(event)
    monkeypatch.undo()
    assert session.store.has(stages.tokenize.artifact)
    assert next(answers, None) is None


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_and_a_retry_mends_it(
    stages: Plan, session: MachineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stages.sft is not None
    stage = replace(stages.sft, spec=replace(stages.sft.spec, training=replace(stages.sft.spec.training, steps=10**6)))
    list(make_in_job(stages.tokenize, [stages.tokenize], session))
    monkeypatch.setattr("infra.jobs.stage_job.STALL_LIMIT", 4.0)

    def pause_it() -> None:
        paused = False
        for event in make_in_job(stage, [stage], session):
            if not paused and isinstance(event, Progress):
                os.kill(job_process(session.store.home / "jobs" / stage.artifact.directory), signal.SIGSTOP)
                paused = True

    with pytest.raises(JobFailed, match="its job hung for 4 s") as caught:
        pause_it()
    assert caught.value.mendable


def test_a_job_of_a_machine_that_is_away_is_left_to_its_limits(caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        name = "far"

        def cancel(self, job: str, asked_by: str | None = None) -> bool:
            raise Unreachable("far does not answer")

    assert not cancel_job("sft-1-ranks", cast(Machine, Away()))
    assert "job sft-1-ranks may run on there; `rollouts cancel` ends it" in caplog.text
