"""The record of a run, written and read."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import TypeAdapter

StageState = Literal["Pending", "Running", "Completed", "Cached", "Failed", "Cancelled"]
RunState = Literal["Running", "Completed", "Failed", "Cancelled", "Lost"]
"""Lost: its orchestrator was killed. Jobs it had started may run on, and the next run of the config finds them."""


@dataclass(frozen=True)
class StageRecord:
    name: str
    key: str | None
    """The artifact's key; None for stages that make no artifact."""
    state: StageState = "Pending"
    seconds: float = 0.0


@dataclass(frozen=True)
class JobRecord:
    """The job that makes a stage, for whoever wants its log or its end."""

    stage: str
    machine: str
    job: str
    log: int | None
    """The offset in the job's log at which this run's part begins, in bytes; None until the job is seen to run."""


@dataclass(frozen=True)
class AccuracyRecord:
    """Held-out accuracy at one point of the chain, as shares, with its 95 % interval."""

    point: str
    accuracy: float
    low: float
    high: float
    total: int


@dataclass(frozen=True)
class RunRecord:
    run_id: str
    name: str
    state: RunState
    started_at: str
    seconds: float
    flow_run_id: str | None
    stages: tuple[StageRecord, ...]
    accuracies: tuple[AccuracyRecord, ...] = ()
    report: str | None = None
    error: str | None = None
    refreshed: tuple[str, ...] = ()
    """Stages whose artifacts this run discarded at its start; a retry does not do so again."""
    updated_at: str = ""
    jobs: tuple[JobRecord, ...] = ()
    """In the order in which they were asked for."""
    process: tuple[int, str] = (0, "")
    """The orchestrator's, and when it began, in the kernel's ticks."""
    discarded_on: tuple[str, ...] = ()
    """Machines where this run has discarded what it refreshed."""


_adapter, _several = TypeAdapter(RunRecord), TypeAdapter(list[RunRecord])


def seconds_so_far(record: RunRecord) -> float:
    """Seconds since the start of a run under way: its record says only how long it had run at its last change."""
    if record.state != "Running":
        return record.seconds
    return (datetime.now(UTC) - datetime.fromisoformat(record.started_at)).total_seconds()


def encode_record(record: RunRecord, indent: int | None = None) -> bytes:
    return _adapter.dump_json(record, indent=indent)


def encode_records(records: Sequence[RunRecord]) -> str:
    """A JSON list."""
    return _several.dump_json(list(records)).decode()


def decode_record(content: bytes) -> RunRecord:
    """Raises ValueError when it is none."""
    return _adapter.validate_json(content)


def is_record(content: bytes) -> bool:
    with suppress(ValueError):
        return bool(decode_record(content))
    return False
