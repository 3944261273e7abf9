"""What is remembered of artifacts: as they are, whatever became of the memory."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts_core.errors import StoreError
from rollouts_core.store import remembered as remembered_module
from rollouts_core.store import remote
from rollouts_core.store.elsewhere import note_elsewhere
from rollouts_core.store.index import features_of, open_index
from rollouts_core.store.local import LocalStore
from rollouts_core.store.manifest import ArtifactId, Manifest, Provenance, encode_manifest
from rollouts_core.store.remembered import FILE
from rollouts_core.store.store import Store, open_store
from tests.rollouts_core.store.artifacts import made_from, put


def key(number: int) -> str:
    return f"{number:064x}"[::-1]


def sft(number: int, stage: str = "sft") -> ArtifactId:
    return ArtifactId(stage, key(number))


def names(store: Store) -> set[str]:
    with open_index(store) as index:
        return {known.artifact.directory for known in index.all()}


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(tmp_path / "home")
    url = request.getfixturevalue("s3_url") if request.param == "s3" else f"memory://{tmp_path.name}"
    return open_store(tmp_path / "home", url)


def test_it_follows_the_store(store: Store, tmp_path: Path) -> None:
    """Here, and in the home of another who uses the same store."""
    others = [store, open_store(tmp_path / "another home", store.url)] if store.url else [store]
    assert [names(one) for one in others] == [set()] * len(others)
    for number in (1, 2):
        put(store, sft(number), made_from({"rate": number}))
    assert [names(one) for one in others] == [{sft(1).directory, sft(2).directory}] * len(others)
    store.discard(sft(1))
    put(store, sft(3), made_from({"rate": 3}))
    assert [names(one) for one in others] == [{sft(2).directory, sft(3).directory}] * len(others)
    put(store, sft(1), made_from({"rate": 1}, started_at="2026-02-02T00:00:00+00:00"))
    for one in others:
        with open_index(one) as index:
            assert index.of_keys([key(1)])[key(1)].started_at.startswith("2026-02")


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b"no database " * 400),
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: sqlite3.connect(file).execute("PRAGMA user_version = 0").connection.commit(),
    ],
    ids=["lost", "another file", "cut off", "another version"],
)
def test_a_memory_that_is_lost_or_damaged_is_made_anew(harm: Callable[[Path], Any], tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(40):
        put(store, sft(number), made_from({"rate": number}))
    before = names(store)
    harm(tmp_path / FILE)
    assert names(store) == before == {sft(number).directory for number in range(40)}


def test_where_none_can_be_written_it_is_in_memory(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put(store, sft(1), made_from({}))
    (tmp_path / FILE).mkdir()
    assert names(store) == {sft(1).directory}


def test_on_a_full_disk_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    put(store, sft(1), made_from({}))
    monkeypatch.setattr(remembered_module, "MIN_FREE_BYTES", 2**62)
    assert names(store) == {sft(1).directory}
    assert not (tmp_path / FILE).exists()


def test_a_file_that_another_writes_to_or_that_may_not_grow_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered_module, "BUSY_SECONDS", 0.1)
    store = LocalStore(tmp_path)
    put(store, sft(1), made_from({}))
    assert names(store) == {sft(1).directory}
    put(store, sft(2), made_from({}))
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert names(store) == {sft(1).directory, sft(2).directory}
    size = (tmp_path / FILE).stat().st_size
    for number in range(3, 60):
        put_quickly(store, sft(number), made_from({"rate": number}))
    code = (
        "import resource, signal, sys; from pathlib import Path; from rollouts_core.store.index import open_index; "
        "from rollouts_core.store.local import LocalStore; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "with open_index(LocalStore(Path(sys.argv[1]))) as index: print(len(index.all()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(size)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "59\n"


def test_reading_holds_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take minutes with a remote store, and is what others wait for."""
    store = LocalStore(tmp_path)
    put(store, sft(1), made_from({}))
    read = store.read_manifests

    def slowly(directories: Collection[str]) -> Iterator[tuple[str, Manifest]]:
        with closing(sqlite3.connect(tmp_path / FILE, timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")
        yield from read(directories)

    monkeypatch.setattr(store, "read_manifests", slowly)
    assert names(store) == {sft(1).directory}
    assert (tmp_path / FILE).stat().st_size


def test_damage_that_shows_late_is_told_and_mended_by_the_next_command(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(200):
        put_quickly(store, sft(number), made_from({"rate": number}))
    assert len(names(store)) == 200
    content = bytearray((tmp_path / FILE).read_bytes())
    content[len(content) // 2 : len(content) // 2 + 40_000] = b"\x07" * 40_000
    (tmp_path / FILE).write_bytes(content)
    with suppress(StoreError):
        names(store)
    assert len(names(store)) == 200


def put_quickly(store: LocalStore, artifact: ArtifactId, provenance: Provenance) -> None:
    """Without a lease and without flushing."""
    directory = store.home / "artifacts" / artifact.directory
    (directory / "files").mkdir(parents=True)
    (directory / "manifest.json").write_bytes(encode_manifest(Manifest(artifact, (), provenance)))


def test_several_that_come_at_once_all_get_an_answer(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(20):
        put(store, sft(number), made_from({"rate": number}))
    code = (
        "import sys; from pathlib import Path; from rollouts_core.store.index import open_index; "
        "from rollouts_core.store.local import LocalStore; store = LocalStore(Path(sys.argv[1]))\n"
        "with open_index(store) as index: print(len(index.all()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [one.communicate(timeout=60)[0] for one in several] == ["20\n"] * 4


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_nearest_is_the_one_that_a_plain_comparison_finds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Specs with fields that others lack; ties go to the name, then to the latest."""
    values = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2), min_size=1)
    made = data.draw(st.lists(st.tuples(values, st.sampled_from(["rl-1", "rl-2"]), st.integers(0, 3)), max_size=8))
    asked, stage = data.draw(values), data.draw(st.sampled_from(["rl-1", "rl-2"]))
    without = {key(number) for number in data.draw(st.sets(st.integers(0, 7)))}
    store = LocalStore(tmp_path_factory.mktemp("store"))
    known: dict[ArtifactId, Manifest] = {}
    for number, (spec, name, day) in enumerate(made):
        put(store, sft(number, name), made_from(spec, started_at=f"2026-01-0{day + 1}"))
        known[sft(number, name)] = store.manifest(sft(number, name))
    wanted = features_of(1, asked, {}, {})
    with open_index(store) as index:
        found = index.nearest("rl", stage, wanted, without)

    def order(manifest: Manifest) -> tuple[int, bool]:
        theirs = features_of(1, manifest.provenance.spec, {}, {})
        apart = sum(theirs.get(name) != wanted.get(name) for name in {*theirs, *wanted})
        unknown = sum(
            all(name not in features_of(1, o.provenance.spec, {}, {}) for o in known.values()) for name in wanted
        )
        return apart - unknown, manifest.artifact.stage != stage

    candidates = [manifest for artifact, manifest in known.items() if artifact.key not in without]
    if not candidates:
        assert found is None
        return
    assert found is not None
    best = min(map(order, candidates))
    alike = [manifest for manifest in candidates if order(manifest) == best]
    assert order(known[found.artifact]) == best
    assert found.started_at == max(manifest.provenance.started_at for manifest in alike)


def test_what_was_seen_elsewhere_counts_and_the_store_comes_first(tmp_path: Path) -> None:
    here, there = LocalStore(tmp_path / "here"), LocalStore(tmp_path / "there")
    for number in (1, 2):
        put(there, sft(number), made_from({"rate": number}))
        note_elsewhere(here.home, "gpu1", there.manifest(sft(number)))
    put(here, sft(1), made_from({"rate": 1}))
    with open_index(here) as index:
        assert {found.machine for found in index.of_keys([key(2)]).values()} == {"gpu1"}
        assert {found.machine for found in index.of_keys([key(1)]).values()} == {""}
        assert index.beginning("sft-") == [sft(1)]
        nearest = index.nearest("sft", "sft", features_of(1, {"rate": 2}, {}, {}), ())
        assert nearest is not None and nearest.machine == "gpu1"


def test_artifacts_are_found_by_how_name_or_key_begins(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in (1, 2, 17):
        put(store, sft(number), made_from({}))

    with open_index(store) as index:
        assert index.beginning(key(1)[:5]) == [sft(1)]
        assert set(index.beginning("sft-")) == {sft(1), sft(2), sft(17)}
        assert index.beginning(sft(2).directory) == [sft(2)]
        assert index.beginning("rl-") == []


def test_news_of_the_journal_are_read_day_by_day_and_all_is_listed_now_and_then(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "home", s3_url)
    put(store, sft(1), made_from({}))
    assert names(store) == {sft(1).directory}
    mark = store.published(None).mark
    assert mark is not None
    listed: list[str] = []
    monkeypatch.setattr(remote.RemoteObjects, "folders", lambda self, prefix: listed.append(prefix) or [], raising=True)
    today = datetime.now(UTC).date()
    for days, expected in ((0, 3), (3, 6), (remote.LISTED_DAYS, 1)):
        listed.clear()
        before = today - timedelta(days=days)
        assert store.published(f"{before} {before}").whole == (expected == 1)
        assert len(listed) == expected
