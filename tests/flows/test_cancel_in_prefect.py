"""Cancelling in Prefect, as its UI does, a run that a real Prefect runner executes on a real host."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import job_process, until
from tests.hosts import HostMachine

pytestmark = pytest.mark.slow

Hosts = tuple[HostMachine, HostMachine]
SERVE = "from flows.post_train import post_train; post_train.serve(name='test', print_starting_message=False)"


@pytest.fixture
def prefect(command_environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Prefect's command line, beside a process that serves the flow."""
    environment = {**command_environment, "ROLLOUTS_MACHINES": str(tmp_path / "machines.toml")}
    server = subprocess.Popen([sys.executable, "-c", SERVE], env=environment, cwd=tmp_path)

    def prefect(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments], env=environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout if done.returncode == 0 else ""

    yield prefect
    server.terminate()
    server.wait(30)


def test_cancelling_ends_the_process_on_the_host(
    prefect: Callable[..., str], small_config: dict[str, Any], hosts: Hosts, tmp_path: Path
) -> None:
    small_config["sft"]["steps"] = 10**6
    machine = {"kind": "ssh", "name": "host-a"}
    config = {**small_config, "rl": None, "machine": machine, "store": {"path": str(tmp_path / ".rollouts")}}
    config["data"] = {**config["data"], "heldout": None}
    until(lambda: prefect("deployment", "inspect", "post-train/test"), "the deployment")
    prefect("deployment", "run", "post-train/test", "--params", json.dumps({"config": config}))
    job = until(lambda: next((hosts[0].work / "store" / "jobs").glob("sft-*/metrics.jsonl"), None), "metrics").parent
    process = job_process(job)
    (record,) = [json.loads(path.read_text()) for path in (tmp_path / ".rollouts" / "runs").glob("*/run.json")]
    assert prefect("flow-run", "cancel", record["flow_run_id"])
    until(lambda: not Path(f"/proc/{process}").exists(), "the job's end")
    until(lambda: "CANCELLED" in prefect("flow-run", "inspect", record["flow_run_id"]), "the state")
    assert json.loads((job / "status.json").read_text())["reason"] == "cancelled"
    assert hosts[0].idle()
