"""A policy as the trainer sees it: packed tokens in, log-probabilities and entropies of the learnt tokens out.

Decision: the model's head runs only where a token is learnt, in chunks, and its logits are made again for the gradient:
with a vocabulary of 150,000 they would be most of a pass's memory. So no more than one chunk of logits ever exists.

Legend: N tokens of the row, M learnt tokens, E hidden size, V vocabulary, C tokens of a chunk.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rollouts_core.config import LoRAConfig
from rollouts_core.errors import BadInput
from rollouts_core.training.backend import TokenScores, TrainBatch
from rollouts_core.training.lora import add_adapters
from rollouts_core.training.packed import attention_over, use_packed_attention

CHUNK_ELEMENTS = 2**26
"""Logits that exist at once: 256 MiB of them in float32."""
SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Names under which configs ask for logits other than the head's product."""


class Policy(nn.Module):
    """A transformers causal language model that scores packed batches. Sharing the model's parameters."""

    def __init__(self, model: Any, temperature: float = 1.0, critic: bool = False, entropy: bool = True) -> None:
        """`critic` adds a value head to the trunk, beginning at zero. `entropy`: whether it is computed.

        Raises `BadInput` for models whose logits or attention this does not compute.
        """
        super().__init__()
        check_head(model)
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
        weight_VE = self.model.get_output_embeddings().weight
        attention = attention_over(batch.spans, batch.tokens_N.device, weight_VE.dtype)
        hidden_1NE = self.model.base_model(
            input_ids=batch.tokens_N[None], position_ids=batch.positions_N[None], use_cache=False, attention=attention
        ).last_hidden_state
        hidden_ME = hidden_1NE[0].index_select(0, batch.source_M)
        scores = head_scores(hidden_ME, weight_VE, batch.targets_M, self._temperature, self._entropy)
        if self.value_head is None:
            return scores
        return scores._replace(values_M=self.value_head(hidden_ME)[:, 0].float())


def create_policy(
    model: Any,
    temperature: float = 1.0,
    critic: bool = False,
    activation_checkpointing: bool = False,
    lora: LoRAConfig | None = None,
    entropy: bool = True,
) -> Policy:
    """A policy ready to be trained. Raises `BadInput` as `Policy` and `add_adapters` do."""
    if lora is not None:
        add_adapters(model, lora)
    if activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(model, temperature, critic, entropy)


def head_scores(
    hidden_ME: torch.Tensor,
    weight_VE: torch.Tensor,
    targets_M: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = True,
) -> TokenScores:
    """log softmax(hidden weight^T / temperature) at the targets, and each row's entropy; both differentiable."""
    scores = _HeadScores.apply(hidden_ME, weight_VE, targets_M, temperature, entropy)  # type: ignore[no-untyped-call]
    return TokenScores(*scores)


def check_head(model: Any) -> None:
    """Raises `BadInput` for a model whose logits are not its head's product."""
    head = model.get_output_embeddings()
    scaled = [name for name in SCALED_LOGITS if getattr(model.config, name, None) not in (None, 1.0)]
    if scaled or head is None or getattr(head, "bias", None) is not None:
        what = f"changes its logits by {', '.join(scaled)}" if scaled else "has no plain head without bias"
        raise BadInput(f"{model.config.model_type} {what}, which the trainer does not compute")


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: torch.Tensor,
        weight_VE: torch.Tensor,
        targets_M: torch.Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs_M = torch.empty(len(hidden_ME), device=hidden_ME.device)
        entropy_M = torch.empty_like(logprobs_M) if entropy else None
        for chunk in _chunks(len(hidden_ME), len(weight_VE)):
            logp_CV = _log_softmax(hidden_ME[chunk], weight_VE, temperature)
            logprobs_M[chunk] = logp_CV.gather(1, targets_M[chunk, None])[:, 0]
            if entropy_M is not None:
                entropy_M[chunk] = -(logp_CV.exp() * logp_CV).sum(1)
        ctx.save_for_backward(hidden_ME, weight_VE, targets_M, entropy_M)
        ctx.temperature = temperature
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob_M: torch.Tensor, by_entropy_M: torch.Tensor | None) -> tuple[Any, ...]:
        """With p the softmax: d logp_t / d z = [t] - p, and d entropy / d z = -p (log p + entropy)."""
        hidden_ME, weight_VE, targets_M, entropy_M = ctx.saved_tensors
        by_hidden_ME = torch.empty_like(hidden_ME)
        by_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        if by_entropy_M is not None and not by_entropy_M.any():
            by_entropy_M = None
        for chunk in _chunks(len(hidden_ME), len(weight_VE)):
            logp_CV = _log_softmax(hidden_ME[chunk], weight_VE, ctx.temperature)
            p_CV = logp_CV.exp()
            by_logits_CV = p_CV * -by_logprob_M[chunk, None]
            by_logits_CV.scatter_add_(1, targets_M[chunk, None], by_logprob_M[chunk, None])
            if entropy_M is not None and by_entropy_M is not None:
                by_logits_CV -= by_entropy_M[chunk, None] * p_CV * (logp_CV + entropy_M[chunk, None])
            by_logits_CV = (by_logits_CV / ctx.temperature).to(hidden_ME.dtype)
            by_hidden_ME[chunk] = by_logits_CV @ weight_VE
            by_weight_VE += by_logits_CV.T @ hidden_ME[chunk]
        return by_hidden_ME, by_weight_VE.to(weight_VE.dtype), None, None, None


def _log_softmax(hidden_CE: torch.Tensor, weight_VE: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax((hidden_CE @ weight_VE.T).float() / temperature, dim=-1)


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(begin, begin + size) for begin in range(0, tokens, size)]
