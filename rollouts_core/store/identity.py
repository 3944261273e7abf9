"""The identity of an input from outside: local files by content, remote objects by their store's checksum, hub models
and data sets by commit.

Decision: an input that can't be identified is an error that says how to pin it, never a guess: a name alone ("main")
means something else tomorrow.

Decision: a stage compares its inputs with what the plan identified, before and after it reads them. Otherwise the
result of a file that was edited in between would be stored under the key of another.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollouts_core.config import Arrow, HubDataset, Jsonl, Parquet, PretrainedModel, Source
from rollouts_core.errors import BadInput
from rollouts_core.store.digests import known_digests
from rollouts_core.store.keys import key_of

CHECKSUMS = ("ChecksumSHA256", "sha256", "md5Hash", "Content-MD5", "content_md5", "Digest", "ETag", "etag", "crc32c")
"""The names of an object's checksum in stores, the strongest first."""


@dataclass(frozen=True)
class External:
    """An input from outside the store: what it is (enters keys) and where it lies (does not)."""

    identity: dict[str, str]
    location: str
    content: tuple[str, ...] = ()
    """The files, directories or URLs whose content the identity tells; empty where it is a commit."""


def identify_source(source: Source) -> External:
    """Raises `BadInput` when a file is missing or an input cannot be identified.

    The location of several data files is their paths, joined as in PATH.
    """
    if not isinstance(source, HubDataset):
        return _file(source)
    if source.data_files:
        files = tuple(_absolute(file) for file in source.data_files)
        return External(_identity(files), os.pathsep.join(files), files)
    if Path(source.name).is_dir():
        return _local(source.name)
    return External({"commit": _hub_commit("dataset", source.name, source.revision)}, source.name)


def identify_model(model: PretrainedModel) -> External:
    """A local directory by its files, a hub name by its commit. Raises `BadInput` when neither can be had."""
    if Path(model.name).is_dir():
        return _local(model.name)
    return External({"commit": _hub_commit("model", model.name, model.revision)}, model.name)


def identify_teacher(name: str, revision: str | None) -> External:
    """A model as `identify_model` does; a server by its address, which says what it serves as far as can be known."""
    if is_url(name):
        return External({"url": name.rstrip("/")}, name.rstrip("/"))
    return identify_model(PretrainedModel(name=name, revision=revision))


def refuse_changed(external: Mapping[str, External]) -> None:
    """Raises `BadInput` naming every input whose content is no longer what the plan identified."""
    problems = []
    for role, input_ in external.items():
        if input_.content and not _identity(input_.content).items() <= input_.identity.items():
            problems.append(f"{role}: {input_.location} has changed since the plan was made: run again")
    if problems:
        raise BadInput(problems, "inputs")


def is_url(place: str) -> bool:
    return "://" in place


def _file(source: Jsonl | Parquet | Arrow) -> External:
    place = _absolute(str(source.path))
    if source.sha256 is None:
        return External(_identity((place,)), place, (place,))
    if not is_url(place) and (found := _identity((place,))["sha256"]) != source.sha256:
        raise BadInput(f"{place} has the sha256 {found}, not the {source.sha256} it is pinned to")
    return External({"sha256": source.sha256}, place, () if is_url(place) else (place,))


def _local(name: str) -> External:
    place = _absolute(name)
    return External(_identity((place,)), place, (place,))


def _identity(places: Sequence[str]) -> dict[str, str]:
    """The content of one place; of several, a digest of theirs."""
    if len(places) > 1:
        return {"sha256": key_of([_identity((place,)) for place in places])}
    if is_url(places[0]):
        return {"checksum": _checksum(places[0])}
    path = Path(places[0])
    if path.is_file():
        return {"sha256": known_digests([path])[0]}
    if not path.is_dir():
        raise BadInput(f"no such data file: {path}")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    names = [file.relative_to(path).as_posix() for file in files]
    return {"sha256": key_of([list(entry) for entry in zip(names, known_digests(files), strict=True)])}


def _absolute(place: str) -> str:
    return place if is_url(place) else str(Path(place).resolve())


def _checksum(url: str) -> str:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        info = fs.info(path)
    except FileNotFoundError:
        raise BadInput(f"no such data file: {url}") from None
    except Exception as error:  # the file system of the URL may raise any exception
        raise BadInput(f"{url} can't be identified: {type(error).__name__}: {error}") from None
    for name in CHECKSUMS:
        value = info.get(name)
        if value and not str(value).startswith("W/"):
            return f"{name}:{info.get('size')}:{str(value).strip(chr(34))}"
    raise BadInput(
        f"{url} can't be identified: its store tells no checksum. Pin it with sha256=..., or copy it to a local file"
    )


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
        f"{kind} {name!r} can't be found: it is not a directory here, the hub does not answer or does not know it, and "
        "no copy is cached. Check the name, go online once, or pin a cached copy with revision=<40-digit commit>"
    )
