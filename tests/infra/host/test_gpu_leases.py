"""Who has which GPU: on a directory for the rules, on a real host for the waiting."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from infra.connection.remote import Remote
from infra.errors import LeaseLapsed, MachineError
from infra.host import gpu_leases
from infra.inventory import find_host
from infra.machines.machine import Job
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.store.local import LocalStore
from tests.hosts import HostMachine

Hosts = tuple[HostMachine, HostMachine]
DEADLINE = 60.0


def ask(token: str, gpus: int = 1, total: int = 1, jobs: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"token": token, "who": f"run {token}", "gpus": gpus, "among": list(range(total)), "jobs": list(jobs)}


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "jobs").mkdir()
    return tmp_path / "leases", tmp_path / "jobs"


def age(root: Path, seconds: float) -> None:
    """As if nobody had been heard of for so long."""
    for holder in root.glob("*/holders/*"):
        os.utime(holder, (time.time() - seconds, time.time() - seconds))


def test_a_gpu_is_had_by_one_run_and_free_when_it_is_released(places: tuple[Path, Path]) -> None:
    had = gpu_leases.acquire(*places, ask("one"))
    assert had["gpus"] == [0]
    assert gpu_leases.acquire(*places, ask("one")) == {**had, "joined": False}
    busy = gpu_leases.acquire(*places, ask("two"))["busy"]
    assert gpu_leases.names(busy).startswith("GPU 0: run one since")
    gpu_leases.release(*places, "one", False)
    assert gpu_leases.acquire(*places, ask("two"))["gpus"] == [0]


def test_a_run_that_is_gone_gets_nothing_when_its_request_arrives_late(places: tuple[Path, Path]) -> None:
    gpu_leases.acquire(*places, ask("another"))
    gpu_leases.release(*places, "another", True)
    gpu_leases.release(*places, "one", True)
    assert gpu_leases.acquire(*places, ask("one")) == {"busy": []}
    assert gpu_leases.living(*places) == []


def test_a_lease_lapses_when_nobody_is_heard_of(places: tuple[Path, Path]) -> None:
    had = gpu_leases.acquire(*places, ask("one"))
    age(places[0], gpu_leases.HOLD_SECONDS - 10)
    assert "busy" in gpu_leases.acquire(*places, ask("two"))
    age(places[0], gpu_leases.HOLD_SECONDS + 1)
    assert gpu_leases.acquire(*places, ask("two"))["gpus"] == [0]
    assert not gpu_leases.renew(places[0], had["lease"], "one")
    assert not gpu_leases.use(places[0], had["lease"], "one", "job")


def test_a_running_job_keeps_the_lease_and_the_run_that_wants_it_joins(places: tuple[Path, Path]) -> None:
    had = gpu_leases.acquire(*places, ask("one"))
    assert gpu_leases.use(places[0], had["lease"], "one", "sft-1")
    with held_lock(places[1] / "sft-1"):
        age(places[0], 1000)
        assert "busy" in gpu_leases.acquire(*places, ask("two", jobs=("other",)))
        assert gpu_leases.acquire(*places, ask("three", jobs=("sft-1",))) == {**had, "joined": True}
        gpu_leases.release(*places, "three", True)
        assert gpu_leases.living(*places)[0]["running"] == ["sft-1"]
    assert gpu_leases.living(*places) == []


class held_lock:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        self._directory.mkdir()
        script = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(); input()"
        self._holder = subprocess.Popen(
            [sys.executable, "-c", script, str(self._directory / "lock")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        self._holder.stdout.readline()

    def __exit__(self, *error: object) -> None:
        self._holder.kill()
        self._holder.communicate()


class GPUsAreExclusive(RuleBasedStateMachine):
    """Runs come, go, and die; no GPU is ever had by two leases, and a free one is never refused."""

    tokens = st.sampled_from(["a", "b", "c", "d"])

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self._directory = tempfile.TemporaryDirectory()
        self.root, self.jobs = Path(self._directory.name) / "leases", Path(self._directory.name) / "jobs"
        self.jobs.mkdir()
        self.held: dict[str, dict[str, Any]] = {}

    def teardown(self) -> None:
        self._directory.cleanup()

    @rule(token=tokens, gpus=st.integers(0, 3))
    def acquire(self, token: str, gpus: int) -> None:
        free = 3 - sum(len(lease["gpus"]) for lease in self.held.values())
        answer = gpu_leases.acquire(self.root, self.jobs, ask(token, gpus, 3))
        if token in self.held:
            assert answer["lease"] == self.held[token]["lease"]
        elif gpus <= free:
            assert len(answer["gpus"]) == gpus
            self.held[token] = answer
        else:
            assert "busy" in answer

    @rule(token=tokens)
    def release(self, token: str) -> None:
        if token in self.held:
            del self.held[token]
            gpu_leases.release(self.root, self.jobs, token, False)

    @rule(token=tokens)
    def die(self, token: str) -> None:
        if token in self.held:
            holder = self.root / self.held.pop(token)["lease"] / "holders" / token
            os.utime(holder, (0, 0))

    @invariant()
    def no_gpu_is_had_twice(self) -> None:
        had = [gpu for lease in gpu_leases.living(self.root, self.jobs) for gpu in lease["gpus"]]
        assert len(had) == len(set(had))
        assert sorted(had) == sorted(gpu for lease in self.held.values() for gpu in lease["gpus"])


TestGPUsAreExclusive = GPUsAreExclusive.TestCase
TestGPUsAreExclusive.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


@pytest.fixture
def reach(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., SSHMachine]]:
    made: list[SSHMachine] = []

    def reach(who: str, **settings: Any) -> SSHMachine:
        config = MachineConfig(kind="ssh", name="host-a", **settings)
        remote = Remote("host-a", find_host("host-a"), 60.0).open()
        made.append(SSHMachine(remote, LocalStore(tmp_path / "store"), config, who))
        made[-1].ship_library()
        return made[-1]

    yield reach
    for machine in made:
        machine.release()


def job(script: str, name: str) -> Job:
    return Job(name, ("sh", "-c", script), {}, 60.0, 60.0, 60.0)


def test_two_runs_want_one_gpu_the_second_waits_and_says_for_whom(reach: Callable[..., SSHMachine]) -> None:
    first, second = reach("the first run"), reach("the second run")
    assert list(first.claim([])) == []
    first.start(job("echo $CUDA_VISIBLE_DEVICES; sleep 30", "first"))
    waiting = second.claim([])
    assert "waiting for 1 of 1 GPUs of host-a: GPU 0: the first run since" in next(waiting)
    first.cancel("first")
    threading.Timer(1.0, first.release).start()
    assert all("GPU 0: the first run since" in said for said in waiting)
    assert second.gpus == (0,)


def test_a_queue_has_a_deadline(reach: Callable[..., SSHMachine]) -> None:
    list(reach("the first run").claim([]))
    with pytest.raises(MachineError, match=r"the first run .* waited 0\.0001 hours"):
        list(reach("the second run", wait_hours=0.0001).claim([]))


def test_without_a_lease_nothing_is_started(reach: Callable[..., SSHMachine], hosts: Hosts) -> None:
    with pytest.raises(LeaseLapsed, match="nothing is leased on host-a yet"):
        reach("a run").start(job("true", "job"))
    assert not (hosts[0].work / "store" / "jobs").exists()


def test_a_run_that_was_not_heard_of_must_claim_again(reach: Callable[..., SSHMachine], hosts: Hosts) -> None:
    machine = reach("a run")
    list(machine.claim([]))
    for holder in (hosts[0].work / "leases").glob("*/holders/*"):
        holder.unlink()
    with pytest.raises(LeaseLapsed):
        machine.start(job("true", "job"))
    list(machine.claim([]))
    machine.start(job("true", "job"))


@pytest.mark.slow
def test_the_lease_of_a_killed_owner_is_free_within_a_minute(reach: Callable[..., SSHMachine], tmp_path: Path) -> None:
    script = (
        "import sys, time; from infra.inventory import find_host; from infra.connection.remote import Remote; "
        "from infra.machines.ssh_machine import SSHMachine; from rollouts_core.config import MachineConfig; "
        "from rollouts_core.store.local import LocalStore; from pathlib import Path; "
        "m = SSHMachine(Remote('host-a', find_host('host-a'), 60.0).open(), LocalStore(Path(sys.argv[1])), "
        "MachineConfig(kind='ssh', name='host-a'), 'a doomed run'); list(m.claim([])); print(flush=True); "
        "time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()
    time.sleep(15)  # so that its heartbeat has been felt
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    survivor = reach("a survivor", wait_hours=DEADLINE / 3600)
    assert "a doomed run" in "".join(survivor.claim([]))
    assert survivor.gpus == (0,)
