"""Copies of an artifact's files, for whoever wants them outside the store."""

from pathlib import Path

from rollouts_core.store.manifest import ArtifactId
from rollouts_core.store.store import Store
from rollouts_core.store.transfer import copy_verified, in_parallel


def fetch(store: Store, artifact: ArtifactId, target: Path, below: str = "") -> None:
    """Copy an artifact's files, or those `below` a folder of it, verified while they are copied.

    Raises `ArtifactDamaged` naming a file that is not what the manifest says.
    """
    entries = [entry for entry in store.manifest(artifact).files if entry.path.startswith(below)]
    source = store.open(artifact)
    for folder in {(target / entry.path).parent for entry in entries}:
        folder.mkdir(parents=True, exist_ok=True)
    in_parallel(
        lambda entry: copy_verified(source / entry.path, target / entry.path, entry.sha256),
        entries,
        [entry.size for entry in entries],
    )
