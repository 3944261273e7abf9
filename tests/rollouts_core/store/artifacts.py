"""Artifacts for tests of what looks at many of them."""

from collections.abc import Mapping
from typing import Any

from rollouts_core.store.maker import making
from rollouts_core.store.manifest import ArtifactId, Manifest, Provenance
from rollouts_core.store.store import Store


def all_manifests(store: Store) -> list[Manifest]:
    return [manifest for _, manifest in store.read_manifests(store.directories())]


def made_from(spec: Mapping[str, Any], version: int = 1, started_at: str = "2026-01-01T00:00:00+00:00") -> Provenance:
    return Provenance(
        version, dict(spec), {}, {}, {}, None, {}, {"node": "here", "device": "cpu"}, started_at, 1.0, {}, {}, {}
    )


def put(store: Store, artifact: ArtifactId, provenance: Provenance, content: str = "hello") -> None:
    with making(store, artifact, 5) as place:
        assert place is not None
        (place.out / "file").write_text(content)
        place.publish(provenance)
