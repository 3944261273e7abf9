"""How many operations a model's own mathematics takes, and what share of a device's speed that is (PaLM, arXiv
2204.02311, appendix B).

Decision: recomputation (activation checkpointing, logits) and padding do not count: the number is the amount of useful
work.

Legend: N tokens of the row, M learnt tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rollouts_core.training.packed import Span

GPU_PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations a second, from the makers' data sheets."""
MATRIX, TURNS = 2048, 3
"""Size of the matrix product that a CPU is measured with, and how often it is repeated."""


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a forward and a backward pass."""

    per_token: float
    """Operations of the layers' matrices for a token."""
    per_learnt: float
    """Operations of the head for a learnt token."""
    per_pair: float
    """Operations of attention for each query and a key that it sees."""

    def of(self, spans: Sequence[Span], learnt: int) -> float:
        """Operations of one pass. A query sees the keys before it and its own; windows are not taken off."""
        tokens = sum(span.queries for span in spans)
        pairs = sum(
            span.queries * (span.keys - span.queries) + span.queries * (span.queries + 1) // 2 for span in spans
        )
        return self.per_token * tokens + self.per_learnt * learnt + self.per_pair * pairs


def flops_of(model: Any) -> ModelFlops:
    """The operations of a model: two for each weight and token forward, two backward, two more if it is trained.
    Of the experts, only those count that a token goes through."""
    config, head = model.config, model.get_output_embeddings()
    outside = {id(head.weight), id(model.get_input_embeddings().weight)}
    matrices = [value for value in model.parameters() if value.ndim > 1 and id(value) not in outside]
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    chosen = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelFlops(
        per_token=sum(
            value.numel() * (6 if value.requires_grad else 4) * (chosen if value.ndim > 2 else 1) for value in matrices
        ),
        per_learnt=head.weight.numel() * (6 if head.weight.requires_grad else 4),
        per_pair=12 * config.num_hidden_layers * config.num_attention_heads * size,
    )


def peak_flops(device: torch.device) -> float | None:
    """Operations a second that the device can do at most: a GPU's by its name, a CPU's measured once in float32; None
    where the GPU is not known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for known, peak in GPU_PEAKS.items() if known in name), None)
    return _measured() if device.type == "cpu" else None


@cache
def _measured() -> float:
    one = torch.ones(MATRIX, MATRIX)
    one @ one
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        one @ one
        seconds.append(time.perf_counter() - began)
    return 2 * MATRIX**3 / min(seconds)
