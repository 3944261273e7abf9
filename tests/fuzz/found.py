"""One input after another, and what was answered by something else than a value or a message."""

import random
import traceback
from dataclasses import dataclass, field
from typing import Any

from rollouts_core.errors import RolloutsError
from tests.fuzz import answers, files, frames
from tests.fuzz.target import Read, Target

TARGETS: dict[str, Target] = {**files.TARGETS, **answers.TARGETS, **frames.TARGETS}
SHOWN = 4000
"""Characters of a traceback; half as many of an input."""


@dataclass
class Findings:
    given: Any = None
    """The input under way."""
    refused: int = 0
    """With a message."""
    found: list[str] = field(default_factory=list)

    def look(self, target: Target, read: Read, draw: random.Random) -> None:
        """Try one more input."""
        self.given = target.make(draw)
        try:
            read(self.given)
        except RolloutsError as error:
            self.refused += 1
            if not str(error).strip():
                self._add(f"{type(error).__name__} without a message")
        except Exception:
            self._add(traceback.format_exc()[-SHOWN:])

    def _add(self, what: str) -> None:
        self.found.append(f"{what}\n  input: {repr(self.given)[: SHOWN // 2]}")
