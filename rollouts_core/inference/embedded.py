"""The embedded engine: `TorchEngine` behind the protocol that all engines share.

Decision: there is no background thread. One of the tasks that wait for an answer steps the engine for all of them, and
hands this on when its own answer is ready. If nobody waits, nothing runs. So there is nothing to start, to stop, or to
leak. Steps run in the event loop's thread: handing each to another thread and back, while torch's own threads spin,
made generation half as fast (3,100 tokens/s instead of 5,500; two cores, 64 requests).
"""

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import torch
from anyio.lowlevel import checkpoint

from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine


class EmbeddedEngine:
    """Serves a policy from this process. Seeds are honoured to the last bit, whatever else is generated beside."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._wake: dict[str, anyio.Event] = {}
        """Events of the requests that wait for another's step."""
        self._followed: set[str] = set()
        self._driver: str | None = None

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    async def generate(self, request: GenerationRequest) -> Completion:
        name = request.request_id
        with self._under_way(request):
            while (completion := self._engine.collect(name)) is None:
                await self._turn(name)
            return completion

    async def follow(self, request: GenerationRequest) -> AsyncGenerator[Completion]:
        """The answer as it grows: what there is of it after each step, with finish reason 'abort', then the whole.
        Raises as `generate` does."""
        name = request.request_id
        self._followed.add(name)
        try:
            with self._under_way(request):
                while (completion := self._engine.collect(name)) is None:
                    await self._turn(name)
                    if self._driver == name:  # a follower may be slow
                        self._hand_on()
                    if there := self._engine.so_far(name):
                        yield there
                yield completion
        finally:
            self._followed.discard(name)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)
        self._tell(request_ids)

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._engine.update_weights(weights, version)

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        self._engine.update_weights_from_checkpoint(path, version)

    def checksum(self) -> str:
        """A checksum of the weights that it computes with."""
        return self._engine.checksum()

    def wants_weights(self) -> bool:
        return False

    @property
    def sync_seconds(self) -> Mapping[str, float]:
        return {}

    @property
    def sync_bytes(self) -> Mapping[str, int]:
        return {}

    def take_tokens(self) -> Mapping[str, int]:
        return {}

    async def release_memory(self) -> None:
        """Do nothing: the engine shares the trainer's process, and its weights and cache stay."""

    async def resume_memory(self) -> None:
        """Do nothing: no memory was released."""

    async def aclose(self) -> None:
        """Do nothing: the engine holds no connection."""

    @contextmanager
    def _under_way(self, request: GenerationRequest) -> Iterator[None]:
        """Submit the request; at the end, whatever happens, remove it from the engine."""
        name = request.request_id
        self._engine.submit([request])
        try:
            yield
        finally:
            self._engine.abort([name])
            self._engine.collect(name)
            if self._driver in (None, name):  # None: it was this task's turn, and its answer was ready
                self._hand_on()

    async def _turn(self, name: str) -> None:
        """Take one step of the engine, or wait while another request's task takes steps."""
        if self._driver in (None, name):
            self._driver = name
            await checkpoint()  # other tasks that are about to ask join this step
            ended = [completion.request_id for completion in self._engine.step()]
            self._tell([*ended, *self._followed])
            return
        self._wake[name] = anyio.Event()
        try:
            await self._wake[name].wait()
        finally:
            del self._wake[name]

    def _hand_on(self) -> None:
        self._driver = None
        self._tell(list(self._wake)[:1])

    def _tell(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._wake:
                self._wake[name].set()
