"""A team's Prefect server, as the page of Prefect's UI says it: on PostgreSQL, with two workers that share a store."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from infra.host.system import free_port
from tests.conftest import until, wait_until_healthy
from tests.flows.test_run_results import post
from tests.postgres import postgres_impossible, running_postgres

pytestmark = pytest.mark.slow
WORKERS = ("one", "other")


@pytest.fixture
def database() -> Iterator[str]:
    if why := postgres_impossible():
        pytest.skip(why)
    with running_postgres("prefect", "prefect", "a-password") as url:
        yield url


@pytest.fixture
def team(database: str, tmp_path: Path, small_config: dict[str, Any]) -> Iterator[str]:
    """A server, a project whose config is deployed, and two workers, each of which leads one run at a time; yields the
    server's address."""
    port = free_port()
    environment = {
        **os.environ,
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        "ROLLOUTS_MACHINES": str(tmp_path / "machines.toml"),
    }
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.json").write_text(json.dumps(small_config))
    with ExitStack() as ending:

        def begin(name: str, *command: str) -> "subprocess.Popen[bytes]":
            log = ending.enter_context((tmp_path / f"{name}.log").open("w"))
            own = {**environment, "PREFECT_HOME": str(tmp_path / name)}
            process = subprocess.Popen([sys.executable, "-m", *command], cwd=tmp_path, env=own, stdout=log, stderr=log)
            ending.callback(process.wait, 60)
            ending.callback(process.terminate)
            return process

        server = begin("server", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
        wait_until_healthy(environment["PREFECT_API_URL"], server)
        assert begin("deploy", "flows.cli", "deploy").wait(120) == 0, (tmp_path / "deploy.log").read_text()
        for name in WORKERS:
            begin(name, "prefect", "worker", "start", "--pool", "rollouts", "--name", name, "--limit", "1")
        yield environment["PREFECT_API_URL"]


def started(server: str, **settings: Any) -> str:
    """A run of the deployment with other settings; its id."""
    found = post(server, "/deployments/filter", {"deployments": {"name": {"any_": ["small"]}}})
    config = {**found[0]["parameters"]["config"], **settings}
    asked = {"parameters": {"config": config}, "state": {"type": "SCHEDULED"}}
    return str(post(server, f"/deployments/{found[0]['id']}/create_flow_run", asked)["id"])


def ended(server: str, run: str) -> str:
    """The state that it ends in."""

    def state() -> str | None:
        (found,) = post(server, "/flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return found["state_name"] if found["state_type"] not in ("SCHEDULED", "PENDING", "RUNNING") else None

    return str(until(state, "the end of a run"))


def tasks(server: str, run: str) -> dict[str, str]:
    found = post(server, "/task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [run]}}})
    return {task["name"].partition(" · ")[2]: task["state_name"] for task in found}


async def count_of_runs(database: str) -> int:
    """Of the table itself."""
    connection = await asyncpg.connect(database.replace("+asyncpg", ""))
    try:
        count: int = await connection.fetchval("select count(*) from flow_run")
        return count
    finally:
        await connection.close()


def test_two_workers_share_the_runs_of_a_server_on_postgresql_and_what_they_make(
    team: str, database: str, tmp_path: Path
) -> None:
    runs = [started(team, seed=seed) for seed in (0, 1, 2)]
    assert [ended(team, run) for run in runs] == ["Completed"] * 3
    logs = {name: re.sub(r"\s+", "", (tmp_path / f"{name}.log").read_text()) for name in WORKERS}
    led = {name: {run for run in runs if run in log} for name, log in logs.items()}
    assert all(led.values())
    assert led["one"] | led["other"] == set(runs)
    again = started(team, seed=0)
    assert ended(team, again) == "Completed"
    made = {name: state for name, state in tasks(team, again).items() if name.startswith(("tokenize", "sft", "rl"))}
    assert len(made) == 4
    assert set(made.values()) == {"Cached"}
    assert asyncio.run(count_of_runs(database)) >= 4
    artifacts = list((tmp_path / ".rollouts" / "artifacts").glob("sft-*"))
    assert len(artifacts) == 3
