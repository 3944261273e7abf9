"""A policy as the trainer sees it: packed tokens in, log-probabilities and entropies of the learnt tokens out.

Decision: the model's head runs only where a token is learnt, in chunks, and its logits are made again for the gradient:
with a vocabulary of 150,000 they would be most of a pass's memory. So no more than one chunk of logits ever exists.

Legend: N tokens of the row, M learnt tokens, E hidden size, V vocabulary, C tokens of a chunk.
"""

from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from rollouts_core.config import LoRAConfig
from rollouts_core.config.training import Recomputed
from rollouts_core.errors import BadInput
from rollouts_core.inference.families import problems_of
from rollouts_core.training.backend import TokenScores, TrainBatch
from rollouts_core.training.layers import compile_layers, compute_again
from rollouts_core.training.lora import add_adapters
from rollouts_core.training.packed import attention_over, use_packed_attention

CHUNK_ELEMENTS = 2**26
"""Logits that exist at once: 256 MiB of them in float32."""


class Head(NamedTuple):
    """From hidden states to logits: softcap x tanh((hidden weight^T + bias) / divisor / softcap)."""

    weight_VE: torch.Tensor
    bias_V: torch.Tensor | None = None
    divisor: float = 1.0
    softcap: float | None = None

    def at(self, temperature: float) -> "Head":
        """The head whose logits are these ones / temperature."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return Head(self.weight_VE, self.bias_V, self.divisor * temperature, softcap)


class Policy(nn.Module):
    """A transformers causal language model that scores packed batches. Sharing the model's parameters."""

    def __init__(self, model: Any, temperature: float = 1.0, critic: bool = False, entropy: bool = True) -> None:
        """`critic` adds a value head to the trunk, beginning at zero. `entropy`: whether it is computed.

        Raises `BadInput` for models whose logits or attention this does not compute.
        """
        super().__init__()
        if problems := problems_of(model.config.to_dict()):
            raise BadInput(problems)
        head_of(model)
        use_packed_attention(model)
        self.model = model
        self._temperature, self._entropy = temperature, entropy
        self.value_head: nn.Linear | None = None
        if critic:
            first = next(model.parameters())
            self.value_head = nn.Linear(model.config.hidden_size, 1, device=first.device, dtype=first.dtype)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, batch: TrainBatch) -> TokenScores:
        head = head_of(self.model)
        attention = attention_over(batch.spans, batch.tokens_N.device, head.weight_VE.dtype)
        hidden_1NE = self.model.base_model(
            input_ids=batch.tokens_N[None], position_ids=batch.positions_N[None], use_cache=False, attention=attention
        ).last_hidden_state
        hidden_ME = hidden_1NE[0].index_select(0, batch.source_M)
        scores = head_scores(hidden_ME, head, batch.targets_M, self._temperature, self._entropy)
        if self.value_head is None:
            return scores
        return scores._replace(values_M=self.value_head(hidden_ME)[:, 0].float())


class PolicyOptions(TypedDict, total=False):
    """Those of `create_policy`."""

    temperature: float
    critic: bool
    activation_checkpointing: Recomputed
    lora: LoRAConfig | None
    entropy: bool
    compiled: bool


def create_policy(
    model: Any,
    temperature: float = 1.0,
    critic: bool = False,
    activation_checkpointing: Recomputed = False,
    lora: LoRAConfig | None = None,
    entropy: bool = True,
    compiled: bool = False,
) -> Policy:
    """A policy ready to be trained.

    `temperature` is that of sampling; `critic` adds a value head; `activation_checkpointing` computes each layer's
    activations again for its gradient instead of keeping them, "selective" all but attention's; `lora` trains adapters
    instead of the weights; `entropy` says whether the loss reads entropies; `compiled`: see `compile_layers`. Raises
    `BadInput` as `Policy`, `add_adapters` and `compile_layers` do.
    """
    if lora is not None:
        add_adapters(model, lora)
    compute_again(model, activation_checkpointing)
    if compiled:
        compile_layers(model)
    return Policy(model, temperature, critic, entropy)


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
    """By the names under which configs say what becomes of the head's product.

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
        for chunk in _chunks(len(hidden_ME), len(weight_VE)):
            logp_CV = torch.log_softmax(_logits(hidden_ME[chunk], head), dim=-1)
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
        for chunk in _chunks(len(hidden_ME), len(weight_VE)):
            logits_CV = _logits(hidden_ME[chunk], head)
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


def _logits(hidden_CE: torch.Tensor, head: Head) -> torch.Tensor:
    """CV, in float32."""
    product_CV = hidden_CE @ head.weight_VE.T if head.bias_V is None else F.linear(hidden_CE, *head[:2])
    logits_CV = _divided(product_CV.float(), head.divisor)
    return logits_CV if head.softcap is None else head.softcap * torch.tanh(logits_CV / head.softcap)


def _divided(fresh: torch.Tensor, divisor: float) -> torch.Tensor:
    """In place: a chunk of logits is large, and each copy of one is memory that has to be found anew."""
    return fresh if divisor == 1 else fresh.div_(divisor)


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(begin, begin + size) for begin in range(0, tokens, size)]
