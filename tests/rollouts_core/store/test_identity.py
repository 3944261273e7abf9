"""Who an input is: content, checksums, pins; and what cannot be identified."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rollouts_core.config import HubDataset, Jsonl
from rollouts_core.data.sources import load_rows
from rollouts_core.errors import BadInput
from rollouts_core.store import digests
from rollouts_core.store.identity import External, identify_source, refuse_changed

ROW = b'{"messages": [{"role": "user", "content": "1"}]}\n'
OTHER = b'{"messages": [{"role": "user", "content": "2"}]}\n'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_bytes(ROW)
    return path


def settled(path: Path) -> None:
    """As if it had been written long ago."""
    long_ago = time.time() - 100
    os.utime(path, (long_ago, long_ago))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose bytes are read, in order; all of them count as written long ago."""
    read: list[Path] = []
    digest = digests.file_digest
    monkeypatch.setattr(digests, "file_digest", lambda path: read.append(path) or digest(path))
    monkeypatch.setattr(digests, "_is_settled", lambda path: True)
    return read


def test_a_file_is_read_once_and_again_when_it_changed(data: Path, reads: list[Path]) -> None:
    first = identify_source(Jsonl(path=data))
    assert identify_source(Jsonl(path=data)) == first
    assert reads == [data]
    data.write_bytes(OTHER)
    assert identify_source(Jsonl(path=data)).identity != first.identity
    assert reads == [data, data]


def test_a_change_of_the_same_size_with_its_old_time_is_seen(data: Path, reads: list[Path]) -> None:
    settled(data)
    first, stamp = identify_source(Jsonl(path=data)), data.stat().st_mtime_ns
    data.write_bytes(OTHER)
    os.utime(data, ns=(stamp, stamp))
    assert identify_source(Jsonl(path=data)).identity != first.identity


def test_what_was_written_just_now_is_not_remembered(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest = digests.file_digest
    monkeypatch.setattr(digests, "file_digest", lambda path: read.append(path) or digest(path))
    for _ in range(2):
        identify_source(Jsonl(path=data))
    assert read == [data, data]


def test_without_a_cache_directory_files_are_read_each_time(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert identify_source(Jsonl(path=data)).identity == {"sha256": hashlib.sha256(ROW).hexdigest()}


def test_a_remote_object_is_identified_by_its_stores_checksum_and_read(s3_url: str) -> None:
    url = f"{s3_url}/data.jsonl"
    with fsspec.open(url, "wb") as file:
        file.write(ROW)
    first = identify_source(Jsonl(path=url))
    assert first.identity["checksum"].startswith("ETag:")
    assert [row.messages[0].content for row in load_rows(Jsonl(path=url), first)] == ["1"]
    assert identify_source(Jsonl(path=url)) == first
    with fsspec.open(url, "wb") as file:
        file.write(OTHER)
    assert identify_source(Jsonl(path=url)).identity != first.identity
    with pytest.raises(BadInput, match="has changed since the plan was made"):
        refuse_changed({"prompts": first})


def test_without_a_checksum_the_error_says_how_to_pin(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/data.jsonl"
    with fsspec.open(url, "wb") as file:
        file.write(ROW)
    with pytest.raises(BadInput, match=r"no checksum. Pin it with sha256="):
        identify_source(Jsonl(path=url))
    pin = hashlib.sha256(ROW).hexdigest()
    pinned = identify_source(Jsonl(path=url, sha256=pin))
    assert pinned.identity == {"sha256": pin}
    assert len(load_rows(Jsonl(path=url, sha256=pin), pinned)) == 1
    wrong = Jsonl(path=url, sha256="0" * 64)
    with pytest.raises(BadInput, match="has the sha256"):
        load_rows(wrong, identify_source(wrong))


@pytest.mark.parametrize("place", ["s3://no-such-bucket-here/data.jsonl", "nonsense://x/y", "/no/such/file"])
def test_what_is_not_there_is_named(place: str, s3_server: str) -> None:
    with pytest.raises(BadInput, match=place.split("/")[-1]):
        identify_source(Jsonl(path=place))


def test_a_local_file_that_is_not_what_it_is_pinned_to_is_refused(data: Path) -> None:
    with pytest.raises(BadInput, match="pinned"):
        identify_source(Jsonl(path=data, sha256="0" * 64))


@pytest.mark.parametrize("count", [1, 2])
def test_a_file_edited_between_plan_and_use_is_refused(data: Path, tmp_path: Path, count: int) -> None:
    files = [str(data), *[str(tmp_path / "second.jsonl")] * (count - 1)]
    for file in files:
        Path(file).write_bytes(ROW)
    source: Any = Jsonl(path=data) if count == 1 else HubDataset(name="json", data_files=tuple(files))
    external = identify_source(source)
    refuse_changed({"prompts": external})
    data.write_bytes(OTHER)
    with pytest.raises(BadInput, match=r"prompts: .* has changed since the plan was made"):
        refuse_changed({"prompts": external})


def test_a_directory_is_identified_by_its_files_wherever_it_lies(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "data.jsonl").write_bytes(ROW)
    one, other = (identify_source(HubDataset(name=str(tmp_path / name))) for name in ("one", "other"))
    assert one.identity == other.identity
    (tmp_path / "other" / "sub" / "data.jsonl").write_bytes(OTHER)
    assert identify_source(HubDataset(name=str(tmp_path / "other"))).identity != one.identity


def test_a_commit_needs_no_second_look() -> None:
    refuse_changed({"model": External({"commit": "0" * 40}, "someone/model")})
