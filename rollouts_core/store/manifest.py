"""The manifest that commits an artifact, and the hashing of its files."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollouts_core.errors import StoreError

MANIFEST = "manifest.json"
FILES = "files"


@dataclass(frozen=True)
class ArtifactId:
    """A stage's name and key. The directory shows both, so that a person finds it."""

    stage: str
    key: str

    @property
    def directory(self) -> str:
        return f"{self.stage}-{self.key[:16]}"


@dataclass(frozen=True)
class FileEntry:
    path: str
    size: int
    sha256: str


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


@dataclass(frozen=True)
class Manifest:
    artifact: ArtifactId
    files: tuple[FileEntry, ...]
    provenance: Provenance


_adapter = TypeAdapter(Manifest)


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """Size and sha256 of every file below a directory, hashed in parallel, sorted by path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(file_digest, paths))
    return tuple(
        FileEntry(path.relative_to(directory).as_posix(), path.stat().st_size, digest)
        for path, digest in zip(paths, digests, strict=True)
    )


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(manifest: Manifest, path: Path) -> None:
    data = _adapter.dump_python(manifest, mode="json")
    path.write_text(json.dumps(data, indent=1) + "\n")


def read_manifest(path: Path) -> Manifest:
    """Raises `StoreError` when the file is not a manifest."""
    try:
        return _adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StoreError(f"{path}: not a readable manifest: {error}") from None
