"""Jobs as directories: started, looked at, ended, on the machine where they run.

Everything about a job is in its directory (see `runner`), so whoever asks may be new to it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts_core.store.locks import is_held

START_DEADLINE = 30.0
CANCEL_DEADLINE = 25.0
READ_AT_ONCE = 2**20
LOOK_SECONDS = 0.05
FILES = ("log", "metrics.jsonl")
LIMITS = ("time_limit", "unattended_limit", "stall_limit")


class JobError(Exception):
    """A job that could not be started or ended. Says so to a person."""


def start(jobs: Path, job: Mapping[str, Any], runner: list[str], environment: Mapping[str, str]) -> None:
    """Start a job (name, command, spec, limits) unless it runs; returns once it does. Raises `JobError`.

    `runner` is the command that runs `runner.py`; `environment` is given to the job's process alone.
    """
    directory = jobs / job["name"]
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_held(directory / "lock"):
            command = [part.format(directory=directory.resolve()) for part in job["command"]]
            _write_json(directory / "spec.json", job["spec"])
            _write_json(directory / "job.json", {"command": command, **{name: job[name] for name in LIMITS}})
        done = subprocess.run(
            [*runner, str(directory)], input=json.dumps(dict(environment)), timeout=START_DEADLINE,
            capture_output=True, text=True,
        )  # fmt: skip
    except OSError as error:
        raise JobError(f"job {job['name']} could not be set up in {directory}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise JobError(f"job {job['name']} did not start within {START_DEADLINE:.0f} s") from None
    if done.returncode:
        raise JobError(f"job {job['name']} could not be started: {done.stderr.strip()}")


def poll(jobs: Path, name: str) -> dict[str, Any]:
    """`state` (absent, running, finished, lost), and of a finished one `exit_status`, `reason` and `message`."""
    directory = jobs / name
    if not (directory / "attempt.json").exists():
        return {"state": "absent"}
    if is_held(directory / "lock"):
        return {"state": "running"}
    status = _read_json(directory / "status.json")
    if not status:
        return {"state": "lost"}
    message = _read_json(directory / "failure.json").get("message", "")
    return {"state": "finished", "exit_status": status["exit_status"], "reason": status["reason"], "message": message}


def attempt(jobs: Path, name: str) -> dict[str, int]:
    """Where in log and metrics the current attempt's output begins, in bytes."""
    begun = _read_json(jobs / name / "attempt.json")
    return {"log": begun.get("log", 0), "metrics": begun.get("metrics", 0)}


def watch(jobs: Path, name: str, log: int, metrics: int, wait: float) -> tuple[dict[str, Any], bytes, bytes]:
    """State, and what log and metrics hold from their offsets on; waits up to `wait` seconds for something new.

    Asking is attending: the job is still wanted.
    """
    end = time.monotonic() + wait
    if (jobs / name / "attended").exists():
        os.utime(jobs / name / "attended")
    while True:
        status = poll(jobs, name)
        lines, values = (_read(jobs / name / file, at) for file, at in zip(FILES, (log, metrics), strict=True))
        if lines or values or status["state"] != "running" or time.monotonic() >= end:
            return status, lines, values
        time.sleep(LOOK_SECONDS)


def cancel(jobs: Path, name: str) -> None:
    """End a job; returns once nothing of it is left. Raises `JobError` when it does not end."""
    lock = jobs / name / "lock"
    if not is_held(lock):
        return
    (jobs / name / "cancel").touch()
    end = time.monotonic() + CANCEL_DEADLINE
    while is_held(lock):
        if time.monotonic() > end:
            raise JobError(f"job {name} did not end within {CANCEL_DEADLINE:.0f} s of being cancelled")
        time.sleep(LOOK_SECONDS)


def running(jobs: Path) -> list[str]:
    """The names of all jobs that run."""
    return sorted(path.parent.name for path in jobs.glob("*/lock") if is_held(path))


def runner_command() -> list[str]:
    """Runs `runner.py` from where this package is: a directory, or the archive that was sent along."""
    here = Path(__file__).parent
    if (here / "runner.py").is_file():
        return [sys.executable, str(here / "runner.py")]
    return [sys.executable, str(here.parents[1]), "runner"]


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as content:
            content.seek(offset)
            return content.read(READ_AT_ONCE)
    except FileNotFoundError:
        return b""


def _write_json(path: Path, value: Any) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(value))
    unfinished.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return value
