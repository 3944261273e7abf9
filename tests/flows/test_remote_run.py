"""Whole runs on a host over SSH: the same as here, found again after kills, cancelled wherever they run."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Done, job_process, until
from tests.hosts import HostMachine
from tests.rollouts_core.stages.test_resume import TWICE

Hosts = tuple[HostMachine, HostMachine]
Rollouts = Callable[..., Done]
DEADLINE = 240.0
SECRET = "hf_a-token-that-nobody-may-see"


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return {"ROLLOUTS_MACHINES": str(tmp_path / "machines.toml"), "SOME_TOKEN": SECRET}


@pytest.fixture
def start(
    command_environment: dict[str, str], variables: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start the command line and go on; what is left of it is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path, first: str = "") -> "subprocess.Popen[str]":
        """`first`: Python to run before the command line."""
        program = (
            ["-c", f"{first}\nfrom flows.cli import main\nraise SystemExit(main())"] if first else ["-m", "flows.cli"]
        )
        command = [sys.executable, *program, *map(str, arguments)]
        environment = {**command_environment, **variables}
        started.append(
            subprocess.Popen(
                command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def training_on(host: HostMachine) -> Path:
    """The directory of the SFT job there, once it has logged its first steps."""
    metrics: Path = until(lambda: next((host.work / "store" / "jobs").glob("sft-*/metrics.jsonl"), None), "metrics")
    return metrics.parent


def files_of(artifact: Path) -> dict[str, str]:
    """Digests; metrics hold times, which differ."""
    entries = json.loads((artifact / "manifest.json").read_text())["files"]
    return {entry["path"]: entry["sha256"] for entry in entries if entry["path"] != "metrics.jsonl"}


def made(store: Path, *kinds: str) -> dict[str, dict[str, str]]:
    found = [path for path in (store / "artifacts").iterdir() if path.name.startswith(kinds)]
    return {path.name: files_of(path) for path in found}


STAGES = ("tokenize", "sft", "rl", "evaluate")


@pytest.mark.slow
def test_a_run_there_gives_the_keys_and_bits_of_a_run_here_and_keeps_secrets(
    rollouts: Rollouts, config_file: Callable[..., Path], hosts: Hosts, tmp_path: Path, variables: dict[str, str]
) -> None:
    (tmp_path / "my_reward.py").write_text("def score(sample):\n    return float(len(sample.response) == 2)\n")
    config = config_file(
        sft={"steps": 40},
        rl={"reward": f"{tmp_path}/my_reward.py:score"},
        machine={"environment": ["SOME_TOKEN", "OMP_NUM_THREADS"]},
        results={"artifacts": ["rl"]},
    )
    assert rollouts("run", config, "--store", tmp_path / "here", **variables).status == 0
    there = rollouts("run", config, "--machine", "host-a", "--json", **variables)
    assert there.status == 0, there.err
    work = hosts[0].work
    assert made(tmp_path / "here", "sft", "rl", "evaluate") == made(work / "store", "sft", "rl", "evaluate")
    assert made(tmp_path / "here", "tokenize", "rl") == made(tmp_path / ".rollouts", "tokenize", "rl")
    record = there.json()
    assert (Path(record["report"]).parent / "policy" / "model.safetensors").exists()
    assert {job["machine"] for job in record["jobs"]} == {"local", "host-a"}
    for place in (work, tmp_path / ".rollouts", tmp_path / "outputs"):
        assert not [path for path in place.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert SECRET not in there.out + there.err
    assert "has expired" not in there.err
    again = rollouts("run", config, "--machine", "host-a", "--json", **variables).json()
    heavy = [stage for stage in again["stages"] if stage["name"].startswith(STAGES)]
    assert {stage["state"] for stage in heavy} == {"Cached"}
    planned = rollouts("plan", config, "--machine", "host-a", **variables).out
    assert "on host-a" in planned
    assert "`--machine host-a` finds it" in rollouts("plan", config, **variables).out


@pytest.mark.slow
def test_an_environment_of_ones_own_is_played_there_and_evaluated_beside_the_training(
    rollouts: Rollouts, config_file: Callable[..., Path], hosts: Hosts, tmp_path: Path, variables: dict[str, str]
) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    config = config_file(
        sft={"steps": 40},
        data={"max_length": 24},
        rl={"max_new_tokens": 8},
        environment={"name": f"{tmp_path}/twice.py:twice"},
        evaluation={"during_rl": True},
        machine={"environment": ["OMP_NUM_THREADS"]},
    )
    assert rollouts("run", config, "--store", tmp_path / "here", **variables).status == 0
    there = rollouts("run", config, "--machine", "host-a", "--json", **variables)
    assert there.status == 0, there.err
    work = hosts[0].work
    assert made(tmp_path / "here", "rl", "evaluate") == made(work / "store", "rl", "evaluate")
    assert [entry["point"] for entry in there.json()["accuracies"]] == ["base", "sft", "rl-1", "rl"]
    again = rollouts("eval", config, "--machine", "host-a", "--set", "evaluation.limit=7", "--json", **variables)
    assert again.status == 0, again.err
    assert [entry["total"] for entry in again.json()["accuracies"]] == [7] * 4


@pytest.mark.slow
def test_the_orchestrator_is_killed_and_the_retry_finds_its_job_and_its_log(
    rollouts: Rollouts,
    start: Callable[..., "subprocess.Popen[str]"],
    config_file: Callable[..., Path],
    hosts: Hosts,
    variables: dict[str, str],
) -> None:
    config = config_file(sft={"steps": 1500, "log_every": 10}, rl=None, data={"heldout": None})
    first = start("run", config, "--machine", "host-a")
    job = training_on(hosts[0])
    process = job_process(job)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (lost,) = rollouts("runs", "--json", **variables).json()
    assert lost["state"] == "Lost"
    told = rollouts("logs", lost["run_id"], "sft", **variables).out
    assert f"making {job.name}" in told
    second = start("run", config, "--machine", "host-a", "--json")
    output, _ = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, output
    assert "a job of this run is running on host-a: its lease is joined" in output
    assert f"another run has started the job {job.name}; this run follows it" in output
    assert json.loads((job / "attempt.json").read_text())["number"] == 1
    assert output.count(f"making {job.name}") == 1
    assert not Path(f"/proc/{process}").exists()
    assert hosts[0].idle()


def test_cancel_ends_the_orchestrator_and_the_job_on_its_host(
    rollouts: Rollouts,
    start: Callable[..., "subprocess.Popen[str]"],
    config_file: Callable[..., Path],
    hosts: Hosts,
    variables: dict[str, str],
) -> None:
    config = config_file(sft={"steps": 10**6}, rl=None, data={"heldout": None})
    run = start("run", config, "--machine", "host-a")
    job = training_on(hosts[0])
    process = job_process(job)
    (live,) = rollouts("runs", "--json", **variables).json()
    following = start("logs", live["run_id"], "-f")
    cancelled = rollouts("cancel", live["run_id"], **variables)
    assert cancelled.status == 0, cancelled.err
    assert not Path(f"/proc/{process}").exists()
    assert run.wait(DEADLINE) != 0
    assert f"making {job.name}" in following.communicate(timeout=DEADLINE)[0]
    (ended,) = rollouts("runs", "--json", **variables).json()
    assert ended["state"] == "Cancelled"
    assert "nothing of it was running" in rollouts("cancel", live["run_id"], **variables).out
    assert hosts[0].idle()


@pytest.mark.slow
def test_what_is_refreshed_is_made_again_on_the_host(
    rollouts: Rollouts, config_file: Callable[..., Path], hosts: Hosts, variables: dict[str, str]
) -> None:
    config = config_file(sft={"steps": 40})
    assert rollouts("run", config, "--machine", "host-a", **variables).status == 0
    refreshed = rollouts("run", config, "--machine", "host-a", "--refresh", "evaluate", "--json", **variables).json()
    states = {stage["name"]: stage["state"] for stage in refreshed["stages"]}
    assert states["rl-2"] == "Cached"
    assert states["evaluate-rl"] == "Completed"


@pytest.mark.slow
def test_a_killed_orchestrators_job_is_cancelled_from_its_record(
    rollouts: Rollouts,
    start: Callable[..., "subprocess.Popen[str]"],
    config_file: Callable[..., Path],
    hosts: Hosts,
    variables: dict[str, str],
) -> None:
    config = config_file(sft={"steps": 10**6}, rl=None, data={"heldout": None})
    run = start("run", config, "--machine", "host-a")
    job = training_on(hosts[0])
    run.send_signal(signal.SIGKILL)
    run.communicate()
    (lost,) = rollouts("runs", "--json", **variables).json()
    assert f"ended {job.name} on host-a" in rollouts("cancel", lost["run_id"], **variables).out
    assert hosts[0].idle()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["reboot", "half a minute without link", "sshd killed"])
def test_a_fault_of_the_host_and_the_run_completes_with_the_same_bits(
    rollouts: Rollouts,
    start: Callable[..., "subprocess.Popen[str]"],
    config_file: Callable[..., Path],
    hosts: Hosts,
    tmp_path: Path,
    variables: dict[str, str],
    fault: str,
) -> None:
    config = config_file(sft={"steps": 2000, "checkpoint_every": 100}, machine={"environment": ["OMP_NUM_THREADS"]})
    assert rollouts("run", config, "--store", tmp_path / "here", **variables).status == 0
    run = start("run", config, "--machine", "host-a", "--json")
    work = hosts[0].work
    until(lambda: next((work / "store" / "work").glob("sft-*/checkpoints/step-*"), None), "a checkpoint")
    if fault == "reboot":
        hosts[0].reboot()
    elif fault == "sshd killed":
        hosts[0].stop_sshd()
        time.sleep(2.0)
        hosts[0].start_sshd()
    else:
        hosts[0].cut()
        time.sleep(30.0)
        hosts[0].mend()
    output, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 0, output
    assert ("resuming after step" in output) == (fault == "reboot")
    assert made(tmp_path / "here", "sft", "rl", "evaluate") == made(work / "store", "sft", "rl", "evaluate")


@pytest.mark.slow
def test_a_host_that_is_switched_off_in_the_middle_is_waited_for_no_longer_than_asked(
    start: Callable[..., "subprocess.Popen[str]"], config_file: Callable[..., Path], hosts: Hosts
) -> None:
    limit = {"unreachable_limit_hours": 5 / 3600}
    config = config_file(sft={"steps": 10**6}, rl=None, data={"heldout": None}, machine=limit)
    run = start("run", config, "--machine", "host-a")
    training_on(hosts[0])
    hosts[0].kill_everything()
    output, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 1
    assert "does not answer" in output
    assert "machine.unreachable_limit_hours" in output
