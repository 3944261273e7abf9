"""What a check of a machine says."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: Literal["ok", "warning", "failed"]
    found: str
    advice: str = ""
