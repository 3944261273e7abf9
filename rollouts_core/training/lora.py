"""Low-rank adapters through peft: added to the model in place, given out merged, exported as peft's own files.

Decision: engines get merged weights under the model's own names, so an adapter needs nothing of them; and a policy's
artifact is a whole model, which any stage can go on from. The adapter alone lies beside it.
"""

from pathlib import Path
from typing import Any

import torch

from rollouts_core.config import LoRAConfig
from rollouts_core.errors import BadInput
from rollouts_core.training.checkpoint import whole

ADAPTER = "default"
SEED = 0
"""Of the adapters' random half; the other half is zero, so an adapter begins as nothing."""


def add_adapters(model: Any, config: LoRAConfig) -> None:
    """Freeze the model and add adapters to its linear layers, in place (LoRA, arXiv 2106.09685, eq. 3).

    Raises `BadInput` when no layer has one of the names that the config gives.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = "all-linear" if not config.targets else list(config.targets)
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            inject_adapter_in_model(settings, model, ADAPTER)
        except ValueError as error:
            raise BadInput(f"backend.lora.targets: {error}") from error
    for name, value in model.named_parameters():
        value.requires_grad_("lora_" in name)


def model_weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights by its own names, whole, with what its adapters add; every rank asks for them."""
    weights = {}
    for name, value in model.named_parameters():
        if "lora_" not in name:
            own = name.replace(".base_layer.", ".")
            layer = model.get_submodule(name.rpartition(".base_layer.")[0]) if own != name else None
            merged = whole(value.detach())
            weights[own] = merged if layer is None or own.endswith(".bias") else merged + _added(layer).to(merged.dtype)
    return weights


def save_adapter(model: Any, directory: Path) -> None:
    """peft's `adapter_model.safetensors` and `adapter_config.json`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    save_file(adapter_tensors(model), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(str(directory))


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """By peft's names, whole; every rank asks for them."""
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": whole(value.detach()).contiguous()
        for name, value in model.named_parameters()
        if "lora_" in name
    }


def _added(layer: Any) -> torch.Tensor:
    """scaling x B A, in float32."""
    down, up = (whole(part[ADAPTER].weight.detach()).float() for part in (layer.lora_A, layer.lora_B))
    scale: float = layer.scaling[ADAPTER]
    return (up @ down) * scale
