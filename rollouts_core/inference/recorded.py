"""Decoding steps that are recorded once for each shape and played again.

Decision: on a GPU a decoding step of a small model is some hundred kernels of a few microseconds each, which Python
takes longer to launch than the GPU to run. A CUDA graph launches them all at once.

Decision: rows and columns come in few sizes, so that a recording serves many steps; at most a quarter is padding. The
first time, a shape is computed plainly, which lets libraries set themselves up. The second time it is recorded, and
from then on the recording is played.

Legend: B rows of a step, padding included, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rollouts_core.inference.devices import to_device
from rollouts_core.inference.tiles import TILE

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Tokens B, their positions B and the columns in use: logits BV. What it does may depend on no value of a tensor."""
Work = Callable[[], None]
Record = Callable[[Work], Work]
"""Records what some work does on the device, and gives what does it again."""
MOST = 64
"""Recordings that are kept."""


class RecordedSteps:
    """Plays steps over rows of a fixed place in memory."""

    def __init__(self, step: Step, record: Record, rows: int, vocabulary: int, like: torch.Tensor) -> None:
        """`rows`: the most of a step; `like`: has the dtype of the logits, on their device."""
        self._step, self._record = step, record
        self._tokens_R = torch.zeros(rows, dtype=torch.long, device=like.device)
        self._positions_R = torch.zeros_like(self._tokens_R)
        self._logits_RV = like.new_empty(rows, vocabulary)
        self._played: dict[tuple[int, int], Work | None] = {}
        """Recordings by rows and columns; None: seen once."""

    def __call__(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, used: int) -> torch.Tensor:
        """Logits BV, until the next step. Tokens and positions are on the CPU."""
        shape = len(tokens_B), used
        for own_R, given_B in ((self._tokens_R, tokens_B), (self._positions_R, positions_B)):
            own_R[: len(given_B)].copy_(to_device(given_B, own_R.device))
        if shape not in self._played:
            self._played[shape] = None
            self._compute(*shape)
        else:
            self._played[shape] = play = self._played[shape] or self._recorded(*shape)
            play()
        return self._logits_RV[: len(tokens_B)]

    def _compute(self, rows: int, used: int) -> None:
        self._logits_RV[:rows] = self._step(self._tokens_R[:rows], self._positions_R[:rows], used)

    def _recorded(self, rows: int, used: int) -> Work:
        if len(self._played) > MOST:
            del self._played[next(iter(self._played))]
        return self._record(lambda: self._compute(rows, used))


def size_of(count: int) -> int:
    """The rows or columns that a step is padded to: whole tiles, and few sizes."""
    step: int = max(TILE, 2 ** (count - 1).bit_length() // 8)
    return -(-count // step) * step


def recorder(device: torch.device) -> Record | None:
    """A recorder for CUDA; None on devices where recording gains nothing."""
    return or_plainly(_CUDAGraphs()) if device.type == "cuda" else None


def or_plainly(record: Record) -> Record:
    """The same, until something can't be recorded: that is said once, and work from then on is done as it is given."""
    failed = False

    def careful(work: Work) -> Work:
        nonlocal failed
        if not failed:
            try:
                return record(work)
            except RuntimeError as error:
                failed = True
                print(f"decoding goes on without CUDA graphs: {str(error).splitlines()[0]}", flush=True)
        return work

    return careful


class _CUDAGraphs:
    """Recordings that share one pool of memory: one is played at a time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """Record by hand, because `torch.cuda.graph` collects Python's garbage and empties the allocator's cache each
        time. Other threads, as a checkpoint's, may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _without_sorting():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


@contextmanager
def _without_sorting() -> Iterator[None]:
    """Deterministic mode sorts the places that a step writes its keys and values to; here no two are the same."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
