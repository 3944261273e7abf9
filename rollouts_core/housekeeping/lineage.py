"""From an artifact back to everything it was made from: artifacts, data files, revisions, configs, commits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollouts_core.housekeeping.find import find_manifest
from rollouts_core.housekeeping.gc import artifacts_of
from rollouts_core.observe.runs import RunRecord, all_runs
from rollouts_core.store.elsewhere import all_manifests
from rollouts_core.store.manifest import Manifest
from rollouts_core.store.store import Store


@dataclass(frozen=True)
class Ancestor:
    """An artifact, with what it was made from."""

    role: str
    """What it was to the artifact made from it; empty for the one that was asked for."""
    artifact: str
    made: str
    """When, in ISO 8601; empty when the artifact is no longer in the store."""
    git_commit: str | None
    version: int
    external: Mapping[str, Mapping[str, str]]
    """Role to identity and `place`."""
    runs: Sequence[str]
    """The runs, with their configs, that this artifact belongs to."""
    inputs: Sequence["Ancestor"]


def lineage(store: Store, name: str) -> Ancestor:
    """Raises `BadInput` when there is no such artifact."""
    manifests = {manifest.artifact.key: manifest for manifest in all_manifests(store)}
    return _ancestor("", find_manifest(store, name).artifact.key, manifests, all_runs(store))


def tree_lines(ancestor: Ancestor, depth: int = 0) -> Iterator[str]:
    """For a terminal: an artifact a line, indented, what came from outside below it."""
    role = f"{ancestor.role}: " if ancestor.role else ""
    commit = f"  commit {ancestor.git_commit[:12]}" if ancestor.git_commit else ""
    yield f"{'  ' * depth}{role}{ancestor.artifact}  {ancestor.made or 'no longer in the store'}{commit}"
    indent = "  " * (depth + 1)
    if depth == 0:
        yield from (f"{indent}run {run}" for run in ancestor.runs)
    for role, identity in ancestor.external.items():
        told = "  ".join(f"{name} {value}" for name, value in identity.items() if name != "place")
        yield f"{indent}{role}: {identity.get('place', '')}  {told}"
    for parent in ancestor.inputs:
        yield from tree_lines(parent, depth + 1)


def _ancestor(role: str, key: str, manifests: Mapping[str, Manifest], runs: Sequence[RunRecord]) -> Ancestor:
    manifest = manifests.get(key)
    if manifest is None:
        return Ancestor(role, key[:16], "", None, 0, {}, (), ())
    made = manifest.provenance
    name = manifest.artifact.directory
    outside = {role: {**made.external[role], "place": made.places.get(role, "")} for role in made.external}
    used_by = [run.run_id for run in runs if name in artifacts_of(run)]
    inputs = [_ancestor(role, parent, manifests, runs) for role, parent in made.inputs.items()]
    return Ancestor(role, name, made.started_at, made.git_commit, made.version, outside, used_by, inputs)
