import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen3MoeConfig

from rollouts_core.config import LoRAConfig
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.flops import flops_of, peak_flops
from rollouts_core.training.lora import add_adapters
from rollouts_core.training.policy import Policy
from tests.rollouts_core.models import CONTEXT, SHAPE, tiny_model
from tests.rollouts_core.training.test_packed import sequences

SMALL = SHAPE | {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False}


def test_what_is_counted_is_what_torch_counts() -> None:
    """But for attention, which torch counts without its mask, and the head's logits, which are made twice."""
    model = tiny_model(architecture=LlamaConfig(**SMALL))
    examples = sequences([20, 20])
    batch = pack_batch(examples, 1.0)
    model.set_attn_implementation("sdpa")
    tokens = torch.stack([torch.from_numpy(example.tokens).long() for example in examples])
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    counted = sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    own = flops_of(model)
    layers_and_head = own.per_token * 40 + own.per_learnt * 40
    assert own.of(batch.spans, learnt_tokens(examples)) > own.per_token * 40
    assert counted == pytest.approx(layers_and_head, rel=0.01)


def test_attention_counts_the_keys_that_a_query_sees() -> None:
    """A prompt that three answers share is there once, and each answer sees it."""
    own = flops_of(tiny_model())
    together = pack_batch(sequences([3, 4, 5], shared=10), 1.0)
    pairs = sum(range(1, 11)) + sum(10 * n + sum(range(1, n + 1)) for n in (3, 4, 5))
    assert own.of(together.spans, 0) == own.per_token * 22 + own.per_pair * pairs


def test_frozen_weights_have_no_gradient_and_unused_experts_no_work() -> None:
    model = tiny_model(architecture=LlamaConfig(**SMALL))
    whole = flops_of(model).per_token
    add_adapters(model, LoRAConfig(rank=1))
    assert flops_of(model).per_token < whole * 0.8
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": []}
    few, many = (
        flops_of(tiny_model(architecture=Qwen3MoeConfig(**SMALL, num_experts=n, head_dim=8, **experts)))  # type: ignore[arg-type]
        for n in (4, 8)
    )
    router = 6 * 4 * SHAPE["hidden_size"] * SHAPE["num_hidden_layers"]
    assert many.per_token - few.per_token == pytest.approx(router)


def test_a_cpu_is_measured_and_a_policy_is_its_model() -> None:
    model = tiny_model()
    assert (peak_flops(torch.device("cpu")) or 0) > 1e8
    assert flops_of(Policy(model).model) == flops_of(model)
