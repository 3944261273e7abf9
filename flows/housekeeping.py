"""The commands that look after the store: verify, gc, pin, lineage, diff."""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from flows.preflight import store_named
from rollouts_core.errors import BadInput
from rollouts_core.housekeeping.compare import compare_runs
from rollouts_core.housekeeping.find import find_manifest
from rollouts_core.housekeeping.gc import Removal, collect_garbage
from rollouts_core.housekeeping.lineage import lineage, tree_lines
from rollouts_core.observe.run_list import runs_beginning
from rollouts_core.store.index import open_index
from rollouts_core.store.manifest import MANIFEST, ArtifactId, artifact_named
from rollouts_core.store.pins import pin, pins, unpin
from rollouts_core.store.store import Store


def verify_command(options: argparse.Namespace) -> int:
    """Exit status 1 when something was damaged; it is then out of use, and the next run makes it again."""
    store = store_named(options.store)
    artifacts = [_artifact(store, name) for name in options.artifact]
    artifacts = artifacts or _published(store)
    damaged = {}
    for artifact in artifacts:
        damages = store.verify(artifact)
        if damages:
            damaged[artifact.directory] = [asdict(damage) for damage in damages]
            store.set_aside(artifact)
        if not options.json:
            print(f"{artifact.directory:<34} {'DAMAGED, taken out of use' if damages else 'whole'}")
            for damage in damages:
                print(f"    {damage.path}: {damage.problem}")
    if options.json:
        print(json.dumps({"checked": [artifact.directory for artifact in artifacts], "damaged": damaged}))
    return 1 if damaged else 0


def gc_command(options: argparse.Namespace) -> int:
    keep_last = checked_keep_last(options)
    print_removals(collect_garbage(store_named(options.store), keep_last, options.dry_run), options)
    return 0


def checked_keep_last(options: argparse.Namespace) -> int | None:
    """Raises `BadInput` when it is negative."""
    keep_last: int | None = options.keep_last
    if keep_last is not None and keep_last < 0:
        raise BadInput(f"--keep-last {keep_last}: write a number of runs, 0 or more")
    return keep_last


def print_removals(removals: Sequence[Removal], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"dry_run": options.dry_run, "removed": [asdict(removal) for removal in removals]}))
        return
    for removal in removals:
        print(f"{removal.kind:<9} {removal.name:<44} {_megabytes(removal.size)}")
    print(f"{'would remove' if options.dry_run else 'removed'} {_summary(removals)}")


def pin_command(options: argparse.Namespace) -> int:
    """Pin or unpin an artifact or a run. Without a name, list the pins."""
    store = store_named(options.store)
    if options.name is not None:
        name = _pinnable(store, options.name)
        if options.remove and not unpin(store.objects, name):
            raise BadInput(f"{name} is not pinned")
        if not options.remove:
            pin(store.objects, name, options.reason)
    found = pins(store.objects)
    if options.json:
        print(json.dumps([asdict(entry) for entry in found]))
        return 0
    for entry in found:
        print(f"{entry.name:<44} {entry.at}  {entry.reason}")
    return 0


def lineage_command(options: argparse.Namespace) -> int:
    found = lineage(store_named(options.store), options.artifact)
    print(json.dumps(asdict(found)) if options.json else "\n".join(tree_lines(found)))
    return 0


def diff_command(options: argparse.Namespace) -> int:
    changes = compare_runs(store_named(options.store), options.one, options.other)
    if options.json:
        print(json.dumps([asdict(change) for change in changes]))
        return 0
    for change in changes:
        print(f"{change.part:<7} {change.name:<36} {_shown(change.one)} -> {_shown(change.other)}")
    if not changes:
        print("no difference")
    return 0


def _published(store: Store) -> list[ArtifactId]:
    """The published artifacts, without unfinished uploads."""
    with open_index(store) as index:
        known = {entry.artifact.directory for entry in index.all()}
    return [
        artifact_named(name)
        for name in store.directories()
        if name in known or store.objects.read(f"artifacts/{name}/{MANIFEST}") is not None
    ]


def _artifact(store: Store, name: str) -> ArtifactId:
    """The artifact of a name. An unreadable artifact can only be named by its directory."""
    return artifact_named(name) if name in store.directories() else find_manifest(store, name).artifact


def _pinnable(store: Store, name: str) -> str:
    """A run's id, or an artifact's directory."""
    runs = runs_beginning(store, name)
    if len(runs) == 1:
        return runs[0]
    if any(entry.name == name for entry in pins(store.objects)):
        return name
    return find_manifest(store, name).artifact.directory


def _summary(removals: Iterable[Removal]) -> str:
    listed = list(removals)
    return f"{len(listed)} things, {_megabytes(sum(removal.size for removal in listed)).strip()}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:10,.1f} MB"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
