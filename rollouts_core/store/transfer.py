"""Parallel work on many files, and copies that are verified while they are made.

Decision: a large file is hashed in one thread while the kernel copies it in another (both leave the interpreter's
lock); small files are handed out in batches, since a task each would cost more than the file.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rollouts_core.errors import ArtifactDamaged
from rollouts_core.store.objects import RemoteObjects

T = TypeVar("T")
R = TypeVar("R")

WORKERS = min(8, os.cpu_count() or 1)
BATCH_BYTES = 32 * 2**20
BATCH_FILES = 256
SMALL = 2**20


def in_parallel(function: Callable[[T], R], values: Sequence[T], sizes: Sequence[int]) -> list[R]:
    """The function of every value, in order; `sizes` in bytes make batches of like work."""
    batches = _batches(values, sizes)
    if len(batches) < 2:
        return [function(value) for value in values]
    with ThreadPoolExecutor(WORKERS) as pool:
        done = pool.map(lambda batch: [function(value) for value in batch], batches)
        return [result for results in done for result in results]


def concurrently(function: Callable[[T], R], values: Sequence[T], at_once: int) -> list[R]:
    """The function of every value, in order; for work that mostly waits."""
    if len(values) < 2:
        return [function(value) for value in values]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(function, values))


def upload(objects: RemoteObjects, name: str, path: Path, offset: int, size: int) -> None:
    """A stretch of a file as one object."""
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        objects.write(name, file.read(size))


def download(objects: RemoteObjects, names: Sequence[str], path: Path) -> str:
    """Write several objects into one file. Returns its digest; empty if one of the objects is missing."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for name in names:
            if (content := objects.read(name)) is None:
                return ""
            digest.update(content)
            file.write(content)
    return digest.hexdigest()


def remote_digest(objects: RemoteObjects, names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(objects.read(name) or b"")
    return digest.hexdigest()


def copy_verified(source: Path, target: Path, sha256: str) -> None:
    """Copy a file. Raises `ArtifactDamaged`, with nothing at the target, when it is not what its digest says."""
    unfinished = target.with_name(f".{target.name}.unfinished")
    if source.stat().st_size < SMALL:
        content = source.read_bytes()
        unfinished.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
    else:
        with ThreadPoolExecutor(1) as pool:
            hashing = pool.submit(file_digest, source)
            shutil.copyfile(source, unfinished)
            digest = hashing.result()
    if digest != sha256:
        unfinished.unlink()
        raise ArtifactDamaged(f"{source} is damaged: its content is not what its manifest says")
    unfinished.rename(target)


def file_digest(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        content = file.read(SMALL)
        digest = hashlib.sha256(content)
        if len(content) == SMALL:
            buffer = memoryview(bytearray(4 * SMALL))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    return digest.hexdigest()


def _batches(values: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    batches: list[list[T]] = []
    room = 0
    for value, size in zip(values, sizes, strict=True):
        if not batches or room < size or len(batches[-1]) == BATCH_FILES:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(value)
        room -= size
    return batches
