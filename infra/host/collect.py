"""The entries of a host's store that no kept run needs. Standard library only.

    <work>/runs/<run>.json   which artifacts a run needs: written before the run looks what is there

Decision: a host knows which runs used it, from any orchestrator. They decide what is kept, as in the store of an
orchestrator, never age. Runs are noted and artifacts removed under the same lock. So a run that begins is either seen,
or finds that an artifact is gone and makes it again.
"""

import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.host import allocated, allocations, gpu_leases, jobs

BESIDE = re.compile(r"^serve-|-here$|-(ranks|node)-\d+$")
"""The names of jobs beside an artifact's own job."""


def note_run(work: Path, run: str, name: str, token: str, needs: Sequence[str]) -> None:
    """`needs`: the directories of the artifacts in its plan. `token` is that of its leases."""
    with gpu_leases.alone(work / "leases"):
        (work / "runs").mkdir(exist_ok=True, mode=0o700)
        noted = {"run": run, "name": name, "token": token, "needs": list(needs), "at": time.time()}
        unfinished = work / "runs" / f"{run}.unfinished"
        unfinished.write_text(json.dumps(noted))
        unfinished.replace(work / "runs" / f"{run}.json")


def noted_runs(work: Path) -> list[dict[str, Any]]:
    """`run`, `name`, `needs`, `at` (seconds since 1970) and `live` of each run, the latest first."""
    leases = gpu_leases.living(work / "leases", _jobs(work))
    leases += allocations.living(work / allocated.FOLDER, _jobs(work))
    holders = {token for lease in leases for token in lease["holders"]}
    used = _used(work)
    found = []
    for path in (work / "runs").glob("*.json"):
        try:
            noted: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        found.append({**noted, "live": noted["token"] in holders or any(name in used for name in noted["needs"])})
    return sorted(found, key=lambda noted: float(noted["at"]), reverse=True)


def collect(
    work: Path, kept: Sequence[str], kept_runs: Sequence[str], other_runs: Sequence[str], dry_run: bool
) -> list[tuple[str, str, int]] | None:
    """Remove all artifacts, partial work and jobs but those `kept`; kind, name and size in bytes of each.

    `other_runs` are forgotten. None, and nothing removed, when there is a run that whoever asks does not know.
    """
    with gpu_leases.alone(work / "leases"):
        if {path.stem for path in (work / "runs").glob("*.json")} - {*kept_runs, *other_runs}:
            return None
        removed = []
        for kind, path in _unneeded(work, set(kept)):
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
            removed.append((kind, path.name, size))
            if not dry_run:
                aside = work / "incoming" / f"collected-{kind}-{path.name}"
                if path.is_symlink():
                    path.unlink()
                    continue
                aside.parent.mkdir(exist_ok=True)
                path.rename(aside)
        for run in () if dry_run else other_runs:
            (work / "runs" / f"{run}.json").unlink(missing_ok=True)
    for aside in (work / "incoming").glob("collected-*"):
        shutil.rmtree(aside, ignore_errors=True)
    return removed


def _unneeded(work: Path, kept: set[str]) -> list[tuple[str, Path]]:
    store = work / "store"
    found = [("artifact", path) for path in store.glob("artifacts/*") if path.name not in kept]
    found += [("work", path) for path in store.glob("work/*") if path.name.rpartition(".")[0] not in kept]
    all_jobs = (path for path in store.glob("jobs/*") if not path.name.startswith("environment-"))
    found += [("job", path) for path in all_jobs if _artifact("job", path.name) not in kept]
    used = _used(work)
    return [(kind, path) for kind, path in sorted(found) if _artifact(kind, path.name) not in used]


def _artifact(kind: str, name: str) -> str:
    if kind == "work":
        return name.rpartition(".")[0]
    return BESIDE.sub("", name) if kind == "job" else name


def _used(work: Path) -> str:
    """A text that names the artifacts which running jobs make or read."""
    running = [_jobs(work) / name for name in jobs.running(_jobs(work))]
    specs = [(job / "spec.json").read_text() for job in running if (job / "spec.json").exists()]
    return " ".join([*specs, *(job.name for job in running)])


def _jobs(work: Path) -> Path:
    return work / "store" / "jobs"
