"""The report of an evaluation: shares with intervals, pass@k, slices, and the comparison of two evaluations."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollouts_core.errors import BadInput
from rollouts_core.evaluation.results import Result
from rollouts_core.evaluation.statistics import (
    Comparison,
    Interval,
    bootstrap_interval,
    compare,
    pass_at_k,
    wilson_interval,
)

TOLD = 10
"""Problems that are told of in words."""

ByPrompt = Mapping[int, Sequence[Result]]


@dataclass(frozen=True)
class EvaluationReport:
    """The results of an evaluation. All means are over prompts, of which each counts once; intervals are of 95 %."""

    prompts: int
    """How many were scored."""
    samples: int
    """How many were scored."""
    failed: int
    """Samples that were not answered or not scored; the shares leave them out."""
    accuracy: Interval
    """Share of correct answers. Its interval is Wilson's for one answer to each prompt, or where all prompts have the
    same share; else the bootstrap's."""
    reward: Interval
    turns: float
    tool_calls: float
    tokens: float
    """Means of samples."""
    tool_use: float
    """Share of samples that called a tool."""
    pass_at: Mapping[str, Interval]
    """For each k, the chance that one of k answers is correct."""
    components: Mapping[str, Interval]
    """Parts of rewards, by name."""
    slices: Mapping[str, Mapping[str, "Slice"]]
    """Results by column and by its values."""
    problems: tuple[str, ...]
    """The first of those that failed."""


@dataclass(frozen=True)
class Slice:
    prompts: int
    accuracy: Interval


def report_of(results: Sequence[Result], pass_at: Sequence[int] = (), slices: Sequence[str] = ()) -> EvaluationReport:
    """Raises `BadInput` when nothing was scored, or a prompt has fewer answers than a k."""
    scored = [result for result in results if result.reward is not None]
    problems = [f"row {r.source_row}, sample {r.sample}: {r.error}" for r in results if r.error]
    if not scored:
        raise BadInput(problems[:TOLD] or ["there are no results"], "evaluation: nothing could be scored")
    by_prompt = _by_prompt(scored)
    return EvaluationReport(
        prompts=len(by_prompt),
        samples=len(scored),
        failed=len(results) - len(scored),
        accuracy=_accuracy(by_prompt),
        reward=_mean(by_prompt, lambda result: result.reward or 0.0),
        turns=fmean(result.turns for result in scored),
        tool_calls=fmean(result.tool_calls for result in scored),
        tokens=fmean(result.tokens for result in scored),
        tool_use=fmean(result.tool_calls > 0 for result in scored),
        pass_at={str(k): _pass_at(by_prompt, k) for k in pass_at},
        components={name: _component(scored, name) for name in _names(scored)},
        slices={column: _slices(by_prompt, column) for column in slices},
        problems=tuple(problems[:TOLD]),
    )


def compare_results(results: Sequence[Result], others: Sequence[Result]) -> Comparison:
    """How far the first policy is above the second, on the prompts that both were scored on.

    Raises `BadInput` where there are none.
    """
    ours, theirs = _scored(results), _scored(others)
    shared = sorted(set(ours) & set(theirs))
    if not shared:
        raise BadInput("the two evaluations have no prompt in common")
    return compare([_share(ours[row]) for row in shared], [_share(theirs[row]) for row in shared])


def share_prompts(results: Sequence[Result], others: Sequence[Result]) -> bool:
    """Whether some prompt was scored for both policies."""
    return not set(_scored(results)).isdisjoint(_scored(others))


def _scored(results: Sequence[Result]) -> ByPrompt:
    return _by_prompt([result for result in results if result.reward is not None])


def _by_prompt(results: Sequence[Result]) -> ByPrompt:
    found: dict[int, list[Result]] = defaultdict(list)
    for result in results:
        found[result.source_row].append(result)
    return found


def _accuracy(by_prompt: ByPrompt) -> Interval:
    shares = [_share(results) for results in by_prompt.values()]
    if all(len(results) == 1 for results in by_prompt.values()) or len(set(shares)) == 1:
        return Interval(fmean(shares), *wilson_interval(sum(shares), len(shares)))
    return bootstrap_interval(shares)


def _share(results: Sequence[Result]) -> float:
    return fmean(result.correct for result in results)


def _mean(by_prompt: ByPrompt, value: Callable[[Result], float]) -> Interval:
    return bootstrap_interval([fmean(map(value, results)) for results in by_prompt.values()])


def _pass_at(by_prompt: ByPrompt, k: int) -> Interval:
    """pass@k over the prompts with at least so many answers; failed answers may have left some with fewer."""
    enough = [results for results in by_prompt.values() if len(results) >= k]
    if not enough:
        raise BadInput(f"pass@{k}: no prompt has {k} scored answers")
    return bootstrap_interval([pass_at_k(len(of), sum(result.correct for result in of), k) for of in enough])


def _names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.rewards))


def _component(results: Sequence[Result], name: str) -> Interval:
    return _mean(_by_prompt([result for result in results if name in result.rewards]), lambda r: r.rewards[name])


def _slices(by_prompt: ByPrompt, column: str) -> dict[str, Slice]:
    parts: dict[str, dict[int, Sequence[Result]]] = defaultdict(dict)
    for row, results in by_prompt.items():
        parts[str(results[0].metadata.get(column, ""))][row] = results
    return {value: Slice(len(part), _accuracy(part)) for value, part in sorted(parts.items())}
