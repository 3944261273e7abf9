"""A policy as the trainer sees it: packed tokens in, log-probabilities and entropies of the learnt tokens out.

Legend: N tokens of the row, M learnt tokens, E hidden size.
"""

from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from rollouts_core.config import LoRAConfig
from rollouts_core.config.training import Recomputed
from rollouts_core.errors import BadInput
from rollouts_core.inference.families import problems_of
from rollouts_core.training.backend import TokenScores, TrainBatch
from rollouts_core.training.balance import Balance, balance_of
from rollouts_core.training.context_parallel import Context, ExchangedAttention
from rollouts_core.training.head import head_of, head_scores
from rollouts_core.training.layers import compile_layers, compute_again
from rollouts_core.training.lora import add_adapters
from rollouts_core.training.packed import attention_over, use_packed_attention
from rollouts_core.training.split_head import split_head_scores


class Policy(nn.Module):
    """A transformers causal language model that scores packed batches. Sharing the model's parameters."""

    def __init__(
        self,
        model: Any,
        temperature: float = 1.0,
        critic: bool = False,
        entropy: bool = True,
        balance: Balance | None = None,
    ) -> None:
        """`critic` adds a value head to the trunk, beginning at zero. `entropy`: whether it is computed. `balance`: of
        a mixture that is trained; its batches may say what its routers choose.

        Raises `BadInput` for models whose logits or attention this does not compute.
        """
        super().__init__()
        if problems := problems_of(model.config.to_dict()):
            raise BadInput(problems)
        head_of(model)
        use_packed_attention(model)
        self.model = model
        self._layout = Layout()
        self._temperature, self._entropy = temperature, entropy
        self.balance = balance
        self.value_head: nn.Linear | None = None
        if critic:
            first = next(model.parameters())
            self.value_head = nn.Linear(model.config.hidden_size, 1, device=first.device, dtype=first.dtype)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def share(self, layout: "Layout") -> None:
        """Say which ranks compute each pass together."""
        self._layout = layout

    def real(self, batch: TrainBatch) -> int:
        """How many of the tokens that this rank computes of a batch are no padding."""
        tokens, context = len(batch.tokens_N), self._layout.context
        return tokens if context is None else context.real(tokens)

    @property
    def context(self) -> dist.ProcessGroup | None:
        """Ranks that have other tokens of the same row."""
        return None if self._layout.context is None else self._layout.context.group

    def forward(self, batch: TrainBatch) -> TokenScores:
        if self._layout.context is None:
            return self._scores(batch, batch.source_M, batch.targets_M)
        context, length = self._layout.context, len(batch.tokens_N)
        indices, places = context.mine(batch.source_M, length)
        found = self._scores(batch, places, batch.targets_M[indices])
        logprobs_M, *others = (context.gathered(values, indices, len(batch.targets_M)) for values in found)
        assert logprobs_M is not None, "log-probabilities are always computed"
        return TokenScores(logprobs_M, *others)

    def _scores(self, batch: TrainBatch, source_M: torch.Tensor, targets_M: torch.Tensor) -> TokenScores:
        """Scores of the tokens behind `source_M`, which are places in what this rank computes."""
        head, context = head_of(self.model), self._layout.context
        attention = attention_over(batch.spans, batch.tokens_N.device, head.weight_VE.dtype)
        tokens_N, positions_N = batch.tokens_N, batch.positions_N
        if context is not None:
            attention = ExchangedAttention(attention, len(tokens_N), context)
            tokens_N, positions_N = context.stretch(tokens_N), context.stretch(positions_N)
        self._prescribe(batch)
        hidden_1NE = self.model.base_model(
            input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False, attention=attention
        ).last_hidden_state
        hidden_ME = hidden_1NE[0].index_select(0, source_M)
        if self._layout.vocabulary is None:
            scores = head_scores(hidden_ME, head, targets_M, self._temperature, self._entropy)
        else:
            own = head.at(self._temperature).of_rank()
            scores = split_head_scores(hidden_ME, own, targets_M, self._entropy, self._layout.vocabulary)
        if self.value_head is None:
            return scores
        return scores._replace(values_M=self.value_head(hidden_ME)[:, 0].float())

    def _prescribe(self, batch: TrainBatch) -> None:
        if self.balance is None:
            return
        rows_NR, context = batch.experts_NR, self._layout.context
        if rows_NR is not None and context is not None:
            rows_NR = context.stretch(rows_NR)
        self.balance.routing.prescribe(rows_NR)


class Layout(NamedTuple):
    """The ranks that compute each pass together with this one."""

    context: Context | None = None
    """Ranks that share a row's tokens."""
    vocabulary: dist.ProcessGroup | None = None
    """Ranks that share the head."""


class PolicyOptions(TypedDict, total=False):
    """Options of `create_policy`."""

    temperature: float
    critic: bool
    activation_checkpointing: Recomputed
    lora: LoRAConfig | None
    entropy: bool
    compiled: bool
    balanced: bool


def create_policy(
    model: Any,
    temperature: float = 1.0,
    critic: bool = False,
    activation_checkpointing: Recomputed = False,
    lora: LoRAConfig | None = None,
    entropy: bool = True,
    compiled: bool = False,
    balanced: bool = False,
) -> Policy:
    """A policy ready to be trained.

    `temperature` is that of sampling; `critic` adds a value head; `activation_checkpointing` computes each layer's
    activations again for its gradient instead of keeping them, "selective" all but attention's; `lora` trains adapters
    instead of the weights; `entropy` says whether the loss reads entropies; `compiled`: see `compile_layers`;
    `balanced` keeps a mixture's experts evenly used, see `balance.py`. Raises `BadInput` as `Policy`, `add_adapters`,
    `compile_layers` and `Balance` do, and where a model that is to be balanced is not a mixture of experts.
    """
    if lora is not None:
        add_adapters(model, lora)
    compute_again(model, activation_checkpointing)
    if compiled:
        compile_layers(model)
    return Policy(model, temperature, critic, entropy, balance_of(model, balanced))
