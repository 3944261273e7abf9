"""Trees on their way: whatever is interrupted, what arrives is what was sent, or it is refused."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.host import trees
from infra.host.trees import BadTree, Entry

NAMES = ("a", "folder/b", "folder/deeper/c", "d e", "f")
SMALL_STRETCH = 16


@pytest.fixture(autouse=True)
def _small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "STRETCH", SMALL_STRETCH)
    monkeypatch.setattr(trees, "PIECE", 5)


def written(root: Path, contents: dict[str, bytes]) -> list[Entry]:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return [(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()]


def reader(data: bytes) -> Callable[[int], bytes]:
    left = memoryview(data)

    def read(count: int) -> bytes:
        nonlocal left
        piece, left = bytes(left[:count]), left[count:]
        return piece

    return read


@settings(max_examples=60, deadline=None)
@given(
    contents=st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=70), min_size=1),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    streams=st.integers(1, 3),
)
def test_whatever_is_cut_off_the_rest_completes_it(contents: dict[str, bytes], cuts: list[int], streams: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root, incoming = Path(directory) / "root", Path(directory) / "incoming"
        entries = written(root, contents)
        for cut in [*cuts, None]:
            missing = trees.begin(incoming, entries, {})
            for first in range(streams):
                data = b"".join(trees.frames(root, entries, missing[first::streams]))
                try:
                    trees.receive(incoming, entries, reader(data[:cut]))
                except EOFError:
                    assert cut is not None
        assert trees.begin(incoming, entries, {}) == []
        assert trees.finish(incoming, entries) == []
        assert {name: (incoming / "files" / name).read_bytes() for name in contents} == contents


def test_only_what_is_missing_travels(tmp_path: Path) -> None:
    entries = written(tmp_path / "root", {"large": bytes(range(40)), "small": b"small"})
    missing = trees.begin(tmp_path / "incoming", entries, {})
    assert missing == [(0, 0, 16), (0, 16, 16), (0, 32, 8), (1, 0, 5)]
    first = b"".join(trees.frames(tmp_path / "root", entries, missing[:2]))
    trees.receive(tmp_path / "incoming", entries, reader(first))
    assert trees.begin(tmp_path / "incoming", entries, {}) == missing[2:]


def test_a_file_that_is_known_is_linked_and_never_written_to(tmp_path: Path) -> None:
    entries = written(tmp_path / "root", {"large": bytes(range(40))})
    known = {entries[0][2]: tmp_path / "root" / "large"}
    assert trees.begin(tmp_path / "incoming", entries, known) == []
    assert trees.begin(tmp_path / "incoming", entries, {}) == []
    evil = trees.HEADER.pack(0, 0, 4) + b"evil" + trees.HEADER.pack(trees.END, 0, 0)
    with pytest.raises(BadTree, match="nothing is written to it"):
        trees.receive(tmp_path / "incoming", entries, reader(evil))
    assert (tmp_path / "root" / "large").read_bytes() == bytes(range(40))


def test_damage_is_named_and_only_the_damaged_file_travels_again(tmp_path: Path) -> None:
    entries = written(tmp_path / "root", {"large": bytes(range(40)), "small": b"small"})
    missing = trees.begin(tmp_path / "incoming", entries, {})
    trees.receive(tmp_path / "incoming", entries, reader(b"".join(trees.frames(tmp_path / "root", entries, missing))))
    (tmp_path / "incoming" / "files" / "large").write_bytes(bytes(40))
    assert trees.finish(tmp_path / "incoming", entries) == ["large"]
    assert {index for index, _, _ in trees.begin(tmp_path / "incoming", entries, {})} == {0}


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "", ".", "a//b", "a/./b", "a\0b", "a/"])
def test_names_that_leave_or_are_no_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadTree):
        trees.begin(tmp_path / "incoming", [(name, 1, "0" * 64)], {})
    assert not (tmp_path / "incoming").exists()


@pytest.mark.parametrize("frame", [(1, 0, 4), (0, 2, 4), (0, 0, 5), (7, 0, 0)])
def test_frames_that_do_not_belong_to_the_tree_are_refused(tmp_path: Path, frame: tuple[int, int, int]) -> None:
    entries = written(tmp_path / "root", {"file": b"four"})
    trees.begin(tmp_path / "incoming", entries, {})
    with pytest.raises(BadTree, match="does not belong"):
        trees.receive(tmp_path / "incoming", entries, reader(trees.HEADER.pack(*frame) + b"evil!"))


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    entries = written(tmp_path / "root", {"file": b"four"})
    missing = trees.begin(tmp_path / "incoming", entries, {})
    (tmp_path / "incoming" / "files" / "file").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        trees.receive(
            tmp_path / "incoming", entries, reader(b"".join(trees.frames(tmp_path / "root", entries, missing)))
        )
    assert not (tmp_path / "elsewhere").exists()
