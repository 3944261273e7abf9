"""What a host costs: sync beside rsync over the same SSH server, a second bootstrap, the first remote line.

`make benchmark`. Nothing here asserts on time.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from infra.connection.remote import Remote
from infra.host.trees import Entry
from infra.inventory import find_host
from infra.jobs.session import MachineSession
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs.trainer import prepare_environment
from infra.transfer.library import tree_of
from infra.transfer.sync import fetch_tree, send_tree
from rollouts_core.config import MachineConfig
from rollouts_core.observe.runs import RunLog
from rollouts_core.store.local import LocalStore
from tests.benchmarks.timing import alternately, report
from tests.hosts import HostMachine

pytestmark = pytest.mark.benchmark

Hosts = tuple[HostMachine, HostMachine]
REPEATS = 3


def one_large(directory: Path) -> None:
    with (directory / "large.bin").open("wb") as file:
        for _ in range(2048):
            file.write(os.urandom(2**20))


def many_small(directory: Path) -> None:
    for folder in range(50):
        (directory / f"{folder}").mkdir()
        for number in range(100):
            (directory / f"{folder}" / f"{number}").write_bytes(os.urandom(2048))


class Both:
    """The same files, moved by us and by rsync."""

    def __init__(self, host: HostMachine, source: Path) -> None:
        self.host, self.source = host, source
        self.entries: list[Entry] = tree_of(source, sorted(path for path in source.rglob("*") if path.is_file()))
        self.numbers = count()
        self.ssh = f"ssh -i {host.client_key} -o UserKnownHostsFile={host.known_hosts}"

    def clean(self, target: Path) -> None:
        for place in (self.host.work / "inputs", self.host.work / "incoming", target):
            shutil.rmtree(place, ignore_errors=True)
        subprocess.run(["sync"], check=True)

    def send(self, name: str) -> None:
        remote = Remote("host-a", find_host("host-a"), 60.0).open()
        send_tree(remote, "inputs", name, self.source, self.entries)
        remote.close()

    def fetch(self, name: str, target: Path) -> None:
        remote = Remote("host-a", find_host("host-a"), 60.0).open()
        fetch_tree(remote, f"inputs/{name}", self.entries, target)
        remote.close()

    def rsync(self, source: str, target: str) -> None:
        subprocess.run(["rsync", "-a", "-e", self.ssh, source, target], check=True)


@pytest.mark.parametrize("fill", [one_large, many_small])
def test_sync_beside_rsync(fill: Callable[[Path], None], hosts: Hosts, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    fill(source)
    host = hosts[0]
    host.work.mkdir()
    both = Both(host, source)
    there = f"root@{host.address}:{host.work}/inputs"

    def prepare() -> None:
        both.clean(target)
        (host.work / "inputs").mkdir()

    ours, theirs = alternately(
        lambda: both.send("tree"), lambda: both.rsync(f"{source}/", f"{there}/tree/"), prepare, REPEATS
    )
    report(f"{fill.__name__}: sent in", ours, "rsync", theirs)
    prepare()
    both.send("tree")
    ours, theirs = alternately(
        lambda: both.send("tree"), lambda: both.rsync(f"{source}/", f"{there}/tree/"), repeats=REPEATS
    )
    report(f"{fill.__name__}: sent again in", ours, "rsync", theirs)

    def prepare_fetch() -> None:
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["sync"], check=True)

    ours, theirs = alternately(
        lambda: both.fetch("tree", target), lambda: both.rsync(f"{there}/tree/", f"{target}/"), prepare_fetch, REPEATS
    )
    report(f"{fill.__name__}: fetched in", ours, "rsync", theirs)


def test_a_second_bootstrap(hosts: Hosts, tmp_path: Path, run_log: RunLog) -> None:
    def bootstrap() -> None:
        remote, store = Remote("host-a", find_host("host-a"), 60.0).open(), LocalStore(tmp_path)
        machine = SSHMachine(remote, store, MachineConfig(kind="ssh", name="host-a"), "a benchmark")
        list(prepare_environment(machine, MachineSession(machine, store, MachineConfig(), run_log)))
        machine.release()

    began = time.perf_counter()
    bootstrap()
    first = time.perf_counter() - began
    again, _ = alternately(bootstrap, lambda: None, repeats=REPEATS)
    report("second bootstrap", again, "first", first)


def test_from_run_to_the_first_remote_line(
    hosts: Hosts, tmp_path: Path, config_file: Callable[..., Path], command_environment: dict[str, str]
) -> None:
    """The whole command, tokenization cached: from its start to the first line that the host's job has printed."""
    config = config_file(sft={"steps": 10}, rl=None, data={"heldout": None})
    times = []
    for turn in range(REPEATS + 1):
        command = [sys.executable, "-m", "flows.cli", "run", str(config), "--machine", "host-a"]
        began = time.perf_counter()
        run = subprocess.Popen(
            [*command, "--set", f"seed={turn}"],
            env=command_environment,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert run.stderr is not None
        for line in run.stderr:
            if "making sft" in line:
                times.append(time.perf_counter() - began)
        assert run.wait(120) == 0
    first, *rest = times
    report("from run to the first remote line, the first time", first, "afterwards", sorted(rest)[len(rest) // 2])
