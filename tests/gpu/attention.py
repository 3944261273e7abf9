"""Packed rows on the device against transformers' own forward pass, in float32 on the CPU, on each sequence alone.

In bfloat16 nothing is equal, so the mistake is compared with that of transformers' own pass in bfloat16 on the device.
"""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, Qwen2Config, Qwen3Config

from rollouts_core.data.tokenized import Example
from rollouts_core.training.collate import learnt, pack_batch
from rollouts_core.training.policy import Policy
from tests.gpu.rows import tell
from tests.rollouts_core.training.test_packed import sequences

SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 64, "initializer_range": 0.1,
}  # fmt: skip
WINDOW: dict[str, Any] = {"sliding_window": 32}
FAMILIES: dict[str, Any] = {
    "qwen3, shared key heads": lambda: Qwen3Config(**SHAPE),
    "qwen2, windows": lambda: Qwen2Config(
        **{**SHAPE, **WINDOW, "hidden_size": 512}, use_sliding_window=True, max_window_layers=1
    ),
    "gemma2, soft caps": lambda: Gemma2Config(**SHAPE, **WINDOW),
    "gpt_oss, sinks": lambda: GptOssConfig(
        **SHAPE, **WINDOW, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention"] * 3
    ),
}
LENGTHS = [40, 90, 65, 1, 120]
WORSE = 1.5
"""How much larger our mistake may be than that of transformers in the same precision."""


def main(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    examples = sequences(LENGTHS, shared=37) + sequences([77, 30], seed=1)
    for name, config in FAMILIES.items():
        exact, gradient = _alone(seeded_model(config(), "cpu", torch.float32), examples)
        theirs, their_gradient = _alone(seeded_model(config(), device, dtype), examples)
        model = seeded_model(config(), device, dtype)
        scores = Policy(model)(pack_batch(examples, 1.0).to(torch.device(device)))
        scores.logprobs_M.sum().backward()
        ours, our_gradient = scores.logprobs_M.detach().double().cpu(), _gradient(model)
        mistakes = [(found - exact).abs().mean().item() for found in (ours, theirs)]
        angles = [torch.cosine_similarity(found, gradient, dim=0).item() for found in (our_gradient, their_gradient)]
        good = mistakes[0] <= WORSE * mistakes[1] + 1e-5 and angles[0] >= angles[1] - 0.01
        told = f"mean mistake {mistakes[0]:.2e}, transformers' {mistakes[1]:.2e}; gradient's cosine {angles[0]:.5f}"
        tell(name, f"{told}, {angles[1]:.5f}", good)


def _alone(model: Any, examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    device = next(model.parameters()).device
    found = []
    for example in examples:
        tokens = torch.from_numpy(example.tokens).long().to(device)[None]
        places = torch.from_numpy(learnt(example)).to(device)
        logp = torch.log_softmax(model(tokens).logits[0].float(), -1)[places - 1]
        found.append(logp.gather(1, tokens[0, places, None])[:, 0])
    together = torch.cat(found)
    together.sum().backward()
    return together.detach().double().cpu(), _gradient(model)


def _gradient(model: Any) -> torch.Tensor:
    return torch.cat([value.grad.flatten().double().cpu() for value in model.parameters() if value.grad is not None])


def seeded_model(config: Any, device: str, dtype: torch.dtype) -> Any:
    """The same weights whatever the device."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.to(device, dtype).eval()


if __name__ == "__main__":
    main(sys.argv[1])
