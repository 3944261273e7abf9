"""Servers that stay for the next run: joined by who wants the same, in nobody's way, gone in time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.host import gpu_leases, jobs, keeping
from tests.conftest import until

Start = Callable[..., str]


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "leases", tmp_path / "jobs"


@pytest.fixture
def start(places: tuple[Path, Path]) -> Iterator[Start]:
    """Starts a job on a lease of a run that is then gone; returns the lease's name."""

    def begin(name: str, unattended: float = 600.0) -> str:
        job = {
            "name": name, "command": ["sleep", "600"], "spec": {}, "time_limit": 600.0, "unattended_limit": unattended,
            "stall_limit": 600.0,
        }  # fmt: skip
        keeping.place(places[1], name)
        lease = str(gpu_leases.acquire(*places, ask(f"run of {name}"))["lease"])
        assert gpu_leases.use(places[0], lease, f"run of {name}", name)
        jobs.start(places[1], job, jobs.runner_command(), {})
        return lease

    yield begin
    for name in jobs.running(places[1]):
        jobs.cancel(places[1], name)


def ask(token: str, label: str = "", gpus: int = 1) -> dict[str, Any]:
    return {"token": token, "who": token, "gpus": gpus, "among": [0], "jobs": [], "label": label}


def keep(places: tuple[Path, Path], name: str, seconds: float = 600.0) -> None:
    assert keeping.keep(places[1], name, "label", "key", seconds)
    gpu_leases.release(*places, f"run of {name}", True)


def test_who_wants_the_same_joins_the_lease_and_takes_the_job_over(places: tuple[Path, Path], start: Start) -> None:
    lease = start("first")
    (places[1] / "first" / keeping.HANDED).write_text("a key")
    keep(places, "first")
    had = gpu_leases.acquire(*places, ask("second", "label"))
    assert (had["lease"], had["kept"]["job"], had["kept"]["key"]) == (lease, "first", "key")
    assert not (places[1] / "first" / keeping.HANDED).exists()
    assert keeping.take_over(places[1], "first", "mine")
    assert gpu_leases.pass_on(places[0], lease, "second", "the second", "mine")
    assert jobs.poll(places[1], "mine") == {"state": "running"}
    assert jobs.poll(places[1], "first") == {"state": "absent"}
    assert jobs.running(places[1]) == ["mine"]
    (living,) = gpu_leases.living(*places)
    assert (living["who"], living["running"], living["kept"]) == ("the second", ["mine"], None)
    jobs.cancel(places[1], "mine")
    assert jobs.poll(places[1], "mine")["state"] == "finished"


def test_the_same_run_takes_its_own_servers_over(places: tuple[Path, Path], start: Start) -> None:
    lease = start("first")
    keep(places, "first")
    assert gpu_leases.acquire(*places, {**ask("again"), "jobs": ["first"]})["kept"]["job"] == "first"
    assert keeping.take_over(places[1], "first", "first")
    assert gpu_leases.pass_on(places[0], lease, "again", "again", "first")
    assert jobs.running(places[1]) == ["first"] and gpu_leases.living(*places)[0]["kept"] is None


def test_only_one_of_two_that_want_the_same_gets_it(places: tuple[Path, Path], start: Start) -> None:
    start("first")
    keep(places, "first")
    assert "kept" in gpu_leases.acquire(*places, ask("second", "label"))
    assert "busy" in gpu_leases.acquire(*places, ask("third", "label"))
    gpu_leases.release(*places, "second", True)
    assert gpu_leases.acquire(*places, ask("third", "label"))["kept"]["job"] == "first"


@pytest.mark.parametrize("label", ["", "another"])
def test_who_wants_something_else_has_the_gpus_when_it_has_ended(
    label: str, places: tuple[Path, Path], start: Start
) -> None:
    start("first")
    keep(places, "first")
    assert "busy" in gpu_leases.acquire(*places, ask("second", label))
    had = until(lambda: "lease" in (got := gpu_leases.acquire(*places, ask("second", label))) and got, "the lease")
    assert (had["gpus"], had["kept"]) == ([0], None)


def test_a_job_that_is_used_gives_way_to_nobody(places: tuple[Path, Path], start: Start) -> None:
    start("first")
    assert "busy" in gpu_leases.acquire(*places, ask("second"))
    assert not (places[1] / "first" / "cancel").exists()


def test_it_ends_in_time(places: tuple[Path, Path], start: Start) -> None:
    start("first", unattended=600.0)
    keep(places, "first", seconds=1.0)
    until(lambda: jobs.poll(places[1], "first")["state"] == "finished", "its end")
    assert jobs.poll(places[1], "first")["reason"] == "unattended"


def test_what_has_ended_is_neither_kept_nor_taken_over(places: tuple[Path, Path], start: Start) -> None:
    start("first")
    jobs.cancel(places[1], "first")
    assert not keeping.keep(places[1], "first", "label", "key", 600.0)
    assert not keeping.take_over(places[1], "first", "mine")
