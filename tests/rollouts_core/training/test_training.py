"""The backend, the SFT loop and checkpoints."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config

from rollouts_core.data.batching import batch_indices
from rollouts_core.data.packing import best_fit
from rollouts_core.data.tokenized import Example
from rollouts_core.errors import BadInput, NonFiniteGradient, WeightMismatch
from rollouts_core.training.backend import LazyTrainFuture
from rollouts_core.training.checkpoint import Checkpoints, last_checkpoint
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.inspection import keeping_nonfinite
from rollouts_core.training.models import check_context
from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.optimizers import OptimizerName, create_optimizers
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.training.schedule import create_warmup_cosine_scheduler, rate
from rollouts_core.training.sft import SFTTrainingConfig, run_sft_training
from tests.rollouts_core.models import CONTEXT, VOCABULARY, tiny_model


def examples(count: int = 40) -> list[Example]:
    random = np.random.default_rng(0)
    made = []
    for _ in range(count):
        length = int(random.integers(4, 12))
        mask = (np.arange(length) >= length // 2).astype(np.int32)
        made.append(Example(random.integers(1, VOCABULARY, length).astype(np.int32), mask))
    return made


def backend(
    steps: int = 20, optimizer: OptimizerName = "adamw", dtype: torch.dtype = torch.float32
) -> PyTorchTrainingBackend:
    optimization = Optimization(1e-2, optimizer, rate=create_warmup_cosine_scheduler(3, steps))
    return create_pytorch_backend(tiny_model().to(dtype), create_cross_entropy_loss(), optimization)


def settings(steps: int = 20, tokens_per_pass: int = 1000) -> SFTTrainingConfig:
    return SFTTrainingConfig(steps, 8, seed=1, tokens_per_pass=tokens_per_pass)


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_runs_give_the_same_bits(optimizer: OptimizerName) -> None:
    one, other = backend(optimizer=optimizer), backend(optimizer=optimizer)
    for trained in (one, other):
        run(trained, settings())
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def test_passes_change_nothing_but_rounding() -> None:
    gradients = []
    for tokens_per_pass in (1000, 20, 1):
        trained = backend()
        batch = examples(8)
        for chosen in best_fit([len(example.tokens) for example in batch], tokens_per_pass):
            trained.forward_backward(pack_batch([batch[index] for index in chosen], float(learnt_tokens(batch))))
        gradients.append([value.grad for value in trained.unwrap().parameters()])
    for other in gradients[1:]:
        for one, another in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(one, another, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_from_a_checkpoint_gives_the_same_bits(
    tmp_path: Path, optimizer: OptimizerName, dtype: torch.dtype
) -> None:
    straight = backend(optimizer=optimizer, dtype=dtype)
    run(straight, settings())
    first = backend(optimizer=optimizer, dtype=dtype)
    run(first, settings(7))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.begin(7, first.save)
    resumed = backend(optimizer=optimizer, dtype=dtype)
    found = last_checkpoint(tmp_path)
    assert found is not None
    resumed.load(found[1])
    run(resumed, settings(), start=found[0])
    assert resumed.weight_version == straight.weight_version == 20
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(straight).items())


def test_a_checkpoint_holds_the_state_it_was_begun_with(tmp_path: Path) -> None:
    """However much is trained before it is written."""
    trained, again = backend(), backend()
    run(trained, settings(3))
    before = {name: value.clone() for name, value in weights(trained).items()}
    saving = trained.save(tmp_path)
    run(trained, settings(6), start=3)
    saving.result()
    again.load(tmp_path)
    assert again.weight_version == 3
    assert all(torch.equal(value, before[name]) for name, value in weights(again).items())
    run(again, settings(6), start=3)
    assert all(torch.equal(value, weights(trained)[name]) for name, value in weights(again).items())


def assert_true(value: bool) -> None:
    assert value


def test_what_has_become_complete_is_told_once(tmp_path: Path) -> None:
    go_on = threading.Event()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.begin(5, lambda directory: LazyTrainFuture(lambda: assert_true(go_on.wait(60))))
        assert checkpoints.completed() is None and last_checkpoint(tmp_path) is None
        go_on.set()
        checkpoints.begin(10, lambda directory: LazyTrainFuture(lambda: None))
        assert checkpoints.completed() in (5, 10)
    assert last_checkpoint(tmp_path) == (10, tmp_path / "step-00000010")


def test_the_same_state_is_the_same_bytes(tmp_path: Path) -> None:
    trained, again = backend(), backend()
    run(trained, settings(3))
    trained.save(tmp_path).result()
    again.load(tmp_path)
    (other := tmp_path / "again").mkdir()
    again.save(other).result()
    for path in (path for path in tmp_path.glob("*/*.safetensors") if "again" not in path.parts):
        assert path.read_bytes() == (other / path.relative_to(tmp_path)).read_bytes()


def test_checkpoints_hold_no_pickle(tmp_path: Path) -> None:
    trained = backend()
    run(trained, settings(2))
    trained.save(tmp_path).result()
    assert {path.suffix for path in tmp_path.rglob("*.*")} == {".safetensors", ".json"}


def test_an_unfinished_checkpoint_is_never_taken_and_old_ones_go(tmp_path: Path) -> None:
    def writing(directory: Path, step: int) -> LazyTrainFuture[None]:
        def write() -> None:
            (directory / "file").write_text(str(step))
            if step == 20:
                raise OSError("no space left")

        return LazyTrainFuture(write)

    with pytest.raises(OSError, match="no space"), Checkpoints(tmp_path) as checkpoints:
        for step in (5, 10, 15, 20):
            checkpoints.begin(step, partial(writing, step=step))
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert (found[0], (found[1] / "file").read_text()) == (15, "15")
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000010", "step-00000015"]


def test_a_context_longer_than_the_models_positions_is_refused() -> None:
    check_context(tiny_model(), CONTEXT)
    with pytest.raises(BadInput, match=f"data.max_length {CONTEXT + 1}: the model has positions for {CONTEXT} tokens"):
        check_context(tiny_model(), CONTEXT + 1)


def test_clipping_bounds_the_step() -> None:
    optimization = Optimization(1e-3, max_grad_norm=1e-3)
    trained = create_pytorch_backend(tiny_model(), create_cross_entropy_loss(), optimization)
    *_, last = run_sft_training(trained, examples(), settings(5))
    assert last.metrics["grad_norm"] > 1e-3  # measured before clipping


def test_weights_can_be_replaced_only_by_their_like() -> None:
    trained, other = backend(), tiny_model(1)
    trained.load_weights(dict(other.named_parameters())).result()
    assert all(torch.equal(value, weights(trained)[name]) for name, value in other.named_parameters())
    with pytest.raises(WeightMismatch, match="nonsense"):
        trained.load_weights(dict(other.named_parameters()) | {"nonsense": torch.zeros(1)})


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "stable_then_decay"])
def test_schedules(kind: Any) -> None:
    rates = [rate(kind, step, 10, 100) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert 0 < rates[0] < 0.1
    assert rates[10] == max(rates) == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[-1] < 0.06) == (kind != "constant")
    if kind == "cosine":
        assert rates[55] == pytest.approx(0.5)
    if kind == "stable_then_decay":
        assert rates[80] == 1 > rates[81]
        assert rates[90] == pytest.approx(0.5)


def test_master_weights_keep_steps_that_bfloat16_would_lose() -> None:
    trained = backend(dtype=torch.bfloat16)
    trained.load_weights({name: torch.ones_like(value) for name, value in weights(trained).items()}).result()
    masters = trained._masters.named
    with torch.no_grad():
        for _ in range(8):
            for master in masters.values():
                master -= 0.001
    trained._masters.give_back()
    assert all(value.dtype == torch.bfloat16 for value in weights(trained).values())
    assert all((value.float() - 0.992).abs().max() < 0.004 for value in weights(trained).values())


def test_bfloat16_learns_like_float32() -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        *_, last = run_sft_training(backend(60, dtype=dtype), examples(8), settings(60))
        losses.append(last.metrics["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_muon_steps_in_matrices_of_layers_and_adamw_in_the_rest() -> None:
    muon, adamw = create_optimizers("muon", dict(tiny_model().named_parameters()), 0.01)
    assert {tuple(p.shape) for group in muon.param_groups for p in group["params"]} == {
        (32, 32), (16, 32), (64, 32), (32, 64)
    }  # fmt: skip
    assert (VOCABULARY, 32) in {tuple(p.shape) for group in adamw.param_groups for p in group["params"]}


def test_a_gradient_that_is_no_number_stops_the_run_and_keeps_the_batch(tmp_path: Path) -> None:
    trained = backend()
    with torch.no_grad():
        trained.unwrap().model.norm.weight[3] = float("nan")
    before = weights(trained)
    with pytest.raises(BadInput, match="norm is nan at optimizer step 0; the batch is kept in") as raised:
        list(keeping_nonfinite(run_sft_training(trained, examples(), settings(tokens_per_pass=30)), tmp_path / "bad"))
    assert str(tmp_path / "bad") in str(raised.value)
    kept = [load_file(path) for path in sorted((tmp_path / "bad").iterdir())]
    assert len(kept) > 1
    wanted = [example.tokens for example in (examples()[i] for i in batch_indices([40], 8, 1, 0))]
    assert sum(len(tensors["tokens_N"]) for tensors in kept) == sum(map(len, wanted))
    assert trained.weight_version == 0
    assert all(torch.equal(v, before[n]) for n, v in weights(trained).items() if n != "model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_no_number_is_gone_with_its_step(dtype: torch.dtype) -> None:
    trained, batch = backend(dtype=dtype), examples(4)
    trained.forward_backward(pack_batch(batch, float("nan")))
    with pytest.raises(NonFiniteGradient):
        trained.optim_step()
    trained.forward_backward(pack_batch(batch, 10.0))
    assert np.isfinite(trained.optim_step().result()["grad_norm"])


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    backend().save(tmp_path).result()
    narrow = Qwen2Config(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT)  # fmt: skip
    other = create_pytorch_backend(tiny_model(architecture=narrow), create_cross_entropy_loss(), Optimization(1e-2))
    with pytest.raises(BadInput, match=r"embed_tokens.weight is \(24, 32\), and the model's is \(24, 16\)"):
        other.load(tmp_path)
    with pytest.raises(BadInput, match="optimizers"):
        backend(optimizer="muon").load(tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_in_the_hosts_memory_takes_the_same_steps(
    optimizer: OptimizerName, dtype: torch.dtype, tmp_path: Path
) -> None:
    """And its checkpoint is taken up by one that is not."""
    usual, away = (
        create_pytorch_backend(
            tiny_model().to(dtype), create_cross_entropy_loss(), Optimization(1e-2, optimizer, offloaded=offloaded)
        )
        for offloaded in (False, True)
    )
    run(usual, settings(5))
    run(away, settings(5))
    away.save(tmp_path).result()
    again = backend(optimizer=optimizer, dtype=dtype)
    again.load(tmp_path)
    for other in (away, again):
        assert all(torch.equal(value, weights(other)[name]) for name, value in weights(usual).items())
