"""A trainer's way to servers on other machines, over a real SSH server: small web servers stand for engines."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.host import jobs
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.inference.replicas import Replica, SupervisedServers
from tests.conftest import until
from tests.hosts import HostMachine
from tests.infra.host.test_servers import SERVER
from tests.pools import NAME, running_pool, wait_for_replicas


@dataclass(frozen=True)
class Pool:
    """Two replicas on a host, and the pool that leads to them."""

    host: HostMachine
    machine: SSHMachine
    jobs: Path
    directory: Path

    @property
    def fleet(self) -> SupervisedServers:
        return SupervisedServers(self.directory)

    def ready(self, count: int = 2) -> list[Replica]:
        return list(wait_for_replicas(self.directory, count).ready().replicas)


def asked(replica: Replica) -> list[int]:
    with urllib.request.urlopen(replica.url, timeout=5) as answer:
        return [int(word) for word in answer.read().split()]


@pytest.fixture
def pool(hosts: tuple[HostMachine, HostMachine], tmp_path: Path) -> Iterator[Pool]:
    (tmp_path / "server.py").write_text(SERVER)
    parent = tmp_path / "jobs"
    with running_pool(parent, hosts[1:], lambda host: spec(host, tmp_path)) as (directory, machines):
        yield Pool(hosts[1], machines[0], parent, directory)


def spec(host: HostMachine, tmp_path: Path) -> dict[str, Any]:
    program = str(tmp_path / "server.py")
    replicas = [
        {
            "name": f"replica-{number}",
            "command": [sys.executable, program, "{port}", str(tmp_path / f"mood-{number}")],
            "environment": {},
            "devices": [],
            "ready": "/",
            "probe": "/",
            "abort": {"path": "/", "body": {}},
        }
        for number in range(2)
    ]
    return {
        "replicas": replicas,
        "router": None,
        "start_seconds": 20.0,
        "hang_seconds": 5.0,
        "restarts": 3,
        "memory": str(tmp_path / "memory"),
        "gate": {"drained": str(host.work / "drained")},
    }


def test_replicas_are_reached_and_a_new_start_has_a_new_address(pool: Pool) -> None:
    before = pool.ready()
    assert [replica.name for replica in before] == ["host-b:replica-0", "host-b:replica-1"]
    pids = [asked(replica) for replica in before]
    assert pids[0] != pids[1]
    pool.fleet.restart(before[0], "a test")
    until(lambda: before[0] not in pool.fleet.ready().replicas, "its end")
    after = pool.ready()
    assert after[1] == before[1] and after[0].url != before[0].url
    assert asked(after[0]) != pids[0]
    with pytest.raises(OSError, match=r"refused|reset"):
        asked(before[0])


def test_a_link_that_breaks_is_made_anew_and_replicas_keep_their_addresses(pool: Pool) -> None:
    before = pool.ready()
    pool.host.stop_sshd()
    pool.ready(0)
    pool.host.start_sshd()
    assert pool.ready() == before
    assert asked(before[0])


def test_a_drained_machine_s_replicas_leave_and_its_servers_end(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.ready()
    assert pool.machine.remote.call("drain", who="a test", undo=False)
    pool.ready(0)
    assert all(
        entry["state"] == "leaving" for entry in json.loads((pool.directory / "servers.json").read_text())["replicas"]
    )
    ask = {"token": "another", "who": "another run", "gpus": 0, "among": [], "jobs": []}
    assert pool.machine.remote.call("acquire", ask=ask) == {"busy": [], "drained": "a test"}
    pool.machine.remote.call("drain", who="a test", undo=True)


def test_the_key_and_the_line_that_lets_it_in_end_with_their_jobs(pool: Pool) -> None:
    pool.ready()
    keys = pool.host.directory / ".ssh" / "authorized_keys"
    assert "rollouts-servers:" in keys.read_text()
    jobs.cancel(pool.jobs, NAME)
    pool.machine.cancel(NAME)
    assert not (pool.directory / "key").exists()
    assert "rollouts-servers:" not in keys.read_text()
