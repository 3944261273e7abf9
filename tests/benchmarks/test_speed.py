"""What things cost, as medians and ratios of one run: `make benchmark`. Nothing here asserts on time."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollouts_core.data.collate import collate_batch, learnt_tokens
from rollouts_core.data.tokenized import Example
from rollouts_core.inference.engine import GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine
from rollouts_core.training.losses import create_cross_entropy_loss
from rollouts_core.training.pytorch import create_pytorch_backend
from tests.benchmarks.timing import alternately

REQUESTS, PROMPT, ANSWER = 64, 16, 64
VOCABULARY = 512

pytestmark = pytest.mark.benchmark


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_generation_beside_transformers() -> None:
    served = model().eval()
    prompts = torch.randint(1, VOCABULARY, (REQUESTS, PROMPT))
    engine = TorchEngine(served, PROMPT + ANSWER, REQUESTS)

    def ours() -> None:
        engine.generate(
            [
                GenerationRequest(f"{row}", tuple(prompt), ANSWER, (), 1.0, seed=row)
                for row, prompt in enumerate(prompts.tolist())
            ]
        )

    @torch.inference_mode()
    def theirs() -> None:
        served.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, pad_token_id=0,
            min_new_tokens=ANSWER, max_new_tokens=ANSWER, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip

    compare("embedded engine", "transformers generate", REQUESTS * ANSWER, *alternately(ours, theirs))


def test_sft_step_beside_a_bare_loop() -> None:
    examples = [Example(row, (row * 0 + 1)) for row in torch.randint(1, VOCABULARY, (32, 64)).numpy()]
    trained, bare = model(), model()
    backend = create_pytorch_backend(trained, create_cross_entropy_loss(), learning_rate=1e-3)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)

    def ours() -> None:
        backend.forward_backward(collate_batch(examples, float(learnt_tokens(examples)))).result()
        backend.optim_step().result()

    def theirs() -> None:
        tokens = torch.tensor([example.tokens.tolist() for example in examples])
        bare(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    compare("SFT backend", "bare loop", 32 * 64, *alternately(ours, theirs))


def compare(mine: str, other: str, tokens: int, seconds: float, other_seconds: float) -> None:
    ratio = other_seconds / seconds
    print(f"\n{mine} {tokens / seconds:,.0f} tokens/s, {other} {tokens / other_seconds:,.0f}, ratio {ratio:.2f}")
