"""A request's tokens and log-probabilities do not depend on which requests share its batch, to the bit."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine


@pytest.mark.parametrize(("width", "heads", "kv_heads", "context"), [(32, 2, 1, 40), (128, 4, 4, 64), (64, 4, 2, 23)])
def test_alone_in_small_batches_or_all_together(width: int, heads: int, kv_heads: int, context: int) -> None:
    model = random_model(width, heads, kv_heads)
    requests = random_requests(40, context)

    def answers(rows: int, *batches: list[GenerationRequest]) -> dict[str, Completion]:
        engine = TorchEngine(model, context, rows)
        return {completion.request_id: completion for batch in batches for completion in engine.generate(batch)}

    together = answers(64, requests)
    assert answers(1, *[[request] for request in requests]) == together
    assert answers(7, requests) == together
    assert answers(64, requests[::3], requests[1::3], requests[2::3]) == together
    assert answers(64, requests[::-1]) == together


def random_model(width: int, heads: int, kv_heads: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


def random_requests(count: int, context: int) -> list[GenerationRequest]:
    draw = random.Random(0)
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_tokens=tuple(draw.randrange(97) for _ in range(draw.randrange(1, context // 2))),
            max_new_tokens=draw.randrange(1, context // 2),
            stop_token_ids=(5,),
            seed=index,
        )
        for index in range(count)
    ]
