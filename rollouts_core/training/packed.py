"""Attention over packed tokens: examples are one after another in a row, and none sees another.

Decision: a pass has no padding outside attention. Every operator that works token by token (most of a small model's
time, and all of its matrix products) runs on exactly the tokens there are; only attention needs to know where an
example begins. On CUDA in half precision that is `varlen_attn`; elsewhere the rows of attention are padded to others of
like length, which costs little because attention over short rows is cheap.

Decision: a prompt that several answers share is in the row once. Its tokens are computed once, and each answer attends
to it and to itself, as it would with a copy of its own.

Legend: N tokens of the row, H query heads, K key-value heads, D head size, R rows of a block, Q queries and L keys of
each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from rollouts_core.inference.attention import Scores, attend, use_attention
from rollouts_core.inference.devices import to_device
from rollouts_core.training.varlen import variable_length_attention

NAME = "rollouts_packed"
Places = npt.NDArray[np.int64]
LIKE_LENGTHS = 0.75
"""Rows share a block of padded attention when the shortest has this share of the longest's keys."""


class Span(NamedTuple):
    """Tokens `begin` to `end` of the row, which attend to themselves and to the prefix before them."""

    begin: int
    end: int
    prefix_begin: int = 0
    prefix_end: int = 0

    @property
    def queries(self) -> int:
        return self.end - self.begin

    @property
    def keys(self) -> int:
        return self.queries + self.prefix_end - self.prefix_begin


class Attention(Protocol):
    """How the tokens of one packed row attend to each other; the same for all layers of a pass."""

    def __call__(
        self, query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """NHD"""


def attention_over(spans: Sequence[Span], device: torch.device, dtype: torch.dtype) -> Attention:
    """`spans` cover the row in its order."""
    return _Variable(spans, device) if _has_kernel(device, dtype) else _Padded(spans, device)


def padding_of(spans: Sequence[Span], device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of attention that are padding, and all that are computed. Nothing else of a pass is padded."""
    real = sum(span.queries for span in spans)
    if _has_kernel(device, dtype):
        return 0, real
    computed = sum(len(block) * max(span.queries for span in block) for block in _alike(tuple(spans)))
    return computed - real, computed


def use_packed_attention(model: Any) -> None:
    """Make a transformers model attend as the `attention` says that each forward pass is given. Raises as
    `use_attention`."""
    use_attention(model, NAME, "attention", _mix)


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class _Variable:
    """CUDA's kernel for rows of any length."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._spans, self._device = spans, device
        self._longest = max(span.queries for span in spans), max(span.keys for span in spans)
        self._query_ends = _ends([span.queries for span in spans], device)
        self._key_ends = _ends([span.keys for span in spans], device)
        shared = any(span.prefix_end for span in spans)
        self._keys = to_device(_all_keys(spans), device) if shared else None

    def __call__(
        self, query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        if not scores.is_plain:
            return self._padded(query_NHD, key_NKD, value_NKD, scores)
        width = value_NKD.shape[-1]
        value_NKD = F.pad(value_NKD, (0, max(0, query_NHD.shape[-1] - width)))
        if self._keys is not None:
            key_NKD, value_NKD = key_NKD.index_select(0, self._keys), value_NKD.index_select(0, self._keys)
        mixed_NHD = variable_length_attention(
            query_NHD, key_NKD, value_NKD, self._query_ends, self._key_ends, self._longest, scores
        )
        return mixed_NHD[..., :width]

    @cached_property
    def _padded(self) -> "_Padded":
        """Padded attention, for changes of scores that the kernel can't compute."""
        return _Padded(self._spans, self._device)


@dataclass(frozen=True)
class _Block:
    rows: int
    queries_RQ: torch.Tensor
    """Places of the row, flat; padding repeats place 0 and is never read."""
    keys_RL: torch.Tensor
    offsets: torch.Tensor | None
    """Per row, how many keys stand before its first query; None where all stand alone, so plain causal attention."""


class _Padded:
    """torch's attention on blocks of rows of like length."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._blocks: list[_Block] = []
        place_N = np.empty(sum(span.queries for span in spans), np.int64)
        taken = 0
        for chosen in _alike(tuple(spans)):
            queries_RQ, keys_RL, real_RQ = _places(chosen)
            place_N[queries_RQ[real_RQ]] = taken + np.flatnonzero(real_RQ)
            taken += queries_RQ.size
            behind = any(span.prefix_end for span in chosen)
            offsets = _sent([span.keys - span.queries for span in chosen], device) if behind else None
            self._blocks.append(_Block(len(chosen), _flat(queries_RQ, device), _flat(keys_RL, device), offsets))
        self._place_N = to_device(torch.from_numpy(place_N), device)

    def __call__(
        self, query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        mixed = [self._attend(block, query_NHD, key_NKD, value_NKD, scores) for block in self._blocks]
        return torch.cat(mixed).index_select(0, self._place_N)

    def _attend(
        self,
        block: _Block,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        query = _rows(query_NHD, block.queries_RQ, block.rows)
        key, value = (_rows(whole, block.keys_RL, block.rows) for whole in (key_NKD, value_NKD))
        allowed = _allowed(block.offsets, query.shape[2], key.shape[2], scores.window, query.device)
        return attend(query, key, value, allowed, scores).transpose(1, 2).flatten(0, 1)


def _mix(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Attention, scores: Scores
) -> torch.Tensor:
    """Mixes the one row."""
    query_NHD, key_NKD, value_NKD = (whole[0].transpose(0, 1) for whole in (query, key, value))
    return attention(query_NHD, key_NKD, value_NKD, scores).transpose(0, 1)[None]


@lru_cache(maxsize=4)
def _alike(spans: tuple[Span, ...]) -> list[list[Span]]:
    """Blocks of spans: those that stand alone and those behind a prefix apart, each cut where lengths fall.

    Remembered for the passes under way, since their padding is asked for as well.
    """
    blocks: list[list[Span]] = []
    for behind in (False, True):
        chosen = sorted((s for s in spans if bool(s.prefix_end) == behind), key=lambda s: s.keys, reverse=True)
        first = len(blocks)
        for span in chosen:
            if len(blocks) > first and span.keys >= LIKE_LENGTHS * blocks[-1][0].keys:
                blocks[-1].append(span)
            else:
                blocks.append([span])
    return blocks


def _places(spans: Sequence[Span]) -> tuple[Places, Places, npt.NDArray[np.bool_]]:
    """Places of the queries RQ and the keys RL of each span, 0 in padding, and which queries are none."""
    begin, queries, prefix, length = np.array(
        [(s.begin, s.queries, s.prefix_begin, s.prefix_end - s.prefix_begin) for s in spans]
    ).T[..., None]
    query_Q, key_L = np.arange(queries.max()), np.arange((queries + length).max())
    real_RQ = query_Q < queries
    keys_RL = np.where(key_L < length, prefix + key_L, begin + key_L - length)
    return np.where(real_RQ, begin + query_Q, 0), np.where(key_L < length + queries, keys_RL, 0), real_RQ


def _flat(places: Places, device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(places.reshape(-1)), device)


def _all_keys(spans: Sequence[Span]) -> torch.Tensor:
    """The keys of each span behind those of the one before."""
    prefixes_and_own = ((np.arange(s.prefix_begin, s.prefix_end), np.arange(s.begin, s.end)) for s in spans)
    return torch.from_numpy(np.concatenate([part for parts in prefixes_and_own for part in parts]))


def _allowed(
    offsets: torch.Tensor | None, queries: int, keys: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """R1QL, True where a query may look; None where plain causal attention says it all."""
    if offsets is None and (window is None or keys <= window):
        return None
    starts = torch.zeros(1, dtype=torch.long, device=device) if offsets is None else offsets
    query_RQ1 = (starts[:, None] + torch.arange(queries, device=device))[..., None]
    key_L = torch.arange(keys, device=device)
    allowed = key_L <= query_RQ1
    if window is not None:
        allowed &= key_L > query_RQ1 - window
    return allowed[:, None]


def _rows(whole_NHD: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    """RHTD"""
    return whole_NHD.index_select(0, places).view(rows, -1, *whole_NHD.shape[1:]).transpose(1, 2)


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return _sent([0, *lengths], device).cumsum(0).to(torch.int32)


def _sent(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(numbers), device)
