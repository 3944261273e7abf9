"""Jobs on this machine, by their directories: what is started is watched over, and ends when it is cancelled."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

from infra.host import jobs, runner
from tests.conftest import until
from tests.faults.world import command_lines


def test_a_job_whose_start_was_interrupted_is_watched_over(tmp_path: Path) -> None:
    """The process that asks for the start is killed before it hears that the job runs, as by Ctrl-C."""
    directory = tmp_path / "waits"
    limits = dict.fromkeys(jobs.LIMITS, 600.0)
    jobs.prepare(tmp_path, {"name": "waits", "command": ["sleep", "600"], "spec": {}, **limits})
    until(lambda: _started_by_one_that_is_killed(directory), "a start")
    assert jobs.cancel(tmp_path, "waits")
    assert jobs.poll(tmp_path, "waits")["reason"] == "cancelled"


def test_a_command_ends_with_its_runner(tmp_path: Path) -> None:
    limits = dict.fromkeys(jobs.LIMITS, 600.0)
    job = {"name": "waits", "command": ["sleep", "600"], "spec": {}, **limits}
    jobs.start(tmp_path, job, jobs.runner_command(), {})
    for pid in _runners(tmp_path / "waits"):
        os.kill(pid, signal.SIGKILL)
    until(lambda: jobs.poll(tmp_path, "waits")["state"] != "running", "the end of the command")


def _started_by_one_that_is_killed(directory: Path) -> bool:
    """Whether the job runs. While its lock is taken the runner waits, but only for half a second."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asks = subprocess.Popen([sys.executable, runner.__file__, str(directory)], stdin=subprocess.PIPE, text=True)
        assert asks.stdin is not None
        asks.stdin.write("{}")
        asks.stdin.close()
        until(lambda: _runners(directory) - {asks.pid} or asks.poll() is not None, "the runner")
        asks.kill()
        asks.wait()
    until(lambda: not _runners(directory) or (directory / "log").exists(), "the job")
    return (directory / "log").exists()


def _runners(directory: Path) -> set[int]:
    return {pid for pid, line in command_lines() if str(directory) in line}
