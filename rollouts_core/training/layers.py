"""How a model's layers are trained: recomputed for the gradient, or compiled.

Decision: "selective" keeps the output of attention and recomputes the rest of a layer. The cost of attention grows with
the square of a sequence's length, and the size of its output only with the length.

Decision: only the norms and the feed-forward part of a layer are compiled. They are the same for any number of tokens,
so they are compiled once; packed attention differs in each pass.
"""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rollouts_core.config.training import Recomputed
from rollouts_core.errors import BadInput

ATTENTION = ("scaled_dot_product", "varlen_attn", "flex_attention")
"""In the names of torch's operators that compute attention."""


def compute_again(model: Any, which: Recomputed) -> None:
    """Set what a transformers model computes again for the gradient. Nothing here draws random numbers, so gradients
    are the same bits either way."""
    if not which:
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if which == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # older transformers has the older name alone
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def compile_layers(model: Any) -> None:
    """Compile each layer's norms and feed-forward part by torch.compile, at their first pass.

    Raises `BadInput` where there is no C++ compiler, which torch.compile needs.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BadInput(f"backend.compile: torch.compile needs a C++ compiler, and {compiler} is not on this machine")
    for module in beside_attention(model):
        module.compile(dynamic=True)


def beside_attention(model: Any) -> Iterator[nn.Module]:
    """The parts of each layer that are not attention."""
    kinds = set(model._no_split_modules or ())
    for layer in model.modules():
        if type(layer).__name__ in kinds:
            yield from (part for name, part in layer.named_children() if not name.endswith(("attn", "attention")))


def _policy(context: object, operator: object, *args: object, **options: object) -> CheckpointPolicy:
    if any(name in str(operator) for name in ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
