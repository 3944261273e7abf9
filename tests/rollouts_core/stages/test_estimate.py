"""What a plan will take: counted memory, and time in proportion to earlier work."""

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config import MachineConfig, PipelineConfig, PretrainedModel
from rollouts_core.memory import GIB
from rollouts_core.stages import estimate as module
from rollouts_core.stages.estimate import Estimate, estimate, misfit
from rollouts_core.stages.peaks import Part
from rollouts_core.stages.plan import plan
from rollouts_core.stages.sizes import size_of
from rollouts_core.store.index import ArtifactIndex, Known
from rollouts_core.store.manifest import ArtifactId
from rollouts_core.store.store import open_store
from rollouts_core.training.exporting import save_policy
from rollouts_core.training.models import create_model
from tests.rollouts_core.models import character_tokenizer, tiny_model

BASE = 100


@pytest.fixture(autouse=True)
def _no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch in a process of its own takes seconds."""
    monkeypatch.setattr(module, "_imported_bytes", lambda: BASE)


def earlier(name: str, work: float, seconds: float, node: str, device: str = "cpu") -> Known:
    return Known(ArtifactId(name, "0" * 64), "", "", seconds, 0, node, device, work, {})


def by_stage(config: PipelineConfig, store: Any) -> dict[str, Estimate]:
    return {entry.stage: entry for entry in estimate(config, plan(config), store)}


def test_a_model_from_scratch_has_the_size_it_is_made_with(pipeline_config: PipelineConfig) -> None:
    tokenizer = character_tokenizer()
    size = size_of(pipeline_config.model, None, len(tokenizer))
    made = create_model(pipeline_config.model, tokenizer, 32, 0, "cpu")  # type: ignore[arg-type]
    assert size.parameters == sum(value.numel() for value in made.parameters() if value.ndim > 1) + sum(
        value.numel() for name, value in made.named_parameters() if value.ndim == 1 and "bias" not in name
    )


def test_a_pretrained_model_has_the_size_of_its_files(tmp_path: Path, pipeline_config: PipelineConfig) -> None:
    model = tiny_model()
    save_policy(model, character_tokenizer(), tmp_path / "model", dict(model.named_parameters()))
    config = replace(pipeline_config, model=PretrainedModel(name=str(tmp_path / "model")))
    external = plan(config).tokenize.external["model"]
    size = size_of(config.model, external, None)
    assert size.parameters == sum(value.numel() for value in model.parameters())
    assert (size.layers, size.hidden, size.query, size.keys) == (2, 32, 32, 16)
    assert size.cache_per_token == 2 * 2 * 16 * 4


def test_memory_is_counted_part_by_part(tmp_path: Path, pipeline_config: PipelineConfig) -> None:
    found = by_stage(pipeline_config, open_store(tmp_path / "store"))
    size = size_of(pipeline_config.model, None, None)
    parts = {part.name: part.bytes for part in found["rl-1"].parts}
    assert parts["Python, torch and transformers"] == BASE
    assert parts["weights"] == parts["gradients"] == 4 * size.parameters
    assert parts["optimizer"] == 8 * size.parameters
    assert parts["the engine's weights"] == 4 * size.parameters
    assert found["rl-1"].peak == sum(parts.values())
    without = replace(pipeline_config, rl=replace(pipeline_config.rl, tokens_per_pass=1))  # type: ignore[type-var]
    assert by_stage(without, open_store(tmp_path / "store"))["rl-1"].peak < found["rl-1"].peak


def test_on_a_gpu_only_its_own_memory_and_time_count(
    tmp_path: Path, pipeline_config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = open_store(tmp_path / "store"), replace(pipeline_config, machine=MachineConfig(gpus=1))
    host = {part.name for part in by_stage(pipeline_config, store)["sft"].parts}
    entry = by_stage(config, store)["sft"]
    apart = host - {part.name for part in entry.parts}
    assert apart == {"Python, torch and transformers", "the tokenizer", "a checkpoint"}
    assert entry.seconds is None
    work = (entry.tokens or 0) * size_of(config.model, None, None).weights
    made = [earlier("sft", work, 7, platform.node(), "cpu"), earlier("sft", work, 3, "another", "cuda")]
    monkeypatch.setattr(ArtifactIndex, "worked", lambda self: made)
    assert by_stage(config, store)["sft"].seconds == pytest.approx(3)
    assert by_stage(pipeline_config, store)["sft"].seconds == pytest.approx(7)


def test_what_does_not_fit_is_told_with_the_field_to_change() -> None:
    part = Part("a pass", 3 * GIB, "sft.tokens_per_pass")
    small = Part("weights", GIB, "model")
    entries = [Estimate("sft", False, (small, part)), Estimate("rl-1", True, (small, part))]
    assert misfit(entries, 5 * GIB) == []
    (problem,) = misfit(entries, 2 * GIB)
    assert problem == "sft needs about 4.0 GiB, and there are 2.0: 3.0 of them are a pass; change sft.tokens_per_pass"


def test_time_is_that_of_the_nearest_work_of_this_machine(
    tmp_path: Path, pipeline_config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "store")
    size = size_of(pipeline_config.model, None, None)
    tokens = by_stage(pipeline_config, store)["sft"].tokens or 0

    work = tokens * size.weights
    here, others = platform.node(), "another"
    made = [earlier("sft", work / 2, 30, here), earlier("sft", work * 90, 1, here), earlier("sft", work, 7, others)]
    monkeypatch.setattr(ArtifactIndex, "worked", lambda self: made)
    found = by_stage(pipeline_config, store)["sft"]
    assert found.seconds == pytest.approx(60)
    assert found.basis == made[0].artifact.directory
