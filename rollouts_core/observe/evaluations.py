"""The evaluations of a run, for its page and the terminal: tables, and policies compared in pairs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter

from rollouts_core.errors import BadInput
from rollouts_core.evaluation.report import EvaluationReport, compare_results, share_prompts
from rollouts_core.evaluation.results import Result, read_results
from rollouts_core.evaluation.statistics import Comparison

POINTS = {"base": "before training", "sft": "after SFT", "dpo": "after DPO", "rl": "after RL"}

_adapter = TypeAdapter(EvaluationReport)


@dataclass(frozen=True)
class Evaluated:
    """The results of a policy, as they were copied back."""

    point: str
    name: str
    """The name to show."""
    report: EvaluationReport


@dataclass(frozen=True)
class Compared:
    name: str
    against: str
    comparison: Comparison | None
    """The comparison; None if no prompt was scored for both."""


def name_of(point: str) -> str:
    """The name to show for a point of the chain; `rl-2` is the second segment."""
    return POINTS.get(point) or f"after RL, segment {point.removeprefix('rl-')}"


def read_evaluations(results: Path, points: Sequence[str]) -> list[Evaluated]:
    """The evaluations in a run's results directory; see `infra.results` for its files."""
    reports = [_adapter.validate_python(json.loads((_folder(results) / f"{p}.json").read_text())) for p in points]
    return [Evaluated(point, name_of(point), report) for point, report in zip(points, reports, strict=True)]


def compare_in_order(results: Path, points: Sequence[str]) -> list[Compared]:
    """Compare each policy with the one before it in the chain, on the same prompts."""
    found = {point: read_results(_folder(results) / f"{point}.jsonl") for point in points}
    return [
        _compared(name_of(later), name_of(earlier), found[later], found[earlier]) for earlier, later in pairwise(points)
    ]


def compare_with_run(results: Path, other: Path, run: str, points: Sequence[str]) -> list[Compared]:
    """Compare each policy with the one at the same point in another run's results.

    Raises `BadInput` if the two were not asked the same prompts.
    """
    shared = [point for point in points if (_folder(other) / f"{point}.jsonl").is_file()]
    if not shared:
        raise BadInput(f"run {run} has evaluated none of {', '.join(points)}")
    compared = []
    for point in shared:
        ours, theirs = (read_results(_folder(place) / f"{point}.jsonl") for place in (results, other))
        _refuse_other_questions(ours, theirs, run)
        compared.append(_compared(name_of(point), f"{name_of(point)} of {run}", ours, theirs))
    return compared


def _compared(name: str, against: str, results: Sequence[Result], others: Sequence[Result]) -> Compared:
    comparison = compare_results(results, others) if share_prompts(results, others) else None
    return Compared(name, against, comparison)


def _refuse_other_questions(ours: Sequence[Result], theirs: Sequence[Result], run: str) -> None:
    asked = {result.source_row: result.prompt for result in theirs}
    differing = [r for r in ours if r.source_row in asked and asked[r.source_row] != r.prompt]
    if differing:
        first = differing[0]
        raise BadInput(
            f"run {run} was evaluated on other prompts: row {first.source_row} is {first.prompt[:60]!r} here and "
            f"{asked[first.source_row][:60]!r} there"
        )


def _folder(results: Path) -> Path:
    return results / "evaluation"
