"""What the code for CUDA asks of torch: its functions as installed, and its kernel's stand-ins of two versions."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn

from rollouts_core.inference.attention import Scores
from rollouts_core.training.varlen import variable_length_attention

Kernel = Callable[..., torch.Tensor]


def rows_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], scale: float, window: int
) -> torch.Tensor:
    mixed = []
    for begin, end in itertools.pairwise(ends):
        own = (whole[begin:end].transpose(0, 1) for whole in (query, key, value))
        places = torch.arange(end - begin)
        seen = (places <= places[:, None]) & (places > places[:, None] - window)
        mixed.append(F.scaled_dot_product_attention(*own, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(mixed)


def torch_2_11(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    """As many key heads as query heads."""
    assert query.shape[1] == key.shape[1] and window_size[1] == 0 and scale is not None
    window = len(query) if window_size[0] < 0 else window_size[0] + 1
    return rows_alone(query, key, value, cu_seq_q.tolist(), scale, window)


def torch_2_12(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Shared key heads must be announced."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    copies = query.shape[1] // key.shape[1]
    key, value = (whole.repeat_interleave(copies, 1) for whole in (key, value))
    return torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("kernel", [torch_2_11, torch_2_12])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_every_version_of_the_kernel_is_called_as_it_wants(kernel: Kernel, heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(9, 4, 8), torch.randn(9, heads, 8), torch.randn(9, heads, 8)
    ends = torch.tensor([0, 5, 9], dtype=torch.int32)
    mixed = variable_length_attention(query, key, value, ends, ends, (5, 5), Scores(0.5, window), kernel)
    copies = 4 // heads
    expected = rows_alone(
        query, *(whole.repeat_interleave(copies, 1) for whole in (key, value)), [0, 5, 9], 0.5, window or 9
    )
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (varlen_attn, ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"]),
        (flex_attention, ["query", "key", "value", "score_mod", "scale", "enable_gqa", "return_lse"]),
        (F.scaled_dot_product_attention, None),
        (torch.optim.AdamW.__init__, ["params", "lr", "weight_decay", "fused"]),
        (torch.optim.Muon.__init__, ["params", "lr", "weight_decay", "adjust_lr_fn"]),
        (fully_shard, ["module", "mesh", "mp_policy", "reshard_after_forward"]),
        (MixedPrecisionPolicy, ["param_dtype", "reduce_dtype"]),
        (FSDPModule.set_gradient_divide_factor, ["factor"]),
        (FSDPModule.set_force_sum_reduction_for_comms, ["enable"]),
        (torch.nn.utils.clip_grad_norm_, ["parameters", "max_norm"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_torch_s_functions_take_what_the_code_for_gpus_gives(function: Any, names: list[str] | None) -> None:
    """They don't run here, or not on this device; their signatures are read."""
    if names is None:
        assert "enable_gqa" in (function.__doc__ or "")
        return
    assert set(names) <= set(inspect.signature(function).parameters)
