"""Slurm, spoken to by its own commands: submit, look, cancel, queue again.

Decision: if Slurm does not answer, that does not mean that a job has ended. The last known state is kept, and those who
wait are told why (`Queue.away`).

Decision: all runs of one user on a login node share one look at the queue, kept in a file for `LOOK_SECONDS`. Slurm is
asked no more often than that, however many jobs are followed.
"""

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.host.files import write_json

NAME = "rollouts-"
"""How the names of our Slurm jobs begin, and of their directories on nodes."""
LOOK_SECONDS = 3.0
DEADLINE = 25.0
QUEUE = "queue.json"
FORMAT = "%i|%T|%r|%S|%P|%N"
NEVER = (
    "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionNodeLimit", "PartitionTimeLimit",
    "AssocMaxGRESPerJob", "AssocMaxNodePerJobLimit", "AssocMaxWallDurationPerJobLimit",
    "QOSMaxGRESPerJob", "QOSMaxNodePerJobLimit", "QOSMaxWallDurationPerJobLimit",
)  # fmt: skip
"""Reasons of a waiting job that no waiting mends."""
AWAY = re.compile(
    "unable to contact slurm controller|connection refused|timed out|standby|authentication|munge|"
    "temporarily unable|zero bytes|fetch_config|communication connection failure",
    re.IGNORECASE,
)
ENDED = re.compile(r"\bJobState=(\w+)")
RUNNING = re.compile(r"\bJobId=(\d+) .*?\bJobState=RUNNING .*?\bRestarts=(\d+)")


class Refused(Exception):
    """Slurm does not take the job as it is. Says so in Slurm's words."""


class Away(Exception):
    """Slurm does not answer."""


@dataclass(frozen=True)
class Row:
    """A job of the queue."""

    state: str
    reason: str
    start: str
    """When Slurm expects it to start, in the cluster's time; N/A if Slurm does not say."""
    partition: str
    nodes: str


@dataclass(frozen=True)
class Queue:
    """This user's jobs that have not ended."""

    rows: dict[str, Row] = field(default_factory=dict)
    """By the job's number: `7`; `7_3` is an element of an array, `7` the first component of a heterogeneous job."""
    away: str = ""
    """Why Slurm did not answer; the rows are then those of the last answer."""


def submit(script: str, options: Sequence[str]) -> str:
    """The number of the new job. Raises `Refused` or `Away`."""
    return asked(["sbatch", "--parsable", *options], script).strip().partition(";")[0]


def look(root: Path) -> Queue:
    """The queue as it was at most `LOOK_SECONDS` ago; `root` has the file that is shared."""
    try:
        kept = json.loads((root / QUEUE).read_text())
        known = Queue({number: Row(**row) for number, row in kept["rows"].items()}, kept["away"])
        if 0 <= time.time() - kept["at"] < LOOK_SECONDS:
            return known
    except (OSError, ValueError, KeyError, TypeError):
        known = Queue()
    queue = _look(known)
    rows = {number: asdict(row) for number, row in queue.rows.items()}
    write_json(root / QUEUE, {"at": time.time(), "rows": rows, "away": queue.away})
    return queue


def forget(root: Path) -> None:
    """Look anew the next time."""
    (root / QUEUE).unlink(missing_ok=True)


def place_in_line(number: str, partition: str) -> tuple[int, int]:
    """The place of a job among the waiting jobs of its partition, from 1, and their number; 0 of 0 if Slurm does
    not say."""
    try:
        waiting = asked(["squeue", "-h", "-t", "PENDING", "-p", partition, "--sort=-p,i", "-o", "%i"]).split()
    except (Away, Refused):
        return 0, 0
    return (waiting.index(number) + 1, len(waiting)) if number in waiting else (0, 0)


def how_it_ended(number: str) -> str:
    """The state of a job, as Slurm names it; empty if Slurm has forgotten the job. Raises `Away`."""
    try:
        found = ENDED.search(asked(["scontrol", "-o", "show", "job", number]))
    except Refused:
        found = None
    return found[1] if found else ""


def running(number: str) -> tuple[str, int] | None:
    """For a running job: the number that steps need, which is not in the name of an array's element,
    and how often it was queued again. None if it does not run, or if Slurm does not say."""
    try:
        found = RUNNING.search(asked(["scontrol", "-o", "show", "job", number]))
    except (Away, Refused):
        return None
    return (found[1], int(found[2])) if found else None


def cancel(number: str) -> None:
    """Raises `Away`; a job that has ended is left alone."""
    try:
        asked(["scancel", number])
    except Refused:
        return


def requeue(number: str) -> None:
    """End a job and queue it again. Raises `Refused` or `Away`."""
    asked(["scontrol", "requeue", number])


def longest(partition: str | None) -> int | None:
    """The longest time in minutes that a job of the partition may take; None where there is no limit.

    Raises `Away`; `Refused` where there is no such partition.
    """
    rows = asked(["sinfo", "-h", *(["-p", partition] if partition else []), "-o", "%P|%l"]).splitlines()
    rows = [row for row in rows if partition or "*" in row.partition("|")[0]]
    if partition and not rows:
        raise Refused(f"there is no partition {partition!r}")
    return minutes(rows[0].partition("|")[2]) if rows else None


def minutes(limit: str) -> int | None:
    """A time limit as Slurm writes it (`1-02:03:04`, `02:03:04`, `03:04`); None for infinite."""
    days, _, clock = limit.strip().rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
    except ValueError:
        return None
    hours, mins, _ = [0] * (3 - len(parts)) + parts if len(parts) > 1 else (0, parts[0], 0)
    return int(days or 0) * 1440 + hours * 60 + mins


def _look(known: Queue) -> Queue:
    try:
        lines = asked(["squeue", "-h", "-r", "--me", "-o", FORMAT]).splitlines()
    except (Away, Refused) as error:
        return Queue(known.rows, str(error))
    rows = [line.split("|") for line in lines if line.count("|") == FORMAT.count("|")]
    return Queue({
        number.removesuffix("+0"): Row(state, reason.strip("()"), *rest) for number, state, reason, *rest in rows
    })  # fmt: skip


def asked(command: list[str], given: str | None = None) -> str:
    try:
        done: Any = subprocess.run(command, input=given, capture_output=True, text=True, timeout=DEADLINE)
    except FileNotFoundError:
        raise Refused(f"there is no {command[0]} on this machine: is it a login node of a Slurm cluster?") from None
    except subprocess.TimeoutExpired:
        raise Away(f"{command[0]} has not answered for {DEADLINE:.0f} s") from None
    if done.returncode == 0:
        return str(done.stdout)
    said = "; ".join(line.partition("error: ")[2] or line for line in done.stderr.strip().splitlines())
    raise (Away if AWAY.search(said) else Refused)(said or f"{command[0]} ended with exit status {done.returncode}")
