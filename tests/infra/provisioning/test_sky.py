"""Renting through SkyPilot. There is no cloud here: a stand-in for the `sky` program rents one of the test's hosts."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import MachineError
from infra.jobs.session import MachineSession
from infra.machines.machine import Job, Offsets
from infra.machines.ssh_machine import SSHMachine
from infra.provisioning.provision import provision_machine
from infra.provisioning.sky import KEEPER, SkyPilot
from rollouts_core.config import MachineConfig
from rollouts_core.config.loading import from_data
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import open_run
from rollouts_core.stages.plan import plan
from rollouts_core.store.local import LocalStore
from tests.hosts import HostMachine
from tests.infra.provisioning.interrupting import lines_in_turn

Hosts = tuple[HostMachine, HostMachine]
STAND_IN = """\
import json, sys
from pathlib import Path
here = Path({here!r})
with (here / "calls").open("a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
if (here / "fails").exists():
    sys.exit("no capacity in any region")
if sys.argv[1] == "launch":
    (here / "task.yaml").write_text(Path(sys.argv[-1]).read_text())
if sys.argv[1] == "exec":
    print("(sky-cmd, pid=123) " + Path({host_key!r}).read_text())
"""


@pytest.fixture
def sky(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in's directory, with its `calls`. `ssh CLUSTER` leads to host-a."""
    here = tmp_path / "sky"
    here.mkdir()
    (here / "sky.py").write_text(STAND_IN.format(here=str(here), host_key=str(hosts[0].directory / "host-key.pub")))
    (here / "config").write_text(
        f"Host rollouts-*\n HostName {hosts[0].address}\n User root\n IdentityFile {hosts[0].client_key}\n"
    )
    (here / "sky").write_text(f'#!/bin/sh\nexec {sys.executable} {here}/sky.py "$@"\n')
    (here / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {here}/config "$@"\n')
    for program in ("sky", "ssh"):
        (here / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{Path(sys.executable).parent}:/usr/bin:/bin")
    return here


def calls(sky: Path) -> list[list[str]]:
    return [json.loads(line) for line in (sky / "calls").read_text().splitlines()]


@pytest.fixture
def rented(sky: Path, small_config: dict[str, object], tmp_path: Path) -> Callable[[], MachineSession]:
    def rented() -> MachineSession:
        config = from_data({**small_config, "machine": {"kind": "sky", "accelerator": "H100", "gpus": 2}})
        store = LocalStore(tmp_path / "store")
        run = open_run(store, config, [], None)
        try:
            *_, session = provision_machine(config.machine, plan(config), store, run)
        except BaseException:
            run.endings.end_all()
            raise
        assert isinstance(session, MachineSession)
        return session

    return rented


def test_a_machine_is_rented_used_and_taken_down(rented: Callable[[], MachineSession], sky: Path) -> None:
    session = rented()
    assert isinstance(session.machine, SSHMachine)
    assert session.machine.gpus == (0, 1)
    task = json.loads((sky / "task.yaml").read_text())
    assert task["resources"] == {"accelerators": "H100:2", "autostop": {"idle_minutes": 5, "down": True}}
    session.machine.start(Job("job", ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES"), {}, 60.0, 60.0, 60.0))
    while session.machine.watch("job", Offsets(log=4), 1.0).status.state == "running":
        pass
    assert session.machine.watch("job", Offsets(), 0.0).log == b"0,1\n"
    session.run.endings.end_all()
    assert [call[0] for call in calls(sky)] == ["launch", "exec", "down"]
    assert calls(sky)[-1] == ["down", "-y", session.machine.name]


ENGINES = {"engine": {"machines": {"rented": 1, "accelerator": "H100", "gpus": 2}, "replicas": 2, "min_replicas": 2}}


def test_machines_for_servers_are_rented_leased_together_and_taken_down(
    sky: Path, small_config: dict[str, object], tmp_path: Path
) -> None:
    config = from_data({**small_config, **ENGINES, "machine": {"device": "cpu"}})
    run = open_run(LocalStore(tmp_path / "store"), config, [], None)
    *said, session = provision_machine(config.machine, plan(config), LocalStore(tmp_path / "store"), run)
    assert isinstance(session, MachineSession)
    (machines,) = session.engines.values()
    assert said[0] == f"renting {machines[0].name} (H100)" and machines[0].name.endswith("-1")
    assert [(machine.is_leased, len(machine.gpus)) for machine in machines] == [(True, 2)]
    run.endings.end_all()
    assert [call[0] for call in calls(sky)] == ["launch", "exec", "down"]
    assert calls(sky)[-1] == ["down", "-y", machines[0].name]


@pytest.mark.parametrize("kind", ["trainer", "engines"])
@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_is_rented_is_taken_down_after_an_interrupt_at_any_line(
    sky: Path, small_config: dict[str, object], tmp_path: Path, stride: int, kind: str
) -> None:
    trainer = {"machine": {"kind": "sky", "accelerator": "H100", "gpus": 2}}
    config = from_data({**small_config, **(trainer if kind == "trainer" else ENGINES)})
    store = LocalStore(tmp_path / "store")
    (sky / "calls").touch()

    def rent() -> None:
        run = open_run(store, config, [], None)
        with run.endings, run.endings:
            for _ in provision_machine(config.machine, plan(config), store, run):
                pass

    for at in lines_in_turn(rent, stride):
        said = [call[0] for call in calls(sky)]
        assert said.count("down") >= said.count("launch"), f"{at}: {said}"
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("lease on")], at
        (sky / "calls").write_text("")


def test_a_machine_that_another_run_uses_is_left_to_it(rented: Callable[[], MachineSession], sky: Path) -> None:
    session = rented()
    assert isinstance(session.machine, SSHMachine)
    session.machine.start(Job("job", ("sleep", "30"), {}, 60.0, 60.0, 60.0))
    session.run.endings.end_all()
    assert [call[0] for call in calls(sky)] == ["launch", "exec"]


def test_what_was_rented_is_taken_down_when_provisioning_fails(
    rented: Callable[[], MachineSession], sky: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.machines.check.MIN_FREE_BYTES", 2**60)
    with pytest.raises(BadInput, match="disk: "):
        rented()
    assert [call[0] for call in calls(sky)] == ["launch", "exec", "down"]


def test_what_sky_says_when_it_fails_is_shown(rented: Callable[[], MachineSession], sky: Path) -> None:
    (sky / "fails").touch()
    with pytest.raises(MachineError, match=r"`sky launch` failed:\s+no capacity in any region"):
        rented()


def test_without_sky_it_says_what_to_install(sky: Path) -> None:
    (sky / "sky").unlink()
    with pytest.raises(BadInput, match="install SkyPilot"):
        SkyPilot().launch("rollouts-x", MachineConfig(kind="sky", accelerator="H100"))


def test_the_keeper_ends_when_nothing_was_wanted_and_no_job_ran(tmp_path: Path) -> None:
    """Time is a stand-in: with each of the keeper's naps, what there is grows older by that much."""
    job = tmp_path / ".rollouts" / "store" / "jobs" / "sft"
    job.mkdir(parents=True)
    (job / "heartbeat").touch()
    nap = 'sleep() { echo nap; find "$HOME/.rollouts" -name heartbeat -exec touch -d "$1 seconds ago" {} +; }\n'
    script = nap.replace('"$1 seconds ago"', '"$(( n = n + $1 )) seconds ago"').replace("sleep()", "n=0\nsleep()")
    done = subprocess.run(
        ["sh", "-c", script + KEEPER], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["nap"]
    (job / "heartbeat").touch()
    lively = "n=-1200\n" + script.replace("n=0\n", "")
    done = subprocess.run(
        ["sh", "-c", lively + KEEPER], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) > 10
