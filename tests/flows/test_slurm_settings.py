"""Runs on a real Slurm cluster with what its administrators want: containers, disks of nodes, job arrays, accounts."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollouts_core
from tests.cluster import Cluster
from tests.conftest import Done, until
from tests.flows.test_remote_run import DEADLINE, made, start, variables
from tests.flows.test_slurm_run import ON_CLUSTER, SFT_ONLY, Begin, alone, begin, finished, store_of

Rollouts = Callable[..., Done]
__all__ = ["alone", "begin", "start", "variables"]
ROWS = 9000
"""Five shards."""


@pytest.fixture
def set_up(cluster: Cluster, tmp_path: Path) -> Callable[..., None]:
    """Give the cluster further fields in the inventory."""

    def write(**fields: object) -> None:
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())
        with (tmp_path / "machines.toml").open("a") as file:
            file.write(f"{lines}\n")

    return write


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A container's file system: this machine's programs and nothing else of it."""
    root = tmp_path / "image"
    for name in ("etc", "dev", "proc", "sys", "tmp", "usr", "var"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf", "of-the-image"):
        (root / "etc" / name).touch()
    return root


@pytest.fixture
def container(image: Path, tmp_path: Path) -> str:
    """What runs a command in it: Charliecloud, as Debian has it."""
    if shutil.which("ch-run") is None:
        pytest.skip("containers need ch-run: install charliecloud")
    seen = {"/usr", str(Path(rollouts_core.__file__).parents[1]), sys.prefix, sys.base_prefix, str(tmp_path)}
    for place in seen:
        (image / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    binds = " ".join(f"--bind {place}" for place in sorted(seen))
    return f"ch-run --no-home --set-env=WHERE=container {binds} {image} --"


@pytest.mark.slow
def test_jobs_run_in_a_container_and_give_the_same_bits(
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    cluster: Cluster,
    set_up: Callable[..., None],
    container: str,
    alone: Path,
    tmp_path: Path,
    variables: dict[str, str],
) -> None:
    config = config_file(sft={"steps": 20}, rl=None)
    assert rollouts("run", config, "--store", alone, **variables).status == 0
    set_up(container=container, local_disk=str(tmp_path / "disk"))
    done = rollouts("run", config_file(sft={"steps": 20}, rl=None, machine=ON_CLUSTER), "--json", **variables)
    assert done.status == 0, done.out + done.err
    assert made(alone, "sft", "evaluate") == made(store_of(cluster), "sft", "evaluate")
    jobs = list((store_of(cluster) / "jobs").glob("*/job.json"))
    assert all("ch-run" in json.loads(job.read_text())["command"] for job in jobs)
    assert not list((tmp_path / "disk").glob("*"))


@pytest.mark.slow
def test_what_is_read_again_and_again_lies_on_the_nodes_own_disk(
    begin: Begin, cluster: Cluster, set_up: Callable[..., None], tmp_path: Path
) -> None:
    disk = tmp_path / "disk-gpu"
    (disk / "rollouts-of-others").mkdir(parents=True)
    set_up(local_disk=f"{tmp_path}/disk-$SLURM_JOB_PARTITION")
    run = begin(sft={"steps": 10**6}, **SFT_ONLY)
    until(lambda: list(disk.glob("rollouts-*-*/sft-*")), "the stage's directory on the node's disk")
    cluster.run("scancel", "--signal=KILL", "--full", *cluster.jobs())
    run.terminate()
    run.communicate(timeout=DEADLINE)
    left = list(disk.glob("rollouts-*-*"))
    run = begin(sft={"steps": 20}, **SFT_ONLY)
    finished(run, cluster)
    assert left, "an agent that is killed leaves it"
    assert [path.name for path in disk.glob("*")] == ["rollouts-of-others"]


def rows(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(ROWS):
            answer = {"role": "assistant", "content": str(number % 10)}
            messages = [{"role": "user", "content": f"{number % 7}+{number % 5}="}, answer]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture
def arrays(small_config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Of a config: enough rows for five parts, which are tokenized by a job array, two at once."""
    demonstrations = {"kind": "jsonl", "path": str(rows(tmp_path / "rows.jsonl"))}
    tokenization = {"parts": 5, "task_runner": "slurm", "at_once": 2}
    return {"data": {**small_config["data"], "demonstrations": demonstrations, "tokenization": tokenization}}


def test_parts_of_tokenization_are_one_job_array_and_the_artifact_is_that_of_one_process(
    rollouts: Rollouts,
    begin: Begin,
    config_file: Callable[..., Path],
    cluster: Cluster,
    arrays: dict[str, Any],
    alone: Path,
    tmp_path: Path,
    variables: dict[str, str],
) -> None:
    here = {"data": {**arrays["data"], "tokenization": {"parts": 1}}, "sft": {"steps": 5}, "rl": None}
    assert rollouts("run", config_file(**here), "--store", alone, **variables).status == 0
    run = begin(**arrays, sft={"steps": 5}, rl=None)
    elements = until(lambda: [job for job in cluster.jobs("%i %j %C %b") if "_" in job], "the array")
    assert len({element.split("_")[0] for element in elements}) == 1
    output = finished(run, cluster)
    assert "of 5 parts, 0 wait, 0 run, 5 are done" in output
    assert made(alone, "tokenize-").items() <= made(tmp_path / ".rollouts", "tokenize-").items()
    assert made(alone, "sft") == made(store_of(cluster), "sft")
    until(lambda: not cluster.jobs(), "nothing is left in the queue", 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["preempted", "orchestrator killed", "cancelled", "a part cancelled"])
def test_an_array_goes_on_or_ends_as_a_whole(
    begin: Begin,
    rollouts: Rollouts,
    cluster: Cluster,
    arrays: dict[str, Any],
    variables: dict[str, str],
    fault: str,
) -> None:
    run = begin(**arrays, sft={"steps": 5}, rl=None)
    until(lambda: [job for job in cluster.jobs("%i %T") if "_" in job and "RUNNING" in job], "a part that runs")
    if fault == "preempted":
        cluster.run("sbatch", "-p", "urgent", "-N", "3", "--gres=gpu:2", "-o", "/dev/null", "--wrap", "sleep 5")
    elif fault == "orchestrator killed":
        run.kill()
        run.communicate()
        run = begin(**arrays, sft={"steps": 5}, rl=None)
    elif fault == "cancelled":
        run.terminate()
        run.communicate(timeout=DEADLINE)
        until(lambda: not cluster.jobs(), "nothing is left in the queue", 60.0)
        return
    else:
        part = next(job for job in cluster.jobs("%i %T") if "_" in job and "RUNNING" in job)
        cluster.run("scancel", part.split()[0])
        output, _ = run.communicate(timeout=DEADLINE)
        assert run.returncode == 1
        assert "was cancelled" in output
        until(lambda: not cluster.jobs(), "nothing is left in the queue", 60.0)
        return
    output = finished(run, cluster)
    assert "5 are done" in output
