"""Reward models from transformers: a classifier with one number for a conversation, a group of answers at a time."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from anyio import to_thread

from rollouts_core.data.rendering import chat_format, fitting_render
from rollouts_core.errors import BadInput
from rollouts_core.rewards.reward import GroupReward, OpenReward
from rollouts_core.types import Message, Sample


@dataclass(frozen=True)
class RewardModelSettings:
    name: str
    """Hub name, or a local directory."""
    revision: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    """auto: cuda if there is one."""
    batch_size: int = 16
    """Answers scored together; the groups of a batch are scored one after another."""
    max_length: int = 4096
    """In tokens; of what is longer, the beginning is left out."""


def reward_model(settings: RewardModelSettings) -> OpenReward:
    """What the model makes of each conversation, unscaled. Opened, it raises `BadInput` for what is no reward model."""

    @asynccontextmanager
    async def open_model() -> AsyncIterator[GroupReward]:
        model, tokenizer = await to_thread.run_sync(partial(_loaded, settings))
        yield GroupReward(partial(_scores, settings, model, tokenizer))

    def check() -> None:
        if settings.name.startswith(("/", ".")) and not Path(settings.name, "config.json").is_file():
            raise BadInput(f"reward model {settings.name}: holds no config.json: not a Hugging Face model directory")

    return OpenReward(open_model, check)


def _loaded(settings: RewardModelSettings) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    from rollouts_core.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(settings.name, settings.revision)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            settings.name,
            revision=settings.revision,
            dtype=getattr(torch, settings.dtype),
            num_labels=1,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"reward model {settings.name}: {error}") from error
    if loaded["missing_keys"]:
        raise BadInput(f"reward model {settings.name}: no reward model, it lacks {sorted(loaded['missing_keys'])[:3]}")
    model.config.pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval(), tokenizer


def _scores(settings: RewardModelSettings, model: Any, tokenizer: Any, samples: Sequence[Sample]) -> list[float]:
    import torch

    chat = chat_format(tokenizer)
    texts = []
    for sample in samples:
        messages = _conversation(sample)
        texts.append(fitting_render(chat, messages)(messages))
    tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
    scores: list[float] = []
    for start in range(0, len(texts), settings.batch_size):
        batch = tokenizer(
            texts[start : start + settings.batch_size],
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=settings.max_length,
            add_special_tokens=False,
        ).to(model.device)
        with torch.inference_mode():
            scores += model(**batch).logits[:, 0].float().tolist()
    return scores


def _conversation(sample: Sample) -> list[Message]:
    if sample.trajectory is not None:
        return list(sample.trajectory.final.messages)
    return [*sample.prompt.messages, Message("assistant", sample.response)]
