"""A job beside others, looked at now and then."""

import json
from dataclasses import dataclass, field
from typing import Any

from infra.jobs.follow import Lines
from infra.machines.machine import JobStatus, Machine, Offsets

LAST_LINES = 25


@dataclass
class JobReader:
    """Reads what a job prints and records, from the beginning of its current attempt."""

    machine: Machine
    job: str
    status: JobStatus = field(default_factory=lambda: JobStatus("running"))
    """The job's status at the last look."""
    known: dict[str, Any] = field(default_factory=dict)
    """The latest record of each name."""
    last: list[str] = field(default_factory=list)
    """The job's last lines."""
    _at: Offsets | None = None
    _lines: Lines = field(default_factory=Lines)
    _records: Lines = field(default_factory=Lines)

    def read(self) -> list[str]:
        """New lines. Where the machine does not answer, the status says so. Raises `Unreachable` at the first look."""
        if self._at is None:
            self._at = self.machine.attempt(self.job)
        seen = self.machine.watch(self.job, self._at, 0.0)
        self.status = seen.status
        self._at = Offsets(self._at.log + len(seen.log), self._at.metrics + len(seen.metrics))
        for record in self._records.take(seen.metrics):
            self.known |= json.loads(record)
        new = self._lines.take(seen.log)
        self.last = [*self.last, *new][-LAST_LINES:]
        return new

    def started_again(self) -> None:
        """Note that the job was started again: its next output is of another attempt."""
        self._at = None
