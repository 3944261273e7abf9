"""Who an input from outside is: local files by content, hub models and data sets by commit.

Decision: what cannot be identified is an error that says how to pin it, never a guess; a name alone ("main") means
something else tomorrow.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from rollouts_core.config import HubDataset, Jsonl, PretrainedModel
from rollouts_core.errors import BadInput
from rollouts_core.store.keys import key_of
from rollouts_core.store.manifest import file_digest, list_files


@dataclass(frozen=True)
class External:
    """An input from outside the store: what it is (enters keys) and where it lies (does not)."""

    identity: dict[str, str]
    location: str


def identify_source(source: Jsonl | HubDataset) -> External:
    """Raises `BadInput` when a file is missing or a hub data set cannot be resolved to a commit.

    The location of several data files is their paths, joined as in PATH.
    """
    if isinstance(source, Jsonl):
        return _file(source.path)
    if source.data_files:
        parts = [_file(Path(file)) for file in source.data_files]
        return External(
            {"sha256": key_of([part.identity for part in parts])}, os.pathsep.join(p.location for p in parts)
        )
    if Path(source.name).is_dir():
        return _directory(Path(source.name))
    return External({"commit": _hub_commit("dataset", source.name, source.revision)}, source.name)


def identify_model(model: PretrainedModel) -> External:
    """A local directory by its files, a hub name by its commit. Raises `BadInput` when neither can be had."""
    directory = Path(model.name)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise BadInput(f"model.name: {directory} holds no config.json: not a Hugging Face model directory")
        return _directory(directory)
    return External({"commit": _hub_commit("model", model.name, model.revision)}, model.name)


def _directory(path: Path) -> External:
    digest = key_of([[entry.path, entry.sha256] for entry in list_files(path)])
    return External({"sha256": digest}, str(path.resolve()))


def _file(path: Path) -> External:
    if not path.is_file():
        raise BadInput(f"no such data file: {path}")
    return External({"sha256": file_digest(path)}, str(path.resolve()))


def _hub_commit(kind: str, name: str, revision: str | None) -> str:
    if revision and len(revision) == 40 and set(revision) <= set("0123456789abcdef"):
        return revision
    from huggingface_hub import HfApi, constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, HFValidationError

    try:
        if not constants.HF_HUB_OFFLINE:
            info = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=10)
            if info.sha:
                return str(info.sha)
    except HFValidationError:
        raise BadInput(f"{kind} {name!r} is neither a directory here nor a valid hub name") from None
    except Exception:  # whichever HTTP library is below: no answer means that the cache is asked next
        pass
    try:
        for repo in scan_cache_dir().repos:
            ref = repo.refs.get(revision or "main")
            if repo.repo_id == name and repo.repo_type == kind and ref is not None:
                return str(ref.commit_hash)
    except CacheNotFound:
        pass
    raise BadInput(
        f"{kind} {name!r} can't be found: it is no directory here, the hub does not answer or does not know it, and "
        "no copy is cached. Check the name, go online once, or pin a cached copy with revision=<40-digit commit>"
    )
