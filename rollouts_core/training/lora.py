"""Low-rank adapters through peft: added to the model in place, given to engines merged, exported as peft's own files.

Decision: engines get merged weights under the model's own names, so they need no support for adapters. A policy's
artifact is a whole model, from which any stage can continue; the adapter is beside it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rollouts_core.config import LoRAConfig
from rollouts_core.errors import BadInput
from rollouts_core.inference.weights import stored
from rollouts_core.training.checkpoint import whole

ADAPTER = "default"
SEED = 0
"""Seed of the adapters' random half. The other half is zero, so an adapter changes nothing at first."""


def add_adapters(model: Any, config: LoRAConfig) -> None:
    """Freeze the model and add adapters to its linear layers, in place (LoRA, arXiv 2106.09685, eq. 3).

    A mixture's experts and routers have none: each expert's adapter would be as many weights as the others' together.
    Raises `BadInput` when no layer has one of the names that the config gives.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = _linear_layers(model)
    unknown = [target for target in config.targets if not any(_is_named(name, target) for name in linear)]
    if unknown:
        there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise BadInput(f"backend.lora.targets: there is no linear layer {', '.join(unknown)}; there are {there}")
    targets = [name for name in linear if not config.targets or any(_is_named(name, of) for of in config.targets)]
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(settings, model, ADAPTER)
    own = dict(model.named_parameters())
    for name, value in own.items():
        value.requires_grad_("lora_" in name)
    for name, drawn in drawn_adapters(model):
        own[name].detach().copy_(drawn)


def _linear_layers(model: Any) -> list[str]:
    """The names of all linear layers but the head. GPT-2's are `Conv1D`."""
    head = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def drawn_adapters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """An adapter's first values by the parameters' names, one at a time, in float32: `lora_A` random, as peft draws
    it, `lora_B` zero. The same bits whoever asks, and wherever the model is."""
    draws = torch.Generator().manual_seed(SEED)
    for name, value in model.named_parameters():
        if ".lora_A." in name:
            yield name, nn.init.kaiming_uniform_(torch.empty(value.shape), a=5**0.5, generator=draws)
        elif "lora_" in name:
            yield name, torch.zeros(value.shape)


def weight_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's weights by its own names, with adapters merged."""
    return {name: tuple(value.shape) for name, value in stored(model).items()}


def model_weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights by its own names, whole, with what its adapters add; every rank asks for them."""
    return {name: model_weight(model, name) for name in stored(model)}


def model_weight(model: Any, name: str) -> torch.Tensor:
    """A weight of the model with its adapter added, by name. A sync of weights asks for each."""
    place, _, own = name.rpartition(".")
    layer = model.get_submodule(place)
    value = whole(getattr(getattr(layer, "base_layer", layer), own).detach())
    return value + _added(layer).to(value.dtype) if own == "weight" and hasattr(layer, "lora_A") else value


def save_adapter(model: Any, directory: Path) -> None:
    """peft's `adapter_model.safetensors` and `adapter_config.json`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    save_file(adapter_tensors(model), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(str(directory))


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The adapters' tensors, whole, by peft's names. Every rank must ask for them."""
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": whole(value.detach()).contiguous()
        for name, value in model.named_parameters()
        if "lora_" in name
    }


def _added(layer: Any) -> torch.Tensor:
    """scaling x B A, in float32."""
    down, up = (whole(part[ADAPTER].weight.detach()).float() for part in (layer.lora_A, layer.lora_B))
    scale: float = layer.scaling[ADAPTER]
    added = (up @ down) * scale
    return added.T if isinstance(layer.get_base_layer(), Conv1D) else added
