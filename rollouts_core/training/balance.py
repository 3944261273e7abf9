"""The balance of a mixture's experts: metrics of it, and the rule by which its family keeps it.

    auxiliary loss   X x sum over experts of (choices of it per token) x (its mean probability), a mean over layers
                     (Switch Transformers, arXiv 2101.03961, eq. 4), times `router_aux_loss_coef` of config.json
    bias             after each optimizer step, 0.001 up for experts below the mean load and down for those above
                     (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)

Legend: N tokens of a pass, K experts that each goes through, L layers with experts, X experts of a layer.
"""

from typing import Any

import torch
import torch.distributed as dist

from rollouts_core.errors import BadInput
from rollouts_core.inference.routing import Routers, Routing, routers_of
from rollouts_core.training.collectives import all_reduced, summed

BIAS = "e_score_correction_bias"
BIAS_STEP = 0.001


def balance_of(model: Any, wanted: bool) -> "Balance | None":
    """The balance of a mixture's experts; None for a model without experts. Raises `BadInput` if it is `wanted` of such
    a model, and as `Balance` does."""
    routers = routers_of(model)
    if routers is not None:
        return Balance(model, routers, wanted)
    if wanted:
        raise BadInput(f"backend.balance_experts: {model.config.model_type} has no experts whose routers are known")
    return None


class Balance:
    """Balances the experts of one model over the passes of an optimizer step."""

    def __init__(self, model: Any, routers: Routers, wanted: bool) -> None:
        """`wanted`: keep them even. Raises `BadInput` for a family that was trained in neither way."""
        self.routing = Routing(routers)
        coefficient = getattr(model.config, "router_aux_loss_coef", None) or 0.0
        biased = all(hasattr(router, BIAS) for router in routers.by_layer.values())
        if wanted and not coefficient and not biased:
            raise BadInput(
                f"backend.balance_experts: {model.config.model_type} has neither an auxiliary loss "
                "(router_aux_loss_coef in its config.json) nor a bias of its routers"
            )
        self._coefficient = coefficient if wanted and not biased else 0.0
        self._biased = wanted and biased
        names = {module: name for name, module in model.named_modules()}
        self._names = [f"{names[router]}.{BIAS}" for router in routers.by_layer.values()]
        self._loads_LX: torch.Tensor | None = None
        self._changed: list[torch.Tensor] = []
        """For each layer and pass with prescribed choices: how many differ from the routers' own, and of how many."""

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """The values that change with training, for a checkpoint."""
        return dict(zip(self._names, self._biases, strict=True)) if self._biased else {}

    @property
    def _biases(self) -> list[torch.Tensor]:
        return [getattr(router, BIAS) for router in self.routing.routers.by_layer.values()]

    def loss(self, real: int, share: float, context: dist.ProcessGroup | None) -> torch.Tensor | None:
        """The last pass's part of the step's loss. `real`: its number of tokens without padding; `share`: its part of
        the step's tokens; `context`: ranks that have other tokens of the same row."""
        if not self._coefficient or not self.routing.is_known:
            return None
        losses = [
            _balance_loss(logits_NX[:real], self.routing.chosen_NK[layer][:real], context)
            for layer, logits_NX in self.routing.logits_NX.items()
        ]
        return torch.stack(losses).mean() * (self._coefficient * share)

    @torch.no_grad()
    def count(self, real: int) -> None:
        """Add the last pass to the step's loads, and let go of what it left."""
        routing = self.routing
        if not routing.is_known:
            return
        chosen = [routing.chosen_NK[layer][:real] for layer in routing.routers.by_layer]
        loads_LX = torch.stack([_loads(chosen_NK, routing.routers.experts) for chosen_NK in chosen])
        self._loads_LX = loads_LX if self._loads_LX is None else self._loads_LX + loads_LX
        for layer, own_NK in routing.own_NK.items():
            same = (own_NK[:real, :, None] == routing.chosen_NK[layer][:real, None]).any(-1)
            self._changed.append(torch.stack([(~same).float().sum(), torch.ones_like(same, dtype=torch.float).sum()]))
        routing.forget()

    @torch.no_grad()
    def step(self) -> dict[str, torch.Tensor]:
        """The optimizer step's metrics, over all ranks, each one number; every rank asks for them."""
        routers = self.routing.routers
        device = next(next(iter(routers.by_layer.values())).parameters()).device
        loads_LX, changed = self._loads_LX, self._changed
        self._loads_LX, self._changed = None, []
        if loads_LX is None:
            loads_LX = torch.zeros(len(routers.by_layer), routers.experts, device=device)
        changed_of = torch.stack(changed).sum(0) if changed else torch.zeros(2, device=device)
        if dist.is_initialized():
            dist.all_reduce(loads_LX)
            dist.all_reduce(changed_of)
        self._step_loads_LX = loads_LX
        metrics = {
            "experts/busiest": (loads_LX.max(1).values / loads_LX.mean(1).clamp(min=1e-9)).max(),
            "experts/unused": (loads_LX == 0).float().mean(),
        }
        return metrics | ({"experts/changed": changed_of[0] / changed_of[1]} if changed else {})

    @torch.no_grad()
    def move_biases(self) -> None:
        """Move the biases by the loads of the step that was just measured."""
        if not self._biased:
            return
        for bias_X, load_X in zip(self._biases, self._step_loads_LX, strict=True):
            bias_X.add_(torch.sign(load_X.mean() - load_X), alpha=BIAS_STEP)


def _balance_loss(logits_NX: torch.Tensor, chosen_NK: torch.Tensor, context: dist.ProcessGroup | None) -> torch.Tensor:
    """The balance loss of a layer, which is K if all experts are used equally."""
    choices_X, chances_X = _loads(chosen_NK, logits_NX.shape[1]), logits_NX.float().softmax(-1).sum(0)
    tokens = torch.tensor(float(len(logits_NX)), device=logits_NX.device)
    if context is not None:
        choices_X, tokens = all_reduced(choices_X, context), all_reduced(tokens, context)
        chances_X = summed(chances_X, context)
    return len(choices_X) * ((choices_X / tokens) * (chances_X / tokens)).sum()


def _loads(chosen_NK: torch.Tensor, experts: int) -> torch.Tensor:
    """X: how many choices fell on each."""
    chosen = chosen_NK.flatten()
    return torch.zeros(experts, device=chosen.device).index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float))
