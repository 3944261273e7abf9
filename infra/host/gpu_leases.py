"""Leases of a host's GPUs, kept by the host.

    <root>/<id>/lease.json   GPUs, whom they were given to, the jobs that run on them
    <root>/<id>/holders/<token>   touched by every run that uses the lease; its content names the run
    <root>/gone-<token>           a run that wants nothing any more, whatever of its requests is still on its way

Decision: a lease is valid while one of its holders has been heard of within `HOLD_SECONDS`, by the host's own clock, or
while one of its jobs runs. If an orchestrator dies, its job keeps the GPUs; with neither, they are free. Every look at
the leases removes dead ones, so no service has to run.

Decision: a holder that runs on the machine itself keeps the lock of its file, so it needs no heartbeat.

Decision: a run that wants a job which already runs joins the lease of that job. A retry whose predecessor was killed
finds its GPUs at once, and never waits for itself.

Decision: servers that are kept for a later run (`keeping`) are in nobody's way: a run that wants the GPUs for anything
else has them seconds later.
"""

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.host import keeping
from rollouts_core.store.locks import is_held

HOLD_SECONDS = 45.0
GONE_SECONDS = 3600.0


def acquire(root: Path, jobs: Path, ask: dict[str, Any]) -> dict[str, Any]:
    """Lease `gpus` GPUs `among` some to the run `token`: `lease`, `gpus`, `joined`; or `busy`, the leases in the way.

    `ask` also has `who`, for people, and `jobs`, those that the run is about to want; it may have a `label` of servers.
    Where some of that label are kept, their lease is joined, and `kept` tells of them. Asking again is harmless. A run
    that is gone gets nothing: `busy` with no leases.
    """
    with alone(root):
        leases = _living(root, jobs)
        if (root / f"gone-{ask['token']}").exists():
            return {"busy": []}
        mine = [lease for lease in leases if ask["token"] in lease["holders"]]
        shared = [lease for lease in leases if set(lease["running"]) & set(ask["jobs"])]
        kept = [lease for lease in leases if lease["kept"] and not lease["holders"]]
        fitting = [lease for lease in kept if lease["kept"]["label"] == ask.get("label")]
        if mine or shared or fitting:
            lease = (mine or shared or fitting)[0]
            _hold(root / lease["lease"], ask["token"], ask["who"])
            joined = not mine
            return {"lease": lease["lease"], "gpus": lease["gpus"], "joined": joined, "kept": lease["kept"]}
        taken = {gpu for lease in leases for gpu in lease["gpus"]}
        free = [gpu for gpu in ask["among"] if gpu not in taken]
        if len(free) < ask["gpus"]:
            for lease in kept:
                keeping.give_way(jobs, lease["running"])
            return {"busy": [lease for lease in leases if lease["gpus"]]}
        directory = root / secrets.token_hex(4)
        (directory / "holders").mkdir(parents=True, mode=0o700)
        gpus = free[: ask["gpus"]]
        _write(directory, {"gpus": gpus, "who": ask["who"], "since": time.time(), "jobs": []})
        _hold(directory, ask["token"], ask["who"])
        return {"lease": directory.name, "gpus": gpus, "joined": False, "kept": None}


def renew(root: Path, lease: str, token: str) -> bool:
    """Say that the run still holds the lease; False when it has lapsed."""
    holder = root / lease / "holders" / token
    if not holder.exists():
        return False
    os.utime(holder)
    return True


@contextmanager
def held(root: Path, lease: str, token: str) -> Iterator[None]:
    """Hold the lease by the kernel's lock, with no need to renew it."""
    with (root / lease / "holders" / token).open("r+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        yield


def use(root: Path, lease: str, token: str, job: str) -> bool:
    """Note that a job runs on the lease, before it is started; False when the lease has lapsed."""
    with alone(root):
        if not renew(root, lease, token):
            return False
        held = json.loads((root / lease / "lease.json").read_text())
        held["jobs"] = sorted({*held["jobs"], job})
        _write(root / lease, held)
        return True


def pass_on(root: Path, lease: str, token: str, who: str, job: str) -> bool:
    """Note that a lease is another run's now, with a job that was taken over; False when the lease has lapsed."""
    with alone(root):
        if not renew(root, lease, token):
            return False
        held = json.loads((root / lease / "lease.json").read_text())
        _write(root / lease, {**held, "who": who, "since": time.time(), "jobs": [job]})
        return True


def release(root: Path, jobs: Path, token: str, for_good: bool) -> None:
    """Hold nothing any longer. With neither holder nor running job, a lease's GPUs are free.

    `for_good`: a request of the run that comes later, since it was on its way, is refused.
    """
    with alone(root):
        if for_good:
            (root / f"gone-{token}").touch()
        for holder in root.glob(f"*/holders/{token}"):
            holder.unlink()
        _living(root, jobs)


def living(root: Path, jobs: Path) -> list[dict[str, Any]]:
    """All leases: `lease`, `gpus`, `who`, `since`, `jobs`, `running` (jobs), `holders` (tokens), and `kept`, the
    description of servers that are kept there for another run."""
    with alone(root):
        return _living(root, jobs)


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the lock of the leases. The kernel releases it whatever happens to the process."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _living(root: Path, jobs: Path) -> list[dict[str, Any]]:
    found = []
    for gone in root.glob("gone-*"):
        if time.time() - gone.stat().st_mtime > GONE_SECONDS:
            gone.unlink()
    for directory in sorted(path for path in root.iterdir() if path.is_dir()):
        for holder in (directory / "holders").glob("*"):
            if time.time() - holder.stat().st_mtime > HOLD_SECONDS and not is_held(holder):
                holder.unlink()
        try:
            lease = json.loads((directory / "lease.json").read_text())
        except (OSError, ValueError):
            lease = {"gpus": [], "who": "nobody", "since": 0.0, "jobs": []}
        running = [job for job in lease["jobs"] if is_held(jobs / job / "lock")]
        holders = sorted(holder.name for holder in (directory / "holders").glob("*"))
        if running or holders:
            kept = keeping.kept(jobs, running)
            found.append({**lease, "lease": directory.name, "running": running, "holders": holders, "kept": kept})
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return found


def _hold(directory: Path, token: str, who: str) -> None:
    (directory / "holders" / token).write_text(who)


def _write(directory: Path, lease: dict[str, Any]) -> None:
    unfinished = directory / "lease.json.unfinished"
    unfinished.write_text(json.dumps(lease))
    unfinished.replace(directory / "lease.json")


def names(leases: Sequence[dict[str, Any]]) -> str:
    """The leases, for a person who waits for them."""
    said = []
    for lease in sorted(leases, key=lambda lease: list(lease["gpus"])):
        what = f", running {Path(lease['running'][0]).name}" if lease["running"] else ""
        since = time.strftime("%H:%M:%S", time.gmtime(lease["since"]))
        said.append(f"GPU {','.join(map(str, lease['gpus']))}: {lease['who']} since {since} UTC{what}")
    return "; ".join(said)
