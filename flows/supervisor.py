"""Keeps a server running for as long as its parent lives: `python supervisor.py PARENT COMMAND...`.

Decision: a server that was killed is started again, on the same port with the same data, so its clients go on after
their next attempt to connect. The supervisor is a process and not a thread of the parent: the kernel ends it when the
parent dies, and the server when the supervisor dies (Linux). Standard library only.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

RESTARTS = 5
PAUSE = 0.5
PR_SET_PDEATHSIG = 1
UNDER_UP = "ROLLOUTS_UP"


def main(parent: int, command: list[str]) -> int:
    """Returns the server's exit status when it was told to end, ended by itself, or was killed too often."""
    end_with(parent)
    here = os.getpid()
    servers: list[subprocess.Popen[bytes]] = []
    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)
        for server in servers[-1:]:
            server.terminate()

    signal.signal(signal.SIGTERM, stop)
    for _ in range(RESTARTS + 1):
        servers.append(subprocess.Popen(command, preexec_fn=lambda: end_with(here)))
        if told:
            servers[-1].terminate()
        status = servers[-1].wait()
        if told or status >= 0:
            break
        time.sleep(PAUSE)
    return status


def end_with_worker() -> None:
    """Under `rollouts up`: a process that leads a run ends with the worker that started it."""
    if os.environ.get(UNDER_UP):
        end_with(os.getppid())


def end_with(parent: int) -> None:
    """Ask the kernel to end this process with its parent, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
