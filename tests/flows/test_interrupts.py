"""Ctrl-C at any moment of a whole run leaves no process, and no job that its record does not name."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts_core.observe.run_list import list_runs
from tests.conftest import until
from tests.faults.world import command_lines

TIMES = 50
WHOLE_RUN_SECONDS = 20.0
JUST_BEGUN_SECONDS = 0.25


@pytest.mark.slow
def test_ctrl_c_at_random_moments(
    config_file: Callable[..., Path], command_environment: dict[str, str], tmp_path: Path
) -> None:
    """Half of them just after a job's directory has appeared, half anywhere."""
    moments = random.Random(0)
    config = config_file()
    for number in range(TIMES):
        store = tmp_path / f"store-{number}"
        command = [sys.executable, "-m", "flows.cli", "run", str(config), "--store", str(store), "--quiet"]
        with (tmp_path / "log").open("ab") as log:
            run = subprocess.Popen(command, cwd=tmp_path, env=command_environment, stdout=log, stderr=log)
        if number % 2:
            time.sleep(moments.uniform(0.0, WHOLE_RUN_SECONDS))
        else:
            wanted = moments.randint(1, 4)
            until(lambda: run.poll() is not None or len(jobs(store)) >= wanted, "its jobs")  # noqa: B023
            time.sleep(moments.uniform(0.0, JUST_BEGUN_SECONDS))
        if run.poll() is None:
            os.kill(run.pid, signal.SIGINT)
        run.wait(60)
        left = [line for _, line in command_lines() if str(store) in line]
        recorded = {job.job for record in list_runs(store) for job in record.jobs}
        assert left == [], f"interrupt {number}"
        assert {job.name for job in jobs(store) if (job / "attempt.json").exists()} <= recorded, f"interrupt {number}"


def jobs(store: Path) -> list[Path]:
    return list((store / "jobs").glob("*"))
