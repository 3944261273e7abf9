"""To the disk: what was published is still there after a power failure.

Decision: a handful of files is flushed one by one. Thousands are flushed with their file system, in one call, which
costs a fraction of as many waits.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

MANY = 64


def flush(paths: Sequence[Path | str]) -> None:
    """Files and directories of one file system; more than `MANY` with all that is on it."""
    if len(paths) > MANY and _flush_file_system(paths[0]):
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _flush_file_system(path: Path | str) -> bool:
    """False where the system can't."""
    if sys.platform != "linux":
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return bool(ctypes.CDLL(None, use_errno=True).syncfs(descriptor) == 0)
    finally:
        os.close(descriptor)
