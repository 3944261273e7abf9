"""Where the trainer's batches come from: generated one by one, generated ahead, or kept from an earlier run.

Decision: the trainer is synchronous code that asks for a batch and hands over weights; everything that waits for
engines runs in an event loop in a thread of its own, which ends with the `with` block.

Decision: a server that was started again needs the current weights, which only the trainer has, and which change while
it works. So newcomers are given them when the trainer waits for a batch, or with the next version.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from anyio.from_thread import BlockingPortal, start_blocking_portal

from rollouts_core.inference.engine import InferenceEngine
from rollouts_core.rollout.manager import AsyncRolloutManager, GeneratedBatch
from rollouts_core.rollout.overlap import OverlappedRollouts

if TYPE_CHECKING:
    import torch

LOOK_SECONDS = 1.0

Weights = Mapping[str, "torch.Tensor"]
Manager = AsyncRolloutManager | OverlappedRollouts


class RolloutSource(Protocol):
    """Gives batches, takes weights."""

    def next_batch(self, step: int) -> GeneratedBatch:
        """The batch of a step, counted from 1."""

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        """New weights, which stay as they are until the next batch has been asked for and has come.

        Gives metrics: the seconds of its phases.
        """

    def state(self) -> dict[str, Any]:
        """As JSON data: what a later source goes on from."""


@contextmanager
def generating(
    make_engine: Callable[[], InferenceEngine],
    make_manager: Callable[[InferenceEngine], Manager],
    colocated: bool = False,
) -> Iterator["GeneratedRollouts"]:
    """Batches from an engine. `colocated`: it gives its memory away while the trainer works."""
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        engine = portal.call(make_engine)
        stack.callback(_close, portal, engine)
        manager = portal.call(make_manager, engine)
        rollouts = GeneratedRollouts(portal, engine, manager, colocated)
        stack.callback(rollouts.end)
        yield rollouts


def _close(portal: BlockingPortal, engine: InferenceEngine) -> None:
    with suppress(RuntimeError):  # whatever ended the loop has ended its connections
        portal.call(engine.aclose)


class GeneratedRollouts:
    """Batches from a manager in its event loop. Fits `RolloutSource`."""

    def __init__(self, portal: BlockingPortal, engine: InferenceEngine, manager: Manager, colocated: bool) -> None:
        self._portal, self._engine, self._manager, self._colocated = portal, engine, manager, colocated
        self._published: tuple[Weights, int] | None = None
        self._making: Future[None] | None = None
        self._asleep = False

    def next_batch(self, step: int) -> GeneratedBatch:
        if isinstance(self._manager, OverlappedRollouts):
            if self._making is None:
                self._making = self._portal.start_task_soon(self._manager.run)
            future = self._portal.start_task_soon(self._manager.next_batch, step)
        else:
            future = self._portal.start_task_soon(self._manager.generate_batch, step)
        try:
            batch = self._awaited(future)
        finally:
            future.cancel()
        if self._colocated:
            self._portal.call(self._engine.release_memory)
            self._asleep = True
        return batch

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        if self._asleep:
            self._portal.call(self._engine.resume_memory)
            self._asleep = False
        self._published = (weights, version)
        self._portal.call(self._engine.update_weights, weights, version)
        return {f"timing_s/weight_sync/{phase}": seconds for phase, seconds in self._engine.sync_seconds.items()}

    def state(self) -> dict[str, Any]:
        return self._portal.call(self._manager.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; before the first batch is asked for."""
        self._portal.call(self._manager.restore, state)

    def end(self) -> None:
        """Stop generating ahead."""
        if self._making is not None:
            self._making.cancel()

    def _awaited(self, future: "Future[GeneratedBatch]") -> GeneratedBatch:
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except NotYet:
                if future.done():
                    raise
            if self._published is not None and self._portal.call(self._engine.wants_weights):
                self._portal.call(self._engine.update_weights, *self._published)
