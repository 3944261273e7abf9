"""From conversations and plain text to token ids and loss masks: texts are encoded together, on every core."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollouts_core.data.rendering import ASSISTANT, Rendered, chat_format, render_conversation
from rollouts_core.errors import BadInput
from rollouts_core.texts import has_half_characters
from rollouts_core.types import Data, Message

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Tokenized:
    """Token ids and their loss mask: 1 for each token that is learnt."""

    ids: Ids
    mask: Mask


def tokenize_conversation(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Data] = (), roles: Sequence[str] = ASSISTANT
) -> list[Tokenized]:
    """Token ids and loss mask of a conversation. The turns of these roles are learnt.

    One sequence, unless the template rewrites earlier turns. Raises `BadInput` when the template fails or loses
    something.

    Examples:
        >>> said = [rc.Message("user", "1+1="), rc.Message("assistant", "2")]
        >>> (example,) = rc.tokenize_conversation(policy.tokenizer, said)
        >>> example.ids.shape == example.mask.shape
        True
    """
    return encode_rendered(tokenizer, render_conversation(chat_format(tokenizer), messages, tools, roles))


def encode_rendered(tokenizer: Any, rendered: Sequence[Rendered]) -> list[Tokenized]:
    encodings = _encodings(tokenizer, [text.text for text in rendered])
    return [
        Tokenized(np.array(encoding.ids, np.int32), compute_loss_mask(encoding, text))
        for encoding, text in zip(encodings, rendered, strict=True)
    ]


def encode_plain(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Tokenized]:
    """Prompt and completion, encoded apart as they are when the policy goes on from the prompt.

    What follows the prompt is learnt, with the end of sequence behind it.
    """
    given = encode_texts(tokenizer, [prompt for prompt, _ in pairs])
    follows = encode_texts(tokenizer, [completion for _, completion in pairs])
    end = np.array([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [], np.int32)
    made = []
    for prompt, completion in zip(given, follows, strict=True):
        ids = np.concatenate([prompt, completion, end])
        made.append(Tokenized(ids, (np.arange(len(ids)) >= len(prompt)).astype(np.int8)))
    return made


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """Token ids, nothing added."""
    return [np.array(encoding.ids, np.int32) for encoding in _encodings(tokenizer, texts)]


def compute_loss_mask(encoding: Any, rendered: Rendered) -> Mask:
    """1 for each token of a `tokenizers.Encoding` that begins inside a span of the text's characters."""
    mask = np.zeros(len(encoding.ids), np.int8)
    for start, end in rendered.spans:
        first, behind = (_first_token(encoding, place, len(rendered.text)) for place in (start, end))
        mask[first:behind] = 1
    return mask


def _first_token(encoding: Any, place: int, length: int) -> int:
    """The first that begins at this character or behind it; tokenizers may drop characters."""
    count = len(encoding.ids)
    found = (encoding.char_to_token(at) for at in range(place, length))
    token = next((token for token in found if token is not None), count)
    while token < count and encoding.token_to_chars(token)[0] < place:
        token += 1
    return int(token)


def _encodings(tokenizer: Any, texts: Sequence[str]) -> Sequence[Any]:
    if not texts:
        return []
    core = tokenizer.backend_tokenizer
    core.no_truncation()
    core.no_padding()
    try:
        encodings: Sequence[Any] = core.encode_batch(list(texts), add_special_tokens=False)
    except TypeError:
        half = next((text for text in texts if has_half_characters(text)), None)
        if half is None:
            raise
        raise BadInput(f"a text can't be tokenized, because it has half of a character: {half[:200]!r}") from None
    return encodings
