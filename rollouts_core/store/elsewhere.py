"""What lies on other machines: the manifests of artifacts that were seen there, kept here.

Decision: it is a memory, not a truth. A plan and a comparison may use it; whether an artifact is there, its machine
says when it is asked.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from rollouts_core.errors import StoreError
from rollouts_core.store.manifest import Manifest, decode_manifest, encode_manifest
from rollouts_core.store.store import Store

FOLDER = "elsewhere"


def note_elsewhere(home: Path, machine: str, manifest: Manifest) -> None:
    path = home / FOLDER / machine / f"{manifest.artifact.directory}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(encode_manifest(manifest))
    unfinished.replace(path)


def forget_elsewhere(home: Path, machine: str, directory: str) -> None:
    (home / FOLDER / machine / f"{directory}.json").unlink(missing_ok=True)


def seen_elsewhere(home: Path) -> Mapping[str, list[Manifest]]:
    """Machine to the artifacts that were seen there."""
    found: dict[str, list[Manifest]] = {}
    for path in sorted((home / FOLDER).glob("*/*.json")):
        try:
            found.setdefault(path.parent.name, []).append(decode_manifest(path.read_bytes(), str(path)))
        except (OSError, StoreError):
            continue
    return found


def all_manifests(store: Store) -> list[Manifest]:
    """Of the artifacts in the store, and of those that were seen on other machines."""
    seen = [manifest for manifests in seen_elsewhere(store.home).values() for manifest in manifests]
    return [*store.manifests(), *seen]
