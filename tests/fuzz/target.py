"""What is fuzzed: how input is made, and what reads it."""

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.from_thread

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


@contextmanager
def in_event_loop(
    opened: Callable[[], AbstractAsyncContextManager[Callable[[Any], Awaitable[None]]]],
) -> Iterator[Read]:
    """What reads in an event loop of its own, in another thread."""
    with anyio.from_thread.start_blocking_portal() as portal, portal.wrap_async_context_manager(opened()) as read:
        yield partial(portal.call, read)
