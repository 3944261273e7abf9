"""The protocol of training backends, their batches, and the futures that they return.

    TrainBatch        one pass: sequences packed in one row, with a stream of numbers for each learnt token
    TokenScores       what the policy says of each learnt token
    LossFunction      (scores, batch) -> loss and metrics; the backend does not know the algorithm
    TrainFuture[T]    a result that may still be under way
    TrainingBackend   forward_backward, score, optim_step, get_weights, load_weights, save, load
    TrainStep         what a step of SFT or DPO leaves behind

Legend: N tokens of the row, M learnt tokens, S sequences.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from rollouts_core.inference.devices import to_device
from rollouts_core.metrics.timing import PhaseTimer
from rollouts_core.training.packed import Span
from rollouts_core.training.pending import Metrics as Metrics
from rollouts_core.training.pending import Numbers

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TrainBatch:
    """The sequences of one forward-backward pass, packed in a row. What is not learnt is only looked at."""

    tokens_N: torch.Tensor
    positions_N: torch.Tensor
    """Each token's place in its own sequence."""
    spans: tuple[Span, ...]
    """Which tokens see which."""
    source_M: torch.Tensor
    """The place in the row whose hidden state predicts the learnt token."""
    targets_M: torch.Tensor
    """The learnt tokens, sequence by sequence."""
    sequence_M: torch.Tensor
    """Which sequence each belongs to, ascending."""
    sequences: int
    normalizer: float
    """The divisor of summed losses: tokens (or sequences) of the whole optimizer step, so that splitting a step into
    several passes changes nothing."""
    advantages_M: torch.Tensor | None = None
    rollout_logprobs_M: torch.Tensor | None = None
    """The engine's, under the weights that made each token."""
    old_logprobs_M: torch.Tensor | None = None
    """The trainer's, before the step's first update; None where the pass at hand is that one."""
    reference_logprobs_M: torch.Tensor | None = None
    old_values_M: torch.Tensor | None = None
    """The critic's, before the step's first update."""
    returns_M: torch.Tensor | None = None
    experts_NR: torch.Tensor | None = None
    """The experts that each token is to use (`inference.told_experts`); None if the policy's routers choose."""
    share: float = 1.0
    """This batch's share of the optimizer step's tokens."""

    def to(self, device: torch.device) -> "TrainBatch":
        moved = {
            entry.name: to_device(value, device)
            for entry in fields(self)
            if isinstance(value := getattr(self, entry.name), torch.Tensor)
        }
        return replace(self, **moved)  # type: ignore[arg-type]


class TokenScores(NamedTuple):
    """The policy's scores of each learnt token, in the order of the batch; float32."""

    logprobs_M: torch.Tensor
    entropy_M: torch.Tensor | None = None
    """Entropy of the distribution that the token was drawn from; None where the policy computes none."""
    values_M: torch.Tensor | None = None
    """The critic's value of the state before each token; None without a critic."""


LossFunction = Callable[[TokenScores, TrainBatch], tuple[torch.Tensor, Numbers]]
"""Metrics may stay tensors of one number, which costs no wait for the device. Those ending in `_sum` add up over
passes, those ending in `_max` combine by maximum."""


def combined(passes: Sequence[Metrics]) -> Metrics:
    """The metrics of an optimizer step from those of its passes: sums are added, maxima compared."""
    return {name: (max if name.endswith("_max") else sum)(metrics[name] for metrics in passes) for name in passes[0]}


class TrainFuture(Protocol[T_co]):
    """A result that may still be under way."""

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for it, at most `timeout` seconds. Raises what the work raised, or TimeoutError."""


@dataclass(frozen=True)
class ImmediateTrainFuture(Generic[T]):
    """A result that was there at once."""

    value: T

    def result(self, timeout: float | None = None) -> T:
        return self.value


class LazyTrainFuture(Generic[T]):
    """Work that is done where its result is first asked for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done: list[T] = []

    def result(self, timeout: float | None = None) -> T:
        if not self._done:
            self._done.append(self._work())
        return self._done[0]


class TrainingBackend(Protocol):
    """Trains one policy."""

    @property
    def weight_version(self) -> int:
        """Optimizer steps taken since the policy began."""

    @property
    def parallel_passes(self) -> int:
        """How many passes are computed at once: a step is best cut into a multiple of it."""

    @property
    def peak_flops(self) -> float | None:
        """Operations a second that all its devices can do at most; None where that is not known."""

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the batch's gradients to what has accumulated. Its metrics are best asked for behind `optim_step`, which
        brings them along."""

    def score(self, batch: TrainBatch) -> TrainFuture[TokenScores]:
        """The batch's tokens under the current weights; no gradient."""

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip, step, advance the schedule, clear gradients. Gives grad_norm and learning_rate.

        Raises `NonFiniteGradient`, with the passes that made it, and changes nothing.
        """

    def get_weights(self) -> TrainFuture[Weights]:
        """The current weights by name: shared with the backend, or gathered when they are asked for. So copy what must
        not change."""

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> TrainFuture[None]:
        """Replace the weights, in place."""

    def save(self, directory: Path) -> TrainFuture[None]:
        """Take everything needed to go on exactly: weights, optimizer, scheduler, RNG, weight version. The result
        writes it, in whichever thread it is asked for; training may go on meanwhile."""

    def load(self, directory: Path) -> None:
        """Take up what `save` wrote."""


@dataclass(frozen=True)
class TrainStep:
    """The results of one step."""

    step: int
    """Counted from 1."""
    metrics: Metrics


def optimizer_step(
    backend: TrainingBackend, passes: Iterable[TrainBatch], timer: PhaseTimer
) -> tuple[Metrics, Metrics]:
    """Take an optimizer step over these passes. Returns their combined metrics, and the optimizer's with its speed."""
    began = time.perf_counter()
    passes = list(passes)
    tokens = sum(len(batch.tokens_N) for batch in passes)
    passes = [replace(batch, share=len(batch.tokens_N) / tokens) for batch in passes]
    with timer.phase("forward_backward"):
        futures = [backend.forward_backward(batch) for batch in passes]
    with timer.phase("optim"):
        stepped = backend.optim_step().result()
    summed = combined([future.result() for future in futures])
    uneven = {"experts/balance_loss": summed["balance_loss_sum"]} if "balance_loss_sum" in summed else {}
    return summed, {**stepped, **uneven, **_speed(backend, summed, time.perf_counter() - began)}


def _speed(backend: TrainingBackend, summed: Metrics, seconds: float) -> Metrics:
    """Tokens a second of each device, and model FLOP utilisation."""
    speed = {"perf/tokens_per_second": summed["row_sum"] / seconds / backend.parallel_passes}
    peak = backend.peak_flops
    return speed if peak is None else {**speed, "perf/mfu": summed["flops_sum"] / seconds / peak}
