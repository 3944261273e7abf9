"""Weights as they arrive on an engine machine."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from infra.host import weight_files
from rollouts_core.weight_changes import change, changed, pieces


def put(memory: Path, version: int, name: str, data: bytes, digest: str | None = None) -> str:
    with weight_files.arriving(memory, version, name) as file:
        file.take(data[:3])
        file.take(data[3:])
        return file.keep(digest or sha256(data).hexdigest())


def test_a_version_is_there_once_all_its_files_are(tmp_path: Path) -> None:
    assert put(tmp_path, 1, "a", b"12345") == put(tmp_path, 1, "b", b"678") == ""
    files = weight_files.held(tmp_path, 1)
    assert files == {"a": sha256(b"12345").hexdigest(), "b": sha256(b"678").hexdigest()}
    assert weight_files.settle(tmp_path, 1, {**files, "c": "0"}) == "weight version 1 is not whole: c"
    assert weight_files.settle(tmp_path, 1, files) == weight_files.settle(tmp_path, 1, files) == ""
    assert (tmp_path / "version-1" / "a").read_bytes() == b"12345"
    assert weight_files.held(tmp_path, 1) == files


def test_a_file_goes_when_its_successor_has_come_and_the_version_when_the_next_is_whole(tmp_path: Path) -> None:
    put(tmp_path, 1, "a", b"12345")
    put(tmp_path, 1, "b", b"678")
    put(tmp_path, 1, "c", b"9")
    weight_files.settle(tmp_path, 1, weight_files.held(tmp_path, 1))
    put(tmp_path, 2, "a", b"67890")
    assert weight_files.before(tmp_path, 2) == {"b": sha256(b"678").hexdigest(), "c": sha256(b"9").hexdigest()}
    assert sorted(path.name for path in (tmp_path / "version-1").iterdir()) == ["b", "b.sha256", "c", "c.sha256"]
    put(tmp_path, 2, "b", b"876")
    weight_files.settle(tmp_path, 2, weight_files.held(tmp_path, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["version-2"]


def test_a_file_may_come_as_what_has_changed(tmp_path: Path) -> None:
    old, new = os.urandom(2**20 + 7), os.urandom(2**20 + 7)
    put(tmp_path, 1, "a", old)
    with weight_files.arriving(tmp_path, 2, "a") as file:
        for before, after in zip(pieces(old), pieces(new), strict=True):
            assert file.next_before() == before
            file.take(changed(before, change(before, after)))
        assert file.keep(sha256(new).hexdigest()) == ""
    assert (tmp_path / "arriving-2" / "a").read_bytes() == new
    assert not (tmp_path / "arriving-1" / "a").exists()


def test_what_has_changed_is_refused_where_the_version_before_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="the version before is not here"),
        weight_files.arriving(tmp_path, 2, "a") as file,
    ):
        file.next_before()


def test_a_file_of_a_version_that_is_another_now_takes_its_place(tmp_path: Path) -> None:
    put(tmp_path, 1, "a", b"12345")
    put(tmp_path, 1, "b", b"678")
    weight_files.settle(tmp_path, 1, weight_files.held(tmp_path, 1))
    put(tmp_path, 1, "a", b"54321")
    weight_files.settle(tmp_path, 1, weight_files.held(tmp_path, 1))
    assert [(tmp_path / "version-1" / name).read_bytes() for name in "ab"] == [b"54321", b"678"]


def test_what_was_damaged_or_cut_off_does_not_count(tmp_path: Path) -> None:
    assert "damaged" in put(tmp_path, 1, "a", b"12345", sha256(b"12346").hexdigest())
    with pytest.raises(EOFError), weight_files.arriving(tmp_path, 1, "b") as file:
        file.take(b"12")
        raise EOFError
    assert weight_files.held(tmp_path, 1) == {}
    assert list((tmp_path / "arriving-1").iterdir()) == []


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a\0"])
def test_a_name_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a valid name"):
        put(tmp_path, 1, name, b"1")
