"""Artifacts at any fsspec URL, with copies of those used here in a local directory.

Layout below the URL:

    artifacts/<stage>-<key>/manifest.json                   written last, exclusively: with it, the artifact is there
    artifacts/<stage>-<key>/files/<path>.<sha256>[.<part>]  the files, large ones in parts
    journal/<day>/<stage>-<key>~<random>                    empty: of whom there is news, by the day in UTC
    leases/, pins/, runs/                                   of everybody who uses the store

Decision: an object store has no rename, so the manifest is the commit: one exclusive write. Objects are named by their
content, so two makers can't mix their files, an interrupted upload goes on with the parts that are missing, and a part
that is there is whole (an object appears when its upload is complete; its size is compared all the same).

Decision: new artifacts are found in the journal, which has a folder for each day, since listing all artifacts takes a
request for each thousand. A process may be killed before it writes to the journal, so everything is listed again now
and then. Only explanations depend on it.

Decision: an artifact is published in the local directory first. Killed during the upload, the next attempt finds it
there and goes on uploading; nothing is computed again.
"""

import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from rollouts_core.errors import ArtifactDamaged, BadInput, StoreError, StoreUnavailable
from rollouts_core.store.leases import Lease
from rollouts_core.store.local import LocalStore, settle
from rollouts_core.store.manifest import (
    FILES,
    MANIFEST,
    ArtifactId,
    Damage,
    FileEntry,
    Manifest,
    Provenance,
    Published,
    decode_manifest,
    encode_manifest,
)
from rollouts_core.store.objects import RemoteObjects
from rollouts_core.store.transfer import concurrently, download, remote_digest, upload

JOURNAL = "journal"
LISTED = "listed"
LISTED_DAYS = 30
READ_AT_ONCE = 1000
TRANSFERS = 8
"""Objects under way at once; each is in memory for as long."""


@dataclass(frozen=True)
class Part:
    """A stretch of a file, and the object that holds it."""

    name: str
    path: str
    offset: int
    size: int


class RemoteStore:
    """A content-addressed store below one URL. Keeps no state in memory."""

    def __init__(self, url: str, home: Path) -> None:
        self.home = home
        self.url: str | None = url
        self.objects = RemoteObjects(url)
        self._copies = LocalStore(home)

    def has(self, artifact: ArtifactId) -> bool:
        try:
            return self.manifest(artifact).artifact == artifact
        except StoreUnavailable:
            raise
        except StoreError:
            return False

    def manifest(self, artifact: ArtifactId) -> Manifest:
        name = _manifest(artifact)
        content = self.objects.read(name)
        if content is None:
            raise StoreError(f"{artifact.directory} is not in the store {self.url}")
        return decode_manifest(content, f"{self.url}/{name}")

    def found(self, artifacts: Sequence[ArtifactId]) -> dict[ArtifactId, Manifest]:
        read = dict(self.read_manifests([artifact.directory for artifact in artifacts]))
        return {a: read[a.directory] for a in artifacts if a.directory in read and read[a.directory].artifact == a}

    def read_manifests(self, directories: Collection[str]) -> Iterator[tuple[str, Manifest]]:
        names = [f"artifacts/{directory}/{MANIFEST}" for directory in directories]
        for begin in range(0, len(names), READ_AT_ONCE):
            for name, content in self.objects.read_many(names[begin : begin + READ_AT_ONCE]).items():
                with suppress(StoreError):
                    yield name.split("/")[1], decode_manifest(content, name)

    def published(self, since: str | None) -> Published:
        """The published artifacts, by the journal, which has a folder for each day. All are listed at first, and
        after again after `LISTED_DAYS`."""
        today = datetime.now(UTC).date()
        listed, last = map(date.fromisoformat, since.split()) if since else (None, None)
        if listed is None or last is None or (today - listed).days >= LISTED_DAYS:
            return Published(dict.fromkeys(self.directories(), LISTED), mark=f"{today} {today}")
        days = [last + timedelta(days=number) for number in range(-1, (today - last).days + 2)]
        markers = [name for day in days for name in self.objects.folders(f"{JOURNAL}/{day}")]
        return Published({name.rpartition("~")[0]: name for name in markers}, False, f"{listed} {today}")

    def open(self, artifact: ArtifactId) -> Path:
        """Fetches what is not here yet."""
        manifest = self.manifest(artifact)
        if not self._has_copy(manifest):
            self._copies.discard(artifact)
            self._fetch_copy(manifest)
        return self._copies.open(artifact)

    def publish(self, artifact: ArtifactId, staged: Path, provenance: Provenance, lease: Lease) -> Manifest:
        self._copies.publish(artifact, staged, provenance, lease)
        return self._upload_copy(artifact, lease)

    def finish_upload(self, artifact: ArtifactId, lease: Lease) -> bool:
        if not self._copies.has(artifact):
            return False
        self._upload_copy(artifact, lease)
        return True

    def _upload_copy(self, artifact: ArtifactId, lease: Lease) -> Manifest:
        """Upload what is missing, then commit. Where somebody else has committed, theirs stands."""
        manifest, files = self._copies.manifest(artifact), self._copies.open(artifact)
        there = self.objects.sizes(f"artifacts/{artifact.directory}/files")
        missing = [part for part in _parts(manifest) if there.get(part.name) != part.size]
        concurrently(
            lambda part: upload(self.objects, part.name, files / part.path, part.offset, part.size), missing, TRANSFERS
        )
        lease.check()
        if not self.objects.create(_manifest(artifact), encode_manifest(manifest)):
            return self.manifest(artifact)
        self._note(artifact)
        return manifest

    def verify(self, artifact: ArtifactId) -> list[Damage]:
        try:
            manifest = self.manifest(artifact)
        except StoreUnavailable:
            raise
        except StoreError as error:
            return [Damage(MANIFEST, str(error))]
        there = self.objects.sizes(f"artifacts/{artifact.directory}/files")
        mine = manifest.artifact.directory == artifact.directory
        damages = [] if mine else [Damage(MANIFEST, "is another artifact's")]
        for entry in manifest.files:
            parts = _parts_of(manifest, entry)
            if any(part.name not in there for part in parts):
                damages.append(Damage(entry.path, "is missing"))
            elif any(there[part.name] != part.size for part in parts):
                damages.append(Damage(entry.path, f"has not {entry.size:,} bytes"))
            elif remote_digest(self.objects, [part.name for part in parts]) != entry.sha256:
                damages.append(Damage(entry.path, "has another content of the same size"))
        return damages

    def discard(self, artifact: ArtifactId) -> None:
        self.objects.delete(_manifest(artifact))
        for name in self.objects.names(f"artifacts/{artifact.directory}"):
            self.objects.delete(name)
        self._copies.discard(artifact)
        self._note(artifact)

    def set_aside(self, artifact: ArtifactId) -> None:
        """The damaged objects go, since an upload would take them for its own; the manifest is kept as a record."""
        if content := self.objects.read(_manifest(artifact)):
            self.objects.write(f"damaged/{artifact.directory}.json", content)
        self.discard(artifact)

    def directories(self) -> list[str]:
        return self.objects.folders("artifacts")

    def check_usable(self) -> None:
        self._copies.check_usable()
        try:
            self.objects.write("probe", b"probe")
            self.objects.delete("probe")
        except StoreUnavailable as error:
            raise BadInput(f"{error}: check the URL, the network, and the credentials in the environment") from None

    def _note(self, artifact: ArtifactId) -> None:
        """Note in the journal that an artifact has changed. Who reads the journal looks what has changed."""
        with suppress(StoreUnavailable):
            self.objects.write(f"{JOURNAL}/{datetime.now(UTC).date()}/{artifact.directory}~{secrets.token_hex(4)}", b"")

    def _has_copy(self, manifest: Manifest) -> bool:
        if not self._copies.has(manifest.artifact) or self._copies.manifest(manifest.artifact).files != manifest.files:
            return False
        try:
            self._copies.open(manifest.artifact)
        except ArtifactDamaged:
            return False
        return True

    def _fetch_copy(self, manifest: Manifest) -> None:
        """Into a directory of its own, verified, then renamed; two that fetch at once don't meet."""
        staging = self._copies.new_staging(manifest.artifact)
        target = staging / FILES
        try:
            for folder in {(target / entry.path).parent for entry in manifest.files}:
                folder.mkdir(parents=True, exist_ok=True)
            concurrently(lambda entry: self._download(manifest, entry, target), manifest.files, TRANSFERS)
            settle(manifest, staging)
            self._copies.adopt(manifest, staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _download(self, manifest: Manifest, entry: FileEntry, target: Path) -> None:
        names = [part.name for part in _parts_of(manifest, entry)]
        if download(self.objects, names, target / entry.path) != entry.sha256:
            artifact = manifest.artifact
            raise ArtifactDamaged(
                f"{artifact.directory}: {entry.path} is damaged in {self.url}. `rollouts verify {artifact.directory}` "
                "takes the artifact out of use, and the next run makes it again"
            )


def _manifest(artifact: ArtifactId) -> str:
    return f"artifacts/{artifact.directory}/{MANIFEST}"


def _parts(manifest: Manifest) -> list[Part]:
    return [part for entry in manifest.files for part in _parts_of(manifest, entry)]


def _parts_of(manifest: Manifest, entry: FileEntry) -> list[Part]:
    name = f"artifacts/{manifest.artifact.directory}/files/{entry.path}.{entry.sha256[:16]}"
    if entry.size <= manifest.part_bytes:
        return [Part(name, entry.path, 0, entry.size)]
    starts = range(0, entry.size, manifest.part_bytes)
    return [
        Part(f"{name}.{index:05d}", entry.path, start, min(manifest.part_bytes, entry.size - start))
        for index, start in enumerate(starts)
    ]
