"""Runs on a real Slurm cluster that keeps accounts: who pays, what a policy refuses, who preempts whom."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.accounts import CONF, accounts_impossible, start_accounts
from tests.cluster import Cluster, cluster_impossible, running_cluster
from tests.conftest import Done, write_cluster
from tests.flows.test_remote_run import made, start, variables
from tests.flows.test_slurm_run import LONG_SFT, ON_CLUSTER, Begin, alone, begin, checkpoint, finished, store_of
from tests.hosts import HostMachine

Rollouts = Callable[..., Done]
__all__ = ["alone", "begin", "start", "variables"]
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(three_hosts: tuple[HostMachine, ...], tmp_path: Path) -> Iterator[Cluster]:
    if why := cluster_impossible() or accounts_impossible():
        pytest.skip(why)
    write_cluster(three_hosts[0], tmp_path / "machines.toml")
    with running_cluster(three_hosts[0], CONF, start_accounts) as running:
        yield running


@pytest.fixture
def charge(cluster: Cluster, tmp_path: Path) -> Callable[..., None]:
    """Say in the inventory who pays, and with which quality of service."""

    def write(**fields: str) -> None:
        write_cluster(cluster.host, tmp_path / "machines.toml")
        with (tmp_path / "machines.toml").open("a") as file:
            file.write("".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))

    return write


def test_what_accounts_and_policies_refuse_is_told_at_once_in_slurms_words(
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    cluster: Cluster,
    charge: Callable[..., None],
    variables: dict[str, str],
) -> None:
    for fields, said in (
        ({"account": "vision"}, "Invalid account or account/partition combination specified"),
        ({"account": "nlp", "qos": "nothing"}, "Invalid qos specification"),
        ({"account": "nlp", "qos": "small"}, "Job violates accounting/QOS policy"),
    ):
        charge(**fields)
        done = rollouts("run", config_file(machine=ON_CLUSTER), **variables)
        assert done.status != 0
        assert "cluster: Slurm refuses the job: " in done.out
        assert said in " ".join(done.out.split())
    assert not cluster.jobs()


def test_check_says_which_accounts_there_are(
    rollouts: Rollouts, cluster: Cluster, charge: Callable[..., None], variables: dict[str, str]
) -> None:
    charge(account="nlp")
    findings = {
        found["what"]: found for found in rollouts("machines", "check", "cluster", "--json", **variables).json()
    }
    assert findings["account"]["state"] == "ok"
    assert "nlp" in findings["account"]["found"]
    charge(account="vision")
    findings = {
        found["what"]: found for found in rollouts("machines", "check", "cluster", "--json", **variables).json()
    }
    assert findings["account"]["state"] == "failed"
    assert "nlp" in findings["account"]["advice"]


def test_a_run_that_a_higher_quality_of_service_preempts_completes_with_the_same_bits(
    rollouts: Rollouts,
    begin: Begin,
    config_file: Callable[..., Path],
    cluster: Cluster,
    charge: Callable[..., None],
    alone: Path,
    variables: dict[str, str],
) -> None:
    assert rollouts("run", config_file(sft=LONG_SFT), "--store", alone, **variables).status == 0
    charge(account="nlp")
    run = begin(sft=LONG_SFT)
    checkpoint(cluster)
    cluster.run(
        "sbatch", "--account=nlp", "--qos=high", "-N", "3", "--gres=gpu:2", "-o", "/dev/null", "--wrap", "sleep 8"
    )  # fmt: skip
    output = finished(run, cluster)
    assert "resuming after step" in output
    assert made(alone, "sft", "rl", "evaluate") == made(store_of(cluster), "sft", "rl", "evaluate")
