"""rollouts machines ls | check | add | gc, and machines in a config."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.preflight import check_inputs
from infra.connection.remote import Remote
from infra.inventory import find_host, load_inventory
from infra.machines.doing import doing
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.config.loading import from_data
from rollouts_core.errors import BadInput
from rollouts_core.store.local import LocalStore
from tests.cluster import Cluster
from tests.conftest import Done
from tests.hosts import HostMachine, write_inventory

Hosts = tuple[HostMachine, HostMachine]
Rollouts = Callable[..., Done]


@pytest.fixture
def machines_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "machines.toml"
    monkeypatch.setenv("ROLLOUTS_MACHINES", str(path))
    return path


def test_add_then_ls(rollouts: Rollouts, machines_file: Path) -> None:
    variables = {"ROLLOUTS_MACHINES": str(machines_file)}
    added = rollouts("machines", "add", "gpu1", "--host", "10.0.0.5", "--gpus", "8", "--labels", "h100", **variables)
    assert added.status == 0, added.err
    again = rollouts("machines", "add", "gpu1", "--host", "10.0.0.6", **variables)
    assert "has a machine 'gpu1' already" in again.err
    wrong = rollouts("machines", "add", "gpu2", "--host", "x", "--port", "99999", "--jump", "gpu9", **variables)
    assert "port" in wrong.err
    slurm = ("machines", "add", "cluster", "--slurm", "--host", "login", "--partition", "gpu", "--options=--nice=9")
    assert rollouts(*slurm, **variables).status == 0
    lone = rollouts("machines", "add", "gpu3", "--host", "x", "--partition", "gpu", **variables)
    assert "--partition needs --slurm" in lone.err
    listed = rollouts("machines", "ls", "--json", **variables).json()
    assert listed["gpu1"]["gpus"] == 8
    assert listed["cluster"]["slurm"]["partition"] == "gpu"
    assert listed["cluster"]["slurm"]["options"] == ["--nice=9"]
    assert [*listed] == ["gpu1", "cluster"]


def test_every_problem_of_the_file_is_listed(rollouts: Rollouts, machines_file: Path) -> None:
    machines_file.parent.mkdir()
    machines_file.write_text('[a]\nhost = ""\n[b]\nhost = "b"\njump = "c"\n[d]\nhost = "d"\nspeed = 9\n')
    done = rollouts("machines", "ls", ROLLOUTS_MACHINES=str(machines_file))
    assert done.status == 1
    assert "a: host" in done.err
    assert "b: jump 'c' is not a machine of this file" in done.err
    assert "d: speed: no such field" in done.err


def test_check_of_a_host(rollouts: Rollouts, hosts: Hosts, tmp_path: Path) -> None:
    variables = {"ROLLOUTS_MACHINES": str(tmp_path / "machines.toml")}
    write_inventory(tmp_path / "machines.toml", hosts[0], gpus=0)
    done = rollouts("machines", "check", "host-a", "--json", **variables)
    assert done.status == 0, done.err
    assert {finding["state"] for finding in done.json()} == {"ok"}
    write_inventory(tmp_path / "machines.toml", hosts[0], port=2222)
    done = rollouts("machines", "check", "host-a", **variables)
    assert done.status == 1
    assert "FAILED" in done.out


def test_check_and_ls_of_a_cluster(rollouts: Rollouts, cluster: Cluster, tmp_path: Path) -> None:
    variables = {"ROLLOUTS_MACHINES": str(tmp_path / "machines.toml")}
    done = rollouts("machines", "check", "cluster", "--json", **variables)
    found = {finding["what"]: finding for finding in done.json()}
    assert done.status == 0, done.out
    assert found["partition"]["found"] == "gpu: 3 nodes with gpu:2, at most infinite a job"
    assert found["node"]["state"] == found["shared"]["state"] == "ok"
    machine = SSHMachine(
        Remote("cluster", find_host("cluster"), 20.0).open(), LocalStore(tmp_path / "store"),
        MachineConfig(kind="slurm", name="cluster"), "somebody's run",
    )  # fmt: skip
    list(machine.claim([]))
    (line,) = rollouts("machines", "ls", **variables).out.splitlines()[1:]
    assert line.strip().startswith("Slurm job 2 (running, GPU 0): somebody's run since ")
    machine.release()
    (tmp_path / "machines.toml").write_text(
        (tmp_path / "machines.toml").read_text().replace('partition = "gpu"', 'partition = "nowhere"')
    )
    done = rollouts("machines", "check", "cluster", **variables)
    assert done.status == 1
    assert "there is no partition 'nowhere'" in done.out
    assert "set slurm.partition to one of gpu, short, urgent" in done.out


def test_what_machines_do_and_that_one_is_drained(rollouts: Rollouts, hosts: Hosts, tmp_path: Path) -> None:
    variables = {"ROLLOUTS_MACHINES": str(tmp_path / "machines.toml")}
    remote = Remote("host-b", find_host("host-b"), 20.0).open()
    machine = SSHMachine(remote, LocalStore(tmp_path / "store"), MachineConfig(kind="ssh"), "somebody's run")
    assert machine.try_claim([]) == ""
    drained = rollouts("machines", "drain", "host-a", **variables)
    assert "host-a is drained" in drained.out, drained.err
    listed = rollouts("machines", "ls", **variables).out.splitlines()
    assert "drained by " in listed[1] and "GPU 0: somebody's run since" in listed[3]
    machine.release()
    hosts[1].stop_sshd()
    told = doing(load_inventory())
    assert told["host-b"].problem.startswith("host-b (") and told["host-a"].drained_by
    assert "may be leased again" in rollouts("machines", "drain", "host-a", "--undo", **variables).out
    assert doing({"host-a": find_host("host-a")})["host-a"].lines() == ["free"]


def test_machines_for_servers_are_looked_at_before_anything_starts(
    small_config: dict[str, Any], machines_file: Path
) -> None:
    machines_file.parent.mkdir()
    machines_file.write_text('[a]\nhost = "a"\ngpus = 1\n[b]\nhost = "b"\njump = "a"\n')

    def told(engine: dict[str, Any], **machine: Any) -> str:
        config = {**small_config, "engine": {"kind": "sglang", **engine}, "machine": machine}
        with pytest.raises(BadInput) as caught:
            check_inputs(from_data(config))
        return str(caught.value)

    assert "no machine 'c' in " in told({"machines": {"names": ["c"]}})
    assert "b: is reached through a; say in `address`" in told({"machines": {"names": ["b"]}})
    assert "a: is not labelled h100" in told({"machines": {"labels": ["h100"]}})
    assert "a: trains as well; say how many" in told({"machines": {"names": ["a"]}}, kind="ssh", name="a")
    too_many = told({"machines": {"names": ["a"], "gpus": 1}}, kind="ssh", name="a")
    assert "the trainer or other servers of this run take the GPUs of a" in too_many
    wide = {"machines": {"names": ["a"]}, "tensor_parallel": 2}
    assert "engine.min_replicas: a have room for 0 servers of 2 GPUs, and 1 are needed" in told(wide)


def test_gc_on_a_host(rollouts: Rollouts, hosts: Hosts, tmp_path: Path) -> None:
    variables = {"ROLLOUTS_MACHINES": str(tmp_path / "machines.toml")}
    artifact = hosts[0].work / "store" / "artifacts" / f"sft-{'a' * 16}"
    (artifact / "files").mkdir(parents=True)
    told = rollouts("machines", "gc", "host-a", "--dry-run", **variables)
    assert told.out.splitlines()[-1] == "would remove 1 things, 0.0 MB", told.err
    assert artifact.exists()
    assert rollouts("machines", "gc", "host-a", "--json", **variables).json()["removed"][0]["name"] == artifact.name
    assert not artifact.exists()
    assert "--keep-last -1" in rollouts("machines", "gc", "host-a", "--keep-last", "-1", **variables).err


def test_a_machine_that_is_not_there_or_does_not_fit_fails_before_anything_starts(
    rollouts: Rollouts, config_file: Callable[..., Path], machines_file: Path
) -> None:
    machines_file.parent.mkdir()
    machines_file.write_text('[small]\nhost = "small"\ngpus = 1\n')
    variables = {"ROLLOUTS_MACHINES": str(machines_file)}
    config = config_file()
    unknown = rollouts("run", config, "--machine", "large", **variables)
    assert unknown.status == 1
    assert "no machine 'large'" in unknown.err
    assert "there are small" in unknown.err
    wanting = ["--set", "machine.kind=ssh", "--set", "machine.gpus=8", "--set", 'machine.labels=["h100"]']
    unfit = rollouts("run", config, *wanting, "--set", 'machine.environment=["NO_SUCH_SECRET"]', "--json", **variables)
    assert unfit.status == 1
    assert "small: has 1 GPUs, not 8, is not labelled h100" in unfit.err
    assert "NO_SUCH_SECRET is not set here" in unfit.err
    assert json.loads(unfit.out)["state"] == "Failed"
