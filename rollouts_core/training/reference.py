"""References: they score a step's tokens under another policy, the frozen one of a KL term or a teacher.

Decision: a reference is a function of the step's sequences, so a model in this process and a server are the same for
the loop. A teacher's server is asked for log-probabilities of tokens, never for text. It must have the policy's
tokenizer, and answers about other tokens are refused.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import numpy as np

from rollouts_core.data.tokenized import Example, Floats
from rollouts_core.errors import BadInput, EngineRefused, EngineUnavailable, MalformedAnswer
from rollouts_core.inference.endpoints.served import Addresses, addresses_of
from rollouts_core.inference.http import JsonClient
from rollouts_core.inference.reading import reading
from rollouts_core.training.backend import ImmediateTrainFuture, TokenScores, TrainBatch, TrainFuture
from rollouts_core.training.collate import learnt
from rollouts_core.training.streams import Cuts, scores_of

Reference = Callable[[Sequence[Example], Cuts], Sequence[Floats]]
"""Log-probabilities of each sequence's learnt tokens."""

Call = Callable[..., Awaitable[Any]]
"""Calls a server with method, path, body and a deadline in seconds."""

AT_ONCE = 64
ANSWER_SECONDS = 600.0
TRIES = 4


def reference_model(score: Callable[[TrainBatch], TokenScores]) -> Reference:
    """A whole model in this process."""

    def at_once(batch: TrainBatch) -> ImmediateTrainFuture[TokenScores]:
        return ImmediateTrainFuture(score(batch))

    return lambda examples, cuts: scores_of(examples, cuts, at_once)[0]


def reference_backend(score: Callable[[TrainBatch], TrainFuture[TokenScores]]) -> Reference:
    """A model that ranks share."""
    return lambda examples, cuts: scores_of(examples, cuts, score)[0]


def reference_server(url: str) -> Reference:
    """A server of SGLang, vLLM or our own. Raises `EngineUnavailable` when it does not answer, `BadInput` when it
    refuses the tokens or answers for others."""
    addresses = addresses_of(url)
    return lambda examples, cuts: anyio.run(_scored, url, addresses, examples)


async def _scored(url: str, addresses: Addresses, examples: Sequence[Example]) -> list[Floats]:
    client, places = JsonClient(), anyio.CapacityLimiter(AT_ONCE)
    call = partial(_tried, client, addresses)
    found: list[Floats] = [np.zeros(0)] * len(examples)
    try:
        served = await call("GET", "/v1/models", None, 30.0)
        with reading(url, served):
            model, owner = served["data"][0]["id"], served["data"][0].get("owned_by")
        ask = _ask_vllm if owner == "vllm" else _ask_sglang

        async def score(index: int) -> None:
            async with places:
                found[index] = await ask(call, url, model, examples[index])

        async with anyio.create_task_group() as tasks:
            for index in range(len(examples)):
                tasks.start_soon(score, index)
    except* EngineRefused as refused:
        raise BadInput(f"rl.algorithm.teacher {url}: {refused.exceptions[0]}") from None
    except* (EngineUnavailable, MalformedAnswer, BadInput) as group:
        raise group.exceptions[0] from None
    finally:
        with anyio.CancelScope(shield=True):
            await client.aclose()
    return found


async def _ask_sglang(call: Call, url: str, model: str, example: Example) -> Floats:
    body = {
        "input_ids": example.tokens.tolist(),
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
    }
    answer = await call("POST", "/generate", body, ANSWER_SECONDS)
    with reading(url, answer):
        pairs = [(token, value) for value, token, *_ in answer["meta_info"]["input_token_logprobs"]]
        return _of_learnt(url, example, pairs)


async def _ask_vllm(call: Call, url: str, model: str, example: Example) -> Floats:
    tokens = example.tokens.tolist()
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = await call("POST", "/v1/completions", body, ANSWER_SECONDS)
    with reading(url, answer):
        entries = answer["choices"][0]["prompt_logprobs"]
        values = [
            (entry or {}).get(str(token), {}).get("logprob") for token, entry in zip(tokens, entries, strict=True)
        ]
        return _of_learnt(url, example, list(zip(tokens, values, strict=True)))


def _of_learnt(url: str, example: Example, pairs: Sequence[tuple[int, float | None]]) -> Floats:
    if [token for token, _ in pairs] != example.tokens.tolist():
        raise BadInput(f"rl.algorithm.teacher {url} answers for other tokens: it has another tokenizer or context")
    values = [pairs[place][1] for place in learnt(example)]
    if any(value is None for value in values):
        raise MalformedAnswer(f"{url}: tokens without a log-probability")
    return np.array([float(value) for value in values if value is not None], np.float64)


async def _tried(client: JsonClient, addresses: Addresses, method: str, path: str, body: Any, seconds: float) -> Any:
    for tries in range(1, TRIES + 1):
        try:
            async with addresses.one() as url:
                return await client.call(method, f"{url}{path}", body, deadline=seconds)
        except EngineUnavailable:
            if tries == TRIES:
                raise
            await anyio.sleep(2.0**tries / 2)
    raise AssertionError("the last try returns or raises")
