"""Servers that stay when their run has ended, for the next run that wants the same. Standard library only.

    <job>/kept.json   what they are good for (`label`, `key`), and until when

Decision: kept servers are the same job, which no run asks for. Its lease has no holder. A run that wants such servers
joins the lease and takes the job over; a run that wants the GPUs for anything else ends it.

Decision: such a job has a directory with a name of its own, and the run's name for it is a link to that. A run that
takes the job over makes its own link and removes the other. So the run before can't use the job any more.
"""

import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.host.files import write_json
from rollouts_core.store.locks import is_held

KEPT = "kept.json"
HANDED = "admitted.pub"


def place(jobs: Path, name: str) -> None:
    """Give a job that may be kept a directory with a name of its own; call this before it is started."""
    jobs.mkdir(parents=True, exist_ok=True, mode=0o700)
    link, directory = jobs / name, jobs / f"servers-{secrets.token_hex(8)}"
    if (link.is_symlink() and link.exists()) or is_held(link / "lock"):
        return
    if link.is_symlink() or not link.exists():
        link.unlink(missing_ok=True)
        directory.mkdir(mode=0o700)
    else:
        link.rename(directory)
    link.symlink_to(directory.name)


def keep(jobs: Path, name: str, label: str, key: str, seconds: float) -> bool:
    """Keep a job for so many seconds although no run asks for it. False if it does not run."""
    directory = (jobs / name).resolve()
    if not is_held(directory / "lock"):
        return False
    until = time.time() + seconds
    write_json(directory / KEPT, {"job": name, "label": label, "key": key, "until": until})
    (directory / HANDED).unlink(missing_ok=True)
    attended = until - json.loads((directory / "job.json").read_text())["unattended_limit"]
    os.utime(directory / "attended", (attended, attended))
    return True


def kept(jobs: Path, names: Sequence[str]) -> dict[str, Any] | None:
    """The description of running jobs that are all kept for another run; None if one of them is not."""
    told = [_told(jobs / name) for name in names]
    return told[0] if told and all(told) else None


def take_over(jobs: Path, old: str, name: str) -> bool:
    """Give the kept job another name. False if it has ended."""
    directory, link = (jobs / old).resolve(), jobs / name
    if not is_held(directory / "lock"):
        return False
    if link.exists() and link.resolve() != directory:
        link.rename(jobs / f"servers-{secrets.token_hex(8)}")
    for other in [path for path in jobs.iterdir() if path.is_symlink() and path.resolve() == directory]:
        other.unlink()
    link.symlink_to(directory.name)
    os.utime(directory / "attended")
    (directory / KEPT).unlink(missing_ok=True)
    return True


def give_way(jobs: Path, names: Sequence[str]) -> None:
    """Ask kept jobs to end; they do so within seconds."""
    for name in names:
        (jobs / name / "cancel").touch()


def _told(directory: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((directory / KEPT).read_text())
    except (OSError, ValueError):
        return None
    return found
