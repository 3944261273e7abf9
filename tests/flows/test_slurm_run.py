"""Whole runs on a real Slurm cluster: the same as here, whatever Slurm does to them."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.metrics.loggers import read_jsonl
from tests.cluster import Cluster
from tests.conftest import Done, until
from tests.flows.test_remote_run import DEADLINE, SECRET, made, start, variables
from tests.hosts import HostMachine

Rollouts = Callable[..., Done]
Begin = Callable[..., "subprocess.Popen[str]"]
__all__ = ["start", "variables"]
LONG_SFT = {"steps": 2000, "checkpoint_every": 50}
RL_STEPS = 2000
ENDLESS = {"steps": 10**6}
SFT_ONLY: dict[str, Any] = {"rl": None, "data": {"heldout": None}}
ON_CLUSTER = {"kind": "slurm", "name": "cluster", "gpus": 1, "device": "cpu"}
"""The GPUs are device files: jobs get them and compute on the CPU."""


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """The store of an undisturbed run on this machine."""
    return tmp_path / "here"


@pytest.fixture
def begin(start: Callable[..., "subprocess.Popen[str]"], config_file: Callable[..., Path]) -> Begin:
    """Start a run of the small config on the cluster, some parts changed."""

    def begin(**parts: Any) -> "subprocess.Popen[str]":
        return start("run", config_file(**{"machine": ON_CLUSTER, **parts}), "--json")

    return begin


def store_of(cluster: Cluster) -> Path:
    return cluster.host.work / "store"


def checkpoint(cluster: Cluster, kind: str = "sft") -> Path:
    found: Path = until(
        lambda: next((store_of(cluster) / "work").glob(f"{kind}-*/checkpoints/step-*"), None), "a checkpoint"
    )
    return found


def finished(run: "subprocess.Popen[str]", cluster: Cluster) -> str:
    """What a run has printed that went well, its allocations started without Slurm's usual two minutes."""
    end = time.monotonic() + DEADLINE
    while run.poll() is None and time.monotonic() < end:
        cluster.hurry()
        time.sleep(1.0)
    output, _ = run.communicate(timeout=5.0)
    assert run.returncode == 0, output
    return output


@pytest.mark.slow
def test_a_run_there_gives_the_keys_and_bits_of_a_run_here_and_keeps_secrets(
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    cluster: Cluster,
    alone: Path,
    tmp_path: Path,
    variables: dict[str, str],
) -> None:
    config = config_file(sft={"steps": 40}, results={"artifacts": ["rl"]})
    assert rollouts("run", config, "--store", alone, **variables).status == 0
    config = config_file(
        sft={"steps": 40},
        machine={**ON_CLUSTER, "environment": ["SOME_TOKEN"]},
        results={"artifacts": ["rl"]},
    )
    there = rollouts("run", config, "--json", **variables)
    assert there.status == 0, there.err
    assert made(alone, "sft", "rl", "evaluate") == made(store_of(cluster), "sft", "rl", "evaluate")
    for place in (cluster.host.work, tmp_path / ".rollouts", tmp_path / "outputs", cluster.home):
        assert not [path for path in place.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert SECRET not in there.out + there.err
    until(lambda: not cluster.jobs(), "nothing is left in the queue", 60.0)
    again = rollouts("run", config, "--json", **variables).json()
    assert {stage["state"] for stage in again["stages"] if stage["name"].startswith(("sft", "rl"))} == {"Cached"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "preempted",
        "requeued",
        "requeued with a secret",
        "node lost",
        "node cut off",
        "controller restarted",
        "munge down",
    ],
)
def test_whatever_slurm_does_the_run_completes_with_the_same_bits(
    rollouts: Rollouts,
    begin: Begin,
    config_file: Callable[..., Path],
    cluster: Cluster,
    alone: Path,
    variables: dict[str, str],
    fault: str,
) -> None:
    assert rollouts("run", config_file(sft=LONG_SFT), "--store", alone, **variables).status == 0
    secret = {"environment": ["SOME_TOKEN"]} if fault == "requeued with a secret" else {}
    run = begin(sft=LONG_SFT, machine={**ON_CLUSTER, **secret})
    checkpoint(cluster)
    (job,) = cluster.jobs()
    if fault == "preempted":
        cluster.run("sbatch", "-p", "urgent", "-N", "3", "--gres=gpu:2", "-o", "/dev/null", "--wrap", "sleep 8")
    elif fault.startswith("requeued"):
        cluster.run("scontrol", "requeue", job)
    elif fault == "node lost":
        (node,) = cluster.jobs("%N")
        cluster.lose_node(node)
    elif fault == "node cut off":  # what runs there runs on, and writes to the same disk
        (node,) = cluster.jobs("%N")
        cluster.stop(node)
        cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    elif fault == "controller restarted":
        cluster.stop("slurmctld")
        time.sleep(8.0)
        cluster.start_controller()
    else:
        cluster.stop("munged")
        time.sleep(8.0)
        cluster.start_munge()
    output = finished(run, cluster)
    assert ("resuming after step" in output) == (not fault.endswith(("restarted", "down")))
    assert "waiting for cluster: Slurm" in output
    assert made(alone, "sft", "rl", "evaluate") == made(store_of(cluster), "sft", "rl", "evaluate")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_stage_that_is_longer_than_an_allocation_is_finished_by_several(
    begin: Begin,
    cluster: Cluster,
    tmp_path: Path,
    stage: str,
) -> None:
    """Allocations of one minute, of which jobs leave the last twenty seconds, behind a checkpoint."""
    seldom = {"checkpoint_every": 100000}
    rl = {"steps": RL_STEPS, "steps_per_segment": RL_STEPS, **seldom}
    long = {"sft": {"steps": 12000, **seldom}, **SFT_ONLY} if stage == "sft" else {"sft": {"steps": 20}, "rl": rl}
    inventory = tmp_path / "machines.toml"
    inventory.write_text(inventory.read_text().replace('partition = "gpu"', 'partition = "short"'))
    output = finished(begin(**long), cluster)
    assert "is queued again" in output
    assert "resuming after step" in output


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "requeued"])
def test_two_nodes_learn_what_one_device_learns(
    rollouts: Rollouts,
    begin: Begin,
    config_file: Callable[..., Path],
    cluster: Cluster,
    tmp_path: Path,
    variables: dict[str, str],
    fault: str,
) -> None:
    """One allocation; a rank on each node, which meet on the first of them, also after it was queued again."""
    sft = {"steps": 400, "checkpoint_every": 20}
    config = config_file(sft=sft, rl=None)
    one = rollouts("run", config, "--json", "--store", tmp_path / "here", **variables)
    assert one.status == 0, one.err
    run = begin(sft=sft, rl=None, machine={**ON_CLUSTER, "nodes": 2}, backend={"processes": 2})
    checkpoint(cluster)
    assert cluster.jobs("%D") == ["2"]
    if fault == "requeued":
        cluster.run("scontrol", "requeue", *cluster.jobs())
    output = finished(run, cluster)
    assert ("resuming after step" in output) == (fault == "requeued")
    two = json.loads(output[output.index('{"run_id"') :])
    losses = [
        [line["loss"] for line in read_jsonl(Path(record["report"]).parent / "sft_metrics.jsonl")]
        for record in (one.json(), two)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
def test_the_orchestrator_is_killed_and_the_same_command_finds_the_allocation(
    begin: Begin,
    cluster: Cluster,
) -> None:
    first = begin(sft={"steps": 3000}, **SFT_ONLY)
    job = checkpoint(cluster).parents[1]
    first.kill()
    first.communicate()
    before = cluster.jobs()
    second = begin(sft={"steps": 3000}, **SFT_ONLY)
    output = finished(second, cluster)
    assert "its lease is joined" in output
    assert output.count("making sft-") == 1
    directory = store_of(cluster) / "jobs" / job.name.rpartition(".")[0]
    assert json.loads((directory / "attempt.json").read_text())["number"] == 1
    assert len(before) == 1


def test_a_run_that_is_cancelled_in_the_queue_or_there_leaves_nothing(
    rollouts: Rollouts,
    begin: Begin,
    cluster: Cluster,
    variables: dict[str, str],
) -> None:
    cluster.run("sbatch", "-N", "3", "--gres=gpu:2", "-o", "/dev/null", "-J", "others", "--wrap", "sleep 600")
    run = begin(sft=ENDLESS, **SFT_ONLY)
    ours = until(lambda: [job for job in cluster.jobs("%i %j %T") if "rollouts-" in job], "our job in the queue")
    assert "PENDING" in ours[0]
    time.sleep(8.0)  # Slurm is asked every few seconds
    run.terminate()
    output, _ = run.communicate(timeout=DEADLINE)
    assert "1 of 1 in the queue of gpu" in output
    until(lambda: cluster.jobs("%j") == ["others"], "it leaves the queue", 30.0)
    cluster.run("scancel", "--name=others")
    run = begin(sft=ENDLESS, **SFT_ONLY)
    checkpoint(cluster)
    (live, _) = rollouts("runs", "--json", **variables).json()
    assert rollouts("cancel", live["run_id"], **variables).status == 0
    run.communicate(timeout=DEADLINE)
    until(lambda: not cluster.jobs(), "it leaves the cluster", 30.0)


@pytest.fixture
def small_disk(three_hosts: tuple[HostMachine, ...]) -> Iterator[Path]:
    """The directory that login node and compute nodes share is a disk of its own. Ask for it before the cluster."""
    host = three_hosts[0]
    host.work.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500m", "tmpfs", str(host.work)], check=True)
    host.stop_sshd()
    host.start_sshd()  # its view of disks is that of its start
    yield host.work
    subprocess.run(["umount", "-l", str(host.work)], check=True)


@pytest.mark.slow
def test_a_shared_disk_that_is_full_ends_the_run_with_a_message_and_the_next_one_goes_on(
    small_disk: Path,
    rollouts: Rollouts,
    begin: Begin,
    config_file: Callable[..., Path],
    cluster: Cluster,
    alone: Path,
    variables: dict[str, str],
) -> None:
    assert rollouts("run", config_file(sft=LONG_SFT), "--store", alone, **variables).status == 0
    run = begin(sft=LONG_SFT)
    checkpoint(cluster)
    with (small_disk / "others").open("wb") as others, suppress(OSError):
        while True:
            others.write(bytes(2**20))
            others.flush()
    output, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 1
    assert "no space left" in output.lower()
    (small_disk / "others").unlink()
    until(lambda: not cluster.jobs(), "nothing is left in the queue", 60.0)
    output = finished(begin(sft=LONG_SFT), cluster)
    assert "resuming after step" in output
    assert made(alone, "sft", "rl", "evaluate") == made(store_of(cluster), "sft", "rl", "evaluate")


@pytest.mark.slow
def test_an_allocation_that_a_person_cancels_fails_its_stage(
    begin: Begin,
    cluster: Cluster,
) -> None:
    run = begin(sft=ENDLESS, **SFT_ONLY)
    checkpoint(cluster)
    cluster.run("scancel", *cluster.jobs())
    output, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 1
    assert "its job was ended (its Slurm job was cancelled)" in output
    assert not cluster.jobs()


def test_what_slurm_refuses_is_told_at_once_in_its_words(
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    cluster: Cluster,
    tmp_path: Path,
    variables: dict[str, str],
) -> None:
    inventory = tmp_path / "machines.toml"
    inventory.write_text(inventory.read_text().replace('partition = "gpu"', 'partition = "nowhere"'))
    done = rollouts("run", config_file(machine=ON_CLUSTER), **variables)
    assert done.status != 0
    assert "cluster: Slurm refuses the job: there is no partition 'nowhere'" in done.out
    inventory.write_text(inventory.read_text().replace('"nowhere"', '"gpu"\nmodules = ["nothing"]'))
    done = rollouts("run", config_file(machine=ON_CLUSTER), **variables)
    assert done.status != 0
    assert "cluster: Slurm job 1 ended before its agent began (FAILED)\n" in done.out
    assert "module: command not found" in done.out
    assert not cluster.jobs()
