"""The run report: one self-contained HTML file of accuracy, curves, stages, samples and config."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from rollouts_core.observe.evaluations import Compared, Evaluated, name_of
from rollouts_core.observe.metrics import read_jsonl
from rollouts_core.observe.runs import AccuracyRecord, RunRecord

SAMPLES = 16
MOST_SLICES = 40

Records = Sequence[Mapping[str, Any]]

WITHIN_OTHERS = (
    "timing_s/step", "timing_s/reward", "timing_s/trainer_waiting", "timing_s/generation_waiting",
    "timing_s/weight_sync",
)  # fmt: skip
"""Times that are the whole step, or part of one of its phases: they do not add up with these."""


@dataclass(frozen=True)
class SampleRow:
    """One held-out prompt with the answer at each point, and whether it was right."""

    prompt: str
    answer: str
    responses: Sequence[tuple[str, bool]]


def write_report(
    record: RunRecord,
    results: Path,
    config: Mapping[str, Any],
    plots: Sequence[str],
    evaluated: Sequence[Evaluated],
    compared: Sequence[Compared],
) -> Path:
    """Write `report.html` into a run's results (see `tasks.sync` for what lies there); `plots` are SVG."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    points = [accuracy.point for accuracy in record.accuracies]
    page = environment.get_template("report.html.j2").render(
        record=record,
        points=[name_of(point) for point in points],
        plots=plots,
        evaluated=evaluated,
        compared=compared,
        most_slices=MOST_SLICES,
        samples=_samples([read_jsonl(results / "evaluation" / f"{point}.jsonl") for point in points]),
        config=json.dumps(config, indent=2),
    )
    path = results / "report.html"
    path.write_text(page)
    return path


def draw_plots(accuracies: Sequence[AccuracyRecord], results: Path) -> list[str]:
    """Accuracies and curves of a run's results, as SVG. Takes a second, most of it matplotlib's import."""
    from rollouts_core.observe.plots import interval_plot, line_plot

    sft, dpo, rl = (read_jsonl(results / f"{stage}_metrics.jsonl") for stage in ("sft", "dpo", "rl"))
    plots = []
    if accuracies:
        shares = {name_of(a.point): (100 * a.accuracy, 100 * a.low, 100 * a.high) for a in accuracies}
        plots.append(interval_plot("Held-out accuracy, 95 % interval", shares))
    if sft:
        plots.append(line_plot("SFT: loss per token", "step", {"loss": _curve(sft, "loss")}))
    if dpo:
        rewards = {name: _curve(dpo, f"rewards/{name}") for name in ("chosen", "rejected", "margins")}
        plots += [
            line_plot("DPO: implicit reward", "step", rewards),
            line_plot("DPO: chosen above rejected", "step", {"share": _curve(dpo, "rewards/accuracies")}),
        ]
    if rl:
        mismatch = {name: _curve(rl, f"sampling/sampling_logp_difference/{name}") for name in ("mean", "max")}
        lengths = {name: _curve(rl, f"completions/{name}_length") for name in ("mean", "max")}
        plots += [
            line_plot(
                "RL: reward", "step", {"reward": _curve(rl, "reward"), "within-group std": _curve(rl, "reward_std")}
            ),
            line_plot("RL: entropy", "step", {"entropy": _curve(rl, "entropy")}),
            line_plot("RL: completion length", "step", lengths),
            line_plot("RL: trainer - engine log-probability", "step", mismatch, log_y=True),
            _timing("RL: seconds per step", rl),
            *_episode_plots(rl),
        ]
    return plots


def _episode_plots(rl: Records) -> list[str]:
    """Of what rewards are made of, and of episodes with tools, where there are any."""
    from rollouts_core.observe.plots import line_plot

    parts = [name for name in rl[-1] if name.startswith("rewards/") and name.endswith("/mean")]
    plots = []
    if parts:
        curves = {name.split("/")[1]: _curve(rl, name) for name in parts}
        plots.append(line_plot("RL: parts of the reward", "step", curves))
    if "episodes/turns" in rl[-1]:
        told = {"turns": "episodes/turns", "calls": "tools/call_frequency", "failed share": "tools/failure_frequency"}
        curves = {name: _curve(rl, metric) for name, metric in told.items()}
        plots.append(line_plot("RL: turns and calls of an episode", "step", curves))
    return plots


def _curve(records: Records, name: str) -> tuple[list[float], list[float]]:
    """Steps and values; zeros are left out where a logarithm would meet them."""
    kept = [record for record in records if name in record]
    return [record["step"] for record in kept], [record[name] for record in kept]


def _timing(title: str, records: Records) -> str:
    from rollouts_core.observe.plots import stacked_plot

    timed = [name for name in records[-1] if name.startswith("timing_s/")]
    phases = [name for name in timed if not name.startswith(WITHIN_OTHERS)]
    layers = {name.removeprefix("timing_s/"): [record.get(name, 0.0) for record in records] for name in phases}
    return stacked_plot(title, "step", [record["step"] for record in records], layers)


def _samples(by_point: Sequence[Records]) -> list[SampleRow]:
    """Prompts whose answer changed between right and wrong first, then the rest."""
    rows = [
        SampleRow(
            records[0]["prompt"],
            str(records[0].get("answer") or ""),
            [(record["response"], (record["reward"] or 0) >= 1) for record in records],
        )
        for records in zip(*map(_first_answers, by_point), strict=True)
    ]
    changed = [row for row in rows if _changed(row)]
    steady = [row for row in rows if not _changed(row)]
    return [*changed[: SAMPLES * 3 // 4], *steady][:SAMPLES]


def _first_answers(records: Records) -> Records:
    """Of each prompt, where it has several."""
    return [record for record in records if record["sample"] == 0]


def _changed(row: SampleRow) -> bool:
    """Whether training, once begun, turned a right answer wrong or a wrong one right."""
    return len({right for _, right in row.responses[1:]}) > 1
