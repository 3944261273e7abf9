"""Making an artifact: the lease for it, its directories, and the clean-up afterwards.

Decision: the name of a directory of partial work has the generation of the lease. A process that takes over the lease
renames the directory; if the former maker wakes up, it no longer finds the directory that it wrote to.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollouts_core.store.leases import LEASE_SECONDS, Claim, Lease, holding
from rollouts_core.store.manifest import FILES, ArtifactId, Manifest, Provenance
from rollouts_core.store.store import Store


@dataclass(frozen=True)
class Making:
    """An artifact while it is being made, with the lease for it."""

    store: Store
    artifact: ArtifactId
    out: Path
    """An empty directory for the stage to fill. It becomes the artifact."""
    scratch: Path
    """Partial work: survives a kill, private to this stage, deleted once the artifact is there."""
    lease: Lease

    def publish(self, provenance: Provenance) -> Manifest:
        """Commit what was filled in, then drop partial work. Raises `LeaseLost` when another may be making it."""
        manifest = self.store.publish(self.artifact, self.out, provenance, self.lease)
        drop_work(self.store.home, self.artifact)
        return manifest


@contextmanager
def making(
    store: Store,
    artifact: ArtifactId,
    deadline: float,
    say: Callable[[str], None] = lambda reason: None,
    on_lost: Callable[[str], None] = lambda reason: None,
    lease_seconds: float = LEASE_SECONDS,
) -> Iterator[Making | None]:
    """Hold the right to make an artifact; yields None when it is there, or another has made it meanwhile.

    Waits up to `deadline` seconds for another maker, saying for whom. `on_lost` is called from the lease's own thread
    should it be lost; `publish` then refuses. Raises `StoreError` when the deadline passes.
    """
    if store.has(artifact):
        yield None
        return
    claim = Claim(store.objects, artifact.directory, lease_seconds)
    with holding(claim, deadline, lambda: store.has(artifact), say, on_lost) as lease:
        if lease is None or store.has(artifact):
            yield None
            return
        if store.finish_upload(artifact, lease):
            drop_work(store.home, artifact)
            yield None
            return
        staging = store.home / "staging" / f"{artifact.directory}.{lease.generation}"
        for left in (store.home / "staging").glob(f"{artifact.directory}.*"):
            shutil.rmtree(left, ignore_errors=True)
        (staging / FILES).mkdir(parents=True)
        try:
            yield Making(store, artifact, staging / FILES, _take_work(store.home, artifact, lease.generation), lease)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def drop_work(home: Path, artifact: ArtifactId) -> None:
    for directory in (home / "work").glob(f"{artifact.directory}.*"):
        shutil.rmtree(directory, ignore_errors=True)


def _take_work(home: Path, artifact: ArtifactId, generation: int) -> Path:
    """The partial work that the maker before left, under this generation's name."""
    mine = home / "work" / f"{artifact.directory}.{generation}"
    left = sorted((home / "work").glob(f"{artifact.directory}.*"), key=lambda path: int(path.suffix[1:]))
    if left:
        left[-1].rename(mine)
    for older in left[:-1]:
        shutil.rmtree(older, ignore_errors=True)
    mine.mkdir(parents=True, exist_ok=True)
    return mine
