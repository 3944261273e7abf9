"""The kill matrix: a few of its cases, so that it is known to work when it is run whole (`make faults`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE = 600.0
CASES = ("2", "22", "34")
"""A killed job, a full disk, a store that is unreachable for a while."""


@pytest.mark.slow
def test_runs_that_are_disturbed_recover() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting the small disks takes root")
    command = [sys.executable, "-m", "tests.faults.matrix", *(word for case in CASES for word in ("--only", case))]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| yes | nothing |") == len(CASES), done.stdout
