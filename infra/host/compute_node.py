"""What a compute node of an allocation has, as Slurm gave it, and how others reach it."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from infra.host import slurm


def described(components: Sequence[int], number: int) -> dict[str, Any]:
    """This node, which is that of this number in an allocation of such components (the nodes of each)."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.isdigit()]
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    address = _address(node)
    return {
        "node": node, "address": address, "host_key": _host_key(address), "gpus": list(range(len(visible))),
        "agent": own_command(), "component": sum(end <= number for end in accumulate(components)),
    }  # fmt: skip


def own_command() -> list[str]:
    """Runs the agent, from where this package is."""
    return [sys.executable, str(Path(__file__).parents[2])]


def _address(node: str) -> str:
    """The address by which other nodes reach it."""
    try:
        done = subprocess.run(
            ["scontrol", "-o", "show", "node", node], capture_output=True, text=True, timeout=slurm.DEADLINE
        )
    except (OSError, subprocess.TimeoutExpired):
        return node
    found = [word.partition("=")[2] for word in done.stdout.split() if word.startswith("NodeAddr=")]
    return found[0] if found else node


def _host_key(address: str) -> str:
    """The host key of this node's SSH server, by which other nodes reach it; empty where there is none. It is asked
    from here, so nobody can stand between."""
    try:
        scan = ["ssh-keyscan", "-T", "3", "-t", "ed25519,ecdsa,rsa", address]
        lines = subprocess.run(scan, capture_output=True, text=True, timeout=slurm.DEADLINE).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next((" ".join(line.split()[1:3]) for line in lines if line and not line.startswith("#")), "")
