"""Locks that belong to the kernel: they end with whoever holds them, `kill -9` included."""

import fcntl
from pathlib import Path


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file; it is held until every copy of the descriptor is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a file. Looking takes the lock for a moment."""
    try:
        with path.open("rb") as file:
            return not try_lock(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return False


def born(pid: int) -> str:
    """The process's start, empty when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
