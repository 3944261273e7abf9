"""Tokens as the text that each of them adds, for people to look at."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

UNFINISHED = "\ufffd"
CONTEXT = 6
"""Tokens before one that may change how it is decoded: a leading space, the bytes of a character."""


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds. Joined, the pieces are the decoded text, special tokens included.

    A character that takes several tokens is the piece of the last of them; the pieces of the others are empty.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or tokenizer.clean_up_tokenization_spaces:
        return _decoded_again(tokenizer, tokens)
    stream = DecodeStream(skip_special_tokens=False)
    try:
        pieces = [stream.step(core, token) or "" for token in tokens]
    except Exception:  # a text that became shorter with a further token, which the stream can't handle
        return _decoded_again(tokenizer, tokens)
    unfinished = next((place for place in range(len(pieces), 0, -1) if pieces[place - 1]), 0)
    if unfinished < len(pieces):
        pieces[-1] = tokenizer.decode(tokens[unfinished:], skip_special_tokens=False)
    return pieces


def _decoded_again(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The texts of tokens of any tokenizer, decoded with some tokens before each."""
    pieces: list[str] = []
    begun = told = 0
    for end in range(1, len(tokens) + 1):
        window = tokenizer.decode(tokens[begun:end], skip_special_tokens=False)
        before = tokenizer.decode(tokens[begun:told], skip_special_tokens=False)
        if window.endswith(UNFINISHED) and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(window[len(before) :])
        told = end
        begun = max(begun, end - CONTEXT)
    return pieces
