"""How each artifact of a run was made, kept in the run's results: its lineage, for whoever has no store at hand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollouts_core.stages.stage import Stage
from rollouts_core.store.manifest import Manifest

MADE = "made.json"


@dataclass(frozen=True)
class Made:
    artifact: str
    inputs: Mapping[str, str]
    """Role to artifact."""
    external: Mapping[str, str]
    """Role to what identifies it, shortened: a file's digest, a repository's commit."""
    started_at: str
    seconds: float
    device: str
    git_commit: str | None
    libraries: Mapping[str, str]


def made_of(stage: Stage, manifest: Manifest) -> Made:
    told = manifest.provenance
    return Made(
        artifact=manifest.artifact.directory,
        inputs={role: artifact.directory for role, artifact in stage.inputs.items()},
        external={
            role: " ".join(value[:16] for value in identity.values()) for role, identity in told.external.items()
        },
        started_at=told.started_at,
        seconds=told.seconds,
        device=told.host.get("device", ""),
        git_commit=told.git_commit,
        libraries=told.libraries,
    )


def write_made(results: Path, made: Sequence[Made]) -> None:
    (results / MADE).write_text(json.dumps([asdict(entry) for entry in made], indent=1))


def read_made(results: Path) -> list[Made]:
    path = results / MADE
    return [Made(**entry) for entry in json.loads(path.read_text())] if path.is_file() else []
