"""Runs through the command line that are killed or interrupted, or have no Prefect server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import COMMAND_DEADLINE, Done, job_process

Rollouts = Callable[..., Done]


def states(record: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["state"] for stage in record["stages"]}


@pytest.mark.slow
def test_two_runs_with_one_seed_give_the_same_bits(
    rollouts: Rollouts, config_file: Callable[..., Path], tmp_path: Path
) -> None:
    config = config_file(sft={"steps": 20}, data={"heldout": None})
    weights = []
    for store in ("one", "other"):
        done = rollouts("run", config, "--store", tmp_path / store / "store", "--json")
        assert done.status == 0, done.err
        policy = tmp_path / store / "outputs" / done.json()["run_id"] / "policy" / "model.safetensors"
        weights.append(policy.read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_without_a_server_and_with_sft_alone(
    rollouts: Rollouts, config_file: Callable[..., Path], command_environment: dict[str, str]
) -> None:
    """Prefect starts a temporary server of its own."""
    command_environment.pop("PREFECT_API_URL")
    done = rollouts("run", config_file(rl=None, sft={"steps": 5, "warmup_steps": 1}))
    assert done.status == 0, done.err
    for words in ("after SFT", "report ", "completed in"):
        assert words in done.out
    assert "sft" in done.err  # the stages, as they went


def test_an_orchestrator_killed_leaves_the_job_and_the_next_run_finds_it(
    rollouts: Rollouts, config_file: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    config = config_file(sft={"steps": 2000, "log_every": 1}, rl=None)
    first = begin_run(config, command_environment, tmp_path)
    job = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("sft-*")), None))
    wait_for(lambda: (job / "metrics.jsonl").exists() and len((job / "metrics.jsonl").read_bytes()) > 3000)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = rollouts("run", config, "--json")
    assert second.status == 0, second.err
    assert json.loads((job / "attempt.json").read_text())["number"] == 1
    records = {record["state"] for record in rollouts("runs", "--json").json()}
    assert records == {"Lost", "Completed"}


@pytest.mark.slow
def test_the_temporary_server_is_restarted_when_killed_and_ends_with_a_killed_orchestrator(
    config_file: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    command_environment.pop("PREFECT_API_URL")
    run = begin_run(config_file(sft={"steps": 5000}, rl=None), command_environment, tmp_path)
    supervisor = wait_for(lambda: next(iter(children(run.pid, b"uvicorn")), None))
    killed = wait_for(lambda: next(iter(children(supervisor, b"uvicorn")), None))
    os.kill(killed, signal.SIGKILL)
    server = wait_for(lambda: next((pid for pid in children(supervisor, b"uvicorn") if pid != killed), None))
    begun = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("tokenize-*/attempt.json")), None))
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: not Path(f"/proc/{supervisor}").exists() and not Path(f"/proc/{server}").exists())
    wait_for(lambda: (begun.parent / "status.json").exists())


def begin_run(config: Path, environment: dict[str, str], directory: Path) -> "subprocess.Popen[bytes]":
    """A run in the background; what it says is in `run.log`."""
    command = [sys.executable, "-m", "flows.cli", "run", str(config)]
    with (directory / "run.log").open("w") as log:
        return subprocess.Popen(command, env=environment, cwd=directory, stdout=log, stderr=log)


def children(parent: int, argument: bytes) -> list[int]:
    try:
        pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [int(pid) for pid in pids if argument in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except FileNotFoundError:
        return []


@pytest.mark.slow
def test_a_job_killed_during_a_run_is_started_again_and_the_run_completes(
    rollouts: Rollouts, config_file: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    config = config_file(sft={"steps": 1200, "log_every": 1}, rl=None)
    run = begin_run(config, command_environment, tmp_path)
    job = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("sft-*")), None))
    wait_for(lambda: list((tmp_path / ".rollouts" / "work").glob("sft-*/checkpoints/step-*")))
    os.kill(job_process(job), signal.SIGKILL)
    assert run.wait(COMMAND_DEADLINE) == 0, (tmp_path / "run.log").read_text()
    assert json.loads((job / "attempt.json").read_text())["number"] == 2
    assert "resuming after step" in (job / "log").read_text()


def test_an_interrupted_run_ends_its_job_and_says_so(
    rollouts: Rollouts, config_file: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    config = config_file(sft={"steps": 5000, "log_every": 1}, rl=None)
    first = begin_run(config, command_environment, tmp_path)
    job = wait_for(lambda: next(iter((tmp_path / ".rollouts" / "jobs").glob("sft-*")), None))
    wait_for(lambda: (job / "metrics.jsonl").exists() and len((job / "metrics.jsonl").read_bytes()) > 3000)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) != 0
    assert json.loads((job / "status.json").read_text())["reason"] == "cancelled"
    (record,) = rollouts("runs", "--json").json()
    assert (record["state"], states(record)["sft"]) == ("Cancelled", "Cancelled")


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + COMMAND_DEADLINE
    while not (found := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_the_default_experiment_holds_for_ten_seeds() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "seeds.py"
    subprocess.run([sys.executable, str(script)], check=True, timeout=3600)
