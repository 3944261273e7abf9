"""Runs on a real Slurm cluster whose compute nodes do not see the login node's work directory."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, cluster_impossible, running_cluster
from tests.conftest import Done, until, write_cluster
from tests.flows.test_remote_run import made, start, variables
from tests.flows.test_slurm_run import LONG_SFT, ON_CLUSTER, Begin, alone, begin, checkpoint, finished, store_of
from tests.flows.test_slurm_settings import arrays
from tests.hosts import HostMachine

Rollouts = Callable[..., Done]
__all__ = ["alone", "arrays", "begin", "start", "variables"]
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(three_hosts: tuple[HostMachine, ...], tmp_path: Path) -> Iterator[Cluster]:
    if why := cluster_impossible() or ("" if shutil.which("sshfs") else "install sshfs"):
        pytest.skip(why)
    write_cluster(three_hosts[0], tmp_path / "machines.toml")
    with (tmp_path / "machines.toml").open("a") as file:
        file.write("sshfs = true\n")
    with running_cluster(three_hosts[0], blind=True) as running:
        yield running


def mounts(cluster: Cluster) -> list[bytes]:
    """The processes of sshfs on the cluster's own network."""
    lines = [Path(f"/proc/{pid}/cmdline") for pid in cluster.host.processes()]
    return [words for words in (line.read_bytes() for line in lines if line.exists()) if words.startswith(b"sshfs")]


@pytest.mark.parametrize("fault", ["none", "requeued", "node lost"])
def test_a_run_on_nodes_that_mount_everything_has_the_keys_and_bits_of_a_run_here(
    rollouts: Rollouts,
    begin: Begin,
    config_file: Callable[..., Path],
    cluster: Cluster,
    alone: Path,
    variables: dict[str, str],
    fault: str,
) -> None:
    assert rollouts("run", config_file(sft=LONG_SFT), "--store", alone, **variables).status == 0
    run = begin(sft=LONG_SFT, machine={**ON_CLUSTER, "environment": ["SOME_TOKEN"]} if fault == "none" else ON_CLUSTER)
    checkpoint(cluster)
    keys = cluster.host.directory / ".ssh" / "authorized_keys"
    assert keys.read_text().count("internal-sftp") == 1
    if fault == "requeued":
        cluster.run("scontrol", "requeue", *cluster.jobs())
    elif fault == "node lost":
        cluster.lose_node(*cluster.jobs("%N"))
    output = finished(run, cluster)
    assert ("resuming after step" in output) == (fault != "none")
    assert made(alone, "sft", "rl", "evaluate") == made(store_of(cluster), "sft", "rl", "evaluate")
    assert "internal-sftp" not in keys.read_text()
    until(lambda: not mounts(cluster), "the mounts are gone", 30.0)


def test_ranks_on_two_such_nodes_train_together(begin: Begin, cluster: Cluster, variables: dict[str, str]) -> None:
    run = begin(
        sft={"steps": 20}, rl=None, machine={**ON_CLUSTER, "nodes": 2}, backend={"processes": 2}, data={"heldout": None}
    )
    finished(run, cluster)
    assert made(store_of(cluster), "sft")


def test_parts_of_tokenization_are_made_on_such_nodes(
    begin: Begin, cluster: Cluster, arrays: dict[str, Any], tmp_path: Path
) -> None:
    output = finished(begin(**arrays, sft={"steps": 5}, rl=None), cluster)
    assert "5 are done" in output
    assert len(made(tmp_path / ".rollouts", "tokenize-")) == 6


def test_check_says_that_nodes_mount_it_and_what_to_do_where_they_do_not(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path, variables: dict[str, str]
) -> None:
    def shared() -> dict[str, str]:
        found = rollouts("machines", "check", "cluster", "--json", **variables).json()
        return next(finding for finding in found if finding["what"] == "shared")

    assert shared()["state"] == "ok"
    assert "mounts" in shared()["found"]
    inventory = tmp_path / "machines.toml"
    inventory.write_text(inventory.read_text().replace("sshfs = true\n", ""))
    assert shared()["state"] == "failed"
    assert "set slurm.sshfs" in shared()["advice"]
