"""Models without weights, and the weights of a model from scratch, one after another.

Decision: a rank that keeps a shard never holds the whole model. It makes the modules with their parameters on the meta
device, and reads or draws one weight at a time.

Decision: drawn weights have the bits that transformers draws for a whole model. All modules are made once with their
draws, each real only while it draws. The state of the random generator before each module is remembered, so that the
module can be drawn again when its weights are asked for. So a model is drawn twice, and only one module is in memory at
a time.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollouts_core.training.models import seed_torch

DRAWING = (nn.Linear, nn.Embedding)
"""torch's modules that draw when they are made."""


def blank_model(config: Any, dtype: torch.dtype) -> Any:
    """A causal language model with its parameters on the meta device; buffers are as they should be."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def drawn_weights(config: Any, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The initial weights by name, one at a time; the same bits as `create_model` gives a whole model.

    To be read to the end: torch's random numbers are another stream meanwhile.
    """
    with torch.random.fork_rng(devices=[]):
        seed_torch(seed, "initial weights")
        with _drawing() as drawn:
            model = blank_model(config, dtype)
        names = {id(value): name for name, value in model.named_parameters()}
        for module, owner, stream in drawn:
            torch.set_rng_state(stream)
            with _on_cpu(module) as blank:
                owner._init_weights(module)
                for own, value in blank.items():
                    if id(value) in names:
                        yield names.pop(id(value)), module.get_parameter(own).detach()


Drawn = list[tuple[nn.Module, Any, torch.Tensor]]
"""Modules in the order of their drawing, with the model whose rule it is, and where the random numbers stood."""


@contextmanager
def _drawing() -> Iterator[Drawn]:
    """Modules on the meta device draw as many random numbers as real ones. Gives what was drawn."""
    drawn: Drawn = []
    initialize: Any = PreTrainedModel._initialize_weights

    def remember(model: Any, module: nn.Module, *options: Any) -> None:
        if getattr(module, "_is_hf_initialized", False):
            return
        drawn.append((module, model, torch.get_rng_state()))
        with _on_cpu(module):
            initialize(model, module, *options)

    with ExitStack() as patches:
        patches.enter_context(patch.object(PreTrainedModel, "_initialize_weights", remember))
        for kind in DRAWING:
            patches.enter_context(patch.object(kind, "reset_parameters", _drawn_aside(kind.reset_parameters)))
        yield drawn


def _drawn_aside(original: Any) -> Any:
    def reset(module: nn.Module) -> None:
        with _on_cpu(module):
            original(module)

    return reset


@contextmanager
def _on_cpu(module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """The module's own parameters real, and uninitialised, for as long as the block lasts; gives the blank ones."""
    blank = {name: value for name, value in module._parameters.items() if value is not None}
    try:
        for name, value in blank.items():
            module._parameters[name] = nn.Parameter(torch.empty(value.shape, dtype=value.dtype))
        yield blank
    finally:
        module._parameters.update(blank)
