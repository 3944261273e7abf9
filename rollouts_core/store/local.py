"""Artifacts in a local directory.

Layout below the home:

    artifacts/<stage>-<key>/   manifest.json and files/; whole or absent
    staging/                   artifacts being made, seen by their makers only
    work/<stage>-<key>.<n>/    private partial work of a stage under its lease's n-th generation
    damaged/                   what `verify` took out of use
    leases/, pins/             who makes what; what is kept
    jobs/, runs/               what machines and orchestrators write

Decision: publishing is one rename of a directory that is complete, hashed and flushed to disk, manifest included. A
name below `artifacts/` therefore always stands for a whole artifact, whatever was killed at whatever moment. A rename
onto an artifact that is there fails, so nobody publishes over anybody.

Decision: a file that is opened is compared with the manifest through remembered digests (see `digests`): read once,
then trusted until its size or times change. `verify` reads every byte.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rollouts_core.errors import ArtifactDamaged, BadInput, StoreError
from rollouts_core.store.digests import digests, known_digests
from rollouts_core.store.flush import flush
from rollouts_core.store.leases import Lease
from rollouts_core.store.manifest import (
    FILES,
    MANIFEST,
    ArtifactId,
    Damage,
    Manifest,
    Provenance,
    Published,
    decode_manifest,
    encode_manifest,
    list_files,
)
from rollouts_core.store.objects import LocalObjects
from rollouts_core.store.remembered import stamps_in

ARRIVING = ".from-"
"""Part of a name below `staging/`: the artifact is being copied from the machine whose name follows."""
MIN_FREE_BYTES = 256 * 2**20


class LocalStore:
    """A content-addressed store below one directory. Cheap to make; keeps no state in memory."""

    url: str | None = None

    def __init__(self, home: Path) -> None:
        self.home = home
        self.objects = LocalObjects(home)

    def has(self, artifact: ArtifactId) -> bool:
        """Whether the artifact is here and whole: manifest readable, key equal, every file there in its size."""
        try:
            manifest = self.manifest(artifact)
        except StoreError:
            return False
        files = self._home(artifact) / FILES
        return manifest.artifact == artifact and all(_size(f"{files}/{e.path}") == e.size for e in manifest.files)

    def manifest(self, artifact: ArtifactId) -> Manifest:
        return self._read(self._home(artifact))

    def found(self, artifacts: Sequence[ArtifactId]) -> dict[ArtifactId, Manifest]:
        return {artifact: self.manifest(artifact) for artifact in artifacts if self.has(artifact)}

    def read_manifests(self, directories: Collection[str]) -> Iterator[tuple[str, Manifest]]:
        for name in directories:
            with suppress(StoreError):
                yield name, self._read(self.home / "artifacts" / name)

    def published(self, since: str | None) -> Published:
        return Published(stamps_in(self.home / "artifacts"))

    def open(self, artifact: ArtifactId) -> Path:
        if not self.has(artifact):
            raise StoreError(f"{artifact.directory} is not in the store {self.home}")
        entries, files = self.manifest(artifact).files, self._home(artifact) / FILES
        for entry, digest in zip(entries, known_digests([files / entry.path for entry in entries]), strict=True):
            if digest != entry.sha256:
                raise ArtifactDamaged(
                    f"{artifact.directory}: {entry.path} is damaged: its content is not what the manifest says. "
                    f"`rollouts verify {artifact.directory}` takes the artifact out of use, and the next run makes it "
                    "again"
                )
        return files

    def publish(self, artifact: ArtifactId, staged: Path, provenance: Provenance, lease: Lease) -> Manifest:
        """Hash, write the manifest, flush, rename. `staged` is `files` in a directory of its own."""
        manifest = Manifest(artifact, list_files(staged), provenance)
        settle(manifest, staged.parent)
        lease.check()
        return self.adopt(manifest, staged.parent)

    def finish_upload(self, artifact: ArtifactId, lease: Lease) -> bool:
        """Do nothing: a local store has no uploads."""
        return False

    def adopt(self, manifest: Manifest, directory: Path) -> Manifest:
        """Move a settled directory into place, unless a whole artifact is there: then that one stands."""
        artifact = manifest.artifact
        home = self._home(artifact)
        home.parent.mkdir(parents=True, exist_ok=True)
        if home.exists() and not self.has(artifact):
            self.set_aside(artifact)
        try:
            directory.rename(home)
        except OSError:
            if not self.has(artifact):
                raise
            return self.manifest(artifact)
        flush([home.parent])
        return manifest

    def new_staging(self, artifact: ArtifactId) -> Path:
        """An empty directory that nobody else has."""
        directory = self.home / "staging" / f"{artifact.directory}.{os.urandom(4).hex()}"
        (directory / FILES).mkdir(parents=True)
        return directory

    def verify(self, artifact: ArtifactId) -> list[Damage]:
        try:
            manifest = self.manifest(artifact)
        except StoreError as error:
            return [Damage(MANIFEST, str(error))]
        files = self._home(artifact) / FILES
        mine = manifest.artifact.directory == artifact.directory
        damages = [] if mine else [Damage(MANIFEST, "is another artifact's")]
        here = {path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()}
        damages += [Damage(path, "is not in the manifest") for path in sorted(here - {e.path for e in manifest.files})]
        damages += [Damage(entry.path, "is missing") for entry in manifest.files if entry.path not in here]
        entries = [entry for entry in manifest.files if entry.path in here]
        for entry, digest in zip(entries, digests([files / entry.path for entry in entries]), strict=True):
            size = _size(f"{files}/{entry.path}")
            if size != entry.size:
                damages.append(Damage(entry.path, f"has {size:,} bytes, not {entry.size:,}"))
            elif digest != entry.sha256:
                damages.append(Damage(entry.path, "has another content of the same size"))
        return damages

    def discard(self, artifact: ArtifactId) -> None:
        aside = self.home / "staging" / f"{artifact.directory}.discarded-{os.urandom(4).hex()}"
        if self._move(artifact, aside):
            shutil.rmtree(aside, ignore_errors=True)

    def set_aside(self, artifact: ArtifactId) -> None:
        self._move(artifact, self.home / "damaged" / f"{artifact.directory}.{time.strftime('%Y%m%d-%H%M%S')}")

    def directories(self) -> list[str]:
        """The names below `artifacts/`, whatever state they are in."""
        return sorted(path.name for path in (self.home / "artifacts").glob("*") if path.is_dir())

    def check_usable(self) -> None:
        """Raises `BadInput` when the store cannot be written or its disk is all but full."""
        probe = self.home / "staging" / f".probe-{os.getpid()}"
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError as error:
            raise BadInput(
                f"store {self.home} can't be written ({error.strerror}): make it writable or name another with --store"
            ) from None
        free = shutil.disk_usage(self.home).free
        if free < MIN_FREE_BYTES:
            raise BadInput(
                f"store {self.home} has {free / 2**20:.0f} MiB of free disk, less than {MIN_FREE_BYTES / 2**20:.0f}: "
                "free some or choose another with --store"
            )

    def _home(self, artifact: ArtifactId) -> Path:
        return self.home / "artifacts" / artifact.directory

    def _read(self, directory: Path) -> Manifest:
        try:
            return decode_manifest((directory / MANIFEST).read_bytes(), str(directory / MANIFEST))
        except OSError as error:
            raise StoreError(f"{directory / MANIFEST}: {error.strerror}") from None

    def _move(self, artifact: ArtifactId, target: Path) -> bool:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._home(artifact).rename(target)
        except FileNotFoundError:
            return False
        return True


def settle(manifest: Manifest, directory: Path) -> None:
    """Write the manifest beside `files`; make all of it read-only and flush it to the disk."""
    (directory / MANIFEST).write_bytes(encode_manifest(manifest))
    paths = [directory / MANIFEST, *(directory / FILES / entry.path for entry in manifest.files)]
    for path in paths:
        path.chmod(0o444)
    flush([*paths, *{directory, *(path.parent for path in paths)}])


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return -1
