"""Policies as transformers models: from scratch, pretrained, or from an artifact."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollouts_core.config import Dtype, ScratchModel
from rollouts_core.errors import BadInput

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_hf_model(directory_or_name: str, dtype: Dtype, device: str, **options: Any) -> Any:
    """A causal language model by directory or hub name. Raises `BadInput` when it cannot be loaded."""
    refuse_adapter(directory_or_name)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory_or_name, dtype=DTYPES[dtype], **options)
    except (OSError, ValueError) as error:
        raise BadInput(f"model {directory_or_name} can't be loaded: {error}") from error
    return model.to(device)


def refuse_adapter(directory: str) -> None:
    """Raises `BadInput` where a directory holds an adapter, and no model."""
    adapter = Path(directory) / "adapter_config.json"
    if adapter.exists() and not adapter.with_name("config.json").exists():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path")
        raise BadInput(f"{directory} is an adapter of {base}, not a model: merge it into its base first")


def create_model(model: ScratchModel, tokenizer: Any, max_length: int, seed: int, device: str) -> Any:
    """A randomly initialised model; the same seed gives the same weights, of variance 1 / width."""
    return drawn_model(scratch_config(model, tokenizer, max_length), model.dtype, seed, device)


def scratch_config(model: ScratchModel, tokenizer: Any, max_length: int) -> Any:
    """transformers' config."""
    return AutoConfig.for_model(
        model.architecture,
        vocab_size=len(tokenizer),
        hidden_size=model.hidden_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        intermediate_size=model.intermediate_size,
        max_position_embeddings=max_length,
        initializer_range=model.hidden_size**-0.5,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def drawn_model(config: Any, dtype: Dtype, seed: int, device: str) -> Any:
    """A model with transformers' initial weights."""
    with torch.random.fork_rng(devices=[]):
        seed_torch(seed, "initial weights")
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).to(device)


def check_context(model: Any, max_length: int) -> None:
    """Raises `BadInput` when sequences may be longer than the model has positions for."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions < max_length:
        raise BadInput(f"data.max_length {max_length}: the model has positions for {positions} tokens")


def check_teacher(vocabulary: int, tokenizer: Any) -> None:
    """Raises `BadInput` when a teacher does not know every token of the policy's tokenizer."""
    if vocabulary < len(tokenizer):
        raise BadInput(
            f"rl.algorithm.teacher: its vocabulary has {vocabulary} tokens, and the policy's tokenizer "
            f"{len(tokenizer)}: a teacher shares its pupil's tokenizer"
        )


def seed_torch(seed: int, purpose: str) -> None:
    """Torch begins every process with a seed of its own. Purposes that share a run's seed get different streams."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:4]))
