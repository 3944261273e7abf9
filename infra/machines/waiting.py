"""Waiting for GPUs that are in use."""

import time
from collections.abc import Callable, Iterator

from infra.errors import MachineError

FIRST_SECONDS = 0.25
QUEUE_SECONDS = 2.0
SAY_AGAIN_SECONDS = 300.0


def until_free(try_claim: Callable[[], str], hours: float) -> Iterator[str]:
    """Try again and again; yields why it can't be now, when that changes and now and then.

    Raises `MachineError` after `hours`.
    """
    end = time.monotonic() + hours * 3600
    said, told, pause = "", 0.0, FIRST_SECONDS
    while reason := try_claim():
        if time.monotonic() > end:
            raise MachineError(f"{reason}; waited {hours:g} hours (machine.wait_hours)")
        if reason != said or time.monotonic() - told > SAY_AGAIN_SECONDS:
            yield reason
            said, told = reason, time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, QUEUE_SECONDS)
