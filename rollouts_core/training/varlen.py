"""Attention over rows of any length, by torch's kernel for CUDA in half precision.

Differences between versions of torch:

- from 2.12 on, `enable_gqa=True` must say that query heads share key heads;
- 2.11 has no such argument, and promises the kernel for as many key heads as query heads only, so they are repeated.

Legend: N tokens of the row, H query heads, K key-value heads, D head size, S sequences.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from rollouts_core.inference.attention import Scores

Kernel = Callable[..., Any]


def variable_length_attention(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: tuple[int, int],
    scores: Scores,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """NHD, causal: a row's last query sees its last key. Ends are int32 and begin with 0: S + 1 of them; `longest` are
    the most queries and the most keys of a row."""
    run = kernel or _kernel()
    copies = query_NHD.shape[1] // key_NKD.shape[1]
    further: dict[str, Any] = {}
    if copies > 1 and _knows_shared_heads(run):
        further["enable_gqa"] = True
    elif copies > 1:
        key_NKD, value_NKD = (whole.repeat_interleave(copies, dim=1) for whole in (key_NKD, value_NKD))
    mixed = run(
        query_NHD, key_NKD, value_NKD, query_ends, key_ends, *longest,
        scale=scores.scale, window_size=((scores.window or 0) - 1, 0), **further,
    )  # fmt: skip
    assert isinstance(mixed, torch.Tensor), "no further outputs were asked for"
    return mixed


@cache
def _knows_shared_heads(kernel: Kernel) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


def _kernel() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
