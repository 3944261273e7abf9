"""Every kind of store: a local directory, `memory://`, and an S3-compatible server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.errors import ArtifactDamaged, BadInput, StoreError, StoreUnavailable
from rollouts_core.store import manifest, remote
from rollouts_core.store.leases import live_leases
from rollouts_core.store.local import LocalStore
from rollouts_core.store.maker import making
from rollouts_core.store.manifest import ArtifactId, Manifest, Provenance, decode_manifest, encode_manifest
from rollouts_core.store.objects import RemoteObjects
from rollouts_core.store.remote import RemoteStore
from rollouts_core.store.store import Store, open_store
from tests.rollouts_core.store.artifacts import all_manifests

ARTIFACT = ArtifactId("thing", "ab" * 32)
PROVENANCE = Provenance(1, {"a": 1}, {}, {}, {}, None, {}, {}, "2026-01-01T00:00:00+00:00", 1.0, {"loss": 0.5})
LARGE = bytes(range(256)) * 40


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Files of more than 4,096 bytes are uploaded in parts."""
    monkeypatch.setattr(manifest, "PART_BYTES", 4096)
    if request.param == "local":
        return open_store(tmp_path / "home")
    url = request.getfixturevalue("s3_url") if request.param == "s3" else f"memory://{tmp_path.name}"
    return open_store(tmp_path / "home", url)


@pytest.fixture
def remote_store(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    monkeypatch.setattr(manifest, "PART_BYTES", 4096)
    return RemoteStore(s3_url, tmp_path / "home")


def elsewhere(store: Store, tmp_path: Path) -> Store:
    """The same store, as another machine sees it."""
    return store if store.url is None else open_store(tmp_path / "other home", store.url)


def publish(store: Store, content: str = "hello") -> None:
    with making(store, ARTIFACT, 5) as place:
        assert place is not None
        (place.out / "sub").mkdir()
        (place.out / "sub" / "file.txt").write_text(content)
        (place.out / "large.bin").write_bytes(LARGE)
        place.publish(PROVENANCE)


def test_publish_then_open(store: Store, tmp_path: Path) -> None:
    assert not store.has(ARTIFACT)
    publish(store)
    for seen in (store, elsewhere(store, tmp_path)):
        files = seen.open(ARTIFACT)
        assert (files / "sub" / "file.txt").read_text() == "hello"
        assert (files / "large.bin").read_bytes() == LARGE
    published = store.manifest(ARTIFACT)
    assert published.provenance == PROVENANCE
    assert [(entry.path, entry.size) for entry in published.files] == [("large.bin", len(LARGE)), ("sub/file.txt", 5)]
    assert all_manifests(store) == [published]
    assert store.verify(ARTIFACT) == []


def test_what_was_opened_is_read_only(store: Store) -> None:
    publish(store)
    assert not (store.open(ARTIFACT) / "sub" / "file.txt").stat().st_mode & 0o222


def test_what_was_not_published_is_not_there(store: Store) -> None:
    with pytest.raises(RuntimeError, match="boom"), making(store, ARTIFACT, 5) as place:
        assert place is not None
        (place.out / "file").write_text("x")
        raise RuntimeError("boom")
    assert not store.has(ARTIFACT)
    assert not any((store.home / "staging").iterdir())
    assert not live_leases(store.objects)
    with pytest.raises(StoreError, match="not in the store"):
        store.open(ARTIFACT)


def test_what_is_there_is_not_made_again(store: Store) -> None:
    publish(store)
    with making(store, ARTIFACT, 5) as place:
        assert place is None


def test_discarded_it_is_gone_everywhere(store: Store, tmp_path: Path) -> None:
    publish(store)
    store.discard(ARTIFACT)
    store.discard(ARTIFACT)
    assert not store.has(ARTIFACT)
    assert not elsewhere(store, tmp_path).has(ARTIFACT)
    assert store.objects.names("artifacts") == []
    publish(store, "again")
    assert (elsewhere(store, tmp_path).open(ARTIFACT) / "sub" / "file.txt").read_text() == "again"


def damage(store: Store, change: Callable[[bytes], bytes | None]) -> None:
    """Change the bytes of sub/file.txt where the store keeps them."""
    (name,) = [name for name in store.objects.names("artifacts") if "file.txt" in name]
    content = change(store.objects.read(name) or b"")
    store.objects.delete(name)
    if content is not None:
        store.objects.write(name, content)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: None, "is missing"),
        (lambda content: content[:-1], "bytes"),
        (lambda content: b"j" + content[1:], "another content of the same size"),
    ],
)
def test_verify_names_the_damaged_file_and_it_is_made_again_on_request(
    store: Store, change: Callable[[bytes], bytes | None], problem: str, tmp_path: Path
) -> None:
    publish(store)
    damage(store, change)
    (found,) = store.verify(ARTIFACT)
    assert found.path == "sub/file.txt"
    assert problem in found.problem
    store.set_aside(ARTIFACT)
    assert not store.has(ARTIFACT)
    publish(store)
    assert store.verify(ARTIFACT) == []
    assert (elsewhere(store, tmp_path).open(ARTIFACT) / "sub" / "file.txt").read_text() == "hello"


def test_a_file_of_another_content_is_never_opened(store: Store, tmp_path: Path) -> None:
    publish(store)
    damage(store, lambda content: b"j" + content[1:])
    with pytest.raises(ArtifactDamaged, match=r"sub/file\.txt is damaged"):
        elsewhere(store, tmp_path).open(ARTIFACT)


def test_a_damaged_copy_of_a_remote_artifact_is_fetched_again(remote_store: RemoteStore) -> None:
    publish(remote_store)
    copy = remote_store.open(ARTIFACT) / "sub" / "file.txt"
    copy.chmod(0o644)
    copy.write_text("jello")
    assert (remote_store.open(ARTIFACT) / "sub" / "file.txt").read_text() == "hello"


@pytest.mark.parametrize("damaged", ["delete", "truncate", "manifest", "other key"])
def test_a_damaged_local_artifact_is_absent_and_made_again(tmp_path: Path, damaged: str) -> None:
    store = LocalStore(tmp_path)
    publish(store)
    home = store.home / "artifacts" / ARTIFACT.directory
    file, record = home / "files" / "sub" / "file.txt", home / "manifest.json"
    for path in (file, record):
        path.chmod(0o644)
    if damaged == "delete":
        file.unlink()
    elif damaged == "truncate":
        file.write_text("h")
    elif damaged == "manifest":
        record.write_text("{")
    else:
        record.write_text(json.dumps(json.loads(record.read_text()) | {"artifact": {"stage": "thing", "key": "0"}}))
    assert not store.has(ARTIFACT)
    publish(store, "again")
    assert (store.open(ARTIFACT) / "sub" / "file.txt").read_text() == "again"


@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "a/../../outside", ""])
def test_a_manifest_cannot_name_a_file_outside_its_artifact(path: str) -> None:
    data = json.loads(encode_manifest(Manifest(ARTIFACT, (), PROVENANCE))) | {
        "files": [{"path": path, "size": 1, "sha256": "0"}]
    }
    with pytest.raises(StoreError, match="outside the artifact"):
        decode_manifest(json.dumps(data).encode(), "here")


def test_links_do_not_enter_artifacts(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a link"), making(LocalStore(tmp_path), ARTIFACT, 5) as place:
        assert place is not None
        (place.out / "link").symlink_to("/etc/hostname")
        place.publish(PROVENANCE)


def test_an_interrupted_upload_goes_on_where_it_stopped(
    remote_store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = RemoteObjects.write

    def failing(self: RemoteObjects, name: str, data: bytes) -> None:
        if name.startswith("artifacts/"):
            if len(written) == 2:
                raise StoreUnavailable("cut off")
            written.append(name)
        write(self, name, data)

    def counting(self: RemoteObjects, name: str, data: bytes) -> None:
        if name.startswith("artifacts/"):
            written.append(name)
        write(self, name, data)

    monkeypatch.setattr(remote, "TRANSFERS", 1)
    monkeypatch.setattr(RemoteObjects, "write", failing)
    with pytest.raises(StoreUnavailable, match="cut off"):
        publish(remote_store)
    assert not remote_store.has(ARTIFACT)
    monkeypatch.setattr(RemoteObjects, "write", counting)
    with making(remote_store, ARTIFACT, 5) as place:
        assert place is None, "it was made already, and only uploaded now"
    assert remote_store.has(ARTIFACT)
    assert len(written) == len(set(written)) == 4, "three parts of large.bin and file.txt, each once"


def test_an_unreachable_store_says_so_and_is_not_an_absent_artifact(
    remote_store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(remote_store.objects.fs, "cat_file", refuse)
    with pytest.raises(StoreUnavailable, match="nobody there"):
        remote_store.has(ARTIFACT)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "https://host/x?token=secret"])
def test_secrets_in_a_url_are_refused_without_being_shown(url: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="keep secrets out") as caught:
        open_store(tmp_path, url)
    assert "secret@" not in str(caught.value)
    assert "token" not in str(caught.value)


def test_a_url_nobody_can_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nonsense"):
        open_store(tmp_path, "nonsense://x")


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match=r"can't be written .*--store"):
        LocalStore(tmp_path / "file" / "store").check_usable()


def test_partial_work_lasts_until_publication(store: Store) -> None:
    with pytest.raises(RuntimeError), making(store, ARTIFACT, 5) as place:
        assert place is not None
        (place.scratch / "checkpoint").write_text("x")
        raise RuntimeError
    with making(store, ARTIFACT, 5) as place:
        assert place is not None
        assert (place.scratch / "checkpoint").exists()
        place.publish(PROVENANCE)
    assert not any((store.home / "work").iterdir())


PUBLISHER = """
import sys; from pathlib import Path
from tests.rollouts_core.store.test_store import ARTIFACT, PROVENANCE
from rollouts_core.store import manifest
from rollouts_core.store.maker import making
from rollouts_core.store.store import open_store
manifest.PART_BYTES = 50_000
with making(open_store(Path(sys.argv[1]), sys.argv[2] or None), ARTIFACT, 5) as place:
    if place is None:
        sys.exit()  # it had been made, and was only uploaded now
    for index in range(60):
        (place.out / f"{index}.bin").write_bytes(bytes(100_000) + bytes([index]))
    print("publishing", flush=True)
    place.publish(PROVENANCE)
"""


@pytest.mark.parametrize(
    ("kind", "milliseconds"),
    [
        *(("local", moment) for moment in (0, 3, 10, 30, 60, 100)),
        ("s3", 60),
        *(pytest.param("s3", moment, marks=pytest.mark.slow) for moment in (0, 200)),
    ],
)
def test_killed_while_publishing_it_is_whole_or_absent(
    kind: str, milliseconds: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("s3_url") if kind == "s3" else None
    store = open_store(tmp_path / "home", url)
    command = [sys.executable, "-c", PUBLISHER, str(store.home), url or ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(milliseconds / 1000)  # chooses the moment of the kill; whichever it is, the assertions hold
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    if not store.has(ARTIFACT):
        assert ARTIFACT not in [found.artifact for found in all_manifests(store)]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    assert len(list(store.open(ARTIFACT).iterdir())) == 60
    assert store.verify(ARTIFACT) == []


def test_a_manifest_travels_unchanged() -> None:
    one = Manifest(ARTIFACT, (), replace(PROVENANCE, git_commit="abc", inputs={"data": "cd" * 32}))
    assert decode_manifest(encode_manifest(one), "here") == one
