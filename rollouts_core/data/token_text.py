"""Tokens as the text that each of them adds, for people to look at."""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
CONTEXT = 6
"""Tokens before one that may change how it is decoded: a leading space, the bytes of a character."""


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the decoded text; they join to the whole, special tokens included.

    A character of several tokens stands with the last of them, and the others are empty.
    """
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
