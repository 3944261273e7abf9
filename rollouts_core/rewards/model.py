"""Reward models from transformers: a classifier with one number for a conversation, a group of answers at a time."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from anyio import to_thread

from rollouts_core.data.rendering import chat_format, fitting_render
from rollouts_core.errors import BadInput, MalformedAnswer
from rollouts_core.inference.endpoints.client import connected
from rollouts_core.inference.endpoints.openai import message_to_openai
from rollouts_core.inference.endpoints.served import is_served
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.inference.reading import reading
from rollouts_core.rewards.reward import GroupReward, OpenReward
from rollouts_core.types import Message, Sample


@dataclass(frozen=True)
class RewardModelSettings:
    name: str
    """Hub name, a local directory, or `served://NAME` of the config's `served`, which has settings of its own."""
    revision: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    """auto: cuda if there is one."""
    batch_size: int = 16
    """Answers scored together; the groups of a batch are scored one after another."""
    max_length: int = 4096
    """The longest conversation in tokens; the beginning of a longer one is left out."""


def reward_model(settings: RewardModelSettings) -> OpenReward:
    """The reward model's score of each conversation, unscaled. Opening raises `BadInput` if it is none."""

    @asynccontextmanager
    async def open_model() -> AsyncIterator[GroupReward]:
        scores = await to_thread.run_sync(load_scorer, settings)
        yield GroupReward(lambda samples: scores([_conversation(sample) for sample in samples]))

    def check() -> None:
        if settings.name.startswith(("/", ".")) and not Path(settings.name, "config.json").is_file():
            raise BadInput(f"reward model {settings.name}: holds no config.json: not a Hugging Face model directory")

    return OpenReward(_opened(settings.name) if is_served(settings.name) else open_model, check)


Scorer = Callable[[Sequence[Sequence[Message]]], list[float]]
"""Scores conversations."""


def load_scorer(settings: RewardModelSettings) -> Scorer:
    """Scores conversations. Raises `BadInput` for what is not a reward model."""
    return partial(_scores, settings, *_loaded(settings))


def _opened(url: str) -> Callable[[], AbstractAsyncContextManager[GroupReward]]:
    """Opens the reward of a served model."""

    @asynccontextmanager
    async def open_served() -> AsyncIterator[GroupReward]:
        async with connected(Service(url, ""), {}) as client:

            async def scores(samples: Sequence[Sample]) -> list[float]:
                told = [list(map(message_to_openai, _conversation(sample))) for sample in samples]
                answer = await client.post("score", {"conversations": told})
                with reading(url, answer):
                    found = [float(score) for score in answer["scores"]]
                if len(found) != len(samples):
                    raise MalformedAnswer(f"{url}: {len(found)} scores for {len(samples)} conversations")
                return found

            yield GroupReward(scores)

    return open_served


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
        raise BadInput(
            f"reward model {settings.name}: is not a reward model: it lacks {sorted(loaded['missing_keys'])[:3]}"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval(), tokenizer


def _scores(
    settings: RewardModelSettings, model: Any, tokenizer: Any, conversations: Sequence[Sequence[Message]]
) -> list[float]:
    import torch

    chat = chat_format(tokenizer)
    texts = []
    for messages in conversations:
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
