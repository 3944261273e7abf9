"""The server of a `rollouts up` of this user, if one runs.

Decision: `up` writes its address beside a lock that it holds. If nobody holds the lock, `up` has ended, in whatever
way.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rollouts_core.store.locks import is_held, try_lock

TRIES, LOOKED_AT = 20, 0.05
"""Somebody may be looking at the lock, for a moment. In seconds."""


@dataclass(frozen=True)
class UpServer:
    api: str
    pages: str
    """The address where the outputs directory is served."""
    outputs: str


@contextmanager
def announced(server: UpServer) -> Iterator[None]:
    """Others find the server for as long as this lasts. The first of several `up` is found."""
    place = _place()
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        first = _locked(lock.fileno())
        if first:
            unfinished = place / f"server.json.{os.getpid()}"
            unfinished.write_text(json.dumps(asdict(server)))
            unfinished.replace(place / "server.json")
        try:
            yield
        finally:
            if first:
                (place / "server.json").unlink(missing_ok=True)


def find_server() -> UpServer | None:
    place = _place()
    if not is_held(place / "lock"):
        return None
    try:
        return UpServer(**json.loads((place / "server.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def prefect_home() -> Path:
    """Prefect's home, found as Prefect does, without importing it."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def _locked(descriptor: int) -> bool:
    for _ in range(TRIES):
        if try_lock(descriptor):
            return True
        time.sleep(LOOKED_AT)
    return False


def _place() -> Path:
    return prefect_home() / "rollouts-up"
