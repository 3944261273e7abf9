"""Tokenization in parts, as mapped tasks of a real Prefect server, on threads and on a Dask cluster."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.preflight import check_task_runner
from infra.errors import JobFailed
from infra.jobs.session import MachineSession
from infra.machines.local import LocalMachine
from rollouts_core.config import TokenizationConfig
from rollouts_core.config.loading import from_data
from rollouts_core.errors import BadInput
from rollouts_core.metrics.loggers import JSONLLogger
from rollouts_core.observe.runs import open_run
from rollouts_core.stages.plan import plan
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.tokenize_parts import parts_of
from rollouts_core.stages.workspace import make_stage, open_session
from rollouts_core.store.local import LocalStore
from tasks.tokenize import tokenize
from tests.conftest import job_process

ROWS = 5000
"""Three shards."""


@pytest.fixture
def prefect(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        yield


@pytest.fixture
def parted(small_config: dict[str, Any], tmp_path: Path) -> Callable[..., tuple[Stage, MachineSession]]:
    """The tokenize stage in two parts, and this machine."""

    def made(runner: str, **row: str) -> tuple[Stage, MachineSession]:
        with (tmp_path / "rows.jsonl").open("w") as file:
            for number in range(ROWS):
                answer = {"role": "assistant", "content": str(number % 10)}
                messages = [{"role": "user", "content": f"{number % 7}+{number % 5}="}, answer]
                file.write(json.dumps({"messages": messages} | row) + "\n")
        small_config["data"]["demonstrations"]["path"] = str(tmp_path / "rows.jsonl")
        small_config["data"]["tokenization"] = {"parts": 2, "task_runner": runner}
        config, store = from_data(small_config), LocalStore(tmp_path / ".rollouts")
        run = open_run(store, config, [("tokenize", None)], None)
        return plan(config).tokenize, MachineSession(LocalMachine(store), store, config.machine, run)

    return made


@flow(validate_parameters=False, persist_result=False)
def tokenizing(stage: Any, session: Any) -> None:
    tokenize(stage, session, session)


@pytest.mark.usefixtures("prefect")
@pytest.mark.parametrize("runner", ["threads", pytest.param("dask", marks=pytest.mark.slow)])
def test_parts_are_made_at_once_and_the_artifact_is_that_of_one_process(
    parted: Callable[..., tuple[Stage, MachineSession]], tmp_path: Path, runner: str
) -> None:
    stage, session = parted(runner)
    tokenizing(stage, session)
    tokenizer, parts = parts_of(stage)
    assert all(session.has(made.artifact) for made in (tokenizer, *parts, stage))
    manifests = [session.manifest(part.artifact) for part in parts]
    assert [manifest.provenance.summary for manifest in manifests] == [{"shards": 4.0}, {"shards": 1.0}]
    alone = LocalStore(tmp_path / "alone")
    with open_session() as process:
        make_stage(stage, alone, JSONLLogger(tmp_path / "followed.jsonl"), "cpu", process)
    files = {file.path: file.sha256 for file in alone.manifest(stage.artifact).files}
    assert {file.path: file.sha256 for file in session.manifest(stage.artifact).files} == files


@pytest.mark.usefixtures("prefect")
def test_a_part_that_fails_names_its_rows_and_nothing_runs_on(
    parted: Callable[..., tuple[Stage, MachineSession]], tmp_path: Path
) -> None:
    stage, session = parted("threads")
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:2500], "{", *lines[2500:]]))
    stage = plan(from_data(json.loads((session.run.directory / "config.json").read_text()))).tokenize
    with pytest.raises(JobFailed, match=r"rows\.jsonl:2501: not valid JSON"):
        tokenizing(stage, session)
    for part in parts_of(stage)[1]:
        with pytest.raises(AssertionError, match="no process works"):
            job_process(session.store.home / "jobs" / part.artifact.directory)


def test_a_cluster_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_task_runner(TokenizationConfig(task_runner="dask"))
    with pytest.raises(BadInput, match=r"ray needs the package prefect-ray: install rollouts\[ray\]"):
        check_task_runner(TokenizationConfig(task_runner="ray"))
