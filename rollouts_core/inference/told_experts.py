"""The experts that tokens went through, in the form of engines' answers and records: rows of bytes, in base64.

Decision: choices are sent as bytes, a row for each token: the token's experts of every layer, a byte each, or two bytes
if a layer has 256 experts or more. A row of only 0xFF is a token whose experts are not known.

Imports no torch: records and agents read it.
"""

import base64

NOT_TOLD = 0xFF
"""The value of every byte of a row whose experts are not known."""


def to_text(rows: bytes) -> str:
    """Rows as text, as records and servers' answers hold them."""
    return base64.b64encode(rows).decode()


def from_text(text: str) -> bytes:
    return base64.b64decode(text)


def continued(before: str, after: str) -> str:
    """Rows as they were told first, and those behind them of a later answer, which tells of all tokens."""
    there = from_text(before)
    return to_text(there + from_text(behind(len(there), after)))


def behind(told: int, rows: str) -> str:
    """The rows after the first `told` bytes, which are known already."""
    return to_text(from_text(rows)[told:])
