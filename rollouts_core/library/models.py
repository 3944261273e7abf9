"""A model with its tokenizer, by name or as they are."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts_core.config import Dtype, ScratchModel
from rollouts_core.config.model import TokenizerSpec
from rollouts_core.data.tokenizers import load_tokenizer, train_tokenizer
from rollouts_core.errors import BadInput
from rollouts_core.training.exporting import save_policy
from rollouts_core.training.lora import model_weights
from rollouts_core.training.models import create_model as random_model
from rollouts_core.training.models import load_hf_model


@dataclass(frozen=True)
class LanguageModel:
    """A transformers model and its tokenizer. Training changes the model in place."""

    model: Any
    tokenizer: Any

    @property
    def longest(self) -> int:
        """Tokens that it has positions for."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length)

    def save(self, directory: str | Path) -> None:
        """Save a Hugging Face model directory, with what adapters add."""
        save_policy(self.model, self.tokenizer, Path(directory), model_weights(self.model))


def load_model(name: str | Path, device: str | None = None, dtype: Dtype = "float32") -> LanguageModel:
    """A model and its tokenizer, by directory or hub name.

    `device`: None is the first GPU, or the CPU. Raises `BadInput` when it can't be had.

    Examples:
        >>> policy = rc.load_model("Qwen/Qwen2.5-0.5B-Instruct")
    """
    import torch

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(str(name))
    return LanguageModel(load_hf_model(str(name), dtype, place), tokenizer)


def as_language_model(model: Any, tokenizer: Any = None) -> LanguageModel:
    """The `LanguageModel` of an argument `model`: a name, a directory, a `LanguageModel`, or a transformers model
    together with its tokenizer. Raises `BadInput`, naming the argument."""
    if isinstance(model, LanguageModel):
        return model if tokenizer is None else LanguageModel(model.model, tokenizer)
    if isinstance(model, str | Path):
        loaded = load_model(model)
        return loaded if tokenizer is None else LanguageModel(loaded.model, tokenizer)
    if not hasattr(model, "base_model") or not hasattr(model, "config"):
        raise BadInput(f"model: a {type(model).__name__} is neither a transformers model nor the name of one")
    if tokenizer is None:
        raise BadInput(
            "tokenizer: a model that is given as an object has none: pass tokenizer=..., or the model's name"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput("tokenizer: it has no chat template, so conversations can't be tokenized")
    return LanguageModel(model, tokenizer)


def create_model(
    texts: Iterable[str], shape: ScratchModel, max_length: int = 512, seed: int = 0, device: str = "cpu"
) -> LanguageModel:
    """A model with random weights and a tokenizer made from the texts, to try things without a download.

    Examples:
        >>> policy = rc.create_model(["12+34=46"], rc.ScratchModel(hidden_size=64, layers=2, heads=2, kv_heads=2,
        ...     intermediate_size=128))
    """
    spec = TokenizerSpec(kind=shape.tokenizer, vocab_size=shape.vocab_size if shape.tokenizer == "byte_bpe" else None)
    tokenizer = train_tokenizer(spec, texts, max_length)
    return LanguageModel(random_model(shape, tokenizer, max_length, seed, device), tokenizer)
