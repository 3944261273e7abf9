"""The source of the trainer's batches: generated one by one, generated ahead, or kept from an earlier run.

Decision: the trainer is synchronous code that asks for a batch and hands over weights; everything that waits for
engines runs in an event loop, which ends with the `with` block. Where servers generate, or generation runs ahead, the
loop has a thread of its own. Where this process generates and then trains, the loop turns in the trainer's thread while
it waits: each thread that computes has a pool of helpers, and two pools on the same cores take turns asleep (0.79 s a
batch instead of 0.47; two cores, 64 samples of 32 tokens).

Decision: a server that started again needs the current weights. Only the trainer has them, and they change while it
works. So newcomers get them when the trainer waits for a batch, or with the next version.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from inspect import isawaitable
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
        """The state as JSON data, from which a later source goes on."""


@contextmanager
def generating(
    make_engine: Callable[[], InferenceEngine],
    make_manager: Callable[[InferenceEngine], Manager],
    colocated: bool = False,
    same_thread: bool = False,
) -> Iterator["GeneratedRollouts"]:
    """Batches from an engine and a manager, until the block ends.

    `colocated`: the engine gives its memory away while the trainer works. `same_thread`: nothing goes on while nobody
    waits for a batch, so the loop turns in the caller's thread, unless another does.
    """
    with ExitStack() as stack:
        here = same_thread and not _in_a_loop()
        portal: Portal = stack.enter_context(_Here()) if here else stack.enter_context(start_blocking_portal())
        engine = portal.call(make_engine)
        stack.callback(_close, portal, engine)
        manager = portal.call(make_manager, engine)
        stack.callback(_close, portal, manager)
        rollouts = GeneratedRollouts(portal, engine, manager, colocated)
        stack.callback(rollouts.end)
        yield rollouts


def _in_a_loop() -> bool:
    """Whether a loop turns in this thread already, as in a notebook."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


class _Here:
    """A loop that turns in the calling thread, for as long as a call takes."""

    def __enter__(self) -> "_Here":
        self._runner = asyncio.Runner()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async def run() -> Any:
            found = function(*arguments)
            return await found if isawaitable(found) else found

        return self._runner.run(run())

    def start_task_soon(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Done when this returns."""
        future: Future[Any] = Future()
        try:
            future.set_result(self.call(function, *arguments))
        except Exception as error:
            future.set_exception(error)
        return future


Portal = BlockingPortal | _Here


def _close(portal: Portal, opened: InferenceEngine | Manager) -> None:
    with suppress(RuntimeError):  # the end of the loop has closed its connections
        portal.call(opened.aclose)


class GeneratedRollouts:
    """Batches from a manager in its event loop. Fits `RolloutSource`."""

    def __init__(self, portal: Portal, engine: InferenceEngine, manager: Manager, colocated: bool) -> None:
        self._portal, self._engine, self._manager, self._colocated = portal, engine, manager, colocated
        self._published: tuple[Weights, int] | None = None
        self._making: Future[None] | None = None
        self._asleep = False
        self._counted = time.monotonic()

    def next_batch(self, step: int) -> GeneratedBatch:
        if isinstance(self._manager, OverlappedRollouts):
            if self._making is None:
                self._making = self._portal.start_task_soon(self._manager.run)
            future = self._portal.start_task_soon(self._manager.next_batch, step)
        else:
            future = self._portal.start_task_soon(self._manager.generate_batch, step)
        if not self._making:
            self._counted = time.monotonic()
        try:
            batch = self._awaited(future)
        finally:
            future.cancel()
        batch = replace(batch, metrics={**batch.metrics, **self._rates()})
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
        seconds = {f"timing_s/weight_sync/{phase}": value for phase, value in self._engine.sync_seconds.items()}
        return seconds | {f"weight_sync/bytes/{name}": float(sent) for name, sent in self._engine.sync_bytes.items()}

    def state(self) -> dict[str, Any]:
        return self._portal.call(self._manager.state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; before the first batch is asked for."""
        self._portal.call(self._manager.restore, state)

    def end(self) -> None:
        """Stop generating ahead."""
        if self._making is not None:
            self._making.cancel()

    def _rates(self) -> dict[str, float]:
        """Tokens per second of each replica since the last count; where generation pauses, only its time counts."""
        since, self._counted = self._counted, time.monotonic()
        tokens = self._portal.call(self._engine.take_tokens)
        seconds = self._counted - since
        rates = {f"replicas/{name}/tokens_per_second": made / seconds for name, made in tokens.items()}
        return {"replicas/serving": float(len(tokens)), **rates} if tokens else {}

    def _awaited(self, future: "Future[GeneratedBatch]") -> GeneratedBatch:
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except NotYet:
                if future.done():
                    raise
            if self._published is not None and self._portal.call(self._engine.wants_weights):
                self._portal.call(self._engine.update_weights, *self._published)
