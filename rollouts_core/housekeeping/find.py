"""An artifact by what a person has at hand: its directory's name, the beginning of that, a key, or a path."""

from pathlib import Path

from rollouts_core.errors import BadInput
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
    found = [
        manifest
        for manifest in store.manifests()
        if manifest.artifact.directory.startswith(wanted) or manifest.artifact.key.startswith(wanted)
    ]
    exact = [manifest for manifest in found if manifest.artifact.directory == wanted]
    if exact or len(found) == 1:
        return (exact or found)[0]
    if not found:
        return None
    names = ", ".join(manifest.artifact.directory for manifest in found[:5])
    raise BadInput(f"{name} may be {len(found)} artifacts in the store {store.url or store.home}: {names}")
