"""Counted memory: what is trained, and what of it a config keeps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rollouts_core.config import BackendConfig, LoRAConfig, ParallelConfig, PipelineConfig, ScratchModel
from rollouts_core.stages.peaks import parts_of
from rollouts_core.stages.plan import plan
from rollouts_core.stages.sizes import ModelSize
from rollouts_core.training.collate import pack_batch
from rollouts_core.training.lora import add_adapters
from rollouts_core.training.optimizers import create_optimizers
from rollouts_core.training.packed import Span, attention_over, use_packed_attention
from rollouts_core.training.policy import create_policy
from tests.rollouts_core.models import SHAPE, tiny_model
from tests.rollouts_core.training.test_families import family
from tests.rollouts_core.training.test_packed import sequences

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
        (BackendConfig(processes=2), {"weights": 2, "a gathered layer": 6, "gradients": 2, "optimizer": 4}),
        (
            BackendConfig(processes=4, parallel=ParallelConfig(tensor=2)),
            {"weights": 1, "a gathered layer": 3, "gradients": 1, "optimizer": 2},
        ),
    ],
    ids=["one device", "two ranks", "two groups of two"],
)
def test_what_is_kept_of_each_weight(
    pipeline_config: PipelineConfig, backend: BackendConfig, expected: dict[str, int]
) -> None:
    assert isinstance(pipeline_config.model, ScratchModel)
    wide = replace(pipeline_config.model, hidden_size=32, heads=4, kv_heads=4)
    parts = counted(replace(pipeline_config, model=wide, backend=backend), SIZE)
    assert {name: parts[name] for name in expected} == {name: 1000 * each for name, each in expected.items()}


def test_adapters_and_muon_keep_less(pipeline_config: PipelineConfig) -> None:
    whole = counted(pipeline_config, SIZE)
    lora = counted(replace(pipeline_config, backend=BackendConfig(lora=LoRAConfig(rank=2))), SIZE)
    muon = replace(pipeline_config, rl=replace(pipeline_config.rl, optimizer="muon"))  # type: ignore[type-var]
    assert lora["gradients"] == 4 * SIZE.adapters(2, ())
    assert lora["optimizer"] == 2 * lora["gradients"]
    assert lora["weights"] == whole["weights"] + lora["gradients"]
    assert counted(muon, SIZE)["optimizer"] == whole["optimizer"] - 4 * SIZE.in_layers
    passes = [
        counted(replace(pipeline_config, backend=backend), SIZE)["a pass"]
        for backend in (
            BackendConfig(activation_checkpointing=True),
            BackendConfig(activation_checkpointing="selective"),
            BackendConfig(compile=True),
            BackendConfig(),
        )
    ]
    assert passes == sorted(set(passes))


@pytest.mark.parametrize(
    "width", [{}, {"intermediate_size": 256}, {"hidden_size": 64}, {"num_key_value_heads": 4}], ids=str
)
def test_a_layer_keeps_what_autograd_saves(width: dict[str, int]) -> None:
    tokens, layers = 64, (2, 6)
    saved = []
    for number in layers:
        model = tiny_model(architecture=LlamaConfig(**{**SHAPE, **width, "num_hidden_layers": number})).train()
        use_packed_attention(model)
        own = {value.untyped_storage().data_ptr() for value in model.parameters()}
        found: dict[int, int] = {}

        def keep(value: torch.Tensor, own: set[int] = own, found: dict[int, int] = found) -> torch.Tensor:
            place = value.untyped_storage()
            found |= {} if place.data_ptr() in own else {place.data_ptr(): place.nbytes()}
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            attention = attention_over([Span(0, tokens)], torch.device("cpu"), torch.float32)
            ids = torch.ones(1, tokens, dtype=torch.long)
            model.base_model(input_ids=ids, position_ids=ids.cumsum(1) - 1, use_cache=False, attention=attention)
        saved.append(sum(found.values()) / 4 / tokens)
    size = of(model)
    layer = (saved[1] - saved[0]) / (layers[1] - layers[0])
    assert layer == pytest.approx((size.per_token(on_gpu=True) - 15 * size.hidden) / layers[1], rel=0.05)


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


def test_a_mixture_keeps_two_widths_for_each_expert_that_a_token_goes_through() -> None:
    """Beside the feed-forward width of each, by what autograd saves of a tiny Qwen3-MoE."""

    def kept(chosen: int) -> float:
        model = family("qwen3_moe", num_experts=8, num_experts_per_tok=chosen, hidden_size=64)
        own = {value.untyped_storage().data_ptr() for value in model.parameters()}
        saved: dict[int, int] = {}

        def note(value: torch.Tensor) -> torch.Tensor:
            storage = value.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes() // 4
            return value

        batch = pack_batch(sequences([40]), 1.0)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            create_policy(model)(batch)
        return sum(saved.values()) / len(batch.tokens_N) / model.config.num_hidden_layers

    size = ModelSize(0, 0, 64, 1, 2 * 16, 0, 0, 4, experts=8, chosen=2)
    more = replace(size, intermediate=3 * 16, chosen=3)
    assert kept(3) - kept(2) == pytest.approx(more.per_token() - size.per_token(), rel=0.06)
