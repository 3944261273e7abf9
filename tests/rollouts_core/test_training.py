"""The backend, the SFT loop and checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollouts_core.data.tokenized import Example
from rollouts_core.errors import WeightMismatch
from rollouts_core.training.checkpoint import last_checkpoint, new_checkpoint
from rollouts_core.training.losses import create_cross_entropy_loss
from rollouts_core.training.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.training.schedule import create_warmup_cosine_scheduler, rate
from rollouts_core.training.sft import SFTTrainingConfig, run_sft_training
from tests.rollouts_core.models import VOCABULARY, tiny_model


def examples(count: int = 40) -> list[Example]:
    random = np.random.default_rng(0)
    made = []
    for _ in range(count):
        length = int(random.integers(4, 12))
        mask = (np.arange(length) >= length // 2).astype(np.int32)
        made.append(Example(random.integers(1, VOCABULARY, length).astype(np.int32), mask))
    return made


def backend(steps: int = 20) -> PyTorchTrainingBackend:
    return create_pytorch_backend(
        tiny_model(),
        create_cross_entropy_loss(),
        learning_rate=1e-2,
        schedule=lambda optimizer: create_warmup_cosine_scheduler(optimizer, 3, steps),
    )


def settings(steps: int = 20, accumulation: int = 1) -> SFTTrainingConfig:
    return SFTTrainingConfig(steps, 8, accumulation, seed=1)


def run(trained: PyTorchTrainingBackend, config: SFTTrainingConfig, start: int = 0) -> None:
    for _ in run_sft_training(trained, examples(), config, start):
        pass


def weights(trained: PyTorchTrainingBackend) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained.get_weights().result().items()}


def test_the_loss_falls_and_metrics_account_for_the_time() -> None:
    trained = backend(60)
    steps = list(run_sft_training(trained, examples(8), settings(60)))
    assert steps[-1].metrics["loss"] < steps[0].metrics["loss"] / 2
    assert [step.step for step in steps] == list(range(1, 61))
    metrics = steps[-1].metrics
    phases = sum(value for name, value in metrics.items() if name.startswith("timing_s/"))
    assert phases == pytest.approx(2 * metrics["timing_s/step"])
    assert {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens"} <= set(metrics)


def test_two_runs_give_the_same_bits() -> None:
    one, other = backend(), backend()
    for trained in (one, other):
        run(trained, settings())
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def test_gradient_accumulation_changes_nothing_but_rounding() -> None:
    one, other = backend(), backend()
    run(one, settings(5))
    run(other, settings(5, accumulation=4))
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(other)[name], atol=2e-4, rtol=2e-3)


def test_resuming_from_a_checkpoint_gives_the_same_bits(tmp_path: Path) -> None:
    straight = backend()
    run(straight, settings())
    first = backend()
    run(first, settings(7))
    with new_checkpoint(tmp_path, 7) as directory:
        first.save(directory)
    resumed = backend()
    found = last_checkpoint(tmp_path)
    assert found is not None
    resumed.load(found[1])
    run(resumed, settings(), start=found[0])
    assert resumed.weight_version == straight.weight_version == 20
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(straight).items())


def test_checkpoints_hold_no_pickle(tmp_path: Path) -> None:
    trained = backend()
    run(trained, settings(2))
    trained.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}


def test_an_unfinished_checkpoint_is_never_taken_and_old_ones_go(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        with new_checkpoint(tmp_path, step) as directory:
            (directory / "file").write_text(str(step))
    with pytest.raises(RuntimeError), new_checkpoint(tmp_path, 20) as directory:
        (directory / "file").write_text("half")
        raise RuntimeError
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert (found[0], (found[1] / "file").read_text()) == (15, "15")
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000010", "step-00000015"]


def test_clipping_bounds_the_step() -> None:
    trained = create_pytorch_backend(tiny_model(), create_cross_entropy_loss(), learning_rate=1e-3, max_grad_norm=1e-3)
    *_, last = run_sft_training(trained, examples(), settings(5))
    assert last.metrics["grad_norm"] > 1e-3  # measured before clipping


def test_weights_can_be_replaced_only_by_their_like() -> None:
    trained, other = backend(), tiny_model(1)
    trained.load_weights(dict(other.named_parameters())).result()
    assert all(torch.equal(value, weights(trained)[name]) for name, value in other.named_parameters())
    with pytest.raises(WeightMismatch, match="nonsense"):
        trained.load_weights(dict(other.named_parameters()) | {"nonsense": torch.zeros(1)})


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedules(kind: Any) -> None:
    rates = [rate(kind, step, 10, 100) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert 0 < rates[0] < 0.1
    assert rates[10] == max(rates) == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[-1] < 0.02) == (kind != "constant")
    if kind == "cosine":
        assert rates[55] == pytest.approx(0.5)
