"""How evenly experts are used: the auxiliary loss against transformers' own, the bias against a direct count."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts_core.errors import BadInput
from rollouts_core.training.backend import TrainBatch
from rollouts_core.training.balance import BIAS, BIAS_STEP
from rollouts_core.training.collate import pack_batch
from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend, create_pytorch_backend
from tests.rollouts_core.training.test_families import family, tells_choices
from tests.rollouts_core.training.test_packed import sequences

COEFFICIENT = 0.3


def mixture(name: str = "qwen3_moe") -> Any:
    model = tells_choices(family(name))
    model.config.router_aux_loss_coef = COEFFICIENT if name != "deepseek_v3" else None
    return model


def backend(model: Any, balanced: bool = True, **options: Any) -> PyTorchTrainingBackend:
    return create_pytorch_backend(model, create_cross_entropy_loss(), Optimization(1e-2), balanced=balanced, **options)


def a_pass(lengths: Sequence[int] = (5, 9, 4)) -> TrainBatch:
    return pack_batch(sequences(list(lengths), seed=3), 10.0)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def choices(model: Any, batch: TrainBatch) -> torch.Tensor:
    """LX: how many of the tokens go to each expert, of each sequence alone in transformers."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, given, out: found.append(out[2]))
        for module in model.modules()
        if hasattr(module, "top_k") and hasattr(module, "weight")
    ]
    with torch.no_grad():
        for span in batch.spans:
            model(batch.tokens_N[None, span.begin : span.end])
    for hook in hooks:
        hook.remove()
    layers = len(hooks)
    counts = [torch.bincount(torch.cat(found[layer::layers]).flatten(), minlength=4) for layer in range(layers)]
    return torch.stack(counts)


@pytest.mark.parametrize("again", [False, True])
def test_the_auxiliary_loss_is_that_of_transformers_layer_by_layer(again: bool) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = mixture()
    plain = backend(mixture(), balanced=False)
    plain.forward_backward(a_pass()).result()
    trained = backend(model, activation_checkpointing=again)
    told = trained.forward_backward(a_pass()).result()["balance_loss_sum"]

    own = mixture()
    logits: list[torch.Tensor] = []
    for module in own.modules():
        if hasattr(module, "top_k") and hasattr(module, "weight"):
            module.register_forward_hook(lambda module, given, out: logits.append(out[0]))
    for span in (batch := a_pass()).spans:
        own(batch.tokens_N[None, span.begin : span.end])
    by_layer = [torch.cat(logits[layer::2]) for layer in range(2)]
    losses = [load_balancing_loss_func((layer,), 4, 2) for layer in by_layer]
    expected = COEFFICIENT * torch.stack(losses).mean()
    expected.backward()

    assert told == pytest.approx(expected.item(), rel=1e-5)
    both, without = gradients(model), gradients(plain.unwrap())
    assert both.keys() == without.keys()
    for name, added in gradients(own).items():
        torch.testing.assert_close(both[name] - without[name], added, atol=2e-6, rtol=1e-4)


def test_a_passs_share_of_the_step_is_its_share_of_the_loss() -> None:
    whole = backend(mixture()).forward_backward(a_pass()).result()["balance_loss_sum"]
    part = backend(mixture()).forward_backward(replace(a_pass(), share=0.25)).result()["balance_loss_sum"]
    assert part == pytest.approx(whole / 4)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_loads_are_told_over_all_passes_of_a_step(name: str, again: bool) -> None:
    """Also where a pass is computed twice for its gradient."""
    batches = [a_pass((5, 9, 4)), a_pass((7, 3))]
    loads = sum(choices(mixture(name), batch) for batch in batches)
    trained = backend(mixture(name), activation_checkpointing=again)
    for batch in batches:
        trained.forward_backward(batch)
    told = trained.optim_step().result()
    busiest = (loads.max(1).values / loads.float().mean(1)).max()
    assert told["experts/busiest"] == pytest.approx(busiest.item())
    assert told["experts/unused"] == pytest.approx((loads == 0).float().mean().item())


def test_biases_move_against_the_load_and_are_kept(tmp_path: Path) -> None:
    model = mixture("deepseek_v3")
    loads = choices(model, a_pass()).float()
    trained = backend(model)
    trained.forward_backward(a_pass())
    trained.optim_step()
    moved = [value.clone() for name, value in model.named_buffers() if name.endswith(BIAS)]
    assert torch.equal(torch.stack(moved), BIAS_STEP * torch.sign(loads.mean(1, keepdim=True) - loads))
    trained.save(tmp_path).result()
    other = backend(mixture("deepseek_v3"))
    other.load(tmp_path)
    again = [value for name, value in other.unwrap().named_buffers() if name.endswith(BIAS)]
    assert all(torch.equal(one, two) for one, two in zip(moved, again, strict=True))
    assert [name for name in trained.get_weights().result() if name.endswith(BIAS)]


def test_biases_stay_where_nobody_asked() -> None:
    model = mixture("deepseek_v3")
    trained = backend(model, balanced=False)
    trained.forward_backward(a_pass())
    trained.optim_step()
    assert not any(value.any() for name, value in model.named_buffers() if name.endswith(BIAS))


def test_what_can_not_be_balanced_is_refused() -> None:
    with pytest.raises(BadInput, match=r"backend\.balance_experts: llama has no experts"):
        backend(family("llama"))
    model = family("qwen3_moe")
    model.config.router_aux_loss_coef = 0.0
    with pytest.raises(BadInput, match="neither an auxiliary loss"):
        backend(model)


def test_choices_that_were_replaced_are_told() -> None:
    batch = a_pass()
    everywhere_first = torch.tensor([0, 1] * 2, dtype=torch.uint8).repeat(len(batch.tokens_N), 1)
    trained = backend(mixture(), balanced=False)
    trained.forward_backward(replace(batch, experts_NR=everywhere_first))
    told = trained.optim_step().result()
    assert told["experts/busiest"] == 2.0
    assert told["experts/unused"] == 0.5
    assert 0.0 < told["experts/changed"] < 1.0
