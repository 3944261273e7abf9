"""Attention of a block of tokens, with what families of models do to the scores: windows, soft caps, sinks.

Decision: torch's fused kernel wherever it computes what is asked. It knows neither soft caps (Gemma 2) nor sinks
(gpt-oss); those are computed by FlexAttention on CUDA and written out on the CPU, where FlexAttention has no gradient.

It is given to transformers as an attention implementation, so it serves every family whose layers hand their keyword
arguments on, which all that use transformers' attention interface do.

Legend: R rows of a block, Q queries and L keys of each, H query heads, K key-value heads, D head size.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rollouts_core.errors import BadInput


class Scores(NamedTuple):
    """How a layer changes its attention scores."""

    scale: float
    window: int | None = None
    """The number of tokens that a token sees at most, itself included."""
    softcap: float | None = None
    """Scores become softcap x tanh(scores / softcap) (Gemma 2, arXiv 2408.00118, section 2)."""
    sinks_H: torch.Tensor | None = None
    """A score for each head that takes part in the softmax and has no value vector (gpt-oss; arXiv 2309.17453)."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks_H is None


Mixing = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, Scores], torch.Tensor]
"""Queries RHQD, keys RKLD and values RKLD of a layer, what the pass was given, and the layer's scores: RHQD."""


def use_attention(model: Any, name: str, given: str, mix: Mixing) -> None:
    """Make a transformers model attend by `mix`. Each forward pass gets the keyword argument `given`.

    Raises `BadInput` where its layers need what this does not compute.
    """

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        if others.get(given) is None:
            raise BadInput("the model does not hand a pass's keyword arguments on to its attention")
        if dropout:
            raise BadInput("the model's attention has dropout, which is not computed here")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = Scores(scale, sliding_window, softcap, s_aux)
        return mix(query, key, value, others[given], scores).transpose(1, 2), None

    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise BadInput(f"{model.config.model_type} does not take attention from transformers' interface")


def attend(
    query_RHQD: torch.Tensor,
    key_RKLD: torch.Tensor,
    value_RKLD: torch.Tensor,
    allowed_R1QL: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """RHQD. True in `allowed_R1QL` where a query may look; without it attention is causal, with as many keys as
    queries. Values may be narrower or wider than keys."""
    shared_keys = query_RHQD.shape[1] != key_RKLD.shape[1]
    if scores.is_plain:
        return F.scaled_dot_product_attention(
            query_RHQD, key_RKLD, value_RKLD, attn_mask=allowed_R1QL, is_causal=allowed_R1QL is None,
            scale=scores.scale, enable_gqa=shared_keys,
        )  # fmt: skip
    if allowed_R1QL is None:
        queries = query_RHQD.shape[2]
        allowed_R1QL = torch.ones(1, 1, queries, queries, dtype=torch.bool, device=query_RHQD.device).tril()
    if query_RHQD.device.type == "cuda":
        return by_flex_attention(query_RHQD, key_RKLD, value_RKLD, allowed_R1QL, scores, _compiled_flex_attention())
    return _written_out(query_RHQD, key_RKLD, value_RKLD, allowed_R1QL, scores)


def by_flex_attention(
    query_RHQD: torch.Tensor,
    key_RKLD: torch.Tensor,
    value_RKLD: torch.Tensor,
    allowed_R1QL: torch.Tensor,
    scores: Scores,
    flex_attention: Any,
) -> torch.Tensor:
    """A sink only adds to the softmax's divisor: with z its logarithm without the sink, what comes out is scaled by
    exp(z) / (exp(z) + exp(sink)) = sigmoid(z - sink)."""
    allowed_RQL = allowed_R1QL[:, 0].expand(len(query_RHQD), -1, -1)
    softcap = scores.softcap

    def score_mod(
        score: torch.Tensor, row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        capped = score if softcap is None else softcap * torch.tanh(score / softcap)
        return torch.where(allowed_RQL[row, query, key], capped, float("-inf"))

    mixed_RHQD, divisor_RHQ = flex_attention(
        query_RHQD, key_RKLD, value_RKLD, score_mod=score_mod, scale=scores.scale,
        enable_gqa=query_RHQD.shape[1] != key_RKLD.shape[1], return_lse=True,
    )  # fmt: skip
    if scores.sinks_H is None:
        return mixed_RHQD  # type: ignore[no-any-return]
    share_RHQ = torch.sigmoid(divisor_RHQ.float() - scores.sinks_H.float()[:, None])
    return mixed_RHQD * share_RHQ[..., None].to(mixed_RHQD.dtype)  # type: ignore[no-any-return]


@cache
def _compiled_flex_attention() -> Any:
    """FlexAttention, compiled: without compilation it holds all scores of a block in memory at once."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _written_out(
    query_RHQD: torch.Tensor,
    key_RKLD: torch.Tensor,
    value_RKLD: torch.Tensor,
    allowed_R1QL: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    copies = query_RHQD.shape[1] // key_RKLD.shape[1]
    key_RHLD, value_RHLD = (whole.repeat_interleave(copies, dim=1) for whole in (key_RKLD, value_RKLD))
    found_RHQL = (query_RHQD @ key_RHLD.transpose(2, 3)).float() * scores.scale
    if scores.softcap is not None:
        found_RHQL = scores.softcap * torch.tanh(found_RHQL / scores.softcap)
    found_RHQL = found_RHQL.masked_fill(~allowed_R1QL, float("-inf"))
    if scores.sinks_H is not None:
        sinks_RHQ1 = scores.sinks_H.float()[:, None, None].expand(*found_RHQL.shape[:3], 1)
        found_RHQL = torch.cat((found_RHQL, sinks_RHQ1), dim=-1)
    share_RHQL = torch.softmax(found_RHQL, dim=-1)[..., : key_RHLD.shape[2]].to(query_RHQD.dtype)
    return share_RHQL @ value_RHLD
