"""What trains: the protocol every backend fits, the batch it is fed, and the futures it answers with.

    TrainBatch        padded tokens with mask and, for RL, per-token advantage and log-probability streams
    LossFunction      (logits, batch) -> loss and metrics; the backend does not know the algorithm
    TrainFuture[T]    a result that may still be under way
    TrainingBackend   forward_backward, optim_step, get_weights, load_weights, save, load

Legend: B examples, T tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Metrics = dict[str, float]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainBatch:
    """One forward-backward pass. Padding is on the right, with mask 0."""

    tokens_BT: torch.Tensor
    loss_mask_BT: torch.Tensor
    """1 where the token is learnt; column 0 is always 0, since nothing predicts it."""
    attention_mask_BT: torch.Tensor
    normalizer: float
    """What summed token losses are divided by: tokens (or sequences) of the whole optimizer step, so that splitting
    a step into several passes changes nothing."""
    advantages_BT: torch.Tensor | None = None
    rollout_logprobs_BT: torch.Tensor | None = None
    """The engine's, under the weights that made each token."""
    old_logprobs_BT: torch.Tensor | None = None
    """The trainer's, before the step's first update; None where the pass at hand is that one."""
    reference_logprobs_BT: torch.Tensor | None = None

    def to(self, device: torch.device) -> "TrainBatch":
        moved = {
            entry.name: value.to(device)
            for entry in fields(self)
            if isinstance(value := getattr(self, entry.name), torch.Tensor)
        }
        return replace(self, **moved)  # type: ignore[arg-type]


LossFunction = Callable[[torch.Tensor, TrainBatch], tuple[torch.Tensor, Metrics]]


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


class TrainingBackend(Protocol):
    """Trains one policy."""

    @property
    def weight_version(self) -> int:
        """Optimizer steps taken since the policy began."""

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the batch's gradients to what has accumulated. Metrics are sums to be added over passes."""

    def logprobs(self, batch: TrainBatch, temperature: float) -> TrainFuture[torch.Tensor]:
        """Log-probabilities BT of the batch's tokens under the current weights; no gradient."""

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip, step, advance the schedule, clear gradients. Gives grad_norm and learning_rate."""

    def get_weights(self) -> TrainFuture[Weights]:
        """The current weights by name; shared with the backend, so copy what must not change."""

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> TrainFuture[None]:
        """Replace the weights, in place."""

    def save(self, directory: Path) -> None:
        """Write everything needed to go on exactly: weights, optimizer, scheduler, RNG, weight version."""

    def load(self, directory: Path) -> None:
        """Take up what `save` wrote."""
