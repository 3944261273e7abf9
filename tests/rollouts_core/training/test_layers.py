"""Layers that are computed again or compiled give what layers give, and do what is said of them."""

from collections import Counter
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts_core.config import LoRAConfig
from rollouts_core.config.training import Recomputed
from rollouts_core.errors import BadInput
from rollouts_core.training.collate import pack_batch
from rollouts_core.training.policy import create_policy
from tests.rollouts_core.models import tiny_model
from tests.rollouts_core.training.test_packed import sequences

LAYERS = 2


class Counted(TorchDispatchMode):
    """Counts the passes of attention forward."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def attention(self) -> int:
        return sum(
            number for name, number in self.operators.items() if "scaled_dot_product" in name and "backward" not in name
        )


def gradients(lengths: list[int], **options: Any) -> list[torch.Tensor]:
    model = tiny_model().train()
    policy = create_policy(model, **options)
    policy(pack_batch(sequences(lengths, shared=3), 1.0)).logprobs_M.sum().backward()
    return [value.grad for value in model.parameters() if value.grad is not None]


@pytest.mark.parametrize(
    ("again", "times"), [(False, 1), (True, 2), ("selective", 1)], ids=["kept", "all again", "all but attention"]
)
def test_gradients_are_the_same_bits_and_attention_is_computed_as_often_as_said(again: Recomputed, times: int) -> None:
    kept = gradients([5, 9])
    with Counted() as once:
        gradients([5, 9])
    with Counted() as counted:
        found = gradients([5, 9], activation_checkpointing=again)
    assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))
    assert counted.attention == times * once.attention > 0


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": "selective"}, {"lora": LoRAConfig(rank=2)}])
def test_compiled_layers_give_the_same_gradients_and_are_compiled_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as for a GPU; torch.compile's own code for it stays away, since compiling that takes half a minute."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for lengths in ([5, 9], [30], [17, 3, 8]):
        torch.manual_seed(0)
        found = gradients(lengths, compiled=True, **options)
        torch.manual_seed(0)
        plain = gradients(lengths, **options)
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    parts = 3
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= parts * LAYERS


@pytest.mark.slow
def test_layers_are_compiled_for_real() -> None:
    torch._dynamo.reset()
    for one, other in zip(gradients([5, 9], compiled=True), gradients([5, 9]), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BadInput, match=r"needs a C.* compiler, and no-such-compiler"):
        gradients([5], compiled=True)
