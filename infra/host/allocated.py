"""The list of Slurm allocations, and the states of their jobs. The files are described in `allocations`.

Decision: Slurm and the agent that keeps a job say whether it runs, and not a lock. Locks on a file system that nodes
share may not be seen from the login node.

Decision: a job lasts as long as its allocation. While the allocation waits for its turn again (preempted, at its time
limit, after a node's failure), the job counts as running, and its status says what it waits for.
"""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.host import slurm
from infra.host.files import read_json, write_json
from infra.host.gpu_leases import GONE_SECONDS, HOLD_SECONDS, alone

FOLDER = "allocations"
LIVE = ("RUNNING", "SUSPENDED")
NOBODYS_FAULT = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT")
"""Ends of an allocation behind which another one may do better."""
LAST_LINES = 10
SLOW_STATES = {"CONFIGURING": "its nodes are made ready", "SUSPENDED": "it is suspended", "COMPLETING": "it is ending"}


def poll(directory: Path) -> dict[str, Any] | None:
    """How a job is that an allocation keeps: None where it does not, and the job's directory says all."""
    keeper = keeper_of(directory)
    if keeper is None:
        return None
    home, node, number = keeper
    queue = slurm.look(home.parent)
    row = queue.rows.get(number)
    if queue.away:
        return {"state": "running", "message": f"Slurm does not answer ({queue.away}); the job may run on"}
    if row is None:
        slurm.forget(home.parent)
        with alone(home.parent):
            living(home.parent, directory.parent, slurm.look(home.parent))
        ending = {"state": "running", "message": f"Slurm job {number} is ending"}
        return ending if keeper_of(directory) else None
    if row.state in LIVE and (home / "leaving").exists():
        return {"state": "running", "message": f"Slurm job {number} leaves its nodes, and is queued again"}
    if row.state in LIVE and (home / f"node-{node}.json").exists():
        return {"state": "running", "message": ""}
    return {"state": "running", "message": waits_for(number, row, queue)}


def drop(directory: Path) -> bool:
    """No longer keep a job whose allocation waits for its turn; False where an agent has it."""
    keeper = keeper_of(directory)
    if keeper is None:
        return False
    home, node, number = keeper
    row = slurm.look(home.parent).rows.get(number)
    if row is None or row.state != "PENDING":
        return False
    names = read_json(home / f"jobs-{node}.json")
    names.pop(directory.name, None)
    write_json(directory / "status.json", {"exit_status": None, "reason": "cancelled", "ended_at": time.time()})
    write_json(home / f"jobs-{node}.json", names)
    if read_json(home / "allocation.json")["array"]:
        with suppress(slurm.Away):  # its agent finds nothing to do
            slurm.cancel(number)
    return True


def kept_jobs(root: Path) -> list[str]:
    """The names of all jobs that allocations keep."""
    return sorted({name for directory in root.glob("*/") for name in _kept_in(directory)})


def waits_for(number: str, row: slurm.Row | None, queue: slurm.Queue) -> str:
    """Why a job waits, as text: the reason, its place in line, and the start that Slurm expects."""
    if queue.away:
        return f"Slurm does not answer: {queue.away}"
    if row is None:
        return f"Slurm job {number} is submitted"
    if row.state in LIVE:
        return f"Slurm job {number} has begun on {row.nodes}: its agent starts"
    if row.state != "PENDING":
        return f"Slurm job {number}: {SLOW_STATES.get(row.state, row.state.lower())}"
    place, of = slurm.place_in_line(number, row.partition)
    line = f", {place} of {of} in the queue of {row.partition}" if place else ""
    reason = "" if row.reason == "None" else f": {row.reason}"
    return f"Slurm job {number} waits{reason}{line}{_expected(row.start)}"


def keeper_of(directory: Path) -> tuple[Path, int, str] | None:
    """The allocation that keeps a job: its directory, the node, its number in Slurm. None where none does."""
    kept = read_json(directory / "allocation")
    if not kept:
        return None
    home = directory.parents[2] / FOLDER / kept["lease"]
    if directory.name not in read_json(home / f"jobs-{kept['node']}.json"):
        return None
    return home, kept["node"], read_json(home / "allocation.json").get("slurm", "")


def living(root: Path, jobs: Path, queue: slurm.Queue) -> list[dict[str, Any]]:
    """All allocations that wait or run: fields of `gpu_leases.living`, `slurm`, the number, `nodes`, whether it is of
    an `array`, and `state`. Those that have ended are removed, and their jobs are told how. Call it under the lock."""
    found, now = [], _now(root)
    for gone in (*root.glob("gone-*"), *root.glob("failed-*")):
        if now - gone.stat().st_mtime > GONE_SECONDS:
            gone.unlink()
    for directory in sorted(path for path in root.iterdir() if path.is_dir()):
        told = read_json(directory / "allocation.json")
        number = told.get("slurm")
        if not number:  # its submission was killed, or is under way: then this lock is held by it
            shutil.rmtree(directory, ignore_errors=True)
            continue
        row = queue.rows.get(number)
        ended = _end_of(number) if row is None and not queue.away else None
        if ended is not None:
            _bury(directory, jobs, f"Slurm job {number}", ended)
            continue
        running = _kept_in(directory)
        holders = sorted(
            holder.name for holder in (directory / "holders").glob("*")
            if now - holder.stat().st_mtime < HOLD_SECONDS
        )  # fmt: skip
        gpus = sorted({gpu for file in directory.glob("node-*.json") for gpu in read_json(file).get("gpus", [])})
        found.append({
            "lease": directory.name, "gpus": gpus, "who": told["who"], "since": told["since"], "running": running,
            "jobs": sorted({*told["jobs"], *running}), "holders": holders, "kept": None, "slurm": number,
            "asked": told["asked"], "nodes": sum(told["components"]), "array": told["array"],
            "state": row.state.lower() if row else "submitted",
        })  # fmt: skip
    return found


def _expected(start: str) -> str:
    """Coarser the longer it takes, so that a line is not told anew every minute."""
    try:
        seconds = time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) - time.time()
    except ValueError:
        return ""
    if seconds < 60:
        return ", within a minute"
    minutes = seconds / 60
    if minutes < 90:
        return f", in about {max(5, 5 * round(minutes / 5)):.0f} min" if minutes >= 3 else ", within five minutes"
    return f", in about {minutes / 60:.0f} hours"


def _now(root: Path) -> float:
    """The time, by the clock of the file system, which also dates files."""
    os.utime(root / "lock")
    return (root / "lock").stat().st_mtime


def _end_of(number: str) -> str | None:
    """How a job ended, empty where Slurm has forgotten it; None where it goes on. One that was submitted a moment ago
    may not be in the queue yet."""
    try:
        state = slurm.how_it_ended(number)
    except slurm.Away:
        return None
    return None if state in ("PENDING", "CONFIGURING", "COMPLETING", *LIVE) else state


def _bury(directory: Path, jobs: Path, name: str, state: str) -> None:
    """Say in the directories of the jobs that ended with their allocation how that was, and to the runs that waited for
    one that has not begun."""
    how = state or "Slurm no longer knows why"
    if state not in NOBODYS_FAULT and not (directory / "begun").exists():
        how = "\n    ".join([f"before its agent began ({how})", *_last_lines(directory / "log")])
        for holder in (directory / "holders").glob("*"):
            (directory.parent / f"failed-{holder.name}").write_text(f"{name} ended {how}")
    for job in {jobs / kept for kept in _kept_in(directory)}:
        if (job / "status.json").exists():
            continue
        write_json(job / "failure.json", {"message": f"{name} was ended: {how}"})
        if state == "CANCELLED":
            status = {"exit_status": None, "reason": "its Slurm job was cancelled", "ended_at": time.time()}
            write_json(job / "status.json", status)
    shutil.rmtree(directory, ignore_errors=True)


def _kept_in(directory: Path) -> list[str]:
    """The jobs of all its nodes."""
    return sorted({name for file in directory.glob("jobs-*.json") for name in read_json(file)})


def _last_lines(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        return []
