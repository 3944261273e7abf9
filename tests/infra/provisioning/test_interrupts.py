"""An interrupt at any line leaves nothing running, here or on hosts; the run's record names all that was started."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.host import gpu_leases
from infra.jobs.follow import LogLine
from infra.jobs.session import MachineSession
from infra.jobs.stage_job import make_in_job
from infra.machines.machine import Job
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs.build import followed_build
from infra.servers.model import ServedModel
from infra.servers.start import start_servers
from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import from_data
from rollouts_core.observe.run_list import list_runs
from rollouts_core.stages.plan import Plan, plan
from rollouts_core.store.local import LocalStore
from tasks import provision as provisioning
from tasks.run import recording
from tests.conftest import until
from tests.faults.world import command_lines
from tests.hosts import HostMachine
from tests.infra.provisioning.interrupting import lines_in_turn

Hosts = tuple[HostMachine, HostMachine]
Use = Callable[[MachineSession, Plan], object]


class World:
    """A store, a config, and jobs whose command waits until it is told to end."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.store = LocalStore(directory / "store")
        self.told_to_end = directory / "end"
        stand_in = directory / "python"
        stand_in.write_text(f"#!/bin/sh\necho begun\nwhile [ ! -e {self.told_to_end} ]; do sleep 0.02; done\nexit 3\n")
        stand_in.chmod(0o755)
        self.python = str(stand_in)
        self.config: PipelineConfig = from_data(config)
        self.plan = plan(self.config)

    def run(self, use: Use) -> None:
        """As a flow does it: a record, a machine, and what it is used for."""
        with (
            recording(self.config, self.plan, self.store, None) as run,
            provisioning.provision(self.config.machine, self.plan, self.store, run) as session,
        ):
            for machine in (session.machine, *session.peers):
                if isinstance(machine, SSHMachine):
                    machine.ship_library()
                machine.python = self.python  # type: ignore[misc]
            use(session, self.plan)

    def make(self, session: MachineSession, plan: Plan) -> None:
        for event in make_in_job(plan.tokenize, [plan.tokenize], session):
            if event == LogLine("begun"):
                self.told_to_end.touch()

    def train(self, session: MachineSession, plan: Plan) -> None:
        """On all machines of the session."""
        assert plan.sft is not None
        session.machine.supply = lambda stages: iter(())  # type: ignore[method-assign]
        for event in make_in_job(plan.sft, [plan.sft], session):
            if isinstance(event, LogLine) and "begun" in event.text:
                self.told_to_end.touch()

    def build(self, session: MachineSession, plan: Plan) -> None:
        job = Job("environment-of-a-test", (self.python,), {}, 60.0, 60.0, 60.0)
        for line in followed_build(session.machine, job, session, "bootstrap", "an environment"):
            if line == "begun":
                self.told_to_end.touch()

    def serve(self, session: MachineSession, plan: Plan) -> None:
        session.machine.supply = lambda stages: iter(())  # type: ignore[method-assign]
        for line in start_servers(self.config.engine, plan.rl, session):
            if "begun" in line:
                return

    def check(self, at: str) -> None:
        """Nothing of it is left, and everything that was started is recorded."""
        ours = str(self.directory)
        until(lambda: not [line for _, line in command_lines() if ours in line], f"the end after {at}", seconds=3.0)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("lease on")], at
        started = {path.parent.name for path in (self.directory).rglob("attempt.json")}
        recorded = {job.job for record in list_runs(self.store.home) for job in record.jobs}
        assert started <= recorded, at
        self.told_to_end.unlink(missing_ok=True)


@pytest.fixture
def world(small_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes one; `provision` without Prefect around it."""

    def provision_plainly(*arguments: Any) -> MachineSession:
        *_, session = provisioning.provision_machine(*arguments)
        assert isinstance(session, MachineSession)
        return session

    monkeypatch.setattr(provisioning, "provision_task", provision_plainly)

    def make(**parts: Any) -> World:
        return World(tmp_path, {**small_config, **parts})

    return make


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_on_this_machine(world: Callable[..., World], stride: int) -> None:
    here = world()
    for at in lines_in_turn(lambda: here.run(here.make), stride):
        here.check(at)


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_on_a_host(world: Callable[..., World], hosts: Hosts, stride: int) -> None:
    here = world(machine={"kind": "ssh", "name": "host-a"})
    for at in lines_in_turn(lambda: here.run(here.make), stride):
        here.check(at)
        check_hosts(hosts, at)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [{}, {"kind": "ssh", "name": "host-a"}])
def test_a_build(world: Callable[..., World], hosts: Hosts, machine: dict[str, Any]) -> None:
    here = world(machine=machine)
    for at in lines_in_turn(lambda: here.run(here.build), 1):
        here.check(at)
        check_hosts(hosts, at)


@pytest.mark.slow
def test_on_a_group_of_hosts(world: Callable[..., World], hosts: Hosts, small_config: dict[str, Any]) -> None:
    machine = {"kind": "ssh", "name": "host-a", "peers": ["host-b"], "device": "cpu"}
    here = world(machine=machine, backend={"processes": 2})
    for at in lines_in_turn(lambda: here.run(here.train), 1):
        here.check(at)
        check_hosts(hosts, at)


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_servers(world: Callable[..., World], stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ServedModel("/a/model", "float32", 12)
    monkeypatch.setattr("infra.servers.start.served_model", lambda segment, session: model)
    here = world(engine={"kind": "sglang", "python": str(tmp_path / "python")})
    for at in lines_in_turn(lambda: here.run(here.serve), stride):
        here.check(at)


def check_hosts(hosts: Hosts, at: str) -> None:
    for host in hosts:
        assert host.idle(), f"{host.name} is not idle after {at}: {host.processes()}"
        if (host.work / "leases").exists():
            assert gpu_leases.living(host.work / "leases", host.work / "store" / "jobs") == [], at
