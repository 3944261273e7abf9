"""Mathematical equivalence by math-verify: 1/2 is 0.5, and \\boxed{\\frac{1}{2}}.

Decision: answers are compared in separate processes. Some texts keep a computer algebra system busy for ever, and a
thread can't be ended. A process can, and another replaces it.
"""

import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from rollouts_core.errors import BadInput, RewardFailed
from rollouts_core.rewards.reward import OpenReward, RewardFunction
from rollouts_core.types import Sample

WORKER = "rollouts_core.rewards.math_worker"
MOST_WORKERS = 8
LONGEST_LINE = 1 << 20
START_SECONDS = 60.0


def math_equal(seconds: float = 10.0) -> OpenReward:
    """1.0 where the last expression of the answer, or what it puts in a box, equals the row's `answer`; else 0.0.

    What takes longer than `seconds` to compare is not equal. An `answer` that is not mathematics fails.
    """

    @asynccontextmanager
    async def open_workers() -> AsyncIterator[RewardFunction]:
        workers = [_Worker(seconds) for _ in range(max(1, min(MOST_WORKERS, os.cpu_count() or 1)))]
        places = anyio.CapacityLimiter(len(workers))

        async def equal(sample: Sample) -> float:
            async with places:
                worker = workers.pop()
                try:
                    return await worker.equal(str(sample.prompt.metadata["answer"]), sample.response)
                finally:
                    workers.append(worker)

        try:
            yield equal
        finally:
            with anyio.CancelScope(shield=True):
                for worker in workers:
                    await worker.end()

    return OpenReward(open_workers, _check)


def _check() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise BadInput("reward math_equal: needs the package math-verify: `pip install math-verify`")


class _Worker:
    """A process that compares answers. It is started when it is first needed, and again after it was ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: Process | None = None

    async def equal(self, answer: str, response: str) -> float:
        done = False
        try:
            process, lines = await self._started()
            with anyio.move_on_after(self._seconds):
                assert process.stdin is not None, "it is a pipe"
                await process.stdin.send(json.dumps({"answer": answer, "response": response}).encode() + b"\n")
                told = json.loads(await lines.receive_until(b"\n", LONGEST_LINE))
                done = True
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise RewardFailed("the process that compares mathematics has died; out of memory?") from None
        finally:
            if not done:
                with anyio.CancelScope(shield=True):
                    await self.end()
        if not done:
            return 0.0
        if "error" in told:
            raise RewardFailed(told["error"])
        return float(told["equal"])

    async def end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            if process.returncode is None:
                process.kill()
            await process.aclose()

    async def _started(self) -> tuple[Process, BufferedByteReceiveStream]:
        if self._process is None:
            self._process = await anyio.open_process([sys.executable, "-m", WORKER], stderr=None)
            assert self._process.stdout is not None, "it is a pipe"
            self._lines = BufferedByteReceiveStream(self._process.stdout)
            with anyio.fail_after(START_SECONDS):
                ready = json.loads(await self._lines.receive_until(b"\n", LONGEST_LINE))
            if "error" in ready:
                raise BadInput(ready["error"])
        return self._process, self._lines
