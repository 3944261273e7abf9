"""Charts as data, and as a picture."""

import pytest

from rollouts_core.observe.charts import Chart, Curve, mean_phases, training_charts
from rollouts_core.observe.plots import picture_of

RECORDS = [
    {"step": 1, "reward": 0.25, "entropy": 2.0, "num_tokens": 100.0, "timing_s/step": 2.0, "timing_s/gen": 1.5},
    {"step": 2, "reward": 0.5, "entropy": 1.0, "num_tokens": 100.0, "timing_s/step": 4.0, "timing_s/gen": 2.5},
]
MISMATCH = "sampling/sampling_logp_difference/mean"


def by_title(charts: list[Chart]) -> dict[str, Chart]:
    return {chart.title: chart for chart in charts}


def test_only_what_was_measured_has_a_chart() -> None:
    charts = by_title(training_charts("rl", RECORDS))
    assert set(charts) == {"RL: reward", "RL: entropy", "RL: tokens per second"}
    assert charts["RL: reward"].curves == [Curve("reward", [1, 2], [0.25, 0.5])]
    assert charts["RL: tokens per second"].curves[0].values == [50.0, 25.0]
    assert training_charts("sft", []) == []


def test_a_logarithm_meets_no_zero() -> None:
    records = [{"step": 1, MISMATCH: 0.0}, {"step": 2, MISMATCH: 1e-6}]
    (chart,) = training_charts("rl", records)
    assert chart.log_y
    assert chart.curves[0] == Curve("mean", [2], [1e-6])


def test_another_runs_curves_stand_beside() -> None:
    other = [{"step": 1, "reward": 0.9, "kl": 0.1}]
    charts = by_title(training_charts("rl", RECORDS, other))
    assert charts["RL: reward"].curves[1] == Curve("reward", [1], [0.9], other=True)
    assert "RL: KL to where RL began" not in charts, "a chart of the other run alone says nothing of this one"


def test_phases_are_means_without_the_whole_step() -> None:
    assert mean_phases(RECORDS) == {"gen": 2.0}


def test_parts_of_the_reward_are_one_chart() -> None:
    records = [{"step": 1, "reward": 1.0, "rewards/form/mean": 0.5, "rewards/form/std": 0.1}]
    assert by_title(training_charts("rl", records))["RL: parts of the reward"].curves == [Curve("form", [1], [0.5])]


def test_a_picture_is_a_png_and_of_something() -> None:
    picture = picture_of(training_charts("rl", RECORDS))
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000
    with pytest.raises(ValueError, match="nothing to draw"):
        picture_of([])


def test_a_replica_that_was_away_made_nothing_then() -> None:
    rate = "replicas/{}/tokens_per_second".format
    records = [{"step": 1, rate("a:replica-0"): 5.0, rate("b:replica-0"): 7.0}, {"step": 2, rate("b:replica-0"): 9.0}]
    (chart,) = training_charts("rl", records)
    assert chart.curves == [Curve("a:replica-0", [1, 2], [5.0, 0.0]), Curve("b:replica-0", [1, 2], [7.0, 9.0])]
