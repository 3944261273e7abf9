"""The store of artifacts, in a local directory or at a URL.

    Store         has, manifest, open, publish, discard, ...: the protocol
    open_store    a local directory, or an fsspec URL with a local directory beside it

Decision: every store has a home, a local directory. Runs, jobs and partial work are there; with a remote store, also
copies of the artifacts that were used here. Only the store itself says what is in it, never these copies.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from rollouts_core.store.leases import Lease
from rollouts_core.store.local import LocalStore
from rollouts_core.store.manifest import ArtifactId, Damage, Manifest, Provenance, Published
from rollouts_core.store.objects import Objects
from rollouts_core.store.remote import RemoteStore


class Store(Protocol):
    """Artifacts under their keys, each whole or absent. Keeps no state in memory."""

    @property
    def home(self) -> Path: ...

    @property
    def objects(self) -> Objects:
        """The place of leases, pins and run references of everybody who uses this store."""

    @property
    def url(self) -> str | None:
        """The store's URL; None for a local directory."""

    def has(self, artifact: ArtifactId) -> bool: ...

    def manifest(self, artifact: ArtifactId) -> Manifest:
        """Raises `StoreError` when the artifact is not here."""

    def found(self, artifacts: Sequence[ArtifactId]) -> dict[ArtifactId, Manifest]:
        """The artifacts that are there, as `has` says; of a remote store all are asked for at once."""

    def read_manifests(self, directories: Collection[str]) -> Iterable[tuple[str, Manifest]]:
        """Directory and manifest of each that can be read."""

    def published(self, since: str | None) -> Published:
        """The published artifacts; with the `mark` of an earlier answer, those that may have changed since."""

    def directories(self) -> Sequence[str]:
        """The directory names of all artifacts, unreadable and unfinished ones included."""

    def open(self, artifact: ArtifactId) -> Path:
        """A local directory with the artifact's files, to be read only.

        Raises `StoreError` when it is not here, `ArtifactDamaged` when a file is not what the manifest says.
        """

    def publish(self, artifact: ArtifactId, staged: Path, provenance: Provenance, lease: Lease) -> Manifest:
        """Commit a directory of files, all or nothing. Raises `LeaseLost` when somebody else may have done so."""

    def finish_upload(self, artifact: ArtifactId, lease: Lease) -> bool:
        """Publish what was made here before, and only not uploaded to its end; False when there is no such thing."""

    def verify(self, artifact: ArtifactId) -> Sequence[Damage]:
        """Read every byte of an artifact and say what is not as it was published."""

    def discard(self, artifact: ArtifactId) -> None:
        """Remove an artifact; nothing happens when there is none."""

    def set_aside(self, artifact: ArtifactId) -> None:
        """Take a damaged artifact out of use."""

    def check_usable(self) -> None:
        """Raises `BadInput` when nothing can be written here."""


def open_store(home: Path, url: str | None = None) -> Store:
    """Raises `BadInput` when there is no file system for the URL."""
    return LocalStore(home) if url is None else RemoteStore(url, home)
