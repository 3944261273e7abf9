"""New weights on an engine machine: files in memory, sent once for all replicas there.

    <memory>/arriving-<version>/<file>   whole files; what is half there begins with a dot
    <memory>/version-<version>/          all of a version, for replicas to load

Decision: a file counts once it is whole and its digest is the sender's. A transfer that breaks off goes on with the
files that are not there yet.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._:-]*")
SUFFIX = ".sha256"


def plain(name: str) -> str:
    """The name. Raises ValueError where it could be a path to somewhere else."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name")
    return name


def held(memory: Path, version: int) -> dict[str, str]:
    """Digests of the whole files of a version, by name."""
    for place in (memory / f"version-{version}", _arriving(memory, version)):
        if place.exists():
            return {path.name.removesuffix(SUFFIX): path.read_text() for path in place.glob(f"*{SUFFIX}")}
    return {}


class File:
    """One that arrives."""

    def __init__(self, place: Path, opened: BinaryIO) -> None:
        self._place, self._opened, self._digest = place, opened, hashlib.sha256()

    def take(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._opened.write(piece)

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
    """Take in a file of a version; the files of other versions go, and others of the same version stay."""
    directory, settled = _arriving(memory, version), memory / f"version-{version}"
    if settled.exists():
        settled.rename(directory)
    for old in (*memory.glob("arriving-*"), *memory.glob("version-*")):
        if old != directory:
            shutil.rmtree(old, ignore_errors=True)
    directory.mkdir(exist_ok=True, mode=0o700)
    half = directory / f".{plain(name)}"
    try:
        with half.open("wb") as opened:
            yield File(directory / name, opened)
    finally:
        half.unlink(missing_ok=True)


def settle(memory: Path, version: int, files: Mapping[str, str]) -> str:
    """Make a version of its files, given by name and digest; says which are missing or others."""
    there = held(memory, version)
    if wrong := sorted(name for name in files if there.get(name) != files[name]):
        return f"weight version {version} is not whole: {', '.join(wrong[:3])}"
    if _arriving(memory, version).exists():
        _arriving(memory, version).rename(memory / f"version-{version}")
    return ""


def _arriving(memory: Path, version: int) -> Path:
    return memory / f"arriving-{version}"
