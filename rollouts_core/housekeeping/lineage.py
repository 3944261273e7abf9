"""The lineage of an artifact: everything it was made from (artifacts, data files, revisions, configs, commits)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollouts_core.housekeeping.find import find_manifest
from rollouts_core.observe.run_list import runs_with
from rollouts_core.store.index import ArtifactIndex, manifest_of, open_index
from rollouts_core.store.manifest import Manifest
from rollouts_core.store.store import Store


@dataclass(frozen=True)
class Ancestor:
    """An artifact, with what it was made from."""

    role: str
    """Its role for the artifact that was made from it; empty for the artifact that was asked about."""
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
    keys: dict[str, str] = {}
    with open_index(store) as index:
        tree = _ancestor("", find_manifest(store, name), store, index, keys)
    return _with_runs(tree, keys, runs_with(store, keys.values()))


def tree_lines(ancestor: Ancestor, depth: int = 0) -> Iterator[str]:
    """The lineage as lines for a terminal: an artifact each, indented, its outside inputs below it."""
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


def _ancestor(role: str, manifest: Manifest, store: Store, index: ArtifactIndex, keys: dict[str, str]) -> Ancestor:
    """The ancestor of a manifest, without its runs. `keys` gets the key of each artifact by its directory."""
    made, name = manifest.provenance, manifest.artifact.directory
    keys[name] = manifest.artifact.key
    outside = {role: {**made.external[role], "place": made.places.get(role, "")} for role in made.external}
    known, inputs = index.of_keys(made.inputs.values()), []
    for of, key in made.inputs.items():
        parent = manifest_of(known[key], store) if key in known else None
        gone = Ancestor(of, key[:16], "", None, 0, {}, (), ())
        inputs.append(_ancestor(of, parent, store, index, keys) if parent else gone)
    return Ancestor(role, name, made.started_at, made.git_commit, made.version, outside, (), inputs)


def _with_runs(ancestor: Ancestor, keys: Mapping[str, str], runs: Mapping[str, Sequence[str]]) -> Ancestor:
    inputs = [_with_runs(parent, keys, runs) for parent in ancestor.inputs]
    used_by = runs[keys[ancestor.artifact]] if ancestor.artifact in keys else ()
    return replace(ancestor, runs=used_by, inputs=inputs)
