"""What is asked of Slurm, as sbatch would be told. No cluster: the real one is in `tests/flows`."""

import pytest

from infra.connection.remote import Remote
from infra.inventory import Host, Slurm
from infra.machines.submission import Component, for_arrays, submission
from rollouts_core.config import MachineConfig

SLURM = Slurm(partition="gpu", account="nlp", gpu_type="h100", cpus=64, memory_gb=500, constraint="ib", exclusive=True)


@pytest.fixture
def remote() -> Remote:
    return Remote("cluster", Host(host="login.example", gpus=8, slurm=SLURM), 0.0)


def options(remote: Remote, slurm: Slurm, *components: Component) -> list[list[str]]:
    asked = submission(remote, slurm, MachineConfig(kind="slurm", name="cluster", gpus=8), components)
    return [component["options"] for component in asked["components"]]


def test_an_allocation_asks_for_gpus_and_whatever_the_inventory_says(remote: Remote) -> None:
    (first,) = options(remote, SLURM, Component(2))
    assert first == [
        "--gres=gpu:h100:8", "--cpus-per-task=64", "--mem=512000M", "--exclusive", "--partition=gpu", "--account=nlp",
        "--constraint=ib",
    ]  # fmt: skip


def test_nodes_of_another_kind_say_last_what_is_different(remote: Remote) -> None:
    first, servers = options(remote, SLURM, Component(1), Component(2, 4, ("--partition=l40s", "--gres=gpu:l40s:4")))
    assert first[0] == "--gres=gpu:h100:8"
    assert servers[0] == "--gres=gpu:h100:4"
    assert servers[-2:] == ["--partition=l40s", "--gres=gpu:l40s:4"]


def test_an_array_asks_for_nothing_that_is_of_nodes_with_gpus(remote: Remote) -> None:
    assert options(remote, for_arrays(SLURM), Component(1, 0)) == [
        ["--partition=gpu", "--account=nlp", "--constraint=ib"]
    ]
    elsewhere = for_arrays(Slurm(partition="gpu", account="nlp", constraint="ib", cpu_partition="cpu"))
    assert options(remote, elsewhere, Component(1, 0)) == [["--partition=cpu", "--account=nlp"]]
