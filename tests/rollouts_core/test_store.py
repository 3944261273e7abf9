import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollouts_core.errors import BadInput, StoreError
from rollouts_core.store.local import LocalStore
from rollouts_core.store.manifest import ArtifactId, Provenance

ARTIFACT = ArtifactId("thing", "ab" * 32)
PROVENANCE = Provenance(1, {"a": 1}, {}, {}, {}, None, {}, {}, "2026-01-01T00:00:00+00:00", 1.0, {"loss": 0.5})


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def publish(store: LocalStore, content: str = "hello") -> None:
    with store.making(ARTIFACT, 5) as out:
        assert out is not None
        (out / "sub").mkdir()
        (out / "sub" / "file.txt").write_text(content)
        store.publish(ARTIFACT, PROVENANCE)


def test_publish_then_open(store: LocalStore) -> None:
    assert not store.has(ARTIFACT)
    publish(store)
    assert (store.open(ARTIFACT) / "sub" / "file.txt").read_text() == "hello"
    manifest = store.manifest(ARTIFACT)
    assert manifest.provenance == PROVENANCE
    assert [(entry.path, entry.size) for entry in manifest.files] == [("sub/file.txt", 5)]


def test_artifacts_are_read_only(store: LocalStore) -> None:
    publish(store)
    assert not (store.open(ARTIFACT) / "sub" / "file.txt").stat().st_mode & 0o222


def test_what_was_not_published_is_not_there(store: LocalStore) -> None:
    with pytest.raises(RuntimeError, match="boom"), store.making(ARTIFACT, 5) as out:
        assert out is not None
        (out / "file").write_text("x")
        raise RuntimeError("boom")
    assert not store.has(ARTIFACT)
    assert not any((store.root / "staging").iterdir())
    with pytest.raises(StoreError, match="not in the store"):
        store.open(ARTIFACT)


@pytest.mark.parametrize("damage", ["delete", "truncate", "manifest", "other key"])
def test_a_damaged_artifact_is_absent_and_made_again(store: LocalStore, damage: str) -> None:
    publish(store)
    home = store.root / "artifacts" / ARTIFACT.directory
    file, manifest = home / "files" / "sub" / "file.txt", home / "manifest.json"
    for path in (file, manifest):
        path.chmod(0o644)
    if damage == "delete":
        file.unlink()
    elif damage == "truncate":
        file.write_text("h")
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"artifact": {"stage": "thing", "key": "0"}}))
    assert not store.has(ARTIFACT)
    publish(store, "again")
    assert (store.open(ARTIFACT) / "sub" / "file.txt").read_text() == "again"


def test_second_maker_waits_and_takes_what_the_first_made(store: LocalStore) -> None:
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()

    def first() -> None:
        with store.making(ARTIFACT, 5) as out:
            assert out is not None
            ready.set()
            go.wait(10)
            (out / "file").write_text("first")
            store.publish(ARTIFACT, PROVENANCE)

    process = context.Process(target=first)
    process.start()
    assert ready.wait(10)
    with pytest.raises(StoreError, match="another process is making"), store.making(ARTIFACT, 0.2):
        pass
    go.set()
    with store.making(ARTIFACT, 10) as out:
        assert out is None
    process.join()
    assert (store.open(ARTIFACT) / "file").read_text() == "first"


PUBLISHER = """
import sys; from pathlib import Path
from tests.rollouts_core.test_store import ARTIFACT, PROVENANCE
from rollouts_core.store.local import LocalStore
store = LocalStore(Path(sys.argv[1]))
with store.making(ARTIFACT, 5) as out:
    for index in range(60):
        (out / f"{index}.bin").write_bytes(bytes(200_000))
    print("publishing", flush=True)
    store.publish(ARTIFACT, PROVENANCE)
"""


@pytest.mark.parametrize("milliseconds", [0, 3, 10, 30, 60, 100])
def test_killed_while_publishing_it_is_whole_or_absent(store: LocalStore, milliseconds: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(store.root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(milliseconds / 1000)  # chooses the moment of the kill; whichever it is, the assertions hold
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if store.has(ARTIFACT):
        assert len(list(store.open(ARTIFACT).iterdir())) == 60
    else:
        assert not (store.root / "artifacts" / ARTIFACT.directory).exists()
        publish(store)
        assert store.has(ARTIFACT)
    process.stdout.close()


def test_partial_work_lasts_until_publication(store: LocalStore) -> None:
    (store.work(ARTIFACT) / "checkpoint").write_text("x")
    assert (store.work(ARTIFACT) / "checkpoint").exists()
    publish(store)
    assert not (store.root / "work" / ARTIFACT.directory).exists()


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match=r"can't be written .*--store"):
        LocalStore(tmp_path / "file" / "store").check_usable()
