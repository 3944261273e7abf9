"""Runs whose engines are on other machines than the trainer: the same bits, and nothing is left behind."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from infra.connection.remote import Remote
from infra.inventory import find_host
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.metrics.loggers import read_jsonl
from rollouts_core.store.local import LocalStore
from tests.conftest import COMMAND_DEADLINE, Done, job_process, until
from tests.flows.test_remote_run import made, start, variables  # noqa: F401
from tests.hosts import HostMachine
from tests.servers import engine_python

Hosts = tuple[HostMachine, ...]
Rollouts = Callable[..., Done]
ENGINE: dict[str, Any] = {
    "kind": "embedded",
    "machines": {"names": ["host-b", "host-c"]},
    "replicas": 2,
    "start_minutes": 2.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["here", "host-a", "host-b"])
def test_engines_on_other_machines_give_the_bits_of_one_machine(
    trainer: str,
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    machine = {"device": "cpu", "environment": ["OMP_NUM_THREADS"]}
    machine |= {} if trainer == "here" else {"kind": "ssh", "name": trainer}
    engine = ENGINE
    if trainer == "host-b":  # has servers, too
        machine, engine = {**machine, "gpus": 0}, {**ENGINE, "machines": {**ENGINE["machines"], "gpus": 1}}
    kept = {"results": {"artifacts": ["rl"]}}
    stores = []
    for place in ({}, {"engine": engine, "machine": machine}):
        store = tmp_path / f"store-{len(place)}"
        done = rollouts("run", config_file(sft={"steps": 40}, **kept, **place), "--json", "--store", store, **variables)
        assert done.status == 0, done.err
        stores.append(made(store, "rl"))
    assert stores[0] == stores[1] and len(stores[0]) == 2
    assert all(host.idle() for host in three_hosts)
    for host in three_hosts[1:]:
        assert "rollouts-servers" not in (host.directory / ".ssh" / "authorized_keys").read_text()


STEPS = 200
REWARD = """
import pathlib, time
def score(sample):
    if not pathlib.Path("{over}").exists():
        time.sleep(0.05)
    return float(len(sample.response) == 2)
"""
"""Slow until the fault is over: the run lasts until a machine that was away is back, and leaves it the processor."""
LONG_RUN: dict[str, Any] = {
    "sft": {"steps": 20},
    "rl": {"steps": STEPS, "steps_per_segment": STEPS, "checkpoint_every": 20},
    "evaluation": {"during_rl": False},
    "machine": {"device": "cpu", "environment": ["OMP_NUM_THREADS"]},
}


class Run:
    """A run under way, as a fault finds it."""

    def __init__(self, begin: "Callable[[], subprocess.Popen[str]]", home: Path, hosts: Hosts) -> None:
        self.begin, self.process, self.home, self.hosts = begin, begin(), home, hosts

    def ended(self, over: Path) -> str:
        """What it has printed, once it has ended well; it need not be slow any more."""
        over.touch()
        output, _ = self.process.communicate(timeout=COMMAND_DEADLINE)
        assert self.process.returncode == 0, output
        return output

    @property
    def trainer(self) -> Path:
        """The directory of its job."""
        found: Path = until(lambda: next((self.home / "jobs").glob("rl-1-*"), None), "the trainer's job")
        return found

    def step(self) -> int:
        file = self.trainer / "metrics.jsonl"
        return max((line["step"] for line in read_jsonl(file) if "done" in line), default=0) if file.exists() else 0

    def at(self, step: int) -> None:
        until(lambda: self.step() >= step or self.process.poll() is not None, f"step {step}", 120.0)
        assert self.process.poll() is None, self.process.communicate()[0]

    def serving(self) -> set[str]:
        """The machines whose replicas answer, as the trainer is told."""
        (told,) = (self.home / "jobs").glob("serve-rl-1-*/servers.json")
        replicas = json.loads(told.read_text())["replicas"]
        return {entry["machine"] for entry in replicas if entry["state"] == "ready"}

    def starts(self, machine: str) -> int:
        """How often its replica has been started."""
        (told,) = (self.home / "jobs").glob("serve-rl-1-*/servers.json")
        found = [entry["starts"] for entry in json.loads(told.read_text())["replicas"] if entry["machine"] == machine]
        return max(found, default=0)

    @contextmanager
    def sync_under_way(self, number: int) -> Iterator[Path]:
        """A host's link is so slow that a sync takes seconds; yields where weights arrive, when some have."""
        host = self.hosts[number]
        (spec,) = (host.work / "store" / "jobs").glob("serve-rl-1-*/spec.json")
        memory = Path(json.loads(spec.read_text())["memory"])

        def halfway() -> Path | None:
            return next((path for path in memory.glob("arriving-*") if len(whole_buckets(path)) > 1), None)

        with host.slow(kilobits=100):
            yield until(halfway, "a sync", 60.0)

    def replicas_of(self, number: int) -> list[int]:
        """The processes of a host's replicas."""
        return [pid for pid in self.hosts[number].processes() if b"serving.replica" in command_line(pid)]


def whole_buckets(arriving: Path) -> list[Path]:
    return [path.with_suffix("") for path in arriving.glob("*.sha256")]


def processes_with(*words: bytes) -> list[int]:
    """Whose command line has all of them."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if all(word in command_line(pid) for word in words)]


def ours_on(host: HostMachine) -> list[int]:
    """What runs there, but for the SSH server; that keeps sessions whose link was cut."""
    return [pid for pid in host.processes() if b"sshd" not in command_line(pid)]


def command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def replica_is_killed(run: Run) -> None:
    for pid in run.replicas_of(1):
        os.kill(pid, signal.SIGKILL)
    until(lambda: run.serving() == {"host-b", "host-c"}, "it is back", 60.0)


def machine_is_rebooted(run: Run) -> None:
    run.hosts[1].reboot()
    until(lambda: run.serving() == {"host-c"}, "it is gone", 60.0)
    until(lambda: run.serving() == {"host-b", "host-c"}, "it is back", 90.0)


def link_is_cut_for_30_s(run: Run) -> None:
    run.hosts[1].cut()
    time.sleep(30.0)
    run.hosts[1].mend()
    until(lambda: run.serving() == {"host-b", "host-c"}, "it is back", 60.0)


def trainer_is_killed(run: Run) -> None:
    os.kill(job_process(run.trainer), signal.SIGKILL)


def orchestrator_is_killed(run: Run) -> None:
    run.process.kill()
    before = run.step()
    time.sleep(5.0)
    assert run.step() > before, "nobody leads it, and it goes on"
    run.process = run.begin()


def machine_is_drained(run: Run) -> None:
    drain(run.hosts[1])
    until(lambda: run.serving() == {"host-c"}, "it leaves", 30.0)


def machine_comes_back_from_draining(run: Run) -> None:
    drain(run.hosts[1])
    until(lambda: run.serving() == {"host-c"}, "it leaves", 30.0)
    until(lambda: not run.replicas_of(1), "its servers end", 60.0)
    drain(run.hosts[1], undo=True)
    until(lambda: run.serving() == {"host-b", "host-c"}, "it joins", 90.0)


def link_is_cut_during_a_sync(run: Run) -> None:
    with run.sync_under_way(1):
        run.hosts[1].cut()
        time.sleep(12.0)
        run.hosts[1].mend()
    until(lambda: run.serving() == {"host-b", "host-c"}, "it is back", 60.0)


def sync_is_broken_off_between_buckets(run: Run) -> None:
    with run.sync_under_way(1) as arriving:
        before = {path: path.stat().st_mtime_ns for path in whole_buckets(arriving)}
        for pid in processes_with(b"ssh", run.hosts[1].address.encode(), b"LocalForward"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(whole_buckets(arriving)) > len(before), "the next bucket", 60.0)
        assert before.items() <= {path: path.stat().st_mtime_ns for path in whole_buckets(arriving)}.items()
    until(lambda: run.serving() == {"host-b", "host-c"}, "it is back", 60.0)


def weights_are_damaged_behind_their_check(run: Run) -> None:
    before = run.starts("host-b")
    with run.sync_under_way(1) as arriving:
        for file in whole_buckets(arriving):
            data = file.read_bytes()
            file.write_bytes(data[: len(data) // 2] + bytes([0x3F, 0xBF]) * (len(data) // 4 + 1))
    until(lambda: run.starts("host-b") > before, "it is started again", 60.0)
    until(lambda: run.serving() == {"host-b", "host-c"}, "it is back", 60.0)


def replica_is_ten_times_slower(run: Run) -> None:
    begun, slowed = run.step(), run.replicas_of(1)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # wakes up in time on a busy machine
    try:
        for _ in range(2000):
            for number, seconds in ((signal.SIGSTOP, 0.009), (signal.SIGCONT, 0.001)):
                for pid in slowed:
                    os.kill(pid, number)
                time.sleep(seconds)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    lines = [line for line in read_jsonl(run.trainer / "metrics.jsonl") if "done" in line and line["step"] > begun + 3]
    rates = [f"replicas/{name}:replica-0/tokens_per_second" for name in ("host-b", "host-c")]
    slow, other = ([line.get(rate, 0.0) for line in lines] for rate in rates)
    assert 0 < sum(slow) < sum(other) / 2, (slow, other)


def all_are_gone_and_back(run: Run) -> None:
    for host in run.hosts[1:]:
        host.reboot()


def drain(host: HostMachine, undo: bool = False) -> None:
    remote = Remote(host.name, find_host(host.name), 10.0).open()
    remote.call("drain", who="a test", undo=undo)
    remote.close()


@pytest.fixture(scope="module")
def over_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reward") / "over"


@pytest.fixture
def over(over_file: Path) -> Path:
    """The file whose appearance ends the slowness of a long run."""
    over_file.unlink(missing_ok=True)
    return over_file


@pytest.fixture(scope="module")
def long_run(over_file: Path) -> dict[str, Any]:
    """Parts of a config whose run lasts minutes, or until the fault is over."""
    reward = over_file.with_name("slow_reward.py")
    reward.write_text(REWARD.format(over=over_file))
    return {**LONG_RUN, "rl": {**LONG_RUN["rl"], "reward": f"{reward}:score"}}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The artifacts of the same run on one machine, once it was made."""
    return {}


@pytest.fixture
def alone(
    over: Path,
    long_run: dict[str, Any],
    undisturbed: dict[str, Any],
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    tmp_path: Path,
) -> dict[str, Any]:
    """The artifacts of the long run on one machine."""
    if not undisturbed:
        over.touch()
        assert rollouts("run", config_file(**long_run), "--store", tmp_path / "alone").status == 0
        undisturbed |= made(tmp_path / "alone", "rl")
        over.unlink()
    return undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        replica_is_killed, machine_is_rebooted, link_is_cut_for_30_s, trainer_is_killed, orchestrator_is_killed,
        machine_is_drained, machine_comes_back_from_draining, all_are_gone_and_back, link_is_cut_during_a_sync,
        sync_is_broken_off_between_buckets, weights_are_damaged_behind_their_check, replica_is_ten_times_slower,
    ],
)  # fmt: skip
def test_whatever_happens_to_engines_the_run_ends_with_the_same_bits(
    fault: Callable[[Run], None],
    over: Path,
    alone: dict[str, Any],
    long_run: dict[str, Any],
    start: Callable[..., "subprocess.Popen[str]"],  # noqa: F811
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    tmp_path: Path,
) -> None:
    config = config_file(**long_run, engine=ENGINE)
    run = Run(lambda: start("run", config, "--store", tmp_path / "store"), tmp_path / "store", three_hosts)
    run.at(8)
    fault(run)
    run.ended(over)
    assert made(tmp_path / "store", "rl") == alone
    until(lambda: not any(map(ours_on, three_hosts)), "the ends", 60.0)


@pytest.mark.slow
def test_evaluation_by_servers_on_other_machines_gives_the_answers_of_one_machine(
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Of a model from scratch, which has no files, and of two that were trained. RL uses the same machines before."""
    machine = {"device": "cpu", "environment": ["OMP_NUM_THREADS"]}
    answers = []
    for parts in ({}, {"engine": ENGINE, "evaluation": {"engine": ENGINE, "max_new_tokens": 3}}):
        store = tmp_path / f"store-{len(parts)}"
        done = rollouts("run", config_file(sft={"steps": 20}, machine=machine, **parts), "--store", store, **variables)
        assert done.status == 0, done.out + done.err
        found = sorted(store.glob("artifacts/evaluate-*/files/samples.jsonl"))
        answers.append([(path.parts[-3].rpartition("-")[0], path.read_text()) for path in found])
    assert answers[0] == answers[1] and len(answers[0]) == 3
    assert "serve-evaluation" in done.err
    assert all(host.idle() for host in three_hosts)


@pytest.mark.slow
def test_weights_go_from_machine_to_machine(
    over: Path,
    alone: dict[str, Any],
    long_run: dict[str, Any],
    start: Callable[..., "subprocess.Popen[str]"],  # noqa: F811
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    tmp_path: Path,
) -> None:
    """The trainer sends to one machine alone, which passes on to the other, and goes down in between."""
    store, config = tmp_path / "store", config_file(**long_run, engine=ENGINE)
    few = "import infra.servers.tree\ninfra.servers.tree.FANOUT = 1"
    run = Run(lambda: start("run", config, "--store", store, first=few), store, three_hosts)

    def ways() -> list[str]:
        told = next(iter((store / "jobs").glob("serve-rl-1-*/servers.json")), None)
        machines = json.loads(told.read_text())["machines"] if told else []
        return [f"{machine['name']} to {other}" for machine in machines for other in machine["reaches"]]

    until(ways, "a way from one to the other", 120.0)
    begun = run.step()
    run.at(begun + 20)
    assert ways() == ["host-b to host-c"] and run.serving() == {"host-b", "host-c"}
    machine_is_rebooted(run)
    run.ended(over)
    assert made(store, "rl") == alone
    until(lambda: not any(map(ours_on, three_hosts)), "the ends", 60.0)


def both_hold(rollouts: Rollouts, store: Path, variables: dict[str, str]) -> list[dict[str, Any]]:  # noqa: F811
    """What the two replicas say they hold, once both say it of one version."""
    (name,) = (path.name for path in (store / "runs").iterdir())
    done = rollouts("checksums", name, "--json", "--store", store, **variables)
    assert done.status == 0, done.err
    told = json.loads(done.out)
    return told if [replica.get("version") for replica in told].count(told[0].get("version")) == 2 else []


@pytest.mark.slow
def test_a_machine_that_was_in_use_joins_when_it_is_free(
    rollouts: Rollouts,
    start: Callable[..., "subprocess.Popen[str]"],  # noqa: F811
    over: Path,
    long_run: dict[str, Any],
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    remote = Remote("host-b", find_host("host-b"), 10.0).open()
    other = SSHMachine(remote, LocalStore(tmp_path / "other"), MachineConfig(kind="ssh", name="host-b"), "another run")
    assert other.try_claim([]) == ""
    config = config_file(**long_run, engine=ENGINE)
    run = Run(lambda: start("run", config, "--store", tmp_path / "store"), tmp_path / "store", three_hosts)
    run.at(5)
    assert run.serving() == {"host-c"}
    other.release()
    until(lambda: run.serving() == {"host-b", "host-c"}, "it joins", 90.0)
    told = until(lambda: both_hold(rollouts, tmp_path / "store", variables), "what both hold", 60.0)
    assert len({replica["checksum"] for replica in told}) == 1 and all(replica["agrees"] for replica in told)
    output = run.ended(over)
    assert "waiting for 1 of 1 GPUs of host-b: GPU 0: another run" in output, output
    lines = [line for line in read_jsonl(run.trainer / "metrics.jsonl") if "done" in line]
    rate = "replicas/host-b:replica-0/tokens_per_second"
    assert rate not in lines[0] and lines[-1][rate] > 0


@pytest.mark.parametrize(
    ("kind", "weight_sync"),
    [
        pytest.param("sglang", "disk", marks=pytest.mark.sglang),
        pytest.param("sglang", "broadcast", marks=pytest.mark.sglang),
        pytest.param("vllm", "disk", marks=pytest.mark.vllm),
    ],
)
def test_real_servers_on_two_machines_and_one_of_them_is_drained(
    rollouts: Rollouts,
    kind: str,
    weight_sync: str,
    start: Callable[..., "subprocess.Popen[str]"],  # noqa: F811
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    """The trainer is on a third. What a server says its log-probabilities are is what the trainer computes."""
    engine = {**ENGINE, "kind": kind, "python": engine_python(kind), "start_minutes": 5.0}
    engine |= {"weight_sync": weight_sync}
    parts = {**LONG_RUN, "rl": {"steps": 60, "steps_per_segment": 60, "batch_size": 8}, "engine": engine}
    if kind == "vllm":  # its attention has no narrower heads on CPUs
        parts["model"] = {**LONG_RUN.get("model", {}), "hidden_size": 64}
    parts["machine"] = {"kind": "ssh", "name": "host-a", "device": "cpu"}
    home = three_hosts[0].work / "store"
    config = config_file(**parts)
    run = Run(lambda: start("run", config, "--store", tmp_path / "store"), home, three_hosts)
    run.at(5)
    if kind == "sglang":
        told = until(lambda: both_hold(rollouts, tmp_path / "store", variables), "what both hold", 60.0)
        assert len({replica["checksum"] for replica in told}) == 1, told
    drain(three_hosts[1])
    until(lambda: run.serving() == {"host-c"}, "it leaves", 60.0)
    output, _ = run.process.communicate(timeout=COMMAND_DEADLINE)
    assert run.process.returncode == 0, output
    steps = [line for line in read_jsonl(run.trainer / "metrics.jsonl") if "done" in line]
    assert [line["step"] for line in steps] == list(range(1, 61))
    differences = [line["sampling/sampling_logp_difference/mean"] for line in steps]
    assert max(differences) < 1e-3, differences
    rates = {machine: f"replicas/{machine}:replica-0/tokens_per_second" for machine in ("host-b", "host-c")}
    assert steps[0][rates["host-b"]] > 0 < steps[0][rates["host-c"]]
    assert rates["host-b"] not in steps[-1] and steps[-1][rates["host-c"]] > 0
    assert all(host.idle() for host in three_hosts)


@pytest.mark.slow
def test_servers_stay_for_the_next_run_and_give_way_to_others(
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Three runs: one leaves its servers, one of another seed takes them over, one wants others."""
    parts: dict[str, Any] = {"sft": {"steps": 20}, "machine": {"device": "cpu", "environment": ["OMP_NUM_THREADS"]}}
    engine = {**ENGINE, "machines": {**ENGINE["machines"], "keep_minutes": 10.0}}
    store, alone = tmp_path / "store", tmp_path / "alone"
    servers = []
    for seed in (0, 1):
        done = rollouts("run", config_file(**parts, engine=engine, seed=seed), "--store", store, **variables)
        assert done.status == 0, done.out + done.err
        assert ("of an earlier run are taken over" in done.err) == bool(seed)
        servers.append(
            {pid for host in three_hosts[1:] for pid in host.processes() if b"serving.replica" in command_line(pid)}
        )
    assert len(servers[0]) == 2 and servers[0] == servers[1]
    told = rollouts("machines", "ls", **variables).out
    assert told.count("for a run that wants the same, running 1 of 1 servers for rl-") == 2, told
    assert rollouts("run", config_file(**parts, seed=1), "--store", alone, **variables).status == 0
    assert made(alone, "rl").items() <= made(store, "rl").items()
    other = {**ENGINE, "max_running_requests": 32}
    done = rollouts("run", config_file(**parts, engine=other, seed=2), "--store", store, **variables)
    assert done.status == 0, done.out + done.err
    assert all(host.idle() for host in three_hosts)


@pytest.mark.slow
def test_servers_that_do_not_come_up_fail_the_run_with_their_last_lines(
    rollouts: Rollouts,
    config_file: Callable[..., Path],
    three_hosts: Hosts,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    says = tmp_path / "says"
    says.write_text("#!/bin/sh\necho no kernel image is available for this device\nexit 3\n")
    says.chmod(0o755)
    engine = {**ENGINE, "kind": "sglang", "python": str(says)}
    done = rollouts("run", config_file(sft={"steps": 5}, engine=engine, machine={"device": "cpu"}), **variables)
    assert done.status == 1
    assert "0 servers answer, and 1 are needed (engine.min_replicas)" in done.out
    assert "host-b: replica-0 ended with exit status 3 before it answered, 3 times in a row" in done.out
    assert "no kernel image is available for this device" in done.out
    assert all(host.idle() for host in three_hosts)
