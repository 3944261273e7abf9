"""Jobs here, on a host over SSH and in a Slurm allocation, with real processes really killed: one contract for all."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.connection.remote import Remote
from infra.errors import MachineError
from infra.inventory import find_host
from infra.machines.local import LocalMachine
from infra.machines.machine import Job, JobStatus, Machine, Offsets
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.store.local import LocalStore

DEADLINE = 20.0


@pytest.fixture(params=["local", "ssh", "slurm"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    store = LocalStore(tmp_path / "store")
    if request.param == "local":
        yield LocalMachine(store)
        return
    request.getfixturevalue("hosts" if request.param == "ssh" else "cluster")
    name = "host-a" if request.param == "ssh" else "cluster"
    settings = MachineConfig(kind=request.param, name=name)
    machine = SSHMachine(Remote(name, find_host(name), 60.0).open(), store, settings, "a test")
    machine.ship_library()
    list(machine.claim([]))
    yield machine
    machine.release()


@pytest.fixture
def jobs(machine: Machine) -> Path:
    """Where the jobs' directories are."""
    home = machine.places["home"]
    assert home is not None
    return Path(home) / "jobs"


def shell(script: str, name: str = "job", **limits: float) -> Job:
    usual = {"time_limit": 60.0, "unattended_limit": 60.0, "stall_limit": 60.0}
    return Job(name, ("sh", "-c", script), {"what": "spec"}, **{**usual, **limits})


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def status_of(machine: Machine, name: str) -> JobStatus:
    return machine.watch(name, Offsets(), 0.0).status


def log(machine: Machine, offset: int = 0) -> bytes:
    return machine.watch("job", Offsets(log=offset), 0.0).log


def ended(machine: Machine, name: str = "job") -> JobStatus:
    until(lambda: status_of(machine, name).state != "running")
    return status_of(machine, name)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_job_leaves_its_log_spec_and_exit_status(machine: Machine, jobs: Path) -> None:
    assert status_of(machine, "job").state == "absent"
    machine.start(shell("echo out; echo err >&2; exit 3"))
    status = ended(machine)
    assert (status.state, status.exit_status, status.reason) == ("finished", 3, "exited")
    assert log(machine) == b"out\nerr\n"
    assert log(machine, 4) == b"err\n"
    assert json.loads((jobs / "job" / "spec.json").read_text()) == {"what": "spec"}
    assert (jobs / "job").stat().st_mode & 0o777 == 0o700


def test_a_second_start_attaches(machine: Machine) -> None:
    machine.start(shell("echo begun; sleep 30"))
    until(lambda: log(machine))
    for _ in range(3):
        machine.start(shell("echo begun; sleep 30"))
    machine.cancel("job")
    assert log(machine) == b"begun\n"


def test_a_finished_job_starts_anew_and_its_output_follows_on(machine: Machine) -> None:
    machine.start(shell("echo one; exit 1"))
    ended(machine)
    machine.start(shell("echo two"))
    assert ended(machine).exit_status == 0
    assert log(machine) == b"one\ntwo\n"
    assert machine.attempt("job").log == 4


def test_cancelling_ends_the_whole_group_even_what_ignores_the_request(machine: Machine, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    machine.start(shell(f"trap '' TERM; (trap '' TERM; sleep 60) & echo $! $$ > {pids}; wait; sleep 60"))
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    machine.cancel("job")
    assert status_of(machine, "job").reason == "cancelled"
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


def test_cancelling_ends_what_has_left_the_group(machine: Machine, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    machine.start(shell(f"setsid sh -c 'echo $$ > {pid}; sleep 60' & sleep 60"))
    until(lambda: pid.exists() and pid.read_text().strip())
    machine.cancel("job")
    assert not alive(int(pid.read_text()))


def test_cancelling_what_does_not_run_is_harmless(machine: Machine) -> None:
    machine.cancel("nothing")
    machine.start(shell("true"))
    ended(machine)
    machine.cancel("job")
    assert status_of(machine, "job").reason == "exited"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"time_limit": 0.3}, "time limit"), ({"unattended_limit": 0.3}, "unattended")],
)
def test_limits_end_a_job(machine: Machine, jobs: Path, limits: dict[str, float], reason: str) -> None:
    machine.start(shell("sleep 60", **limits))
    until((jobs / "job" / "status.json").exists)  # nobody asks the machine meanwhile
    assert ended(machine).reason == reason


def test_an_attended_job_goes_on(machine: Machine) -> None:
    machine.start(shell("sleep 3", unattended_limit=2.0))
    while status_of(machine, "job").state == "running":
        time.sleep(0.05)  # asking is attending
    assert status_of(machine, "job").reason == "exited"


def test_a_job_killed_by_a_signal_says_which(machine: Machine) -> None:
    machine.start(shell("kill -9 $$"))
    assert ended(machine).exit_status == -9


def test_while_anything_of_a_killed_job_lives_nothing_starts_in_its_place(machine: Machine, tmp_path: Path) -> None:
    """The runner is killed, and the command with it; a process that the command started lives, so the job does."""
    pid = tmp_path / "pid"
    machine.start(shell(f"sleep 60 & echo $! $PPID > {pid}; wait"))
    until(lambda: pid.exists() and len(pid.read_text().split()) == 2)
    command, runner = map(int, pid.read_text().split())
    os.kill(runner, signal.SIGKILL)
    until(lambda: not alive(runner))
    assert status_of(machine, "job").state == "running"
    os.kill(command, signal.SIGKILL)
    until(lambda: not alive(command))
    assert ended(machine).state == "lost"
    machine.start(shell("echo again"))
    assert ended(machine).exit_status == 0


def test_a_job_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    machine = LocalMachine(LocalStore(tmp_path))
    starter = os.fork()
    if starter == 0:
        machine.start(shell("sleep 0.5; echo done"))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(starter, 0)
    assert ended(machine).exit_status == 0
    assert log(machine) == b"done\n"


def test_a_command_whose_pulse_stands_still_is_ended(machine: Machine, jobs: Path) -> None:
    machine.start(shell(f"touch {jobs}/job/pulse; sleep 30", stall_limit=0.5))
    assert ended(machine).reason == "stalled"
    machine.start(shell("sleep 1", stall_limit=0.5))
    assert ended(machine).reason == "exited", "the pulse of the attempt before does not count"


def test_a_paused_command_is_ended_as_well(machine: Machine, jobs: Path) -> None:
    script = f"while true; do touch {jobs}/job/pulse; echo $$; sleep 0.1; done"
    machine.start(shell(script, stall_limit=1.0))
    until(lambda: log(machine))
    pid = int(log(machine).split()[0])
    os.kill(pid, signal.SIGSTOP)
    assert ended(machine).reason == "stalled"
    assert not alive(pid)


def test_a_cancellation_also_stops_a_start_that_arrives_after_it(machine: Machine) -> None:
    job = Job("job", ("sleep", "60"), {}, 60.0, 60.0, 60.0)
    assert not machine.cancel("job", job.asked_by[0])
    with pytest.raises(MachineError, match="job job was cancelled before it started"):
        machine.start(job)
    assert machine.watch("job", Offsets(), 0.0).status.state == "absent"
    machine.start(replace(job, asked_by=("somebody else",)))
    assert machine.cancel("job", job.asked_by[0])
