"""What Slurm's commands say, read; and what is said of it to people. No cluster: the real one is in `tests/flows`."""

import json
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.host import slurm
from infra.host.allocated import waits_for
from infra.host.cluster import quotas
from infra.host.slurm import Away, Queue, Refused, Row, look, minutes


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for programs that stand in for Slurm's."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59))
def test_time_limits_as_slurm_writes_them(days: int, hours: int, mins: int) -> None:
    assert minutes(f"{days}-{hours:02}:{mins:02}:00") == days * 1440 + hours * 60 + mins
    assert minutes(f"{hours}:{mins:02}:00") == hours * 60 + mins
    assert minutes(f"{mins}:00") == mins
    assert minutes(f"{mins}") == mins


def test_no_time_limit() -> None:
    assert minutes("infinite") is None


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Away),
        ("sbatch: error: Munge encode failed: Failed to access munge.socket", Away),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", Refused),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy", Refused),
    ],
)
def test_a_slurm_that_is_away_is_told_from_one_that_refuses(commands: Path, said: str, kind: type[Exception]) -> None:
    program(commands / "sbatch", f"echo '{said}' >&2; exit 1")
    with pytest.raises(kind, match=said.rpartition("error: ")[2][:20]):
        slurm.submit("#!/bin/sh", [])


def test_what_was_known_holds_while_slurm_is_away(commands: Path, tmp_path: Path) -> None:
    program(commands / "squeue", "echo '7|RUNNING|None|2026-01-01T00:00:00|gpu|n1'")
    assert look(tmp_path).rows["7"].nodes == "n1"
    program(commands / "squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    assert not look(tmp_path).away, "asked a moment ago"
    kept = json.loads((tmp_path / slurm.QUEUE).read_text())
    (tmp_path / slurm.QUEUE).write_text(json.dumps({**kept, "at": 0}))
    queue = look(tmp_path)
    assert queue.rows["7"].state == "RUNNING"
    assert queue.away == "Unable to contact slurm controller"


def test_what_a_job_waits_for_is_said(commands: Path) -> None:
    program(commands / "squeue", "printf '3\\n7\\n9\\n'")
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 41 * 60))
    row = Row("PENDING", "Resources", soon, "gpu", "")
    said = waits_for("7", row, Queue({"7": row}))
    assert said == "Slurm job 7 waits: Resources, 2 of 3 in the queue of gpu, in about 40 min"
    unknown = Row("PENDING", "Priority", "N/A", "gpu", "")
    assert waits_for("8", unknown, Queue({})) == "Slurm job 8 waits: Priority"
    assert waits_for("8", None, Queue({}, "it is down")) == "Slurm does not answer: it is down"


def test_quotas_are_read_of_lustre_and_of_others(commands: Path, tmp_path: Path) -> None:
    program(commands / "lfs", "echo '/scratch 1048576* 524288 2097152 6d 10 0 0 -'")
    told = ["Disk quotas for user me (uid 7):", " Filesystem blocks quota limit grace files quota limit grace"]
    told += ["/dev/sda1 9 0 20 0 9 0 0 0", "/dev/sdb1 5 0 0 0 9 0 0 0"]
    program(commands / "quota", "\n".join(f"echo '{line}'" for line in told))
    assert quotas(tmp_path) == [
        {"where": "/scratch", "used": 2**30, "limit": 2**29},
        {"where": "/dev/sda1", "used": 9 * 1024, "limit": 20 * 1024},
    ]
