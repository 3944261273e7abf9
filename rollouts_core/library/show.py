"""A batch looked at as a table: in a notebook as HTML, in a terminal as text."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from rollouts_core.data.token_text import token_pieces
from rollouts_core.errors import BadInput
from rollouts_core.training.backend import TrainBatch
from rollouts_core.training.rl import RLStep
from rollouts_core.types import Sample

COLUMNS = ("sequence", "token", "text", "learnt", "advantage", "log-probability")
WIDTH = 100
Line = tuple[str, ...]


@dataclass(frozen=True)
class Shown:
    """A table. A notebook draws it; `print` writes it."""

    lines: Sequence[Line]
    left_out: int
    """Rows beyond the most that were asked for."""

    def __str__(self) -> str:
        table = Table(*COLUMNS, box=None, pad_edge=False)
        for line in self.lines:
            table.add_row(*line)
        written = StringIO()
        Console(file=written, width=WIDTH, no_color=True).print(table)
        return written.getvalue().rstrip() + self._rest("\n")

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in self.lines)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{self._rest('')}"

    def _rest(self, before: str) -> str:
        return f"{before}{self.left_out:,} more tokens" if self.left_out else ""


def show(batch: TrainBatch | RLStep | Sequence[Sample], tokenizer: Any = None, most: int = 200) -> Shown:
    """A table of tokens: text, loss mask, advantage, and the log-probability when the token was sampled.

    `batch`: a batch of `prepare_grpo_batch`, a step of `grpo`, or samples. With a `tokenizer`, tokens have their text.
    `most`: the largest number of rows.

    Examples:
        >>> print(rc.show(step, policy.tokenizer, most=20))
    """
    if isinstance(batch, TrainBatch):
        lines = _of_batch(batch, tokenizer)
    elif isinstance(batch, RLStep):
        lines = _of_samples(batch.samples, tokenizer, [list(of) for of in batch.advantages])
    elif isinstance(batch, Sequence) and batch and all(isinstance(sample, Sample) for sample in batch):
        lines = _of_samples(batch, tokenizer, [[] for _ in batch])
    else:
        raise BadInput(f"batch: a {type(batch).__name__} is neither a batch, nor a step of RL, nor a list of samples")
    return Shown(lines[:most], max(0, len(lines) - most))


def _of_batch(batch: TrainBatch, tokenizer: Any) -> list[Line]:
    """Tokens of a prompt that several answers share stand there once, before the first of them."""
    shared = {(span.prefix_begin, span.prefix_end) for span in batch.spans}
    own = [span for span in batch.spans if (span.begin, span.end) not in shared]
    learnt: dict[int, int] = {}
    for number, (source, of) in enumerate(zip(batch.source_M.tolist(), batch.sequence_M.tolist(), strict=True)):
        learnt[max(source + 1, own[of].begin)] = number
    ends = [span.end for span in own]
    tokens = batch.tokens_N.tolist()
    lines = []
    for place, (token, piece) in enumerate(zip(tokens, _pieces(tokenizer, tokens), strict=True)):
        advantage = logprob = None
        if place in learnt:
            advantage = None if batch.advantages_M is None else float(batch.advantages_M[learnt[place]])
            sampled = batch.rollout_logprobs_M
            logprob = None if sampled is None else float(sampled[learnt[place]])
        lines.append(_line(bisect_right(ends, place), token, piece, place in learnt, advantage, logprob))
    return lines


def _of_samples(samples: Sequence[Sample], tokenizer: Any, advantages: Sequence[Sequence[float]]) -> list[Line]:
    lines = []
    for number, (sample, given) in enumerate(zip(samples, advantages, strict=True)):
        begin, of_learnt = len(sample.tokens) - len(sample.rollout_log_probs), iter(given)
        for place, piece in enumerate(_pieces(tokenizer, sample.tokens)):
            is_learnt = bool(sample.loss_mask[place])
            advantage = next(of_learnt, None) if is_learnt else None
            logprob = sample.rollout_log_probs[place - begin] if is_learnt else None
            lines.append(_line(number, sample.tokens[place], piece, is_learnt, advantage, logprob))
    return lines


def _pieces(tokenizer: Any, tokens: Sequence[int]) -> Sequence[str]:
    return [""] * len(tokens) if tokenizer is None else token_pieces(tokenizer, tokens)


def _line(sequence: int, token: int, piece: str, learnt: bool, advantage: float | None, logprob: float | None) -> Line:
    numbers = ("" if value is None else f"{value:+.4f}" for value in (advantage, logprob))
    return (str(sequence), str(token), repr(piece)[1:-1], "1" if learnt else "", *numbers)
