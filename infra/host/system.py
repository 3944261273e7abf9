"""Questions of processes to the system. Standard library only."""

import ctypes
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Die with the process that watches over this one, however it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A free port of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
