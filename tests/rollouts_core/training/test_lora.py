"""Adapters against peft itself: what they compute, what is given to engines, what is exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from rollouts_core.config import LoRAConfig
from rollouts_core.config.loading import from_data
from rollouts_core.errors import BadInput
from rollouts_core.metrics.loggers import read_jsonl
from rollouts_core.stages.plan import plan
from rollouts_core.store.local import LocalStore
from rollouts_core.training.collate import learnt, pack_batch
from rollouts_core.training.lora import add_adapters, model_weights
from rollouts_core.training.models import load_hf_model
from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend, create_pytorch_backend
from tests.rollouts_core.models import tiny_model
from tests.rollouts_core.training.test_families import family
from tests.rollouts_core.training.test_packed import alone, sequences
from tests.rollouts_core.training.test_rl import make, same, state
from tests.rollouts_core.training.test_training import run, settings

TARGETS = [(), ("q_proj", "v_proj")]


def backend(targets: tuple[str, ...] = (), steps: int = 10) -> PyTorchTrainingBackend:
    trained = create_pytorch_backend(
        tiny_model(), create_cross_entropy_loss(), Optimization(1e-2), lora=LoRAConfig(rank=4, targets=targets)
    )
    run(trained, settings(steps))
    return trained


def weights_of(trained: PyTorchTrainingBackend) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained.get_weights().result().items()}


def test_an_adapter_begins_as_nothing() -> None:
    own = dict(tiny_model().named_parameters())
    begun = weights_of(backend(steps=0))
    assert set(begun) == set(own)
    assert all(torch.equal(begun[name], value) for name, value in own.items())


@pytest.mark.parametrize("targets", TARGETS)
def test_only_the_layers_it_names_change(targets: tuple[str, ...]) -> None:
    own = dict(tiny_model().named_parameters())
    changed = {name for name, value in weights_of(backend(targets)).items() if not torch.equal(value, own[name])}
    linear = {name for name in own if name.endswith("proj.weight") and (not targets or name.split(".")[-2] in targets)}
    assert changed == linear


@pytest.mark.parametrize("targets", TARGETS)
def test_merged_weights_and_the_exported_adapter_say_what_the_trainer_says(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    trained = backend(targets)
    trained.save_adapter(tmp_path / "adapter")
    merged = tiny_model(seed=5)
    merged.load_state_dict(weights_of(trained), strict=False)
    by_peft = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "adapter")).eval()
    (example,) = sequences([9])
    scores = trained.score(pack_batch([example], 1.0)).result().logprobs_M
    assert len(scores) == len(learnt(example))
    for model in (merged, by_peft):
        torch.testing.assert_close(scores.double(), alone(model, example, 1.0)[0], atol=1e-5, rtol=1e-5)


def test_resuming_gives_the_same_bits(tmp_path: Path) -> None:
    straight, first, resumed = backend(steps=20), backend(steps=7), backend(steps=0)
    first.save(tmp_path).result()
    resumed.load(tmp_path)
    run(resumed, settings(20), start=7)
    assert same(weights_of(straight), weights_of(resumed))


def test_layers_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"backend.lora.targets: .*nonsense"):
        backend(("nonsense",))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    backend(steps=0).save_adapter(tmp_path / "adapter")
    with pytest.raises(BadInput, match="is an adapter of None, not a model"):
        load_hf_model(str(tmp_path / "adapter"), "float32", "cpu")


def test_segments_warm_or_cold_train_the_same_adapter(small_config: dict[str, Any], tmp_path: Path) -> None:
    small_config["sft"]["steps"] = 30
    small_config["backend"] = {"lora": {"rank": 2}}
    stages = plan(from_data(small_config))
    warm, cold = LocalStore(tmp_path / "warm"), LocalStore(tmp_path / "cold")
    make(warm, stages.tokenize, stages.sft, *stages.rl)
    for stage in (stages.tokenize, stages.sft, *stages.rl):
        make(cold, stage)
    assert same(state(warm, stages.rl[-1]), state(cold, stages.rl[-1]))
    last = warm.open(stages.rl[-1].artifact)
    assert (last / "adapter" / "adapter_config.json").exists()
    mismatch = [record["sampling/sampling_logp_difference/max"] for record in read_jsonl(last / "metrics.jsonl")]
    assert max(mismatch) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe"])
@torch.no_grad()
def test_merged_weights_say_what_adapters_say_in_every_kind_of_layer(name: str) -> None:
    """GPT-2's layers hold their matrices the other way round; a mixture's experts and routers have no adapters."""
    adapted, plain, tokens = family(name), family(name), torch.arange(1, 9)[None]
    add_adapters(adapted, LoRAConfig(rank=4))
    for parameter, value in adapted.named_parameters():
        if "lora_B" in parameter:
            value += torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    merged = model_weights(adapted)
    before = plain(tokens).logits
    for parameter, value in plain.named_parameters():
        value.copy_(merged[parameter])
    assert not torch.allclose(before, adapted(tokens).logits, atol=1e-2)
    torch.testing.assert_close(plain(tokens).logits, adapted(tokens).logits, atol=1e-3, rtol=1e-3)
    names = [parameter for parameter, _ in adapted.named_parameters()]
    assert not [parameter for parameter in names if "experts" in parameter and "lora" in parameter]
