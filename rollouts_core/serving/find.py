"""The policy that a person means: of a run, of an artifact, or in a directory."""

from dataclasses import dataclass
from pathlib import Path

from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import load_config
from rollouts_core.errors import BadInput
from rollouts_core.housekeeping.find import manifest_if_any
from rollouts_core.observe.run_list import find_run, runs_beginning
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.store.manifest import ArtifactId
from rollouts_core.store.store import Store

TRAINED = ("rl", "dpo", "sft")


@dataclass(frozen=True)
class FoundPolicy:
    name: str
    directory: Path
    """A Hugging Face model directory, tokenizer included."""
    config: PipelineConfig | None = None
    """The config of its run; None where that is not known."""


def find_policy(store: Store, name: str) -> FoundPolicy:
    """Find a policy by a run's id, an artifact's name, the beginning of one of these, or a model directory.

    Raises `BadInput` when there is none, or several are meant.
    """
    for directory in (Path(name), Path(name) / "policy"):
        if (directory / "config.json").is_file():
            return FoundPolicy(name.rstrip("/"), directory)
    if runs_beginning(store, name):
        return _of_run(store, find_run(store.home, name, store))
    manifest = manifest_if_any(store, name)
    if manifest is None:
        raise BadInput(
            f"{name} is not a model directory, nor a run or an artifact of the store {store.url or store.home}; "
            "`rollouts runs` lists runs"
        )
    directory = store.open(manifest.artifact) / "policy"
    if not directory.is_dir():
        raise BadInput(f"the artifact {manifest.artifact.directory} has no policy: only sft, dpo and rl make one")
    return FoundPolicy(manifest.artifact.directory, directory)


def _of_run(store: Store, record: RunRecord) -> FoundPolicy:
    """The policy of a run's last trained stage."""
    made = [
        ArtifactId(stage.name, stage.key)
        for stage in record.stages
        if stage.key and stage.name.startswith(TRAINED) and stage.state in ("Completed", "Cached")
    ]
    there = [artifact for artifact in made if store.has(artifact)]
    if not there:
        why = f": {record.error.splitlines()[0]}" if record.error else ""
        what = "its artifacts have been removed" if made else "none of its stages has trained one"
        raise BadInput(f"run {record.run_id} ({record.state}) has no policy: {what}{why}")
    config = load_config(store.home / "runs" / record.run_id / "config.json")
    return FoundPolicy(record.run_id, store.open(there[-1]) / "policy", config)
