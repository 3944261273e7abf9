"""The head: log-probabilities and entropies of the learnt tokens from hidden states.

Decision: the model's head runs only for learnt tokens, in chunks, and its logits are computed again for the gradient.
With a vocabulary of 150,000 the logits of all tokens would take most of a pass's memory. So only one chunk of logits
exists at a time.

Legend: M learnt tokens, E hidden size, V vocabulary, C tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from rollouts_core.errors import BadInput
from rollouts_core.training.backend import TokenScores
from rollouts_core.training.shard_files import local

CHUNK_ELEMENTS = 2**26
"""Logits that exist at once: 256 MiB of them in float32."""


class Head(NamedTuple):
    """The head that makes logits: softcap x tanh((hidden weight^T + bias) / divisor / softcap)."""

    weight_VE: torch.Tensor
    bias_V: torch.Tensor | None = None
    divisor: float = 1.0
    softcap: float | None = None

    def at(self, temperature: float) -> "Head":
        """The head whose logits are these ones / temperature."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return Head(self.weight_VE, self.bias_V, self.divisor * temperature, softcap)

    def of_rank(self) -> "Head":
        """This rank's part of a head that ranks share."""
        bias = None if self.bias_V is None else local(self.bias_V)
        return self._replace(weight_VE=local(self.weight_VE), bias_V=bias)


def head_scores(
    hidden_ME: torch.Tensor,
    head: Head,
    targets_M: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = True,
) -> TokenScores:
    """log softmax(logits / temperature) at the targets, and each row's entropy; both differentiable."""
    scores = _HeadScores.apply(hidden_ME, *head.at(temperature), targets_M, entropy)  # type: ignore[no-untyped-call]
    return TokenScores(*scores)


def head_of(model: Any) -> Head:
    """The head of a model, with what its config says is done to the product.

    Raises `BadInput` for a model without a head that is one matrix.
    """
    head, config = model.get_output_embeddings(), model.config
    if head is None:
        raise BadInput(f"{config.model_type} has no head that gives a logit for each token of its vocabulary")
    divisor = getattr(config, "logits_scaling", None) or 1.0
    multiplier = getattr(config, "logit_scale", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(head.weight, getattr(head, "bias", None), divisor / multiplier, softcap)


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        divisor: float,
        softcap: float | None,
        targets_M: torch.Tensor,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = Head(weight_VE, bias_V, divisor, softcap)
        logprobs_M = torch.empty(len(hidden_ME), device=hidden_ME.device)
        entropy_M = torch.empty_like(logprobs_M) if entropy else None
        for chunk in chunks(len(hidden_ME), len(weight_VE)):
            logp_CV = torch.log_softmax(logits_of(hidden_ME[chunk], head), dim=-1)
            logprobs_M[chunk] = logp_CV.gather(1, targets_M[chunk, None])[:, 0]
            if entropy_M is not None:
                entropy_M[chunk] = -(logp_CV.exp() * logp_CV).sum(1)
        ctx.save_for_backward(hidden_ME, weight_VE, bias_V, targets_M, entropy_M)
        ctx.divisor, ctx.softcap = divisor, softcap
        ctx.set_materialize_grads(False)
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob_M: torch.Tensor | None, by_entropy_M: torch.Tensor | None) -> tuple[Any, ...]:
        """With p the softmax: d logp_t / d z = [t] - p, and d entropy / d z = -p (log p + entropy)."""
        hidden_ME, weight_VE, bias_V, targets_M, entropy_M = ctx.saved_tensors
        head = Head(weight_VE, bias_V, ctx.divisor, ctx.softcap)
        if by_logprob_M is None:
            by_logprob_M = torch.zeros(len(hidden_ME), device=hidden_ME.device)
        by_hidden_ME = torch.empty_like(hidden_ME)
        by_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        by_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for chunk in chunks(len(hidden_ME), len(weight_VE)):
            logits_CV = logits_of(hidden_ME[chunk], head)
            logp_CV = torch.log_softmax(logits_CV, dim=-1)
            slope_CV = None if head.softcap is None else 1 - (logits_CV / head.softcap).square()
            del logits_CV
            if entropy_M is not None and by_entropy_M is not None:
                p_CV = logp_CV.exp()
                by_entropy_CV = by_entropy_M[chunk, None] * p_CV * (logp_CV + entropy_M[chunk, None])
            else:
                p_CV, by_entropy_CV = logp_CV.exp_(), None
            by_logits_CV = p_CV.mul_(-by_logprob_M[chunk, None])
            by_logits_CV.scatter_add_(1, targets_M[chunk, None], by_logprob_M[chunk, None])
            if by_entropy_CV is not None:
                by_logits_CV -= by_entropy_CV
            if slope_CV is not None:
                by_logits_CV *= slope_CV
            by_product_CV = _divided(by_logits_CV, head.divisor).to(hidden_ME.dtype)
            by_hidden_ME[chunk] = by_product_CV @ weight_VE
            by_weight_VE += by_product_CV.T @ hidden_ME[chunk]
            if by_bias_V is not None:
                by_bias_V += by_product_CV.sum(0)
        by_bias_V = None if by_bias_V is None else by_bias_V.to(bias_V.dtype)
        return by_hidden_ME, by_weight_VE.to(weight_VE.dtype), by_bias_V, None, None, None, None


def logits_of(hidden_CE: torch.Tensor, head: Head) -> torch.Tensor:
    """CV, in float32."""
    product_CV = hidden_CE @ head.weight_VE.T if head.bias_V is None else F.linear(hidden_CE, *head[:2])
    logits_CV = _divided(product_CV.float(), head.divisor)
    return logits_CV if head.softcap is None else head.softcap * torch.tanh(logits_CV / head.softcap)


def _divided(fresh: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide in place, since a copy of a chunk of logits takes much memory."""
    return fresh if divisor == 1 else fresh.div_(divisor)


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(begin, begin + size) for begin in range(0, tokens, size)]
