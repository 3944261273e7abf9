"""Jobs as directories: started, looked at, ended, on the machine where they run.

Everything about a job is in its directory (see `runner`), so any process can ask about it.

Decision: a cancellation also stops a start that has not arrived yet. A process that is interrupted while it asks for
a start can't know whether its request is still on the way. So every start says who asks for it, a cancellation writes
that name to the file `withdrawn`, and a start by a withdrawn name is refused. The lock `starting` is held from that
check until the runner has the job's own lock, so a cancellation never looks in between.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.host import allocated
from infra.host.files import read_json, write_json, write_text
from rollouts_core.store.locks import is_held, try_lock

START_DEADLINE = 30.0
TURN_DEADLINE = 8.0
"""The deadline for another start of the same job to end."""
CANCEL_DEADLINE = 25.0
READ_AT_ONCE = 2**20
LOOK_SECONDS = 0.05
FILES = ("log", "metrics.jsonl")
LIMITS = ("time_limit", "unattended_limit", "stall_limit")


class JobError(Exception):
    """A job that could not be started or ended. Says so to a person."""


def start(jobs: Path, job: Mapping[str, Any], runner: list[str], environment: Mapping[str, str]) -> None:
    """Start a job (name, command, spec, limits) unless it runs; returns once it does. Raises `JobError`.

    `runner` is the command that runs `runner.py`; `environment` is given to the job's process alone. A job whose
    `asked_by` names who has cancelled it since is not started.
    """
    directory = jobs / job["name"]
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _starting(directory) as starting:
            _refuse_withdrawn(directory, job)
            if not is_held(directory / "lock"):
                _describe(directory, job)
            _run(directory, runner, starting, environment)
    except OSError as error:
        raise JobError(f"job {job['name']} could not be set up in {directory}: {error.strerror}") from error


def prepare(jobs: Path, job: Mapping[str, Any]) -> None:
    """Write a job's directory, and start nothing: `start_again` does, elsewhere. Raises `JobError`."""
    directory = jobs / job["name"]
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _starting(directory):
            _refuse_withdrawn(directory, job)
            for left in ("status.json", "failure.json"):
                (directory / left).unlink(missing_ok=True)
            _describe(directory, job)
    except OSError as error:
        raise JobError(f"job {job['name']} could not be set up in {directory}: {error.strerror}") from error


def start_again(jobs: Path, name: str, runner: list[str], environment: Mapping[str, str]) -> None:
    """The same as `start`, for a job as its directory describes it."""
    with _starting(jobs / name) as starting:
        if (jobs / name / "cancel").exists():
            raise JobError(f"job {name} was cancelled before it started again")
        _run(jobs / name, runner, starting, environment)


def poll(jobs: Path, name: str) -> dict[str, Any]:
    """`state` (absent, running, finished, lost), `exit_status` and `reason` of a finished one, and a `message`: why it
    ended, or what a running one waits for."""
    directory = jobs / name
    if told := allocated.poll(directory):
        return told
    message = read_json(directory / "failure.json").get("message", "")
    if not message and not (directory / "attempt.json").exists():
        return {"state": "absent"}
    if is_held(directory / "lock"):
        return {"state": "running"}
    status = read_json(directory / "status.json")
    if not status:
        return {"state": "lost", "message": message}
    return {"state": "finished", "exit_status": status["exit_status"], "reason": status["reason"], "message": message}


def attempt(jobs: Path, name: str) -> dict[str, int]:
    """The offsets in log and metrics at which the current attempt's output begins, in bytes."""
    begun = read_json(jobs / name / "attempt.json")
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


def cancel(jobs: Path, name: str, asked_by: str | None = None) -> bool:
    """End a job; returns once nothing of it is left, and whether there was anything.

    `asked_by`: who no longer wants it. A start of theirs that is still on its way is refused when it comes.
    Raises `JobError` when the job does not end.
    """
    directory = jobs / name
    if asked_by is not None:
        _withdraw(directory, asked_by)
    end = time.monotonic() + CANCEL_DEADLINE
    was_there = False
    while is_held(directory / "starting") or poll(jobs, name)["state"] == "running":
        was_there = True
        (directory / "cancel").touch()
        if allocated.drop(directory):
            break
        if time.monotonic() > end:
            raise JobError(f"job {name} did not end within {CANCEL_DEADLINE:.0f} s of being cancelled")
        time.sleep(LOOK_SECONDS)
    return was_there


def hand(jobs: Path, name: str, file: str, content: str) -> None:
    """Write a file into a job's directory, whole or not at all; the job may not have begun."""
    (jobs / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(jobs / name / file, content)


def running(jobs: Path) -> list[str]:
    """The names of all jobs that run; of one that a link leads to, the link's."""
    held = [path.parent for path in jobs.glob("*/lock") if is_held(path)]
    linked = {directory.resolve() for directory in held if directory.is_symlink()}
    found = {path.name for path in held if path.is_symlink() or path.resolve() not in linked}
    return sorted({*found, *allocated.kept_jobs(jobs.parents[1] / allocated.FOLDER)})


def runner_command() -> list[str]:
    """Runs `runner.py` from where this package is: a directory, or the archive that was sent along."""
    here = Path(__file__).parent
    if (here / "runner.py").is_file():
        return [sys.executable, str(here / "runner.py")]
    return [sys.executable, str(here.parents[1]), "runner"]


def _describe(directory: Path, job: Mapping[str, Any]) -> None:
    (directory / "cancel").unlink(missing_ok=True)
    command = [part.format(directory=directory.resolve()) for part in job["command"]]
    write_json(directory / "spec.json", job["spec"])
    write_json(directory / "job.json", {"command": command, **{name: job[name] for name in LIMITS}})


def _refuse_withdrawn(directory: Path, job: Mapping[str, Any]) -> None:
    if set(job.get("asked_by", ())) & set(_withdrawn(directory)):
        raise JobError(f"job {job['name']} was cancelled before it started")


def _run(directory: Path, runner: list[str], starting: int, environment: Mapping[str, str]) -> None:
    """Start the job that the directory describes with the runner. Raises `JobError`."""
    name = directory.name
    try:
        done = subprocess.run(
            [*runner, str(directory), str(starting)], input=json.dumps(dict(environment)), timeout=START_DEADLINE,
            capture_output=True, text=True, pass_fds=[starting],
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise JobError(f"job {name} did not start within {START_DEADLINE:.0f} s") from None
    if done.returncode:
        raise JobError(f"job {name} could not be started: {done.stderr.strip()}")


@contextmanager
def _starting(directory: Path) -> Iterator[int]:
    """Hold the lock of starts, and yield its descriptor. The lock is free when all processes that got it have closed
    it."""
    with (directory / "starting").open("w") as lock:
        end = time.monotonic() + TURN_DEADLINE
        while not try_lock(lock.fileno()):
            if time.monotonic() > end:
                raise JobError(f"another start of job {directory.name} has not ended within {TURN_DEADLINE:.0f} s")
            time.sleep(LOOK_SECONDS)
        yield lock.fileno()


def _withdraw(directory: Path, asked_by: str) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (directory / "withdrawn").open("a") as file:
        file.write(f"{asked_by}\n")


def _withdrawn(directory: Path) -> list[str]:
    return _read(directory / "withdrawn", 0).decode(errors="replace").split()


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as content:
            content.seek(offset)
            return content.read(READ_AT_ONCE)
    except FileNotFoundError:
        return b""
