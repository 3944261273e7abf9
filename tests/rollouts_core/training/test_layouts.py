"""Ranks that share passes, by every layout and what may be combined with it, against one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts_core.config import LoRAConfig
from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from tests.rollouts_core.models import tiny_model
from tests.rollouts_core.on_ranks import STEPS, loss_of, optimization, train, train_grpo
from tests.rollouts_core.training.test_families import family
from tests.rollouts_core.training.test_fsdp import launched, on_ranks

LAYOUTS = {
    "tensor": (2, 1, 2, 1),
    "context": (2, 2, 1, 1),
    "data-tensor": (4, 1, 2, 1),
    "data-context": (4, 2, 1, 1),
    "context-tensor": (4, 2, 2, 1),
}
"""By name: ranks, and how many share a row, a layer, and experts."""
OF_EXPERTS = {
    "expert": (2, 1, 1, 2),
    "data-expert": (4, 1, 1, 2),
    "expert-tensor": (4, 1, 2, 2),
    "expert-context": (4, 2, 1, 4),
}
FAST = ("context", "read-grpo")
FAST_MIXTURES = [("expert", "read", "qwen3_moe"), ("tensor", "read", "qwen3_moe")]
COMBINED = ["read", "read-grpo", "read-muon", "read-lora", "read-checkpointing"]


def alone(what: str, model: Any) -> PyTorchTrainingBackend:
    return create_pytorch_backend(
        model,
        loss_of(what),
        optimization("muon" if what.endswith("muon") else "adamw"),
        lora=LoRAConfig(rank=4) if what.endswith("lora") else None,
        critic=what.endswith("grpo"),
        balanced=what.endswith("balanced"),
    )


def in_layout(layout: str, what: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    ranks, *shared = (LAYOUTS | OF_EXPERTS)[layout]
    monkeypatch.setenv("ROLLOUTS_TEST_LAYOUT", " ".join(map(str, shared)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return on_ranks(what, directory, ranks)


def wide_model() -> Any:
    """Four key-value heads, which four ranks divide."""
    return tiny_model(num_key_value_heads=4)


def assert_alike(told: Any, expected: Any, weights: dict[str, torch.Tensor], backend: PyTorchTrainingBackend) -> None:
    for one, other in zip(told, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-5)
    for name, value in backend.get_weights().result().items():
        apart = (weights[name] - value).abs() > 1e-4 + 1e-4 * value.abs()
        assert apart.float().mean() < 0.003, name  # AdamW's first steps have any size where a gradient is rounding


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        pytest.param(layout, what, marks=() if (layout, what) == FAST else pytest.mark.slow)
        for layout in LAYOUTS
        for what in (COMBINED if "data" not in layout else COMBINED[:2])
    ],
)
def test_ranks_that_share_passes_are_one_device(
    layout: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_one_device(wide_model(), layout, what, tmp_path, monkeypatch)


def assert_one_device(model: Any, layout: str, what: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model.save_pretrained(directory / "model")
    told, weights = in_layout(layout, what, directory, monkeypatch)
    backend = alone(what, model)
    if what.endswith("muon"):  # which orthogonalises in bfloat16, whatever the weights are
        expected = train(backend, range(STEPS))
        assert [one["loss"] for one in told] == pytest.approx([one["loss"] for one in expected], rel=1e-2)
        return
    replayed, cut = what.endswith("replayed"), 30 if what.endswith("balanced") else 1000
    expected = train_grpo(backend) if what.endswith("grpo") else train(backend, range(STEPS), cut, replayed)
    assert_alike(told, expected, weights, backend)


@pytest.mark.parametrize(
    ("layout", "what", "name"),
    [
        pytest.param(layout, what, name, marks=() if (layout, what, name) in FAST_MIXTURES else pytest.mark.slow)
        for layout, what, name in [
            ("tensor", "read", "qwen3_moe"),
            *(("expert", what, "qwen3_moe") for what in COMBINED),
            *((layout, what, "qwen3_moe") for layout in OF_EXPERTS if layout != "expert" for what in COMBINED[:2]),
            *((layout, what, "qwen3_moe") for layout in OF_EXPERTS for what in ("read-balanced", "read-replayed")),
            *((layout, "read-balanced", "deepseek_v3") for layout in OF_EXPERTS),
            *((layout, "read", "gpt_oss") for layout in OF_EXPERTS if layout != "expert-tensor"),
            *(("data-expert", "read", name) for name in ("mixtral", "olmoe", "glm4_moe")),
        ]
    ],
)
def test_ranks_that_share_experts_are_one_device(
    layout: str, what: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_one_device(mixture(name), layout, what, tmp_path, monkeypatch)


def mixture(name: str) -> Any:
    """Four experts, and heads that four ranks divide."""
    more = {} if name == "deepseek_v3" else {"router_aux_loss_coef": 0.3}
    return family(name, num_key_value_heads=4, **more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "phi3", "olmo2"])
@pytest.mark.parametrize("layout", ["tensor", "context"])
def test_every_familys_plan_is_one_device(
    layout: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normalised queries, experts, windows."""
    assert_one_device(family(name), layout, "read", tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "resuming"), [("tensor", "context"), ("context-tensor", "tensor"), ("data-context", "context-tensor")]
)
def test_any_layout_takes_up_what_another_left(
    saving: str, resuming: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide_model()
    model.save_pretrained(tmp_path / "model")
    in_layout(saving, "read-save", tmp_path, monkeypatch)
    told, weights = in_layout(resuming, "read-resume", tmp_path, monkeypatch)
    backend = create_pytorch_backend(model, create_cross_entropy_loss(), optimization())
    assert_alike(told, train(backend, range(STEPS))[2:], weights, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "problem"),
    [
        ("tiny", "context-tensor", "context 2 x tensor 2 must divide the model's 4 heads and its 2 key-value heads"),
        ("gpt2", "tensor", "transformers has no plan to cut gpt2"),
    ],
)
def test_what_can_not_be_shared_is_told(
    name: str, layout: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny_model() if name == "tiny" else family(name)).save_pretrained(tmp_path / "model")
    ranks, *shared = (LAYOUTS | OF_EXPERTS)[layout]
    monkeypatch.setenv("ROLLOUTS_TEST_LAYOUT", " ".join(map(str, shared)))
    done = launched("read", tmp_path, ranks)
    assert done.returncode != 0
    assert problem in done.stderr
