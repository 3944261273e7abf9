"""The answer of a sample, from an engine that may fail.

Decision: an error that may pass is retried with growing pauses until the sample's deadline: a server that starts again
takes minutes. Tokens that are there are kept and continued. An error that can't pass fails only this sample.
"""

import time
from collections import Counter
from collections.abc import Callable

import anyio

from rollouts_core.errors import EngineRefused, EngineUnavailable, MalformedAnswer, RolloutsError
from rollouts_core.inference.engine import Completion, GenerationRequest, InferenceEngine, joined

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0
MALFORMED_LIMIT = 3


class SampleFailed(RolloutsError):
    """A sample gets no answer. The message begins with the cause in a word or two, then a colon."""


async def answer_of(
    engine: InferenceEngine,
    request: GenerationRequest,
    before: Completion | None,
    seconds: float,
    faults: Counter[str],
    stopping: Callable[[], bool] = lambda: False,
) -> Completion:
    """The answer, with what was there of it `before`; aborted from outside, or when `stopping`, what there is of it.

    `faults` counts what was survived. Raises `SampleFailed` at the deadline of `seconds`, or when the engine refuses.
    """
    end = time.monotonic() + seconds
    said = ""
    malformed, pause = 0, FIRST_PAUSE
    while True:
        try:
            with anyio.fail_after(end - time.monotonic()):
                return joined(before, await engine.generate(request))
        except TimeoutError:
            waited = f"; last of all, {said}" if said else ""
            raise SampleFailed(
                f"deadline: request {request.request_id} had no answer in {seconds:g} s{waited}"
            ) from None
        except EngineRefused as error:
            raise SampleFailed(f"refused: {error}") from None
        except MalformedAnswer as error:
            malformed += 1
            said = str(error)
            faults["malformed_answer"] += 1
            if malformed == MALFORMED_LIMIT:
                raise SampleFailed(f"malformed answers: {error}") from None
        except EngineUnavailable as error:
            said = str(error)
            faults["engine_unavailable"] += 1
            if stopping():
                return before or Completion(request.request_id, (), (), (), "abort")
        if time.monotonic() + pause > end:
            raise SampleFailed(f"deadline: request {request.request_id} had no answer in {seconds:g} s; {said}")
        await anyio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
