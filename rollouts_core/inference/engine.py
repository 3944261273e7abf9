"""What generates: token ids in; token ids, log-probabilities and weight versions out.

Text never crosses this boundary, so nothing is decoded and encoded again between engine and trainer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class GenerationRequest:
    request_id: str
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    """The request's draws follow from this alone."""


@dataclass(frozen=True)
class Completion:
    request_id: str
    tokens: tuple[int, ...]
    """What was sampled, the stop token included."""
    log_probs: tuple[float, ...]
    """Per token, under the temperature it was sampled with (greedy: under temperature 1)."""
    weight_versions: tuple[int, ...]
    """Per token, the version of the weights that made it."""
    finish_reason: FinishReason


class InferenceEngine(Protocol):
    """Serves one policy."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token is made with."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer all requests, in the order given.

        Raises `ContextOverflow` before anything is generated when a request does not fit.
        """

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Answer all requests, each as soon as it ends. Raises as `generate` does."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests at once; they complete with what they have and finish reason 'abort'."""

    def update_weights(self, weights: "Mapping[str, torch.Tensor]", version: int) -> None:
        """Replace the weights. Raises `WeightMismatch` and changes nothing when names or shapes differ."""

    def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        """Replace the weights by those of a Hugging Face model directory."""
