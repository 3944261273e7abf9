"""What is fuzzed: how input is made, and what reads it."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

Read = Callable[[Any], object]


@dataclass(frozen=True)
class Target:
    make: Callable[[random.Random], Any]
    opened: Callable[[], AbstractContextManager[Read]]
    """What reads, for as long as inputs come."""


def function(make: Callable[[random.Random], Any], read: Read) -> Target:
    """A target that needs nothing but a function."""

    @contextmanager
    def opened() -> Iterator[Read]:
        yield read

    return Target(make, opened)
