"""Tiny models and tokenizers for tests."""

import copy
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollouts_core.config.model import TokenizerSpec
from rollouts_core.data.tokenizers import train_tokenizer

VOCABULARY = 24
CONTEXT = 48
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
"""Of a tiny decoder of any family."""


def tiny_model(seed: int = 0, architecture: Any = None, **changes: Any) -> Any:
    """A randomly initialised model, its weights large enough that its choices are far from uniform."""
    config = copy.deepcopy(architecture) or tiny_architecture(**changes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_architecture(**changes: Any) -> Qwen2Config:
    return Qwen2Config(**SHAPE | {"max_position_embeddings": CONTEXT} | changes)


@cache
def character_tokenizer(text: str = "0123456789+=") -> Any:
    return train_tokenizer(TokenizerSpec(kind="character"), [text], CONTEXT)
