"""An artifact by what a person has at hand: its directory's name, the beginning of that, a key, or a path."""

from pathlib import Path

from rollouts_core.errors import BadInput
from rollouts_core.store.index import open_index
from rollouts_core.store.manifest import Manifest
from rollouts_core.store.store import Store


def find_manifest(store: Store, name: str) -> Manifest:
    """Raises `BadInput` when no artifact, or several, are meant."""
    if manifest := manifest_if_any(store, name):
        return manifest
    where = f"the store {store.url or store.home}"
    raise BadInput(f"no artifact {name} in {where}; `rollouts show RUN` names those of a run")


def manifest_if_any(store: Store, name: str) -> Manifest | None:
    """Raises `BadInput` when several artifacts are meant."""
    parts = Path(name).parts
    wanted = parts[parts.index("artifacts") + 1] if "artifacts" in parts[:-1] else name
    with open_index(store) as index:
        found = index.beginning(wanted)
    exact = [artifact for artifact in found if artifact.directory == wanted]
    if exact or len(found) == 1:
        return store.manifest((exact or found)[0])
    if not found:
        return None
    names = ", ".join(artifact.directory for artifact in found[:5])
    raise BadInput(f"{name} may be {len(found)} artifacts in the store {store.url or store.home}: {names}")
