"""A directory on a compute node's own disk for the jobs of one allocation, and the end of it."""

import os
import shutil
from hashlib import sha256
from pathlib import Path

from infra.host.slurm import NAME


def directory_on(disk: str, allocation: Path) -> Path:
    """The allocation's own, removed with it. `disk` may name environment variables of the node."""
    return Path(os.path.expandvars(disk)) / f"{_ours(allocation.parent)}{allocation.name}"


def clear(disk: str, allocation: Path) -> None:
    """Remove what agents that were killed have left there, of allocations that have ended."""
    root, ours = allocation.parent, _ours(allocation.parent)
    for directory in directory_on(disk, allocation).parent.glob(f"{ours}*"):
        if not (root / directory.name.removeprefix(ours)).exists():
            shutil.rmtree(directory, ignore_errors=True)


def _ours(root: Path) -> str:
    """How names begin that belong to allocations below this directory: a node may serve several."""
    return f"{NAME}{sha256(bytes(root)).hexdigest()[:8]}-"
