"""The manifest that commits an artifact: what it holds, and how it came about."""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollouts_core.errors import StoreError
from rollouts_core.store.digests import digests

MANIFEST = "manifest.json"
FILES = "files"
PART_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ArtifactId:
    """A stage's name and key. The directory shows both, so that a person finds it."""

    stage: str
    key: str

    @property
    def directory(self) -> str:
        return f"{self.stage}-{self.key[:16]}"


def artifact_named(directory: str) -> ArtifactId:
    """The artifact of a directory name, which holds the beginning of the key only: enough to find it."""
    stage, _, key = directory.rpartition("-")
    return ArtifactId(stage, key)


@dataclass(frozen=True)
class FileEntry:
    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Damage:
    """A file of an artifact that is not what the manifest says."""

    path: str
    problem: str


@dataclass(frozen=True)
class Provenance:
    """How an artifact came about: everything a person may ask for later, nothing secret."""

    version: int
    spec: dict[str, Any]
    inputs: dict[str, str]
    """Role to input artifact directory name and key."""
    external: dict[str, dict[str, str]]
    """Role to identity of what came from outside the store."""
    code: dict[str, str]
    """Source file to fingerprint, comments and formatting ignored."""
    git_commit: str | None
    libraries: dict[str, str]
    host: dict[str, str]
    started_at: str
    seconds: float
    summary: dict[str, float]
    places: dict[str, str] = field(default_factory=dict)
    """Role to where an input from outside lay. Not part of any identity."""
    used: dict[str, float] = field(default_factory=dict)
    """The resources that were used: `peak_memory` of the process in bytes, and `work`, for estimates of later stages.
    """


@dataclass(frozen=True)
class Manifest:
    artifact: ArtifactId
    files: tuple[FileEntry, ...]
    provenance: Provenance
    part_bytes: int = field(default_factory=lambda: PART_BYTES)
    """In a remote store, files larger than this lie in parts of this size."""


@dataclass(frozen=True)
class Published:
    """The directories of artifacts, each with a stamp that changes when it is published anew."""

    stamps: Mapping[str, str]
    whole: bool = True
    """Whether these are all there are; else those that were published or discarded since they were last asked for."""
    mark: str | None = None
    """How far this is, for the next question."""


_adapter = TypeAdapter(Manifest)


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """Size and sha256 of every file below a directory, sorted by path. Raises `StoreError` on a link that leaves it."""
    paths = sorted(Path(parent, name) for parent, _, names in os.walk(directory) for name in names)
    sizes = []
    for path in paths:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise StoreError(f"{path} is a link; artifacts hold files only")
        sizes.append(status.st_size)
    root = f"{directory}/"
    return tuple(
        FileEntry(str(path).removeprefix(root), size, sha256)
        for path, size, sha256 in zip(paths, sizes, digests(paths), strict=True)
    )


def encode_manifest(manifest: Manifest) -> bytes:
    return json.dumps(_adapter.dump_python(manifest, mode="json"), indent=1).encode() + b"\n"


def decode_manifest(content: bytes, where: str) -> Manifest:
    """Raises `StoreError` when the content is not a manifest, or names files outside its artifact."""
    try:
        manifest = _adapter.validate_json(content)
    except ValidationError as error:
        raise StoreError(f"{where}: not a readable manifest: {error}") from None
    for entry in manifest.files:
        path = PurePosixPath(entry.path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise StoreError(f"{where}: names a file outside the artifact: {entry.path!r}")
    return manifest
