"""The choices of the routers in a mixture's layers: read, or prescribed.

Decision: a router computes with its own class, so each family keeps its own rule. If choices are prescribed (router
replay, arXiv 2510.11370), `topk` returns them inside the router, and the weights that follow are the family's own
arithmetic.

Choices are read and prescribed as rows of bytes (`told_experts.py`).

Legend: N tokens of a pass, K experts that each goes through, X experts of a layer, R bytes of a row.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rollouts_core.errors import BadInput

PLANNED = ("moe_tp_experts", "ep_dispatch_experts")
"""The names of modules of experts in transformers' plans."""
ONE_BYTE = 255
"""Up to this many experts of a layer fit in a byte; the value 255 means that nobody told."""
TOPK = (torch.topk, torch.Tensor.topk)


class Routers(NamedTuple):
    """The routers of the layers that have experts; these layers are alike."""

    by_layer: dict[int, Any]
    experts: int
    """Experts in a layer."""
    per_token: int
    model_layers: int
    """The number of the model's layers, with experts or without."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.experts <= ONE_BYTE else torch.uint16

    def rows_of(self, chosen_NLK: torch.Tensor) -> torch.Tensor:
        """NR"""
        return chosen_NLK.to(self.dtype).view(torch.uint8).flatten(1)

    def read_all_layers(self, numbers: npt.NDArray[np.integer[Any]], tokens: int) -> bytes:
        """Rows of what a server told of every layer of the model, for so many tokens. Raises ValueError."""
        told = numbers.reshape(tokens, self.model_layers, self.per_token)[:, list(self.by_layer)]
        if told.size and not 0 <= told.min() <= told.max() < self.experts:
            raise ValueError(f"experts {told.min()} to {told.max()} of {self.experts}")
        return self.rows_of(torch.from_numpy(told.astype(np.int64))).numpy().tobytes()


class Routing:
    """The choices of a model's routers in a pass. A model has one `Routing` at a time."""

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self.logits_NX: dict[int, torch.Tensor] = {}
        """Logits of the last pass, by layer."""
        self.chosen_NK: dict[int, torch.Tensor] = {}
        self.own_NK: dict[int, torch.Tensor] = {}
        """The choices that the routers would have made, where others were prescribed."""
        self._prescribed: dict[int, torch.Tensor] = {}
        for layer, router in routers.by_layer.items():
            router.forward = partial(self._route, router, layer)

    def prescribe(self, rows_NR: torch.Tensor | None) -> None:
        """Say what the next pass chooses; None: as the routers do."""
        self._prescribed = {}
        if rows_NR is None:
            return
        routers = self.routers
        if rows_NR.shape[1] != len(routers.by_layer) * routers.per_token * routers.dtype.itemsize:
            raise BadInput(f"the recorded experts have {rows_NR.shape[1]} bytes a token: they are from another model")
        told = rows_NR.contiguous().view(routers.dtype).to(torch.int64)
        told = torch.where(told == torch.iinfo(routers.dtype).max, -1, told)
        by_layer = told.view(len(rows_NR), len(routers.by_layer), routers.per_token)
        self._prescribed = {layer: by_layer[:, place] for place, layer in enumerate(routers.by_layer)}

    def rows(self) -> torch.Tensor:
        """NR: what the last pass chose."""
        return self.routers.rows_of(torch.stack([self.chosen_NK[layer] for layer in self.routers.by_layer], 1))

    @property
    def is_known(self) -> bool:
        """Whether the last pass told what it chose. A router of a family that was not tried may give something else."""
        return len(self.chosen_NK) == len(self.routers.by_layer)

    def forget(self) -> None:
        """Let go of what the last pass left."""
        self.logits_NX, self.chosen_NK, self.own_NK = {}, {}, {}

    def _route(self, router: nn.Module, layer: int, *values: torch.Tensor) -> Any:
        kind: Any = type(router)
        prescribed = self._prescribed.get(layer)
        if prescribed is None:
            found = kind.forward(router, *values)
        else:
            with _Prescribed(prescribed, self.routers.experts) as mode:
                found = kind.forward(router, *values)
            self.own_NK[layer] = mode.own_NK
        if isinstance(found, tuple) and len(found) == 3:
            self.logits_NX[layer], _, self.chosen_NK[layer] = found
        return found


def routers_of(model: Any) -> Routers | None:
    """The routers of a model; None without experts, or if the routers' choices can't be read."""
    found: dict[int, Any] = {}
    for name, _ in experts_of(model):
        layer = re.search(r"\.(\d+)\.", name)
        router = next(_routers(model.get_submodule(name.rpartition(".")[0])), None)
        if layer is None or router is None:
            return None
        found[int(layer[1])] = router
    if not found:
        return None
    one = next(iter(found.values()))
    return Routers(found, len(one.weight), one.top_k, model.config.num_hidden_layers)


def let_go(model: Any) -> None:
    """Detach a model's routers from their `Routing`."""
    if routers := routers_of(model):
        for router in routers.by_layer.values():
            vars(router).pop("forward", None)


def experts_of(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules that hold a layer's experts, by name. Each takes tokens, their experts and their weights."""
    plans = (getattr(model.config, name, None) or {} for name in ("base_model_tp_plan", "base_model_ep_plan"))
    named = {name for plan in plans for name, style in plan.items() if style in PLANNED}
    patterns = [re.compile(planned_name(name, model)) for name in named]
    for name, module in model.named_modules():
        if any(pattern.fullmatch(name) for pattern in patterns):
            yield name, module


def planned_name(name: str, model: Any) -> str:
    """A name in a plan, which counts layers by a star, as an expression that a module's name matches."""
    return re.escape(f"{model.base_model_prefix}.{name}").replace(r"\*", r"\d+")


def _routers(block: Any) -> Iterator[Any]:
    for part in block.children():
        if isinstance(getattr(part, "top_k", None), int) and isinstance(getattr(part, "weight", None), torch.Tensor):
            yield part


class _Prescribed(TorchFunctionMode):
    """`topk` over all experts gives the prescribed ones, and its own where nobody prescribed."""

    def __init__(self, given_NK: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._given_NK, self._experts = given_NK, experts
        self.own_NK = given_NK

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOPK or args[0].shape[-1] != self._experts or found.indices.shape != self._given_NK.shape:
            return found
        self.own_NK = found.indices
        given_NK = torch.where(self._given_NK < 0, found.indices, self._given_NK)
        return torch.return_types.topk((args[0].gather(-1, given_NK), given_NK))
