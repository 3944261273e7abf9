"""Artifacts in a local directory.

Layout below the root:

    artifacts/<stage>-<key>/   manifest.json and files/; whole or absent
    staging/<stage>-<key>/     an artifact being made, seen by its maker only
    work/<stage>-<key>/        private partial work of a stage, kept until its artifact is published
    locks/<stage>-<key>        held by the maker while it lives
    jobs/, runs/               what machines and orchestrators write

Decision: publishing is one rename of a directory that is complete, hashed and flushed to disk, manifest included. A
name below `artifacts/` therefore always stands for a whole artifact, whatever was killed at whatever moment. The lock
is the kernel's (`flock`), so it ends with its holder, `kill -9` included.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollouts_core.errors import BadInput, StoreError
from rollouts_core.store.locks import try_lock
from rollouts_core.store.manifest import (
    FILES,
    MANIFEST,
    ArtifactId,
    Manifest,
    Provenance,
    list_files,
    read_manifest,
    write_manifest,
)

MIN_FREE_BYTES = 256 * 2**20


class LocalStore:
    """A content-addressed store below one directory. Cheap to make; keeps no state in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def has(self, artifact: ArtifactId) -> bool:
        """Whether the artifact is here and whole: manifest readable, key equal, every file there in its size."""
        home = self._home(artifact)
        try:
            manifest = read_manifest(home / MANIFEST)
        except StoreError:
            return False
        return manifest.artifact == artifact and all(
            (home / FILES / entry.path).is_file() and (home / FILES / entry.path).stat().st_size == entry.size
            for entry in manifest.files
        )

    def manifest(self, artifact: ArtifactId) -> Manifest:
        return read_manifest(self._home(artifact) / MANIFEST)

    def open(self, artifact: ArtifactId) -> Path:
        """The directory with the artifact's files, to be read only. Raises `StoreError` when it is not here."""
        if not self.has(artifact):
            raise StoreError(f"{artifact.directory} is not in the store {self.root}")
        return self._home(artifact) / FILES

    def work(self, artifact: ArtifactId) -> Path:
        """The stage's directory for partial work, made if absent."""
        directory = self.root / "work" / artifact.directory
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    @contextmanager
    def making(self, artifact: ArtifactId, deadline: float) -> Iterator[Path | None]:
        """Hold the right to make an artifact, and yield an empty directory to fill.

        Waits up to `deadline` seconds for another maker; yields None when that one has published it. What is left in
        the directory at the end is deleted. Raises `StoreError` when the deadline passes.
        """
        (self.root / "locks").mkdir(parents=True, exist_ok=True)
        with (self.root / "locks" / artifact.directory).open("w") as lock:
            _wait_for(lambda: try_lock(lock.fileno()), deadline, f"another process is making {artifact.directory}")
            if self.has(artifact):
                yield None
                return
            staging = self._staging(artifact)
            shutil.rmtree(staging, ignore_errors=True)
            (staging / FILES).mkdir(parents=True)
            try:
                yield staging / FILES
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def publish(self, artifact: ArtifactId, provenance: Provenance) -> Manifest:
        """Commit what was filled in under `making`: hash, write the manifest, flush, rename. Then drop partial work."""
        staging = self._staging(artifact)
        manifest = Manifest(artifact, list_files(staging / FILES), provenance)
        write_manifest(manifest, staging / MANIFEST)
        for path in sorted(staging.rglob("*")):
            if path.is_file():
                path.chmod(0o444)
            _flush(path)
        home = self._home(artifact)
        home.parent.mkdir(parents=True, exist_ok=True)
        self._move_aside(home, artifact)
        staging.rename(home)
        _flush(home.parent)
        shutil.rmtree(self.root / "work" / artifact.directory, ignore_errors=True)
        return manifest

    def check_usable(self) -> None:
        """Raises `BadInput` when the store cannot be written or its disk is all but full."""
        probe = self.root / "staging" / f".probe-{os.getpid()}"
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError as error:
            raise BadInput(
                f"store {self.root} can't be written ({error.strerror}): make it writable or name another with --store"
            ) from None
        free = shutil.disk_usage(self.root).free
        if free < MIN_FREE_BYTES:
            raise BadInput(
                f"store {self.root} has {free / 2**20:.0f} MiB of free disk, less than {MIN_FREE_BYTES / 2**20:.0f}: "
                "free some or choose another with --store"
            )

    def _home(self, artifact: ArtifactId) -> Path:
        return self.root / "artifacts" / artifact.directory

    def _staging(self, artifact: ArtifactId) -> Path:
        return self.root / "staging" / artifact.directory

    def _move_aside(self, home: Path, artifact: ArtifactId) -> None:
        """Only a damaged artifact can stand here, since a whole one is never made again."""
        if home.exists():
            aside = self.root / "staging" / f"{artifact.directory}.damaged-{os.getpid()}"
            home.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def _wait_for(condition: Callable[[], bool], deadline: float, reason: str) -> None:
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise StoreError(f"waited {deadline:.0f} s: {reason}")
        time.sleep(0.1)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
