"""Which replicas take part: new ones, failing ones, slow ones, those with other weights."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.errors import EngineUnavailable, WeightMismatch
from rollouts_core.inference import members as members_module
from rollouts_core.inference.engine import Completion, GenerationRequest, ModelLimits
from rollouts_core.inference.members import Giving, Members, Problems
from rollouts_core.inference.probing import TOLERANCE, outliers, probes
from rollouts_core.inference.replicas import Replica, Servers

LIMITS = ModelLimits(64, 24)


class Fleet:
    """Replicas that come and go as a test says."""

    def __init__(self, *names: str) -> None:
        self.there = {name: Replica(name, f"http://{name}/1") for name in names}
        self.restarted: list[str] = []

    def ready(self) -> Servers:
        return Servers(tuple(self.there.values()))

    def restart(self, replica: Replica, reason: str) -> None:
        self.restarted.append(replica.name)


class Weights:
    """Notes what was brought and swapped; fails as it is told."""

    def __init__(
        self, unreached: Sequence[str] = (), refused: Sequence[str] = (), error: Exception | None = None
    ) -> None:
        self.unreached, self.refused = set(unreached), set(refused)
        self.error = error or EngineUnavailable("away")
        self.brought: list[str] = []
        self.swapped: list[str] = []

    @property
    def giving(self) -> Giving:
        return Giving(self._bring, self._swap)

    async def _bring(self, replicas: Sequence[Replica]) -> Problems:
        self.brought += [replica.name for replica in replicas]
        return {replica.name: self.error for replica in replicas if replica.name in self.unreached}

    async def _swap(self, replicas: Sequence[Replica]) -> Problems:
        self.swapped += [replica.name for replica in replicas]
        return {replica.name: self.error for replica in replicas if replica.name in self.refused}


def bring(members: Members, version: int, weights: Weights) -> None:
    anyio.run(members.bring, version, weights.giving)


def serving(members: Members) -> set[str]:
    return {replica.name for replica in members.serving()}


def test_a_replica_serves_once_it_has_the_version_and_a_new_start_of_it_not_before() -> None:
    fleet = Fleet("a", "b")
    members = Members(fleet, 1.0)
    bring(members, 1, Weights())
    assert serving(members) == {"a", "b"} and not members.newcomers()
    fleet.there["b"] = Replica("b", "http://b/2")
    assert serving(members) == {"a"} and [replica.name for replica in members.newcomers()] == ["b"]
    again = Weights()
    bring(members, 1, again)
    assert again.swapped == ["b"] and serving(members) == {"a", "b"}


def test_what_can_t_be_reached_is_left_and_what_refuses_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet("a", "b", "c")
    members = Members(fleet, 1.0)
    bring(members, 1, Weights(unreached=["b"], refused=["c"]))
    assert serving(members) == {"a"} and fleet.restarted == ["c"]
    assert members.newcomers() == [], "both have just failed"
    monkeypatch.setattr(members_module, "AGAIN_SECONDS", 0.0)
    assert {replica.name for replica in members.newcomers()} == {"b", "c"}


def test_the_old_version_serves_until_the_new_one_has_been_brought() -> None:
    members = Members(Fleet("a"), 1.0)
    bring(members, 1, Weights())
    seen: list[set[str]] = []

    async def look(replicas: Sequence[Replica]) -> Problems:
        seen.append(serving(members))
        return {}

    async def nothing(replicas: Sequence[Replica]) -> Problems:
        return {}

    anyio.run(members.bring, 2, Giving(look, nothing))
    assert seen == [{"a"}] and members.version == 2


def test_too_few_are_waited_for_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "LOOK_SECONDS", 0.01)
    members = Members(Fleet("a"), 0.05, least=2)
    with pytest.raises(EngineUnavailable, match="given to 1 servers of the 2 that are needed"):
        bring(members, 1, Weights())
    with pytest.raises(EngineUnavailable, match="1 servers have weight version 1, and 2 are needed"):
        members.serving()


def test_weights_that_all_refuse_are_told_as_such() -> None:
    with pytest.raises(WeightMismatch, match="wrong shape"):
        bring(Members(Fleet("a"), 1.0), 1, Weights(refused=["a"], error=WeightMismatch("wrong shape")))


def shares(members: Members, requests: int, seconds: Callable[[str], float], of_session: int = 0) -> Counter[str]:
    """How many of requests under way at once each replica gets, once its speed is known; so many make a session."""
    for replica in members.serving():
        members.answered(replica, 100, seconds(replica.name))
    places: Counter[str] = Counter()
    held: list[Any] = []
    for number in range(requests):
        held.append(members.chosen(f"group-{number // of_session}" if of_session else ""))
        places[held[-1].__enter__().name] += 1
    for one in held:
        one.__exit__(None, None, None)
    return places


def test_requests_are_shared_out_by_speed() -> None:
    members = Members(Fleet("fast", "also", "slow"), 1.0)
    bring(members, 1, Weights())
    places = shares(members, 210, lambda name: 10.0 if name == "slow" else 1.0)
    assert places == {"fast": 100, "also": 100, "slow": 10}


def test_groups_are_shared_out_by_speed_and_stay_whole() -> None:
    members = Members(Fleet("fast", "also", "slow"), 1.0)
    bring(members, 1, Weights())
    places = shares(members, 210, lambda name: 10.0 if name == "slow" else 1.0, of_session=5)
    assert places == {"fast": 100, "also": 100, "slow": 10}


def test_what_is_remembered_of_sessions_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "SESSIONS", 10)
    members = Members(Fleet("a", "b"), 1.0)
    bring(members, 1, Weights())
    for number in range(100):
        with members.chosen(f"group-{number}"):
            pass
    assert len(members._homes) == 10


def test_tokens_of_each_replica_are_told_once() -> None:
    members = Members(Fleet("a", "b"), 1.0)
    bring(members, 1, Weights())
    members.answered(members.serving()[0], 7, 1.0)
    assert members.take_tokens() == {"a": 7, "b": 0}
    assert members.take_tokens() == {"a": 0, "b": 0}


@settings(deadline=None)
@given(st.sets(st.text(min_size=1), max_size=30))
def test_a_session_stays_while_its_replica_serves(sessions: set[str]) -> None:
    fleet = Fleet("a", "b", "c")
    members = Members(fleet, 1.0)
    bring(members, 1, Weights())

    def places() -> dict[str, str]:
        found = {}
        for session in sessions:
            with members.chosen(session) as replica:
                found[session] = replica.name
        return found

    before = places()
    assert places() == before
    del fleet.there["c"]
    assert {session: name for session, name in places().items() if before[session] != "c"} == {
        session: name for session, name in before.items() if name != "c"
    }


def test_a_replica_that_says_something_else_is_not_let_in() -> None:
    members = Members(Fleet("a", "b", "c"), 1.0)

    async def ask(request: GenerationRequest, replica: Replica) -> Completion:
        return Completion(request.request_id, (1,), (-1.5 if replica.name == "c" else -0.5,), (1,), "length")

    problems = anyio.run(members.probed, list(members.servers().replicas), LIMITS, ask)
    assert list(problems) == ["c"] and "log-probabilities differ by 1" in str(problems["c"])


def test_outliers_are_those_far_from_the_median() -> None:
    assert outliers({"a": [-1.0], "b": [-1.0 + TOLERANCE / 2], "c": [-1.0]}) == {}
    assert list(outliers({"a": [-1.0, -2.0], "b": [-1.0, -2.0], "c": [-1.0, float("nan")]})) == ["c"]
    assert list(outliers({"a": [-1.0], "b": [-3.0]})) == ["a", "b"]
    assert outliers({"a": [-1.0]}) == {}


def test_probes_fit_any_model() -> None:
    for request in probes(ModelLimits(4, 3)):
        assert 0 < len(request.prompt_tokens) < 4 and all(0 <= token < 3 for token in request.prompt_tokens)
