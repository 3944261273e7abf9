"""The embedded engine: `TorchEngine` behind the protocol that all engines share.

Decision: nothing drives it in the background. One of those who wait for an answer steps the engine for all of them, and
hands that on when its own answer is there; when nobody waits, nothing runs. So there is nothing to start, to stop, or
to leak. Steps run in the event loop's thread: handing each to another thread and back, while torch's own threads spin,
made generation half as fast (3,100 tokens/s instead of 5,500; two cores, 64 requests).
"""

from collections.abc import Iterable, Mapping, Sequence
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
        self._driver: str | None = None

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    async def generate(self, request: GenerationRequest) -> Completion:
        self._engine.submit([request])
        name = request.request_id
        self._wake[name] = anyio.Event()
        try:
            while (completion := self._engine.collect(name)) is None:
                if self._driver in (None, name):
                    self._driver = name
                    await checkpoint()  # whoever else is about to ask joins this step
                    self._tell(ended.request_id for ended in self._engine.step())
                else:
                    await self._wake[name].wait()
                    self._wake[name] = anyio.Event()
            return completion
        finally:
            self._engine.abort([name])
            self._engine.collect(name)
            del self._wake[name]
            if self._driver in (None, name):  # None: it was this one's turn, and its answer was there
                self._driver = None
                self._tell(list(self._wake)[:1])

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)
        self._tell(request_ids)

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._engine.update_weights(weights, version)

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        self._engine.update_weights_from_checkpoint(path, version)

    def wants_weights(self) -> bool:
        return False

    @property
    def sync_seconds(self) -> Mapping[str, float]:
        return {}

    async def release_memory(self) -> None:
        """It shares the trainer's process; its weights and cache stay."""

    async def resume_memory(self) -> None:
        """Nothing was given away."""

    async def aclose(self) -> None:
        """Nothing is open."""

    def _tell(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._wake:
                self._wake[name].set()
