"""GPUs of this machine, leased among its runs. The driver is a stand-in: a script named nvidia-smi."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import MachineError
from infra.host import gpu_leases
from infra.host.facts import gpus, slices_of, visible
from infra.machines.local import LocalMachine, usable_gpus
from infra.machines.machine import Job
from infra.provisioning.provision import provision_machine
from rollouts_core.config import BackendConfig, MachineConfig, PipelineConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.runs import RunLog
from rollouts_core.stages.plan import plan
from rollouts_core.store.local import LocalStore

WHOLE = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)
"""
CUT = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-1111)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)
"""
DRIVER = """#!/bin/sh
if [ "$1" = -L ]; then cat <<'END'
{listing}END
else
echo "0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 570.1, {mode}"
echo "1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 570.1, Disabled"
fi
"""
NOW = MachineConfig(wait_hours=1e-9)
HOLD = """
import sys, time
from pathlib import Path
from infra.machines.local import LocalMachine
from rollouts_core.store.local import LocalStore
machine = LocalMachine(LocalStore(Path(sys.argv[1])))
list(machine.claim([]))
print(machine.gpus, flush=True)
time.sleep(600)
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(listing: str) -> None:
        script = tmp_path / "bin" / "nvidia-smi"
        script.write_text(DRIVER.format(listing=listing, mode="Enabled" if "MIG" in listing else "Disabled"))
        script.chmod(0o755)

    install(WHOLE)
    return install


@pytest.fixture
def machine(tmp_path: Path, driver: object) -> Callable[..., LocalMachine]:
    """Of a run with a store of its own."""
    return lambda name, settings=NOW: LocalMachine(LocalStore(tmp_path / name), settings, f"run {name}")


def test_two_runs_get_two_gpus_and_a_third_waits(machine: Callable[..., LocalMachine]) -> None:
    first, second, third = (machine(name) for name in ("a", "b", "c"))
    assert not [*first.claim([]), *second.claim([])]
    assert (first.gpus, second.gpus) == ((0,), (1,))
    with pytest.raises(MachineError, match=r"waiting for 1 of 2 GPUs here: GPU 0: run a .*; GPU 1: run b"):
        list(third.claim([]))
    first.release()
    assert not list(third.claim([]))
    assert third.gpus == (0,)


def test_jobs_see_the_leased_gpus_by_their_uuids(machine: Callable[..., LocalMachine], tmp_path: Path) -> None:
    first, second = machine("a"), machine("b")
    assert not [*first.claim([]), *second.claim([])]
    second.start(Job("job", ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES"), {}, 60.0, 60.0, 60.0))
    end = time.monotonic() + 30
    while not (log := (tmp_path / "b" / "jobs" / "job" / "log").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    assert log.strip() == "GPU-bbbb"


def test_a_run_that_is_killed_leaves_its_gpus(
    machine: Callable[..., LocalMachine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "(0,)\n"
    monkeypatch.setattr("infra.host.gpu_leases.HOLD_SECONDS", 0.0)  # only the lock speaks for a holder
    other = machine("b", MachineConfig(gpus=2, wait_hours=1e-9))
    with pytest.raises(MachineError, match="waiting for 2 of 2"):
        list(other.claim([]))
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    assert not list(other.claim([]))
    assert other.gpus == (0, 1)


def test_ranks_that_do_not_fit_the_lease_are_refused_before_anything_is_made(
    driver: object, pipeline_config: PipelineConfig, run_log: RunLog, tmp_path: Path
) -> None:
    """Not said otherwise, one GPU is leased; four ranks would share it."""
    config = replace(pipeline_config, backend=BackendConfig(processes=4))
    store = LocalStore(tmp_path / "store")
    with pytest.raises(BadInput, match=r"machine\.gpus: 4 are needed and 1 leased: backend\.processes makes 4 ranks"):
        list(provision_machine(config.machine, plan(config), store, run_log))
    assert not list(store.home.glob("jobs/*"))


def test_a_release_that_comes_in_the_middle_of_a_claim_frees_what_was_leased(
    machine: Callable[..., LocalMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between the lease and its note here."""
    first, second = machine("a", MachineConfig(gpus=2, wait_hours=1e-9)), machine("b")
    with monkeypatch.context() as broken:
        broken.setattr("infra.machines.local.gpu_leases.acquire", leased_and_interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(first.claim([]))
    first.release()
    assert not list(second.claim([]))


def leased_and_interrupted(*args: Any, acquire: Callable[..., object] = gpu_leases.acquire) -> None:
    acquire(*args)
    raise KeyboardInterrupt


def test_more_than_there_are_is_refused(machine: Callable[..., LocalMachine]) -> None:
    with pytest.raises(BadInput, match=r"machine\.gpus: this machine has 2 GPUs to lease, not 3"):
        list(machine("a", MachineConfig(gpus=3)).claim([]))


@pytest.mark.parametrize(("allowed", "usable"), [("1", [1]), ("GPU-bbbb", [1]), ("0, 1", [0, 1]), ("", []), ("7", [])])
def test_what_the_user_hides_is_not_leased(
    allowed: str, usable: list[int], driver: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert [gpu["index"] for gpu in usable_gpus()] == usable


def test_on_the_cpu_nothing_is_leased(machine: Callable[..., LocalMachine]) -> None:
    on_cpu = machine("a", MachineConfig(device="cpu"))
    assert not list(on_cpu.claim([]))
    assert on_cpu.gpus == ()


def test_slices_of_a_cut_gpu_are_leased_each(driver: Callable[[str], None]) -> None:
    driver(CUT)
    there = gpus()
    assert [(gpu["index"], gpu["uuid"], gpu["memory"]) for gpu in there] == [
        (0, "MIG-1111", 40 * 1024), (1, "MIG-2222", 10 * 1024), (2, "GPU-bbbb", 81559),
    ]  # fmt: skip
    assert there[1]["model"] == "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me"
    assert visible([2, 0], there) == "GPU-bbbb,MIG-1111"
    assert slices_of(WHOLE) == {}


def test_where_the_driver_tells_nothing_places_are_numbers() -> None:
    assert visible([1, 0], []) == "1,0"
