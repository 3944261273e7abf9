"""From a conversation to token ids and a loss mask, through the tokenizer's own chat template.

Decision: the conversation is rendered once as text and encoded once. Where each assistant turn stands in that text is
found by rendering its prefixes: up to the turn with the generation prompt, and up to and with the turn. Both must be
prefixes of the whole text. A template that renders an earlier turn differently once later turns follow (some drop
reasoning) is refused by name instead of being guessed at, since its mask would mark the wrong tokens.
"""

from collections.abc import Sequence
from typing import Any

from rollouts_core.errors import BadInput
from rollouts_core.types import Message

Span = tuple[int, int]


def tokenize_conversation(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
    """Token ids, and the character spans of the assistant's turns, ends of turn included.

    Raises `BadInput` when the template does not keep earlier turns as they were.
    """
    text, spans = render_with_spans(tokenizer, messages)
    return _encoded(tokenizer, text), spans


def compute_loss_mask(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Token ids and their loss mask: 1 for each token that begins inside an assistant turn."""
    text, spans = render_with_spans(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        int(any(start <= begin < end and begin < stop for start, end in spans))
        for begin, stop in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], mask


def plain_mask(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Token ids of plain text, its end of sequence included, and their mask: what follows the prompt is learnt.

    Both are encoded apart, as they are when the policy goes on from the prompt.
    """
    given, follows = (_encoded(tokenizer, text) for text in (prompt, completion))
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return [*given, *follows, *end], [0] * len(given) + [1] * (len(follows) + len(end))


def render_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a prompt, ready for the assistant to go on from."""
    return _encoded(tokenizer, _render(tokenizer, messages, add_generation_prompt=True))


def plain_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt of plain text."""
    return _encoded(tokenizer, prompt)


def render_with_spans(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """The whole conversation as text, and the span of each assistant turn in it."""
    whole = _render(tokenizer, messages)
    spans = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = _render(tokenizer, messages[:index], add_generation_prompt=True)
        upto = _render(tokenizer, messages[: index + 1])
        if not (whole.startswith(upto) and upto.startswith(before)):
            raise BadInput(f"the chat template renders turn {index} differently once later turns follow")
        spans.append((len(before), _end_of_turn(tokenizer, upto, len(before))))
    return whole, spans


def _encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _end_of_turn(tokenizer: Any, text: str, start: int) -> int:
    """The turn ends with its end-of-sequence token; what a template adds behind it the model never has to say."""
    end = text.rfind(tokenizer.eos_token or "\0", start)
    return len(text) if end < 0 else end + len(tokenizer.eos_token)


def _render(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    return text
