"""How the process of a job ends."""

import subprocess
import sys

SCRIPT = """
import sys, threading, time
from rollouts_core.stages.job import end_process
threading.Thread(target=time.sleep, args=(600,)).start()
print("told", end="")
end_process(65)
"""


def test_a_job_ends_with_its_status_though_a_thread_goes_on() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (65, "told")
