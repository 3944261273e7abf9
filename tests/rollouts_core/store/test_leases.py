"""Who makes what: exclusion, waiting, death, pauses, and losing the right."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rollouts_core.errors import LeaseLost, StoreError
from rollouts_core.store.leases import Claim, Holder, Lease, live_leases
from rollouts_core.store.maker import making
from rollouts_core.store.objects import LocalObjects, Objects, RemoteObjects
from rollouts_core.store.store import open_store
from tests.rollouts_core.store.test_store import ARTIFACT, PROVENANCE

SHORT = 0.6
"""Seconds of a lease here."""
ELSEWHERE = Holder("them", "far", "another kernel", 1, "1", "2026-01-01T00:00:00+00:00")


@pytest.fixture(params=["local", "memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "local":
        return LocalObjects(tmp_path)
    if request.param == "memory":
        return RemoteObjects(f"memory://{tmp_path.name}")
    return RemoteObjects(request.getfixturevalue("s3_url"))


def ignore(reason: str) -> None: ...


def taken(objects: Objects, seconds: float = SHORT, on_lost: Callable[[str], None] = ignore) -> Lease:
    lease = Claim(objects, "x", seconds).attempt(on_lost)
    assert lease is not None
    return lease


def write_holder(objects: Objects, generation: int, holder: Holder) -> None:
    objects.write(f"leases/x/{generation:08d}.json", json.dumps(asdict(holder)).encode())


def test_objects_are_created_once(objects: Objects) -> None:
    assert objects.create("a/b", b"1")
    assert not objects.create("a/b", b"2")
    assert objects.read("a/b") == b"1"
    objects.write("a/b", b"3")
    assert (objects.read("a/b"), objects.read("a/c"), objects.names("a"), objects.names("z")) == (
        b"3",
        None,
        ["a/b"],
        [],
    )
    objects.delete("a/b")
    objects.delete("a/b")
    assert objects.names("a") == []


def test_of_many_at_once_one_gets_it(objects: Objects) -> None:
    start = threading.Barrier(8)

    def attempt(number: int) -> Lease | None:
        start.wait()
        return Claim(objects, "x").attempt(ignore)

    with ThreadPoolExecutor(8) as pool:
        leases = [lease for lease in pool.map(attempt, range(8)) if lease is not None]
    assert len(leases) == 1
    leases[0].check()
    leases[0].release()


def test_released_it_goes_to_the_next_with_a_higher_generation(objects: Objects) -> None:
    first = taken(objects)
    claim = Claim(objects, "x", SHORT)
    assert claim.attempt(ignore) is None
    assert claim.holder is not None
    assert str(os.getpid()) in str(claim.holder)
    first.release()
    assert live_leases(objects) == {}
    second = taken(objects)
    assert second.generation == first.generation + 1
    second.release()


def test_no_late_beat_revives_a_released_lease(objects: Objects) -> None:
    lease = taken(objects, seconds=0.06)
    time.sleep(0.2)  # some beats
    lease.release()
    before = objects.read("leases/x/00000001.json")
    assert json.loads(before or b"")["released"]
    time.sleep(0.1)  # beats would come
    assert objects.read("leases/x/00000001.json") == before


def test_a_beating_holder_elsewhere_keeps_it_and_a_still_one_loses_it(objects: Objects) -> None:
    claim = Claim(objects, "x", SHORT)
    for beat in range(4):
        write_holder(objects, 1, replace(ELSEWHERE, beat=beat))
        assert claim.attempt(ignore) is None
        time.sleep(SHORT / 2)
    time.sleep(SHORT)
    lease = claim.attempt(ignore)
    assert lease is not None
    assert lease.generation == 2
    lease.release()


def test_whoever_was_taken_over_notices_and_may_not_go_on(objects: Objects) -> None:
    lost: queue.Queue[str] = queue.Queue()
    lease = taken(objects, on_lost=lost.put)
    write_holder(objects, 2, ELSEWHERE)
    with pytest.raises(LeaseLost, match="taken over"):
        lease.check()
    assert "taken over" in lost.get(timeout=10)
    lease.release()
    assert json.loads(objects.read("leases/x/00000002.json") or b"")["owner"] == "them"


def test_a_holder_that_cannot_reach_the_store_gives_up(tmp_path: Path) -> None:
    noticed = threading.Event()
    lease = taken(LocalObjects(tmp_path / "store"), on_lost=lambda reason: noticed.set())
    (tmp_path / "store").rename(tmp_path / "gone")
    (tmp_path / "store").write_text("not a directory")
    assert noticed.wait(10)
    with pytest.raises(LeaseLost, match="could not be renewed"):
        lease.check()


MAKER = """
import sys; from pathlib import Path
from tests.rollouts_core.store.test_store import ARTIFACT, PROVENANCE
from rollouts_core.store.maker import making
from rollouts_core.store.store import open_store
with making(open_store(Path(sys.argv[1]), sys.argv[2] or None), ARTIFACT, 5, lease_seconds=1.0) as place:
    (place.out / "file").write_text("first")
    (place.scratch / "checkpoint").write_text("partial")
    print("made", flush=True)
    sys.stdin.readline()
    place.publish(PROVENANCE)
"""


@pytest.fixture
def maker(tmp_path: Path, request: pytest.FixtureRequest) -> "Iterator[subprocess.Popen[str]]":
    """A process that has filled in the artifact, and publishes it when told to."""
    url = request.getfixturevalue("s3_url") if request.param == "s3" else ""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(tmp_path / "home"), url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def store_of(process: "subprocess.Popen[str]") -> tuple[Path, str | None]:
    *_, home, url = process.args  # type: ignore[misc]
    return Path(str(home)), str(url) or None


@pytest.mark.parametrize("maker", ["local", "s3"], indirect=True)
def test_a_killed_maker_is_succeeded_at_once_and_its_partial_work_taken_up(maker: "subprocess.Popen[str]") -> None:
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait()
    with making(open_store(*store_of(maker)), ARTIFACT, 5, lease_seconds=3600) as place:
        assert place is not None
        assert (place.scratch / "checkpoint").read_text() == "partial"
        assert not any(place.out.iterdir())


@pytest.mark.parametrize("maker", ["local", "s3"], indirect=True)
def test_who_waits_says_for_whom_and_takes_what_the_other_made(maker: "subprocess.Popen[str]") -> None:
    reasons: list[str] = []

    def say(reason: str) -> None:
        reasons.append(reason)
        assert maker.stdin is not None
        maker.stdin.write("go\n")
        maker.stdin.flush()

    store = open_store(*store_of(maker))
    with making(store, ARTIFACT, 30, say=say) as place:
        assert place is None
    assert (store.open(ARTIFACT) / "file").read_text() == "first"
    assert len(reasons) == 1
    assert f"process {maker.pid}" in reasons[0]


@pytest.mark.parametrize("maker", ["local", "s3"], indirect=True)
def test_waiting_has_a_deadline(maker: "subprocess.Popen[str]") -> None:
    with (
        pytest.raises(StoreError, match=f"it is being made by process {maker.pid}"),
        making(open_store(*store_of(maker)), ARTIFACT, 0.3),
    ):
        pass


@pytest.mark.parametrize("maker", ["local", "s3"], indirect=True)
@pytest.mark.parametrize("published", [True, False])
def test_a_paused_maker_cannot_publish_over_its_successor(maker: "subprocess.Popen[str]", published: bool) -> None:
    store = open_store(*store_of(maker))
    os.kill(maker.pid, signal.SIGSTOP)
    with making(store, ARTIFACT, 30, lease_seconds=1.0) as place:
        assert place is not None, "the paused maker's lease lapsed"
        assert (place.scratch / "checkpoint").read_text() == "partial"
        (place.out / "file").write_text("second")
        if published:
            place.publish(PROVENANCE)
        os.kill(maker.pid, signal.SIGCONT)
        _, errors = maker.communicate("go\n", timeout=30)
        assert maker.returncode != 0
        assert "LeaseLost" in errors or "FileNotFoundError" in errors
        if not published:
            place.publish(PROVENANCE)
    assert (store.open(ARTIFACT) / "file").read_text() == "second"
    assert live_leases(store.objects) == {}
