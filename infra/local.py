"""This machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from infra import runner
from infra.errors import MachineError
from infra.machine import Job, JobFile, JobStatus, Offsets
from rollouts_core.store.locks import is_held

START_DEADLINE = 30.0
CANCEL_DEADLINE = 30.0
READ_AT_ONCE = 2**20


class LocalMachine:
    """Jobs as detached processes of this user, each in a directory below `jobs`."""

    name = "local"

    def __init__(self, jobs: Path) -> None:
        self._jobs = jobs

    def start(self, job: Job) -> None:
        directory = self._jobs / job.name
        try:
            self._prepare(job, directory)
            subprocess.run(
                [sys.executable, runner.__file__, str(directory)],
                check=True, timeout=START_DEADLINE, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            raise MachineError(f"job {job.name} could not be started: {error.stderr.strip()}") from error
        except OSError as error:
            raise MachineError(f"job {job.name} could not be set up in {directory}: {error.strerror}") from error

    def poll(self, job: str) -> JobStatus:
        directory = self._jobs / job
        if not (directory / "attempt.json").exists():
            return JobStatus("absent")
        if is_held(directory / "lock"):
            return JobStatus("running")
        status = _read_json(directory / "status.json")
        if not status:
            return JobStatus("lost")
        message = _read_json(directory / "failure.json").get("message", "")
        return JobStatus("finished", status["exit_status"], status["reason"], message)

    def attempt(self, job: str) -> Offsets:
        begun = _read_json(self._jobs / job / "attempt.json")
        return Offsets(begun.get("log", 0), begun.get("metrics", 0))

    def read(self, job: str, file: JobFile, offset: int) -> bytes:
        try:
            with (self._jobs / job / file).open("rb") as content:
                content.seek(offset)
                return content.read(READ_AT_ONCE)
        except FileNotFoundError:
            return b""

    def attend(self, job: str) -> None:
        os.utime(self._jobs / job / "attended")

    def cancel(self, job: str) -> None:
        lock = self._jobs / job / "lock"
        if not is_held(lock):
            return
        (self._jobs / job / "cancel").touch()
        end = time.monotonic() + CANCEL_DEADLINE
        while is_held(lock):
            if time.monotonic() > end:
                raise MachineError(f"job {job} did not end within {CANCEL_DEADLINE:.0f} s of being cancelled")
            time.sleep(0.05)

    def _prepare(self, job: Job, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_held(directory / "lock"):
            command = [part.format(directory=directory.resolve()) for part in job.command]
            limits = {name: getattr(job, name) for name in ("time_limit", "unattended_limit", "stall_limit")}
            _write_json(directory / "spec.json", job.spec)
            _write_json(directory / "job.json", {"command": command, **limits})


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
