"""Weights as they arrive on an engine machine."""

from hashlib import sha256
from pathlib import Path

import pytest

from infra.host import weight_files


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


def test_the_files_of_another_version_go_when_one_begins(tmp_path: Path) -> None:
    put(tmp_path, 1, "a", b"12345")
    weight_files.settle(tmp_path, 1, weight_files.held(tmp_path, 1))
    put(tmp_path, 2, "a", b"67890")
    assert [path.name for path in tmp_path.iterdir()] == ["arriving-2"]


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
    with pytest.raises(ValueError, match="is no name"):
        put(tmp_path, 1, name, b"1")
