"""New weights on an engine machine: files in memory, sent once for all replicas there.

    <memory>/arriving-<version>/<file>   whole files; what is half there begins with a dot
    <memory>/version-<version>/          all of a version, for replicas to load

Decision: a file counts when it is complete and its digest is the sender's. A transfer that broke off continues with the
files that are missing.

Decision: a file of the version before is removed when its successor has come, since the successor may come as changes
(`weight_changes`). So never more than one file is there in two versions.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from rollouts_core.weight_changes import PIECE

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._:-]*")
SUFFIX = ".sha256"


def plain(name: str) -> str:
    """The name. Raises ValueError where it could be a path to somewhere else."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name")
    return name


def held(memory: Path, version: int) -> dict[str, str]:
    """Digests of the whole files of a version, by name."""
    for place in (memory / f"version-{version}", _arriving(memory, version)):
        if place.exists():
            return {path.name.removesuffix(SUFFIX): path.read_text() for path in place.glob(f"*{SUFFIX}")}
    return {}


def before(memory: Path, version: int) -> dict[str, str]:
    """Digests of files of other versions, by name: what changes may be sent of."""
    return {path.name.removesuffix(SUFFIX): path.read_text() for path in _others(memory, version, f"*{SUFFIX}")}


class File:
    """A file of weights that arrives."""

    def __init__(self, place: Path, opened: BinaryIO, before: BinaryIO | None) -> None:
        self._place, self._opened, self._before, self._digest = place, opened, before, hashlib.sha256()

    def take(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._opened.write(piece)

    def next_before(self) -> bytes:
        """The next piece of the version before. Raises ValueError where there is none."""
        if self._before is None:
            raise ValueError("what has changed can't be told: the version before is not here")
        return self._before.read(PIECE)

    def keep(self, digest: str) -> str:
        """Count the file as whole; why not, where it was damaged on its way."""
        self._opened.flush()
        if self._digest.hexdigest() != digest:
            return "it was damaged on its way"
        Path(self._opened.name).rename(self._place)
        self._place.with_name(self._place.name + SUFFIX).write_text(digest)
        return ""


@contextmanager
def arriving(memory: Path, version: int, name: str) -> Iterator[File]:
    """Take in a file of a version; the file of that name of other versions goes behind it."""
    directory, settled = _arriving(memory, version), memory / f"version-{version}"
    if settled.exists():
        settled.rename(directory)
    directory.mkdir(exist_ok=True, mode=0o700)
    half = directory / f".{plain(name)}"
    try:
        with half.open("wb") as opened, ExitStack() as reading:
            old = next(iter(_others(memory, version, name)), None)
            yield File(directory / name, opened, reading.enter_context(old.open("rb")) if old else None)
        if (directory / name).exists():
            for old in (*_others(memory, version, name + SUFFIX), *_others(memory, version, name)):
                old.unlink()
    finally:
        half.unlink(missing_ok=True)


def settle(memory: Path, version: int, files: Mapping[str, str]) -> str:
    """Make a version of its files, given by name and digest, and remove all others; says which files are not these."""
    there = held(memory, version)
    if wrong := sorted(name for name in files if there.get(name) != files[name]):
        return f"weight version {version} is not whole: {', '.join(wrong[:3])}"
    if _arriving(memory, version).exists():
        _arriving(memory, version).rename(memory / f"version-{version}")
    for old in (*memory.glob("arriving-*"), *memory.glob("version-*")):
        if old.name != f"version-{version}":
            shutil.rmtree(old, ignore_errors=True)
    return ""


def _others(memory: Path, version: int, pattern: str) -> list[Path]:
    """Files of other versions."""
    own = {f"version-{version}", f"arriving-{version}"}
    found = (*memory.glob(f"arriving-*/{pattern}"), *memory.glob(f"version-*/{pattern}"))
    return [path for path in found if path.parent.name not in own and not path.name.startswith(".")]


def _arriving(memory: Path, version: int) -> Path:
    return memory / f"arriving-{version}"
