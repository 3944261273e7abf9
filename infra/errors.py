"""Errors of machines and jobs, and whether a retry can help."""

from rollouts_core.errors import RolloutsError


class MachineError(RolloutsError):
    """The machine did not do what it was asked."""


AGAIN = "Retry in Prefect's UI, or the same command again: it goes on from what was committed"
MEND = "fix this, then click Retry in Prefect's UI or give the same command again; finished stages are cached"


class JobFailed(RolloutsError):
    """A job ended without its artifact. `mendable` says whether the same job may do better if started again."""

    def __init__(self, message: str, last_lines: tuple[str, ...], mendable: bool) -> None:
        self.last_lines = last_lines
        self.mendable = mendable
        tail = "".join(f"\n    {line}" for line in last_lines)
        advice = AGAIN if mendable else MEND
        super().__init__(message + (f"\n  its last log lines:{tail}" if tail else "") + f"\n  what to do: {advice}")


class Unreachable(MachineError):
    """A machine does not answer. It may again: what runs there runs on."""


class LeaseLapsed(MachineError):
    """The host has not heard of the run for too long and may have given its GPUs to another."""
