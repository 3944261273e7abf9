"""A job's log over a broken connection: every line once, in order, and the job none the wiser."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.connection import ssh
from infra.connection.remote import Remote
from infra.errors import MachineError
from infra.inventory import find_host
from infra.jobs.follow import Lines, LogLine, watching
from infra.machines.machine import Job, Machine, Offsets
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.store.local import LocalStore
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]


@pytest.fixture
def machine(hosts: Hosts, tmp_path: Path) -> Iterator[SSHMachine]:
    remote = Remote("host-a", find_host("host-a"), 60.0).open()
    machine = SSHMachine(remote, LocalStore(tmp_path / "store"), MachineConfig(kind="ssh", name="host-a"), "a test")
    machine.ship_library()
    list(machine.claim([]))
    yield machine
    machine.release()


def counting(lines: int, seconds_per_line: float) -> Job:
    script = f"i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); sleep {seconds_per_line}; done"
    return Job("counting", ("sh", "-c", script), {}, 600.0, 600.0, 600.0)


def followed(machine: Machine, patience: float = 120.0) -> tuple[list[str], list[str]]:
    """What the job printed, and what was said about the connection."""
    lines, printed, said = Lines(), list[str](), list[str]()
    for seen in watching(machine, "counting", Offsets(), patience):
        if isinstance(seen, LogLine):
            said.append(seen.text)
            continue
        printed += lines.take(seen.log)
        if seen.status.state != "running" and not seen.log:
            assert (seen.status.reason, seen.status.exit_status) == ("exited", 0)
            return printed, said
    raise AssertionError("watching ends with its caller")


def cut(host: HostMachine, seconds: float) -> None:
    host.cut()
    time.sleep(seconds)
    host.mend()


def kill_sshd(host: HostMachine) -> None:
    host.stop_sshd()
    time.sleep(1.0)
    host.start_sshd()


@pytest.mark.parametrize("fault", [lambda host: cut(host, 2.0), kill_sshd], ids=["link cut", "sshd killed"])
def test_every_line_once_whatever_the_connection_does(
    machine: SSHMachine, hosts: Hosts, fault: Callable[[HostMachine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.machines.ssh_machine.WATCH_SECONDS", 0.5)
    machine.start(counting(200, 0.04))
    breaking = threading.Timer(1.5, fault, [hosts[0]])
    breaking.start()
    printed, said = followed(machine)
    breaking.join()
    assert printed == [f"line {number}" for number in range(200)]
    assert "the job runs on there" in said[0]
    assert "answers again" in said[-1]


@pytest.mark.slow
def test_half_a_minute_without_link(machine: SSHMachine, hosts: Hosts) -> None:
    machine.start(counting(1000, 0.06))
    breaking = threading.Timer(5.0, cut, [hosts[0], 30.0])
    breaking.start()
    printed, said = followed(machine)
    breaking.join()
    assert printed == [f"line {number}" for number in range(1000)]
    assert len(said) == 2


def test_a_machine_that_stays_away_is_given_up_and_its_job_is_not(
    machine: SSHMachine, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.machines.ssh_machine.WATCH_SECONDS", 0.5)
    monkeypatch.setattr(ssh, "CONNECT_SECONDS", 1.0)
    machine.start(counting(2000, 0.02))
    hosts[0].cut()
    with pytest.raises(MachineError, match="Its job may run on"):
        followed(machine, patience=2.0)
    hosts[0].mend()
    assert machine.watch("counting", Offsets(), 0.0).status.state in ("running", "unreachable")
    machine.cancel("counting")
    assert machine.watch("counting", Offsets(), 0.0).status.reason == "cancelled"
