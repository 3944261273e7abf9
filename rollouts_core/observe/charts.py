"""The curves to show, as data: the report draws them with uPlot, Prefect's pictures with matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollouts_core.metrics.loggers import read_jsonl
from rollouts_core.observe.replica_bands import rates

Records = Sequence[Mapping[str, Any]]
Training = Literal["sft", "dpo", "rl"]

WITHIN_OTHERS = (
    "timing_s/step", "timing_s/reward", "timing_s/trainer_waiting", "timing_s/generation_waiting",
    "timing_s/weight_sync",
)  # fmt: skip
"""Times that are the whole step, or part of one of its phases: they do not add up with these."""


@dataclass(frozen=True)
class Curve:
    name: str
    steps: Sequence[int]
    values: Sequence[float]
    other: bool = False
    """The curve of the run that this one is compared with."""


@dataclass(frozen=True)
class Chart:
    title: str
    curves: Sequence[Curve]
    log_y: bool = False


CHARTS: Mapping[Training, Sequence[tuple[str, Mapping[str, str], bool]]] = {
    "sft": (
        ("SFT: loss per token", {"loss": "loss"}, False),
        ("SFT: gradient norm", {"gradient norm": "grad_norm"}, False),
    ),
    "dpo": (
        ("DPO: implicit reward", {name: f"rewards/{name}" for name in ("chosen", "rejected", "margins")}, False),
        ("DPO: chosen above rejected", {"share": "rewards/accuracies"}, False),
    ),
    "rl": (
        ("RL: reward", {"reward": "reward", "within-group std": "reward_std"}, False),
        ("RL: policy loss", {"loss": "policy_loss"}, False),
        ("RL: KL to where RL began", {"kl": "kl"}, False),
        ("RL: entropy", {"entropy": "entropy"}, False),
        ("RL: completion length", {name: f"completions/{name}_length" for name in ("mean", "max")}, False),
        (
            "RL: trainer - engine log-probability",
            {name: f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")},
            True,
        ),
        (
            "RL: turns and calls of an episode",
            {"turns": "episodes/turns", "calls": "tools/call_frequency", "failed share": "tools/failure_frequency"},
            False,
        ),
    ),
}
"""Title, metrics by what they are called there, and whether the axis is logarithmic."""


DEVICES = (
    ("share of the device's speed and time", {"model FLOP utilisation": "perf/mfu", "GPU busy": "gpu/utilization"}),
    ("GPU memory, GiB", {"the fullest GPU": "gpu/memory_gib"}),
    ("GPU power, W, and temperature, °C", {"power, mean": "gpu/power_w", "the hottest GPU": "gpu/temperature_c"}),
)
"""Charts of every training whose metrics have them."""


def charts_of(results: Path, other: Path | None = None) -> list[Chart]:
    """Charts of the metrics in a run's results, with another run's curves beside them."""
    charts = []
    for training in ("sft", "dpo", "rl"):
        records = read_jsonl(results / f"{training}_metrics.jsonl")
        others = read_jsonl(other / f"{training}_metrics.jsonl") if other else []
        charts += training_charts(training, records, others)
    return charts


def training_charts(training: Training, records: Records, others: Records = ()) -> list[Chart]:
    """The charts for which there is something to draw."""
    if not records:
        return []
    told = [*CHARTS[training], *_parts(records)]
    charts = [Chart(title, _curves(metrics, records, others, log_y), log_y) for title, metrics, log_y in told]
    charts.append(Chart(f"{training.upper()}: tokens per second", _throughput(records, others)))
    charts.append(Chart("RL: tokens per second by replica", _replicas(records)))
    charts += [
        Chart(f"{training.upper()}: {title}", _curves(metrics, records, others, False)) for title, metrics in DEVICES
    ]
    return [chart for chart in charts if any(not curve.other for curve in chart.curves)]


def mean_phases(records: Records) -> dict[str, float]:
    """Mean seconds of a step by phase, the largest first; what no phase explains is `unaccounted`."""
    names = {name for record in records for name in record if name.startswith("timing_s/")}
    phases = [name for name in names if not name.startswith(WITHIN_OTHERS)]
    means = {
        name.removeprefix("timing_s/"): sum(record.get(name, 0.0) for record in records) / len(records)
        for name in phases
    }
    return dict(sorted(means.items(), key=lambda phase: -phase[1]))


def _parts(records: Records) -> list[tuple[str, Mapping[str, str], bool]]:
    """Charts of the parts of rewards."""
    parts = [name for name in records[-1] if name.startswith("rewards/") and name.endswith("/mean")]
    return [("RL: parts of the reward", {name.split("/")[1]: name for name in parts}, False)] if parts else []


def _replicas(records: Records) -> list[Curve]:
    """A curve for each replica that ever served, with gaps while it was away."""
    steps = [record["step"] for record in records]
    return [Curve(name, steps, values) for name, values in rates(records).items()]


def _curves(metrics: Mapping[str, str], records: Records, others: Records, log_y: bool) -> list[Curve]:
    return [
        Curve(name, [record["step"] for record in kept], [record[metric] for record in kept], other)
        for name, metric in metrics.items()
        for of, other in ((records, False), (others, True))
        if (kept := [record for record in of if metric in record and (not log_y or record[metric] > 0)])
    ]


def _throughput(records: Records, others: Records) -> list[Curve]:
    return [
        Curve("tokens/s", [r["step"] for r in kept], [r["num_tokens"] / r["timing_s/step"] for r in kept], other)
        for of, other in ((records, False), (others, True))
        if (kept := [record for record in of if record.get("timing_s/step") and "num_tokens" in record])
    ]
