"""Machines that are leased together: all or none, and none held while one is waited for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.connection.remote import Remote
from infra.errors import MachineError
from infra.inventory import find_host
from infra.machines.ssh_machine import SSHMachine
from infra.provisioning.claim import claim_all
from rollouts_core.config import MachineConfig
from rollouts_core.store.local import LocalStore
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]


@pytest.fixture
def machines(hosts: Hosts, tmp_path: Path) -> Iterator[list[SSHMachine]]:
    made = [machine_of(host.name, tmp_path, "a test") for host in hosts]
    yield made
    for machine in made:
        machine.release()


def machine_of(name: str, directory: Path, who: str) -> SSHMachine:
    remote = Remote(name, find_host(name), 20.0).open()
    return SSHMachine(remote, LocalStore(directory / "store"), MachineConfig(kind="ssh"), who)


def test_a_group_that_waits_for_one_machine_holds_none(machines: list[SSHMachine], tmp_path: Path) -> None:
    held = machine_of("host-b", tmp_path, "another group")
    assert held.try_claim([]) == ""
    waiting = claim_all(machines, [], 60.0)
    assert "another group" in next(waiting)
    assert machines[0].remote.call("busy")["leases"] == []
    held.release()
    assert list(waiting) == []
    assert [machine.gpus for machine in machines] == [(0,), (0,)]


def test_a_group_does_not_wait_for_ever(machines: list[SSHMachine], tmp_path: Path) -> None:
    held = machine_of("host-b", tmp_path, "another group")
    held.try_claim([])
    with pytest.raises(MachineError, match=r"another group.*waited 0 hours \(machine.wait_hours\)"):
        list(claim_all(machines, [], 0.0))
    held.release()
