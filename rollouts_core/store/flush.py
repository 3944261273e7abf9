"""Flush files to the disk, so that a published artifact survives a power failure.

Decision: a handful of files is flushed one by one. Thousands are flushed with their file system, in one call, which
costs a fraction of as many waits.
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

MANY = 64


def flush(paths: Iterable[Path]) -> None:
    """Files and directories of one file system; more than `MANY` with all that is on it, and not even listed."""
    rest = iter(paths)
    first = list(islice(rest, MANY + 1))
    if len(first) > MANY and _flush_file_system(first[0]):
        return
    for path in chain(first, rest):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _flush_file_system(path: Path) -> bool:
    """False where the system can't."""
    if sys.platform != "linux":
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return bool(ctypes.CDLL(None, use_errno=True).syncfs(descriptor) == 0)
    finally:
        os.close(descriptor)
