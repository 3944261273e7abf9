"""The findings of a machine's check."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    state: Literal["ok", "warning", "failed"]
    found: str
    advice: str = ""
