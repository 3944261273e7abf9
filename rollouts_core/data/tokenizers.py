"""Tokenizers: pretrained by name, or made from the training data for models from scratch.

A tokenizer made here marks turns with `<|role|>`, ends the assistant's with `<|end|>`, names the tools before all
turns, writes calls as Qwen and Hermes do, and carries that as its chat template, so that the rest of the library knows
only "the tokenizer's own template".
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollouts_core.config.model import TokenizerSpec
from rollouts_core.errors import BadInput
from rollouts_core.types import ToolCall

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
SPECIAL = [PAD, END, UNKNOWN, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CALL = "<tool_call>{{ call.function | tojson }}</tool_call>"
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}" + CALL + "{% endfor %}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def load_tokenizer(directory_or_name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A tokenizer by directory or hub name. Raises `BadInput` when it cannot be had or has no chat template."""
    try:
        tokenizer = _kind_of(Path(directory_or_name)).from_pretrained(
            directory_or_name, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise BadInput(f"model {directory_or_name}: its tokenizer can't be loaded: {error}") from error
    tokenizer.init_kwargs.pop(
        "local_files_only", None
    )  # otherwise the saved tokenizer says whether the machine was online
    if not tokenizer.chat_template:
        raise BadInput(f"model {directory_or_name}: its tokenizer has no chat template; use an instruct model")
    if not tokenizer.is_fast:
        raise BadInput(f"model {directory_or_name}: its tokenizer gives no offsets; a fast tokenizer is needed")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _kind_of(directory: Path) -> Any:
    """The class of a tokenizer that was made here. To ask transformers for it would import torch."""
    settings = directory / "tokenizer_config.json"
    if settings.is_file() and not (directory / "config.json").exists():
        told = json.loads(settings.read_text())
        if told.get("tokenizer_class") == PreTrainedTokenizerFast.__name__ and "auto_map" not in told:
            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def train_tokenizer(spec: TokenizerSpec, texts: Iterable[str], max_length: int) -> Any:
    """A character or byte-level BPE tokenizer of the given texts."""
    if spec.kind == "character":
        core = _character(texts)
    else:
        core = _byte_bpe(texts, spec.vocab_size or 0)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def call_text(call: ToolCall) -> str:
    """The text of a call, as the template made here writes it."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return f"<tool_call>{json.dumps(function, ensure_ascii=False)}</tool_call>"


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    tokenizer.save_pretrained(str(directory))


def _character(texts: Iterable[str]) -> Tokenizer:
    characters = sorted(set().union(*texts))
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    return core


def _byte_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    core = Tokenizer(models.BPE(unk_token=None))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core
