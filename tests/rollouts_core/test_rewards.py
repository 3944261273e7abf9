from pathlib import Path
from typing import Any

import pytest

from rollouts_core.errors import BadInput, RewardFailed
from rollouts_core.evaluation.statistics import wilson_interval
from rollouts_core.rewards.functions import identify_reward, load_reward
from rollouts_core.rewards.scoring import compute_reward
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
