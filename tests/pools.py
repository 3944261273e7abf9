"""Servers on hosts of this machine and the pool that leads to them, started as a run starts them."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from infra.connection.remote import Remote
from infra.host import jobs
from infra.host.keeping import HANDED
from infra.inventory import find_host
from infra.machines.machine import Job
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.store.local import LocalStore
from tests.conftest import until
from tests.hosts import HostMachine

LONG = 600.0
LIMITS = {"time_limit": LONG, "unattended_limit": LONG, "stall_limit": LONG}
NAME = "serve-test"


@contextmanager
def running_pool(
    parent: Path, hosts: Sequence[HostMachine], spec_of: Callable[[HostMachine], Mapping[str, Any]]
) -> Iterator[tuple[Path, list[SSHMachine]]]:
    """The directory of the pool's job here, and the machines. `spec_of`: what keeps the servers of a host is told."""
    directory = parent / NAME
    command = [sys.executable, "-m", "infra.host.pool", "{directory}"]
    job = {**LIMITS, "name": NAME, "command": command, "spec": {"memory": "/dev/shm"}}
    with ExitStack() as ending:
        ending.callback(jobs.cancel, parent, NAME)
        jobs.start(parent, job, jobs.runner_command(), {})
        public = directory / "key.pub"
        key = until(lambda: public.exists() and public.read_text(), "a key")
        machines, described = [], []
        for host in hosts:
            machine = ending.enter_context(_machine(host, parent))
            machines.append(machine)
            machine.hand(NAME, HANDED, key)
            keeps = tuple(machine.remote.command("servers", "{directory}"))
            machine.start(Job(NAME, keeps, {**spec_of(host)}, LONG, LONG, LONG))
            gate = until(partial(_gate, host), "a gate")
            described.append({
                "name": host.name, "host": host.address, "port": 22, "user": "root",
                "host_key": machine.remote.host_key(), "gate": gate,
            })  # fmt: skip
        jobs.hand(parent, NAME, "machines.json", json.dumps(described))
        yield directory, machines


def wait_for_replicas(directory: Path, count: int, seconds: float = 60.0) -> SupervisedServers:
    fleet = SupervisedServers(directory)
    told = directory / "servers.json"
    until(lambda: told.exists() and len(fleet.ready().replicas) == count, f"{count} replicas", seconds)
    return fleet


@contextmanager
def _machine(host: HostMachine, store: Path) -> Iterator[SSHMachine]:
    remote = Remote(host.name, find_host(host.name), 20.0).open()
    machine = SSHMachine(remote, LocalStore(store / "store"), MachineConfig(kind="ssh", name=host.name), "a test")
    try:
        assert machine.try_claim([]) == ""
        yield machine
        machine.cancel(NAME)
    finally:
        machine.release()


def _gate(host: HostMachine) -> int:
    """The port, once the key is let in."""
    file = host.work / "store" / "jobs" / NAME / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return next((line["gate"] for line in lines if "gate" in line), 0)
