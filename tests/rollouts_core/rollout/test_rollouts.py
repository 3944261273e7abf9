"""The rollout managers: what makes a batch, whatever ends first, and what happens when engines and rewards fail."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.concurrency import first_error
from rollouts_core.data.prompts import DataBuffer, check_vocabulary
from rollouts_core.errors import (
    BadInput,
    EngineRefused,
    EngineUnavailable,
    MalformedAnswer,
    RewardFailed,
    RolloutsStalled,
)
from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.rewards.scoring import ScoringSettings
from rollouts_core.rollout.filters import SHIPPED, GroupFilter, identify_filter, load_filter
from rollouts_core.rollout.groups import Group, Outcome, best_filled, choose
from rollouts_core.rollout.manager import AsyncRolloutManager, GeneratedBatch
from rollouts_core.rollout.overlap import OverlappedRollouts
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Message, Prompt, Sample, Status
from tests.rollouts_core.models import character_tokenizer

CONFIG = RolloutConfig(batch_size=4, n_samples_per_prompt=3, max_new_tokens=6, temperature=1.0, seed=1)
DEADLINE = 20.0


@dataclass
class ScriptedEngine:
    """Answers follow from the request's seed; how long each takes, and what goes wrong, is the test's to say."""

    turns: Callable[[GenerationRequest], int] = lambda request: 0
    fail: Callable[[GenerationRequest, int], Exception | None] = lambda request, tries: None
    weight_version: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    under_way: int = 0
    most_under_way: int = 0
    aborted: set[str] = field(default_factory=set)

    async def generate(self, request: GenerationRequest) -> Completion:
        name = request.request_id
        self.asked[name] = self.asked.get(name, 0) + 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if error := self.fail(request, self.asked[name]):
                raise error
            versions: list[int] = []
            left = request.max_new_tokens - len(request.generated)
            for _ in range(left):
                for _ in range(self.turns(request)):
                    await anyio.lowlevel.checkpoint()
                    if name in self.aborted:
                        self.aborted.discard(name)
                        return self._answer(request, versions, "abort")
                versions.append(self.weight_version)
            return self._answer(request, versions, "length")
        finally:
            self.under_way -= 1

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted |= set(request_ids)

    def _answer(self, request: GenerationRequest, versions: list[int], reason: Any) -> Completion:
        begin = len(request.generated)
        tokens = tuple(2 + (request.seed + begin + place) % 10 for place in range(len(versions)))
        return Completion(request.request_id, tokens, (-1.0,) * len(tokens), tuple(versions), reason)


def prompts(count: int = 12) -> list[Prompt]:
    return [Prompt((Message("user", str(row)),), (2, 3 + row % 5), {"answer": str(row)}, row) for row in range(count)]


async def by_row(sample: Sample) -> float:
    """Each sample its own reward, so that no group has but one; in no thread, whose time is nobody's to say."""
    return sample.prompt.source_row + 0.1 * sample.episode


def manager_of(engine: Any, **settings_: Any) -> AsyncRolloutManager:
    reward: Any = settings_.pop("reward", by_row)
    filters = settings_.pop("filters", {})
    buffer = DataBuffer(prompts(), 0)
    return AsyncRolloutManager(engine, character_tokenizer(), buffer, reward, replace(CONFIG, **settings_), filters)


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        with anyio.fail_after(DEADLINE):
            return await test()

    return anyio.run(main)


def batches(manager: AsyncRolloutManager, count: int) -> list[GeneratedBatch]:
    async def make() -> list[GeneratedBatch]:
        return [await manager.generate_batch(step) for step in range(1, count + 1)]

    found: list[GeneratedBatch] = run(make)
    return found


def rows(batch: GeneratedBatch) -> list[int]:
    return [sample.prompt.source_row for sample in batch.samples[:: CONFIG.n_samples_per_prompt]]


def even_rows(samples: Sequence[Sample]) -> bool:
    return samples[0].prompt.source_row % 2 == 0


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1.0, 1.5, 2.0]), st.sampled_from([{}, {"even": even_rows}]))
def test_the_batch_is_the_same_whatever_ends_first(
    delays: int, over_sampling: float, filters: dict[str, GroupFilter]
) -> None:
    def slow(request: GenerationRequest) -> int:
        return hash((delays, request.request_id)) % 7

    expected = batches(manager_of(ScriptedEngine(), over_sampling_factor=over_sampling, filters=filters), 3)
    found = batches(manager_of(ScriptedEngine(slow), over_sampling_factor=over_sampling, filters=filters), 3)
    assert [batch.samples for batch in found] == [batch.samples for batch in expected]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["pending", "accepted", "refused"]), max_size=12), st.integers(1, 5))
def test_choosing_waits_for_all_that_could_come_before(states: list[str], wanted: int) -> None:
    group = Group(1, 0, 0, prompts(1)[0], (None,))
    outcomes = {
        place: Outcome(replace(group, place=place), (), "" if state == "accepted" else "filter")
        for place, state in enumerate(states)
        if state != "pending"
    }
    choice = choose(outcomes, len(states), wanted)
    accepted = [place for place, state in enumerate(states) if state == "accepted"]
    if choice.chosen:
        places = [outcome.group.place for outcome in choice.chosen]
        assert places == accepted[:wanted] and len(places) == wanted
        assert "pending" not in states[: places[-1]]
    else:
        enough = len(accepted) >= wanted and "pending" not in states[: accepted[wanted - 1]]
        assert not enough
        assert choice.lacking == max(0, wanted - len(accepted) - states.count("pending"))


def test_the_best_filled_groups_are_taken() -> None:
    def outcome(row: int, completed: int) -> Outcome:
        prompt = prompts()[row]
        statuses = [Status.COMPLETED] * completed + [Status.TRUNCATED] * (3 - completed)
        samples = tuple(Sample(prompt, "", (2,), (0,), (), (), 0, status, 0.0) for status in statuses)
        return Outcome(Group(1, row, 0, prompt, (None,) * 3), samples)

    chosen = best_filled([outcome(0, 1), outcome(1, 3), outcome(2, 0), outcome(3, 3), outcome(4, 1)], 3)
    assert [entry.group.place for entry in chosen] == [0, 1, 3]


def test_refused_groups_are_replaced_and_counted() -> None:
    (batch,) = batches(manager_of(ScriptedEngine(), filters={"even": even_rows}), 1)
    order = [prompt.source_row for prompt in DataBuffer(prompts(), 0).get_prompts(12)[0]]
    assert rows(batch) == [row for row in order if row % 2 == 0][:4]
    assert batch.metrics["rollout/refused/even"] > 0
    assert [sample.group_index for sample in batch.samples[::3]] == [0, 1, 2, 3]


@pytest.mark.parametrize("ahead", [False, True])
def test_filters_that_refuse_everything_end_with_their_names(ahead: bool) -> None:
    engine, never = ScriptedEngine(), {"never": lambda samples: False}
    with pytest.raises(RolloutsStalled, match=r"refused 20 times as many groups as a batch has: never 81"):
        if ahead:
            config = replace(CONFIG, max_staleness=1)
            buffer = DataBuffer(prompts(), 0)
            train_on(engine, OverlappedRollouts(engine, character_tokenizer(), buffer, by_row, config, never), 1)
        else:
            batches(manager_of(engine, filters=never), 1)


def test_no_more_samples_are_under_way_than_allowed() -> None:
    engine = ScriptedEngine(lambda request: 3)
    batches(manager_of(engine, max_concurrent_samples=5), 2)
    assert engine.most_under_way == 5


def test_what_is_no_longer_needed_is_ended() -> None:
    engine = ScriptedEngine(lambda request: 0 if int(request.request_id.split("/")[1]) < 4 else 10**6)
    (batch,) = batches(manager_of(engine, over_sampling_factor=2.0), 1)
    assert len(rows(batch)) == 4 and engine.under_way == 0


def test_passing_faults_are_survived_and_counted() -> None:
    def twice(request: GenerationRequest, tries: int) -> Exception | None:
        return EngineUnavailable("connection refused") if tries <= 2 and request.request_id == "1/0/0" else None

    engine = ScriptedEngine(fail=twice)
    (batch,) = batches(manager_of(engine), 1)
    assert engine.asked["1/0/0"] == 3
    assert batch.metrics["rollout/faults/engine_unavailable"] == 2
    assert batch.samples == batches(manager_of(ScriptedEngine()), 1)[0].samples


def test_a_failed_sample_is_begun_again_and_counted() -> None:
    def once(request: GenerationRequest, tries: int) -> Exception | None:
        return EngineRefused("400: too long") if tries == 1 and request.request_id == "1/0/0" else None

    (batch,) = batches(manager_of(ScriptedEngine(fail=once)), 1)
    assert batch.metrics["rollout/failed_samples"] == 1
    assert len(batch.samples) == 12


def test_a_group_that_fails_for_good_is_replaced() -> None:
    def always(request: GenerationRequest, tries: int) -> Exception | None:
        return EngineRefused("400: no") if request.request_id == "1/1/2" else None

    (batch,) = batches(manager_of(ScriptedEngine(fail=always)), 1)
    order = [prompt.source_row for prompt in DataBuffer(prompts(), 0).get_prompts(5)[0]]
    assert rows(batch) == [order[0], *order[2:5]]


@pytest.mark.parametrize(
    ("error", "said"), [(EngineRefused("400: no"), "refused: 400: no"), (MalformedAnswer("not JSON"), "malformed")]
)
def test_when_everything_fails_the_causes_are_named(error: Exception, said: str) -> None:
    with pytest.raises(RolloutsStalled, match=f"more samples failed than a batch has(.|\n)*{said}"):
        batches(manager_of(ScriptedEngine(fail=lambda request, tries: error)), 1)


def test_an_engine_that_is_gone_ends_at_the_deadline_with_its_cause() -> None:
    engine = ScriptedEngine(fail=lambda request, tries: EngineUnavailable("GET /x: connection refused"))
    with pytest.raises(RolloutsStalled, match=r"deadline: request .* connection refused"):
        batches(manager_of(engine, sample_seconds=0.3), 1)


def test_endless_generation_ends_at_the_samples_deadline() -> None:
    engine = ScriptedEngine(lambda request: 10**9)
    with pytest.raises(RolloutsStalled, match=r"deadline: request 1/\d/\d had no answer in 0.2 s"):
        batches(manager_of(engine, sample_seconds=0.2), 1)


def test_a_batch_has_a_deadline_that_says_what_is_there() -> None:
    engine = ScriptedEngine(lambda request: 10**9 if request.request_id.startswith("1/2/") else 0)
    with pytest.raises(RolloutsStalled, match=r"batch 1 .* 3 of 4 groups accepted, 1 pending \(1/2\)"):
        batches(manager_of(engine, batch_seconds=0.3), 1)


def test_a_reward_function_that_hangs_is_named() -> None:
    def hangs(sample: Sample) -> float:
        time.sleep(0.6)
        return 0.0

    with pytest.raises(RewardFailed, match=r"has not scored the answers to source row \d+ within 0.1 s"):
        batches(manager_of(ScriptedEngine(), reward=hangs, scoring=ScoringSettings(seconds=0.1)), 1)


def test_a_reward_that_raises_comes_out_as_it_is() -> None:
    def raises(sample: Sample) -> float:
        raise ValueError("nothing works")

    with pytest.raises(
        RewardFailed, match=r"reward given on source row \d+, answer .*: raised ValueError: nothing works"
    ):
        batches(manager_of(ScriptedEngine(), reward=raises), 1)


def test_a_failing_reward_gives_nothing_or_drops_its_group_as_asked() -> None:
    def fails_on_even_rows(sample: Sample) -> float:
        return float("nan") if sample.prompt.source_row % 2 == 0 else 1.0

    for policy, kept in (("zero", {0, 1}), ("drop", {1})):
        manager = manager_of(ScriptedEngine(), reward=fails_on_even_rows, scoring=ScoringSettings(on_failure=policy))
        (batch,) = batches(manager, 1)
        assert {sample.prompt.source_row % 2 for sample in batch.samples} == kept
        assert all(sample.reward == sample.prompt.source_row % 2 for sample in batch.samples)
        failed = [sample.rewards for sample in batch.samples if sample.prompt.source_row % 2 == 0]
        assert all(rewards == {"failed": 1.0} for rewards in failed)
        assert (batch.metrics.get("rollout/refused/reward_failed", 0) > 0) == (policy == "drop")


def test_the_state_goes_on_where_it_was() -> None:
    whole = batches(manager_of(ScriptedEngine(), filters={"even": even_rows}), 4)
    first, second = (manager_of(ScriptedEngine(), filters={"even": even_rows}) for _ in range(2))

    async def in_two() -> list[GeneratedBatch]:
        found = [await first.generate_batch(step) for step in (1, 2)]
        second.restore(first.state())
        return found + [await second.generate_batch(step) for step in (3, 4)]

    assert [batch.samples for batch in run(in_two)] == [batch.samples for batch in whole]


PARTIAL: dict[str, Any] = {"max_staleness": 1, "over_sampling_factor": 2.0}


def late_groups_hang(request: GenerationRequest) -> int:
    """The last groups of a batch make a token now and then."""
    return 0 if int(request.request_id.split("/")[1]) < 4 else 40


def test_partial_samples_go_on_in_the_next_batch_with_their_tokens() -> None:
    engine = ScriptedEngine(late_groups_hang)
    manager = manager_of(engine, **PARTIAL)

    async def two() -> tuple[GeneratedBatch, dict[str, Any], GeneratedBatch]:
        first = await manager.generate_batch(1)
        state = manager.state()
        engine.weight_version, engine.turns = 1, lambda request: 0 if request.request_id.startswith("1/") else 40
        return first, state, await manager.generate_batch(2)

    first, state, second = run(two)
    carried = {group["row"]: group for group in state["groups"]}
    assert len(carried) == 4 and first.metrics["rollout/groups_carried"] == 4
    assert set(rows(second)) == set(carried), "what was under way comes first"
    for sample in second.samples:
        assert len(sample.rollout_log_probs) == len(sample.weight_versions) == 6
        assert list(sample.weight_versions) == sorted(sample.weight_versions)
        begun = [len(answer["tokens"]) for answer in carried[sample.prompt.source_row]["answers"] if answer]
        assert sample.weight_versions.count(0) in {*begun, 0}


def test_what_has_become_too_old_is_begun_anew_and_counted() -> None:
    engine = ScriptedEngine(lambda request: 0 if int(request.request_id.split("/")[1]) < 4 else 40)
    manager = manager_of(engine, **PARTIAL)

    async def three() -> list[GeneratedBatch]:
        made = []
        for step in (1, 2, 3):
            made.append(await manager.generate_batch(step))
            engine.weight_version += 1
        return made

    for number, batch in enumerate(run(three)):
        oldest = min(version for sample in batch.samples for version in sample.weight_versions)
        assert number - oldest <= 1


def test_a_carried_state_survives_json(tmp_path: Path) -> None:
    import json

    engine = ScriptedEngine(late_groups_hang)
    manager, other = manager_of(engine, **PARTIAL), manager_of(engine, **PARTIAL)
    batches(manager, 1)
    other.restore(json.loads(json.dumps(manager.state())))
    assert other.state() == manager.state()


def overlapped(engine: Any, **settings_: Any) -> OverlappedRollouts:
    config = replace(CONFIG, **{"max_staleness": 1, **settings_})
    return OverlappedRollouts(engine, character_tokenizer(), DataBuffer(prompts(), 0), by_row, config)


def train_on(engine: ScriptedEngine, rollouts: OverlappedRollouts, steps: int) -> list[GeneratedBatch]:
    """A trainer that takes a moment for each batch."""

    async def main() -> list[GeneratedBatch]:
        made = []
        async with anyio.create_task_group() as group:
            group.start_soon(rollouts.run)
            for step in range(1, steps + 1):
                made.append(await rollouts.next_batch(step))
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
                engine.weight_version += 1
            group.cancel_scope.cancel()
        return made

    with first_error():
        found: list[GeneratedBatch] = run(main)
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_nothing_older_than_allowed_is_trained_on(delays: int, max_staleness: int) -> None:
    engine = ScriptedEngine(lambda request: hash((delays, request.request_id)) % 30)
    made = train_on(engine, overlapped(engine, max_staleness=max_staleness), 6)
    for version, batch in enumerate(made):
        assert version - min(v for sample in batch.samples for v in sample.weight_versions) <= max_staleness
        assert [sample.group_index for sample in batch.samples] == [group for group in range(4) for _ in range(3)]


def test_generation_goes_on_while_the_trainer_works_and_no_further_than_allowed() -> None:
    engine = ScriptedEngine(lambda request: 1)
    rollouts = overlapped(engine)
    made = train_on(engine, rollouts, 3)
    ahead = rollouts.state()
    assert len(ahead["ready"]) + len(ahead["groups"]) <= CONFIG.batch_size
    assert made[-1].metrics["timing_s/generation_waiting_for_trainer"] >= 0


def test_ready_groups_and_unfinished_prompts_are_restored() -> None:
    engine = ScriptedEngine(lambda request: 0 if int(request.request_id.split("/")[1]) < 2 else 10**6)
    rollouts = overlapped(engine)

    async def some() -> dict[str, Any]:
        async with anyio.create_task_group() as group:
            group.start_soon(rollouts.run)
            while len(rollouts.state()["ready"]) < 2:
                await anyio.sleep(0.01)
            state = rollouts.state()
            group.cancel_scope.cancel()
        return state

    state = run(some)
    assert len(state["ready"]) == 2 and len(state["groups"]) == 2
    again = overlapped(ScriptedEngine())
    again.restore(state)
    (batch,) = train_on(ScriptedEngine(), again, 1)
    issued = {group["row"] for group in [*state["ready"], *state["groups"]]}
    assert set(rows(batch)) == issued


def test_what_ends_generation_is_raised_where_a_batch_is_asked_for() -> None:
    engine = ScriptedEngine(fail=lambda request, tries: EngineRefused("400: no"))
    with pytest.raises(RolloutsStalled, match="400: no"):
        train_on(engine, overlapped(engine), 1)


@pytest.mark.parametrize(
    ("name", "rewards", "texts", "accepted"),
    [
        ("check_reward_nonzero_std", [1.0, 1.0], "ab", False),
        ("check_reward_nonzero_std", [1.0, 0.0], "ab", True),
        ("check_min_reward", [0.0, 0.0], "ab", False),
        ("check_min_reward", [0.0, 0.5], "ab", True),
        ("check_any_success", [0.0, 0.5], "ab", False),
        ("check_any_success", [0.0, 1.0], "ab", True),
        ("check_response_diversity", [0.0, 0.0, 0.0], "aaa", False),
        ("check_response_diversity", [0.0, 0.0, 0.0], "aab", True),
        ("check_reasonable_length", [0.0, 0.0], "a ", False),
        ("check_reasonable_length", [0.0, 0.0], "ab", True),
        ("check_quality_and_diversity", [1.0, 1.0, 1.0], "aaa", False),
        ("check_quality_and_diversity", [1.0, 0.0, 0.0], "abc", True),
    ],
)
def test_shipped_filters(name: str, rewards: list[float], texts: str, accepted: bool) -> None:
    prompt = prompts(1)[0]
    samples = []
    for reward, text in zip(rewards, texts, strict=True):
        answer = (ord(text),) if text.strip() else ()
        log_probs = (-1.0,) * len(answer)
        mask = (0,) * 2 + (1,) * len(answer)
        tokens = prompt.tokens + answer
        samples.append(Sample(prompt, text, tokens, mask, log_probs, (0,) * len(answer), 0, Status.COMPLETED, reward))
    assert SHIPPED[name](samples) == accepted


def test_a_filter_of_ones_own_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(samples):\n    return all(len(s.response) < 3 for s in samples)\n")
    external = identify_filter(f"{tmp_path}/mine.py:short")
    assert external.identity["function"] == "short" and len(external.identity["sha256"]) == 64
    assert load_filter(external.location)([]) is True
    with pytest.raises(BadInput, match="filter 'nothing': write a shipped one"):
        identify_filter("nothing")


def test_prompts_of_another_tokenizer_are_refused_before_anything_is_asked() -> None:
    with pytest.raises(BadInput, match="the data contain token 7, and the model's vocabulary has 7"):
        check_vocabulary(7, 7)
    check_vocabulary(7, 8)
