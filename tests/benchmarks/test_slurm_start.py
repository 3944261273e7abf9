"""From submitting to the first line of a job: our machine beside bare sbatch, on the same idle cluster.

`make benchmark`. A real Slurm on this machine, in turn.
"""

import statistics
import time
from pathlib import Path

import pytest

from infra.connection.remote import Remote
from infra.inventory import find_host
from infra.machines.machine import Job, Offsets
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import MachineConfig
from rollouts_core.store.local import LocalStore
from tests.cluster import Cluster

pytestmark = pytest.mark.benchmark
ROUNDS = 5
LOOK_SECONDS = 0.02


def test_seconds_from_submit_to_first_line(cluster: Cluster, tmp_path: Path) -> None:
    seconds: dict[str, list[float]] = {"sbatch": [], "allocation": [], "next job": []}
    for number in range(ROUNDS):
        seconds["sbatch"].append(_by_sbatch(cluster, tmp_path / f"{number}.log"))
        while cluster.jobs():
            time.sleep(LOOK_SECONDS)
        remote = Remote("cluster", find_host("cluster"), 20.0).open()
        settings = MachineConfig(kind="slurm", name="cluster")
        machine = SSHMachine(remote, LocalStore(tmp_path / "store"), settings, "a benchmark")
        began = time.perf_counter()
        list(machine.claim([]))
        _run(machine, f"first-{number}")
        seconds["allocation"].append(time.perf_counter() - began)
        began = time.perf_counter()
        _run(machine, f"next-{number}")
        seconds["next job"].append(time.perf_counter() - began)
        machine.release()
        while cluster.jobs():
            time.sleep(LOOK_SECONDS)
    print(f"\nseconds from submit to the first line; medians of {ROUNDS}")
    for name, values in seconds.items():
        print(f"  {name}: {statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})")


def _by_sbatch(cluster: Cluster, log: Path) -> float:
    began = time.perf_counter()
    cluster.run("sbatch", "--gres=gpu:1", "-o", str(log), "--wrap", "echo begun")
    while not log.exists() or not log.read_text():
        time.sleep(LOOK_SECONDS)
    return time.perf_counter() - began


def _run(machine: SSHMachine, name: str) -> None:
    machine.start(Job(name, ("echo", "begun"), {}, 60.0, 60.0, 60.0))
    while not machine.watch(name, Offsets(), 1.0).log:
        continue
