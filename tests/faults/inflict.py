"""How each fault is done to a run under way."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.faults.cases import Case
from tests.faults.world import Wire, World, wait_for

FILL_DEADLINE = 30.0


def inflict(case: Case, world: World, run: "subprocess.Popen[bytes]", wire: Wire | None) -> str:
    """Do it. Returns what was hit, empty when there was nothing to hit any more."""
    kind, _, what = case.fault.partition(" ")
    if kind in ("kill", "pause"):
        return _hit_process(case, _find(what, world, run))
    if case.fault == "disk full":
        return _fill_disk(world, run)
    if case.fault == "store read-only":
        return _make_read_only(case, world)
    assert wire is not None, "the runner gives one to this fault"
    wire.break_off()
    time.sleep(case.outage)
    wire.cut = False
    return f"cut off for {case.outage:.1f} s"


def _find(what: str, world: World, run: "subprocess.Popen[bytes]") -> int | None:
    if what == "orchestrator":
        return run.pid if run.poll() is None else None
    if what == "Prefect server":
        supervisors = _children(run.pid) if run.poll() is None else []
        servers = [child for pid in supervisors for child in _children(pid)]
        return servers[0] if servers else None
    found = world.processes("rollouts_core.stages.job" if what == "job" else "runner.py")
    return found[0] if found else None


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _hit_process(case: Case, pid: int | None) -> str:
    if pid is None:
        return ""
    try:
        if case.fault.startswith("kill"):
            os.kill(pid, signal.SIGKILL)
            return f"process {pid}"
        os.kill(pid, signal.SIGSTOP)
        time.sleep(case.outage)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return ""
    return f"process {pid}, {case.outage:.1f} s"


def _fill_disk(world: World, run: "subprocess.Popen[bytes]") -> str:
    """To the last byte, until the run has ended or half a minute has passed; then there is room again."""
    filler = world.store.home / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(2**20))
                file.flush()
        except OSError:
            pass
    with suppress(TimeoutError):
        wait_for(lambda: run.poll() is not None, FILL_DEADLINE, "the run's end")
    filler.unlink()
    return "full"


def _make_read_only(case: Case, world: World) -> str:
    """Whoever opens something there for writing is refused; what is open stays so."""
    home = str(world.store.home)
    subprocess.run(["mount", "--bind", home, home], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", home], check=True)
    time.sleep(case.outage)
    subprocess.run(["umount", "-l", home], check=True)
    return f"for {case.outage:.1f} s"
