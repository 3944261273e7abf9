"""Artifacts on other machines: the manifests of those that were seen there, kept here.

Decision: this is a memory and may be out of date. A plan and a comparison may use it. Whether an artifact is there is
asked of the machine.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rollouts_core.errors import StoreError
from rollouts_core.store.manifest import ArtifactId, Manifest, decode_manifest, encode_manifest
from rollouts_core.store.remembered import stamps_in

FOLDER = "elsewhere"


def note_elsewhere(home: Path, machine: str, manifest: Manifest) -> None:
    path = home / FOLDER / machine / f"{manifest.artifact.directory}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(encode_manifest(manifest))
    unfinished.replace(path)


def forget_elsewhere(home: Path, machine: str, directory: str) -> None:
    (home / FOLDER / machine / f"{directory}.json").unlink(missing_ok=True)


def machines_seen(home: Path) -> list[str]:
    """Machines on which artifacts were seen."""
    return sorted(path.name for path in (home / FOLDER).glob("*") if path.is_dir())


def seen_on(home: Path, machine: str, artifact: ArtifactId) -> Manifest | None:
    """The manifest of an artifact that was seen on the machine; None if it was not."""
    found = dict(manifests_elsewhere(home, machine, [artifact.directory]))
    return found.get(artifact.directory)


def stamps_elsewhere(home: Path, machine: str) -> dict[str, str]:
    """Directory of each artifact that was seen there, with what changes when its file does."""
    there = stamps_in(home / FOLDER / machine)
    return {name.removesuffix(".json"): stamp for name, stamp in there.items() if name.endswith(".json")}


def manifests_elsewhere(home: Path, machine: str, directories: Iterable[str]) -> Iterator[tuple[str, Manifest]]:
    """The manifests of these directories that can be read."""
    for directory in directories:
        path = home / FOLDER / machine / f"{directory}.json"
        try:
            yield directory, decode_manifest(path.read_bytes(), str(path))
        except (OSError, StoreError):
            continue
