"""A row of packed tokens over several ranks: each computes a part of it, and the attention of all of it for some heads.

Decision: tokens are exchanged for heads around attention (DeepSpeed-Ulysses, arXiv 2309.14509). So attention sees whole
rows, and packing, shared prompts and windows work as on one device.

Legend: N tokens of the row, H heads, D head size, M learnt tokens.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rollouts_core.inference.attention import Scores
from rollouts_core.training.collectives import summed, to_heads, to_tokens
from rollouts_core.training.packed import Attention


@dataclass(frozen=True)
class Context:
    """The ranks that share a row."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def stretch(self, values_N: torch.Tensor) -> torch.Tensor:
        """This rank's part of the row, which is padded to parts of one length."""
        padded = F.pad(values_N, (0, 0) * (values_N.ndim - 1) + (0, -len(values_N) % self.size))
        return padded.chunk(self.size)[self.rank]

    def real(self, tokens: int) -> int:
        """How many of this rank's part of so many tokens are no padding."""
        length = -(-tokens // self.size)
        return max(0, min(length, tokens - self.rank * length))

    def mine(self, places_M: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For places in a row of `tokens`: the indices of those in this rank's part, and their places in that part."""
        length = -(-tokens // self.size)
        indices = ((places_M >= self.rank * length) & (places_M < (self.rank + 1) * length)).nonzero()[:, 0]
        return indices, places_M[indices] - self.rank * length

    def gathered(self, values: torch.Tensor | None, indices: torch.Tensor, learnt: int) -> torch.Tensor | None:
        """The values of all ranks, on every rank. A gradient goes to the rank that computed the value."""
        if values is None:
            return None
        return summed(values.new_zeros(learnt).index_put((indices,), values), self.group)


class ExchangedAttention:
    """Attention over the whole row, by ranks that have a part of it each. Fits `Attention`."""

    def __init__(self, whole: Attention, tokens: int, context: Context) -> None:
        self._whole, self._tokens, self._context = whole, tokens, context

    def __call__(
        self, query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        group = self._context.group
        query, key, value = (to_heads(part, group)[: self._tokens] for part in (query_NHD, key_NKD, value_NKD))
        if scores.sinks_H is not None:
            scores = scores._replace(sinks_H=scores.sinks_H.chunk(self._context.size)[self._context.rank])
        mixed = self._whole(query, key, value, scores)
        padding = -self._tokens % self._context.size
        return to_tokens(F.pad(mixed, (0, 0, 0, 0, 0, padding)), group)
