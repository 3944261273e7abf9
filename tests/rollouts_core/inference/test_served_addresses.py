"""Where a model beside the policy is asked."""

import json
from pathlib import Path

import anyio
import pytest

from rollouts_core.errors import BadInput, EngineUnavailable
from rollouts_core.inference.endpoints import served
from rollouts_core.inference.endpoints.served import Addresses, addresses_of, announce


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of its servers' job."""
    monkeypatch.setenv(served.VARIABLE, "{}")
    announce({"grader": tmp_path})
    return tmp_path


def tell(directory: Path, **states: str) -> None:
    replicas = [{"name": name, "url": f"http://{name}", "state": state} for name, state in states.items()]
    file = directory / "unfinished"
    file.write_text(json.dumps({"replicas": replicas, "router": None, "memory": None}))
    file.rename(directory / "servers.json")


async def first(addresses: Addresses) -> str:
    async with addresses.one() as url:
        return url


def test_a_request_goes_to_the_replica_with_the_fewest(grader: Path) -> None:
    tell(grader, a="ready", b="ready", c="starting")

    async def three() -> list[str]:
        addresses = addresses_of("served://grader/v1")
        async with addresses.one() as one, addresses.one() as two:
            return [one, two, await first(addresses)]

    one, two, three_ = anyio.run(three)
    assert {one, two} == {"http://a/v1", "http://b/v1"} and three_ in (one, two)


def test_a_replica_that_failed_is_left_alone_unless_it_is_the_only_one(grader: Path) -> None:
    async def failing() -> list[str]:
        addresses, found = addresses_of("served://grader"), []
        for states in ({"a": "ready", "b": "ready"}, {"a": "ready"}):
            tell(grader, **states)
            with pytest.raises(EngineUnavailable):
                async with addresses.one() as failed:
                    raise EngineUnavailable("gone")
            found += [failed, await first(addresses)]
        return found

    assert anyio.run(failing) == ["http://a", "http://b", "http://a", "http://a"]


def test_requests_wait_until_one_is_ready_and_say_why_when_none_comes(
    grader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def comes_late() -> str:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            return await first(addresses_of("served://grader"))

    async def later() -> None:
        await anyio.sleep(0.1)
        tell(grader, a="ready")

    assert anyio.run(comes_late) == "http://a"
    tell(grader, a="down")
    monkeypatch.setattr(served, "WAIT_SECONDS", 0.0)
    with pytest.raises(EngineUnavailable, match="served://grader: no server has answered for 0 s: none is ready"):
        anyio.run(first, addresses_of("served://grader"))


def test_a_model_that_the_run_does_not_have_is_named_with_those_it_has(grader: Path) -> None:
    with pytest.raises(BadInput, match=r"served://judge/v1: this run has no such model \(it has grader\)"):
        addresses_of("served://judge/v1")
    assert anyio.run(first, addresses_of("https://api.example/v1")) == "https://api.example/v1"
