"""One job over two hosts: gloo over the network between them, through torchrun."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tests
from infra.errors import JobFailed, MachineError
from infra.group import claim_all, group_jobs, run_group
from infra.inventory import find_host
from infra.machine import Machine, Offsets
from infra.remote import Remote
from infra.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.store.local import LocalStore
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]
PORT = 29500
LIMITS = {"time_limit": 120.0, "unattended_limit": 120.0, "stall_limit": 120.0}


@pytest.fixture
def machines(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SSHMachine]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    settings = MachineConfig(kind="ssh", environment=("GLOO_SOCKET_IFNAME",))
    made = []
    for host in hosts:
        remote = Remote(host.name, find_host(host.name), 20.0).open()
        made.append(SSHMachine(remote, LocalStore(tmp_path / "store"), settings, "a test"))
        made[-1].ship_library()
        made[-1].python = find_host(host.name).python
    for machine in made:  # the tests' own module goes along with the library
        target = Path(machine.places["home"] or "").parent / "code" / machine.code / "tests"
        target.symlink_to(Path(tests.__file__).parent)
    yield made
    for machine in made:
        machine.release()


def test_a_group_that_waits_for_one_machine_holds_none(machines: list[SSHMachine], tmp_path: Path) -> None:
    other = Remote("host-b", find_host("host-b"), 20.0).open()
    held = SSHMachine(other, LocalStore(tmp_path / "store"), MachineConfig(kind="ssh"), "another group")
    assert held.try_claim([]) == ""
    waiting = claim_all(machines, 60.0)
    assert "another group" in next(waiting)
    assert machines[0].remote.call("busy")["leases"] == []
    held.release()
    assert list(waiting) == []
    assert [machine.gpus for machine in machines] == [(0,), (0,)]


def states(members: list[Machine], name: str) -> list[str]:
    return [machine.watch(f"{name}-{rank}", Offsets(), 0.0).status.state for rank, machine in enumerate(members)]


def test_two_hosts_reduce_together(machines: list[SSHMachine]) -> None:
    list(claim_all(machines, 30.0))
    members = group_jobs("sum", "tests.infra.all_reduce", machines, PORT, 1, LIMITS)
    lines = [(line.machine, line.text) for line in run_group(members, 30.0)]
    assert ("host-a", "rank 0 of 2: sum 3") in lines
    assert ("host-b", "rank 1 of 2: sum 3") in lines


def test_the_death_of_one_host_ends_the_group_and_is_named(machines: list[SSHMachine], hosts: Hosts) -> None:
    list(claim_all(machines, 30.0))
    members = group_jobs("wait", "tests.infra.all_reduce", machines, PORT, 1, LIMITS)

    def killed_in_the_middle() -> None:
        summed = 0
        for line in run_group(members, 30.0):
            summed += "sum 3" in line.text
            if summed == 2:
                summed += 1
                hosts[1].reboot()

    with pytest.raises(JobFailed, match="host-b: its part of the group was killed"):
        killed_in_the_middle()
    assert states([*machines], "wait") == ["finished", "lost"]


def test_all_or_none_start(machines: list[SSHMachine], hosts: Hosts) -> None:
    list(claim_all(machines, 30.0))
    members = group_jobs("none", "tests.infra.all_reduce", machines, PORT, 1, LIMITS)
    (hosts[1].work / "store").mkdir(parents=True)
    (hosts[1].work / "store" / "jobs").touch()
    with pytest.raises(MachineError, match=r"host-b: .*could not be set up"):
        list(run_group(members, 30.0))
    assert machines[0].watch("none-0", Offsets(), 0.0).status.reason == "cancelled"
