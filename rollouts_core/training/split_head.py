"""Log-probabilities over a vocabulary that ranks share: each has the logits of its tokens, and none has all.

Decision: ranks exchange four numbers a token (the largest logit, the sum of exponentials, the target's logit, and for
an entropy the mean logit) and, backward, the gradient of the hidden state. Logits are never gathered, and are computed
in chunks as on one device.

Legend: M learnt tokens, E hidden size, W tokens of the vocabulary that this rank has, C tokens of a chunk.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rollouts_core.training.backend import TokenScores
from rollouts_core.training.collectives import all_reduced, copied
from rollouts_core.training.head import Head, chunks, logits_of


def split_head_scores(
    hidden_ME: torch.Tensor, head: Head, targets_M: torch.Tensor, entropy: bool, group: dist.ProcessGroup
) -> TokenScores:
    """The same as `head_scores`, with `head` this rank's rows of the head; ranks have as many, in their order."""
    first = dist.get_rank(group) * len(head.weight_VE)
    hidden_ME = copied(hidden_ME, group)
    scores = _SplitHead.apply(hidden_ME, *head, targets_M - first, entropy, group)  # type: ignore[no-untyped-call]
    return TokenScores(*scores)


class _SplitHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: torch.Tensor,
        weight_WE: torch.Tensor,
        bias_W: torch.Tensor | None,
        divisor: float,
        softcap: float | None,
        places_M: torch.Tensor,
        entropy: bool,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`places_M`: of the targets among this rank's tokens; outside of them for other ranks'."""
        head = Head(weight_WE, bias_W, divisor, softcap)
        own_M = (places_M >= 0) & (places_M < len(weight_WE))
        sums = [torch.empty(len(hidden_ME), device=hidden_ME.device) for _ in range(3)]
        largest_M = torch.empty_like(sums[0])
        for chunk in chunks(len(hidden_ME), len(weight_WE)):
            logits_CW = logits_of(hidden_ME[chunk], head)
            largest_M[chunk] = all_reduced(logits_CW.max(1).values, group, dist.ReduceOp.MAX)
            exps_CW = (logits_CW - largest_M[chunk, None]).exp()
            targets_C = places_M[chunk].clamp(0, len(weight_WE) - 1)
            found = (
                exps_CW.sum(1),
                logits_CW.gather(1, targets_C[:, None])[:, 0] * own_M[chunk],
                (exps_CW * logits_CW).sum(1) if entropy else torch.zeros_like(largest_M[chunk]),
            )
            for kept, value in zip(sums, found, strict=True):
                kept[chunk] = value
        exps_M, target_M, weighted_M = all_reduced(torch.stack(sums), group)
        total_M = largest_M + exps_M.log()
        entropy_M = total_M - weighted_M / exps_M if entropy else None
        ctx.save_for_backward(hidden_ME, weight_WE, bias_W, places_M, total_M, entropy_M)
        ctx.divisor, ctx.softcap = divisor, softcap
        ctx.set_materialize_grads(False)
        return target_M - total_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob_M: torch.Tensor | None, by_entropy_M: torch.Tensor | None) -> tuple[Any, ...]:
        """This rank's rows of what `policy` computes; the hidden states' gradients are summed by `copied`."""
        hidden_ME, weight_WE, bias_W, places_M, total_M, entropy_M = ctx.saved_tensors
        head = Head(weight_WE, bias_W, ctx.divisor, ctx.softcap)
        if by_logprob_M is None:
            by_logprob_M = torch.zeros(len(hidden_ME), device=hidden_ME.device)
        by_hidden_ME = torch.empty_like(hidden_ME)
        by_weight_WE = torch.zeros_like(weight_WE, dtype=torch.float32)
        by_bias_W = None if bias_W is None else torch.zeros_like(bias_W, dtype=torch.float32)
        own_M = (places_M >= 0) & (places_M < len(weight_WE))
        for chunk in chunks(len(hidden_ME), len(weight_WE)):
            logits_CW = logits_of(hidden_ME[chunk], head)
            logp_CW = logits_CW - total_M[chunk, None]
            p_CW = logp_CW.exp()
            by_logits_CW = p_CW * -by_logprob_M[chunk, None]
            targets_C1 = places_M[chunk].clamp(0, len(weight_WE) - 1)[:, None]
            by_logits_CW.scatter_add_(1, targets_C1, (by_logprob_M[chunk] * own_M[chunk])[:, None])
            if entropy_M is not None and by_entropy_M is not None:
                by_logits_CW -= by_entropy_M[chunk, None] * p_CW * (logp_CW + entropy_M[chunk, None])
            if head.softcap is not None:
                by_logits_CW *= 1 - (logits_CW / head.softcap).square()
            by_product_CW = (by_logits_CW / head.divisor).to(hidden_ME.dtype)
            by_hidden_ME[chunk] = by_product_CW @ weight_WE
            by_weight_WE += by_product_CW.T @ hidden_ME[chunk]
            if by_bias_W is not None:
                by_bias_W += by_product_CW.sum(0)
        by_bias_W = None if by_bias_W is None else by_bias_W.to(bias_W.dtype)
        return by_hidden_ME, by_weight_WE.to(weight_WE.dtype), by_bias_W, *[None] * 5
