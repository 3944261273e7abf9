"""Removing what no kept run needs.

Decision: runs and pins decide what is kept, never age or access times. An artifact is needed by a kept run if it is in
the run's plan, or if something that is needed was made from it. Kept runs are: live runs, pinned runs, and the last N
of each name (all of them, unless a number is given). Artifacts that are being made are never touched.

Decision: before anything is removed, the memory of the store is deleted and all manifests are read. A dry run uses the
memory.

Decision: a run that begins while things are removed waits (see `wait_for_gc`): it is recorded first and looks into the
store afterwards, and `gc` reads the records when it holds its own lease. So one of the two always sees the other.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol, TypeVar

from rollouts_core.errors import StoreError
from rollouts_core.observe.run_list import all_runs, unreadable_runs
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.store.index import Known, open_index
from rollouts_core.store.leases import Claim, Holder, holding, is_live_lease, live_leases
from rollouts_core.store.local import ARRIVING
from rollouts_core.store.locks import is_held
from rollouts_core.store.manifest import ArtifactId, artifact_named
from rollouts_core.store.pins import pins
from rollouts_core.store.remembered import forget
from rollouts_core.store.store import Store

LEASE = "gc"
DEADLINE = 600.0
FORGOTTEN = timedelta(days=7)
"""A run of another machine that calls itself running and has not written for this long is taken for lost."""


@dataclass(frozen=True)
class Removal:
    """Something that was, or with a dry run would be, removed."""

    kind: str
    """artifact, damaged, staging, work, job, lease or copy."""
    name: str
    size: int
    """Bytes."""


def collect_garbage(store: Store, keep_last: int | None, dry_run: bool) -> list[Removal]:
    """Remove what no kept run needs.

    Raises `StoreError` when another `gc` does not end within the deadline, or a run's record can't be read.
    """
    claim = Claim(store.objects, LEASE)
    with holding(claim, DEADLINE, lambda: False, lambda reason: None, lambda reason: None) as lease:
        if not dry_run:
            forget(store.home)
        removals = _garbage(store, needed_artifacts(store, keep_last))
        for removal in [] if dry_run else removals:
            assert lease is not None, "there is no other way for this wait to end"
            lease.check()
            _remove(store, removal)
    return removals


def wait_for_gc(store: Store) -> None:
    """Wait until nothing is being removed. A run calls this once it is recorded, before it looks for artifacts."""
    if not is_live_lease(store.objects, LEASE):
        return
    with holding(Claim(store.objects, LEASE), DEADLINE, lambda: False, lambda reason: None, lambda reason: None):
        pass


def needed_artifacts(store: Store, keep_last: int | None) -> frozenset[str]:
    """The directories of all artifacts that kept runs and pins need."""
    if unreadable := unreadable_runs(store):
        raise StoreError(
            f"the records of {len(unreadable)} runs can't be read: {', '.join(unreadable[:5])}. What they need is not "
            "known, so nothing is removed. Repair or delete these records first"
        )
    with open_index(store) as index:
        known = index.all()
    pinned = {pin.name for pin in pins(store.objects)}
    roots = [*pinned, *(name for run in kept_runs(all_runs(store), keep_last, pinned) for name in artifacts_of(run))]
    return frozenset(_with_inputs(roots, known))


def kept_runs(runs: Iterable[RunRecord], keep_last: int | None, pinned: set[str]) -> list[RunRecord]:
    """`runs`, the latest first, without those that are neither live, nor pinned, nor among the last of their name."""
    return last_of_each_name(runs, keep_last, lambda run: run.run_id in pinned or is_live(run))


class Named(Protocol):
    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)


def last_of_each_name(runs: Iterable[NamedT], keep_last: int | None, anyway: Callable[[NamedT], bool]) -> list[NamedT]:
    """Of `runs`, the latest first: the last `keep_last` of each name (None: all), and those that are kept
    `anyway`."""
    kept: list[NamedT] = []
    seen: Counter[str] = Counter()
    for run in runs:
        seen[run.name] += 1
        if keep_last is None or seen[run.name] <= keep_last or anyway(run):
            kept.append(run)
    return kept


def is_live(run: RunRecord) -> bool:
    """Whether its orchestrator may be at work. One of this home that was killed is known to be `Lost`."""
    if run.state != "Running":
        return False
    return not run.updated_at or datetime.now(UTC) - datetime.fromisoformat(run.updated_at) < FORGOTTEN


def artifacts_of(run: RunRecord) -> list[str]:
    return [ArtifactId(stage.name, stage.key).directory for stage in run.stages if stage.key]


def _with_inputs(roots: Iterable[str], known: Sequence[Known]) -> set[str]:
    by_name = {entry.artifact.directory: entry for entry in known}
    by_key = {entry.artifact.key: entry.artifact.directory for entry in known}
    found: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            inputs = by_name[name].inputs.values() if name in by_name else ()
            pending += [by_key[key] for key in inputs if key in by_key]
    return found


def _garbage(store: Store, needed: frozenset[str]) -> list[Removal]:
    with open_index(store) as index:
        sizes = {entry.artifact.directory: entry.size for entry in index.all() if not entry.machine}
    leases = live_leases(store.objects)
    found = [
        Removal("artifact", name, sizes.get(name, 0))
        for name in store.directories()
        if name not in needed and name not in leases
    ]
    found += _local_garbage(store, needed, leases)
    kept = {*needed, *leases}
    names = {name.split("/")[1] for name in store.objects.names("leases")}
    return found + [Removal("lease", name, 0) for name in sorted(names - kept)]


def _local_garbage(store: Store, needed: frozenset[str], leases: Mapping[str, Holder]) -> list[Removal]:
    home = store.home
    found = [Removal("damaged", path.name, _size(path)) for path in _entries(home / "damaged")]
    for kind, keep in (("staging", set(leases)), ("work", {*needed, *leases})):
        arriving = needed if kind == "staging" else frozenset()
        left = [
            path
            for path in _entries(home / kind)
            if path.name.rpartition(".")[0] not in keep and path.name.partition(ARRIVING)[0] not in arriving
        ]
        found += [Removal(kind, path.name, _size(path)) for path in left]
    for path in _entries(home / "jobs"):
        if path.name not in needed and path.name not in leases and not is_held(path / "lock"):
            found.append(Removal("job", path.name, _size(path)))
    if store.url is not None:
        copies = [path for path in _entries(home / "artifacts") if path.name not in needed and path.name not in leases]
        found += [Removal("copy", path.name, _size(path)) for path in copies]
    return found


def _remove(store: Store, removal: Removal) -> None:
    if removal.kind == "artifact":
        store.discard(artifact_named(removal.name))
    elif removal.kind == "lease":
        for name in store.objects.names(f"leases/{removal.name}"):
            store.objects.delete(name)
    else:
        folder = {"job": "jobs", "copy": "artifacts"}.get(removal.kind, removal.kind)
        shutil.rmtree(store.home / folder / removal.name, ignore_errors=True)


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
