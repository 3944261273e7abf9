"""What the store costs beside `cp -r`: `make benchmark`. Nothing here asserts on time."""

import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from rollouts_core.store.fetch import fetch
from rollouts_core.store.local import LocalStore
from rollouts_core.store.maker import making
from rollouts_core.store.manifest import ArtifactId, Provenance
from tests.benchmarks.timing import alternately, report

pytestmark = pytest.mark.benchmark

PROVENANCE = Provenance(1, {}, {}, {}, {}, None, {}, {}, "2026-01-01T00:00:00+00:00", 1.0, {})


def one_large(directory: Path) -> None:
    block = os.urandom(2**20)
    with (directory / "large.bin").open("wb") as file:
        for _ in range(1024):
            file.write(block)


def many_small(directory: Path) -> None:
    for folder in range(100):
        (directory / f"{folder}").mkdir()
        for number in range(100):
            (directory / f"{folder}" / f"{number}").write_bytes(os.urandom(2048))


@pytest.mark.parametrize("fill", [one_large, many_small])
def test_publish_and_fetch_beside_cp(fill: Callable[[Path], None], tmp_path: Path) -> None:
    """Publishing hashes what was staged, flushes it and renames it; `cp -r` copies it. Fetching verifies the copy."""
    source = tmp_path / "source"
    source.mkdir()
    fill(source)
    store, numbers = LocalStore(tmp_path / "store"), count()
    subprocess.run(["sync"], check=True)

    def copy() -> None:
        subprocess.run(["cp", "-r", str(source), str(tmp_path / f"copy-{next(numbers)}")], check=True)

    staged = tmp_path / "staged"

    def stage() -> None:
        shutil.rmtree(staged, ignore_errors=True)
        for left in [*tmp_path.glob("copy-*"), *(store.home / "artifacts").glob("*")]:
            shutil.rmtree(left)
        (staged / "files").mkdir(parents=True)
        subprocess.run(["cp", "-r", f"{source}/.", str(staged / "files")], check=True)

    def publish() -> None:
        artifact = ArtifactId("staged", f"{next(numbers):064x}"[::-1])
        with making(store, artifact, 5) as place:
            assert place is not None
            shutil.rmtree(place.out)
            (staged / "files").rename(place.out)
            place.publish(PROVENANCE)

    report(f"\n{fill.__name__}: publish", *_with("cp -r", alternately(publish, copy, before=stage)))
    artifact = ArtifactId("fetched", "f" * 64)
    with making(store, artifact, 5) as place:
        assert place is not None
        shutil.copytree(source, place.out, dirs_exist_ok=True)
        place.publish(PROVENANCE)

    def fetch_it() -> None:
        fetch(store, artifact, tmp_path / f"copy-{next(numbers)}")

    def clear() -> None:
        for left in tmp_path.glob("copy-*"):
            shutil.rmtree(left)

    report(f"{fill.__name__}: fetch", *_with("cp -r", alternately(fetch_it, copy, before=clear)))


def _with(name: str, seconds: tuple[float, float]) -> tuple[float, str, float]:
    return seconds[0], name, seconds[1]
