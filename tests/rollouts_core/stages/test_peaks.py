"""Counted memory: what is trained, and what of it a config keeps."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from rollouts_core.config import BackendConfig, LoRAConfig, PipelineConfig
from rollouts_core.stages.peaks import parts_of
from rollouts_core.stages.plan import plan
from rollouts_core.stages.sizes import ModelSize
from rollouts_core.training.lora import add_adapters
from rollouts_core.training.optimizers import create_optimizers
from tests.rollouts_core.models import SHAPE, tiny_model

SIZE = ModelSize(
    parameters=1000, vocabulary=10, hidden=8, layers=2, intermediate=16, query=8, keys=4, bytes_each=4
)  # fmt: skip


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj"), ("down_proj",)], ids=str)
def test_adapters_are_counted_as_peft_makes_them(targets: tuple[str, ...]) -> None:
    model = tiny_model(architecture=LlamaConfig(**SHAPE))
    size = of(model)
    add_adapters(model, LoRAConfig(rank=3, targets=targets))
    assert size.adapters(3, targets) == sum(v.numel() for v in model.parameters() if v.requires_grad)


def test_what_muon_takes_is_counted_as_it_takes_it() -> None:
    model = tiny_model(architecture=LlamaConfig(**SHAPE))
    muon, _ = create_optimizers("muon", dict(model.named_parameters()), 1e-3)
    assert of(model).in_layers == sum(value.numel() for group in muon.param_groups for value in group["params"])


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (BackendConfig(), {"weights": 4, "gradients": 4, "optimizer": 8}),
        (BackendConfig(processes=2), {"weights": 4, "gathered weights": 4, "gradients": 2, "optimizer": 4}),
    ],
    ids=["one device", "two ranks"],
)
def test_what_is_kept_of_each_weight(
    pipeline_config: PipelineConfig, backend: BackendConfig, expected: dict[str, int]
) -> None:
    parts = counted(replace(pipeline_config, backend=backend), SIZE)
    assert {name: parts[name] for name in expected} == {name: 1000 * each for name, each in expected.items()}


def test_adapters_and_muon_keep_less(pipeline_config: PipelineConfig) -> None:
    whole = counted(pipeline_config, SIZE)
    lora = counted(replace(pipeline_config, backend=BackendConfig(lora=LoRAConfig(rank=2))), SIZE)
    muon = replace(pipeline_config, rl=replace(pipeline_config.rl, optimizer="muon"))  # type: ignore[type-var]
    assert lora["gradients"] == 4 * SIZE.adapters(2, ())
    assert lora["optimizer"] == 2 * lora["gradients"]
    assert lora["weights"] == whole["weights"] + lora["gradients"]
    assert counted(muon, SIZE)["optimizer"] == whole["optimizer"] - 4 * SIZE.in_layers
    again = replace(pipeline_config, backend=BackendConfig(activation_checkpointing=True))
    assert counted(again, SIZE)["a pass"] < whole["a pass"]


def counted(config: PipelineConfig, size: ModelSize) -> dict[str, int]:
    """Of the RL stage, with nothing tokenized yet."""
    stage = next(stage for stage in plan(config).stages if stage.name == "rl-1")
    return {part.name: part.bytes for part in parts_of(stage, size, {})}


def of(model: Any) -> ModelSize:
    config = model.config
    return ModelSize(
        parameters=sum(value.numel() for value in model.parameters()),
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        intermediate=config.intermediate_size,
        query=config.num_attention_heads * config.head_dim,
        keys=config.num_key_value_heads * config.head_dim,
        bytes_each=4,
    )
