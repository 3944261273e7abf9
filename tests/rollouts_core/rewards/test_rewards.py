import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from rollouts_core.errors import BadInput, RewardFailed
from rollouts_core.evaluation.statistics import wilson_interval
from rollouts_core.rewards.functions import exact_match, identify_reward, load_reward
from rollouts_core.rewards.math import math_equal
from rollouts_core.rewards.reward import AnyReward, GroupReward, Reward
from rollouts_core.rewards.rubric import Criterion, rubric
from rollouts_core.rewards.scoring import Scoring, ScoringSettings, compute_reward
from rollouts_core.rewards.text import length_penalty, matches, repetition_penalty
from rollouts_core.types import Prompt, Sample, Status


def sample(response: str, answer: Any = "052") -> Sample:
    prompt = Prompt((), (1, 2), {"answer": answer}, source_row=7)
    return Sample(prompt, response, (1, 2, 3), (0, 0, 1), (-0.5,), (0,), 0, Status.COMPLETED)


@pytest.mark.parametrize(
    ("name", "response", "answer", "reward"),
    [
        ("exact_match", " 052\n", "052", 1.0),
        ("exact_match", "52", "052", 0.0),
        ("exact_match", "52", 52, 1.0),
        ("contains_answer", "it is 052.", "052", 1.0),
        ("contains_answer", "it is 52.", "052", 0.0),
    ],
)
def test_shipped_rewards(name: str, response: str, answer: Any, reward: float) -> None:
    assert load_reward(name)(sample(response, answer)) == reward


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]])
def test_what_is_no_finite_number_is_refused_by_row(value: Any) -> None:
    with pytest.raises(RewardFailed, match=r"reward r on source row 7, answer 'x': returned .* not a finite number"):
        compute_reward(sample("x"), lambda _: value, "r")


def test_an_exception_is_refused_by_row() -> None:
    with pytest.raises(RewardFailed, match=r"row 7, answer 'x': raised ZeroDivisionError: division by zero"):
        compute_reward(sample("x"), lambda _: 1 / 0, "r")


def test_numbers_of_any_kind_become_floats() -> None:
    assert compute_reward(sample("x"), lambda _: True, "r").value == 1.0
    assert compute_reward(sample("x"), lambda _: 3, "r").value == 3.0


def test_a_users_reward_by_file_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("length = len\n")
    (package / "rewards.py").write_text("from .helper import length\ndef score(s):\n    return length(s.response)\n")
    (tmp_path / "alone.py").write_text("def score(s):\n    return len(s.response)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("my_package.rewards:score", "alone.py:score", f"{tmp_path}/alone.py:score"):
        assert load_reward(identify_reward(name).location)(sample("four")) == 4
    by_file, by_module = identify_reward("alone.py:score"), identify_reward("alone:score")
    assert by_file.identity == by_module.identity
    assert by_file.location == f"{tmp_path}/alone.py:score"


@pytest.mark.parametrize("name", ["exact", "no.such.module:f", "/nowhere/f.py:f", "file.py", "m:not a name"])
def test_rewards_that_cannot_be_found(name: str) -> None:
    with pytest.raises(BadInput, match="reward"):
        identify_reward(name)


def test_a_file_without_the_function(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("x = 1\n")
    with pytest.raises(BadInput, match="has no function 'score'"):
        load_reward(f"{tmp_path}/r.py:score")


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [(0, 10, 0.0, 0.27753), (5, 10, 0.23659, 0.76341), (10, 10, 0.72247, 1.0), (1, 3, 0.06149, 0.79234)],
)
def test_wilson_interval(correct: int, total: int, low: float, high: float) -> None:
    """Against (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), worked out by hand with z = 1.959964."""
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=1e-5)


def test_wilson_interval_covers_its_share_at_the_ends() -> None:
    for total in (1, 7, 2000):
        assert wilson_interval(0, total)[0] == 0.0
        assert wilson_interval(total, total)[1] == 1.0


def scored(reward: AnyReward, samples: Sequence[Sample], **settings: Any) -> list[Sample]:
    async def run() -> list[Sample]:
        scoring = Scoring(reward, ScoringSettings(**settings))
        with anyio.fail_after(60):
            try:
                return await scoring(samples)
            finally:
                await scoring.aclose()

    return anyio.run(run)


def group(*responses: str, answer: Any = "052") -> list[Sample]:
    return [replace(sample(response, answer), episode=number) for number, response in enumerate(responses)]


async def waits(scored_sample: Sample) -> float:
    await anyio.sleep(0.01)
    return float(len(scored_sample.response))


def ranks(samples: Sequence[Sample]) -> list[float]:
    """The longest of a group first."""
    lengths = sorted({len(entry.response) for entry in samples})
    return [float(lengths.index(len(entry.response))) for entry in samples]


async def ranks_later(samples: Sequence[Sample]) -> list[float]:
    await anyio.sleep(0)
    return ranks(samples)


def test_rewards_may_wait_and_may_look_at_the_group() -> None:
    samples = group("a", "bbb", "cc")
    assert [s.reward for s in scored(waits, samples)] == [1.0, 3.0, 2.0]
    for reward in (GroupReward(ranks), GroupReward(ranks_later)):
        assert [s.reward for s in scored(reward, samples)] == [0.0, 2.0, 1.0]
    assert [s.reward for s in samples] == [None] * 3


def test_samples_of_one_episode_have_its_reward() -> None:
    whole = group("a", "bb")
    parts = [whole[0], whole[0], whole[1]]
    assert [s.reward for s in scored(GroupReward(ranks), parts)] == [0.0, 0.0, 1.0]


def test_a_rubric_weighs_and_tells_its_parts() -> None:
    reward = rubric(
        Criterion("correct", exact_match),
        Criterion("length", waits, weight=-0.5),
        Criterion("rank", GroupReward(ranks), weight=0.0),
    )
    one, other = scored(reward, group("052", "52"))
    assert (one.reward, dict(one.rewards)) == (1 - 1.5, {"correct": 1.0, "length": 3.0, "rank": 1.0})
    assert (other.reward, dict(other.rewards)) == (-1.0, {"correct": 0.0, "length": 2.0, "rank": 0.0})
    with pytest.raises(ValueError, match="need different names: a, a"):
        rubric(Criterion("a", exact_match), Criterion("a", waits))


def test_a_rubric_adds_the_rewards_of_turns() -> None:
    reward = rubric(
        Criterion("a", lambda s: Reward(1.0, turns=(2.0,)), weight=0.5),
        Criterion("b", lambda s: Reward(0.0, turns=(4.0,))),
    )
    (one,) = scored(reward, group("x"))
    assert (one.reward, one.turn_rewards, dict(one.rewards)) == (5.5, (5.0,), {"a": 3.0, "b": 4.0})


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (lambda s: 1 / 0, "raised ZeroDivisionError"),
        (lambda s: "1", "not a finite number"),
        (lambda s: Reward(1.0, {"a": float("nan")}), "not a finite number"),
        (lambda s: Reward(1.0, turns=(1.0, 2.0)), "rewarded 2 turns, and there are 1"),
        (GroupReward(lambda samples: [1.0]), "gave 1 rewards for a group of 2"),
        (GroupReward(lambda samples: [1.0, ValueError("no")]), "raised ValueError: no"),
        (rubric(Criterion("part", lambda s: float("inf"))), "reward part on source row 7.*not a finite number"),
    ],
)
def test_what_fails_is_told_by_row_or_counted(reward: AnyReward, told: str) -> None:
    with pytest.raises(RewardFailed, match=told):
        scored(reward, group("a", "b"))
    nothing = scored(reward, group("a", "b"), on_failure="zero")
    assert dict(nothing[1].rewards) == {"failed": 1.0}
    assert nothing[1].reward == 0.0
    assert scored(reward, group("a", "b"), on_failure="drop")[1].reward is None


def test_a_reward_that_never_returns_has_a_deadline() -> None:
    async def never(scored_sample: Sample) -> float:
        await anyio.sleep_forever()
        return 0.0

    with pytest.raises(RewardFailed, match=r"has not scored the answers to source row 7 within 0.1 s"):
        scored(never, group("a"), seconds=0.1)


@pytest.mark.parametrize(
    ("reward", "response", "value"),
    [
        (matches(r"<a>.*</a>"), "<a>1\n2</a>\n", 1.0),
        (matches(r"<a>.*</a>"), "so <a>1</a>", 0.0),
        (repetition_penalty(2), "a b c d", 0.0),
        (repetition_penalty(2), "A b a b a b", 2 / 5 - 1),
        (repetition_penalty(3), "a", 0.0),
        (length_penalty(longest=1, buffer=1), "x", -1.0),
        (length_penalty(longest=3, buffer=1), "x", 0.0),
    ],
)
def test_rewards_of_form(reward: Any, response: str, value: float) -> None:
    assert reward(sample(response)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("response", "answer", "equal"),
    [
        (r"So it is $\frac{1}{2}$.", "0.5", 1.0),
        (r"The answer is \boxed{2x + 2}", "2(x+1)", 1.0),
        (r"$\{1, 2, 3\}$", r"\{3, 2, 1\}", 1.0),
        (r"\boxed{13}", "12", 0.0),
        ("I do not know", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_mathematics_is_compared_by_its_meaning(math_processes: Any, response: str, answer: str, equal: float) -> None:
    assert math_processes(response, answer) == equal


def test_an_answer_that_is_no_mathematics_fails(math_processes: Any) -> None:
    with pytest.raises(RewardFailed, match="the row's answer '' is not mathematics"):
        math_processes("1", "")


def test_a_comparison_that_takes_for_ever_is_ended() -> None:
    """And another process does the next one."""
    before = math_workers()
    endless = replace(sample("$(x+y+2)^{400}$", "(x+y+1)^{400}"), episode=0)
    fine = replace(sample("$0.5$", "1/2"), episode=1)
    assert [s.reward for s in scored(math_equal(seconds=1.0), [endless, fine, replace(endless, episode=2)])] == [
        0,
        1,
        0,
    ]
    assert math_workers() == before


def test_processes_end_with_who_opened_them() -> None:
    before = math_workers()
    assert scored(math_equal(), group("$52$"))[0].reward == 1.0
    assert math_workers() == before


def math_workers() -> set[str]:
    found = subprocess.run(
        ["pgrep", "-f", "rollouts_core.rewards.math_worker"], capture_output=True, text=True, timeout=30
    )
    return set(found.stdout.split())


@pytest.fixture(scope="module")
def math_processes() -> Iterator[Any]:
    """Compares one answer, in processes that all tests share."""
    with start_blocking_portal() as portal:
        scoring = portal.call(lambda: Scoring(math_equal(), ScoringSettings()))

        def compare(response: str, answer: str) -> float:
            scored_sample = portal.call(scoring, [sample(response, answer)])[0]
            return float(scored_sample.reward)

        yield compare
        portal.call(scoring.aclose)
