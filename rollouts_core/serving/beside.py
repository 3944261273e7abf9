"""A model beside the policy as a server of our own: `python -m rollouts_core.serving.beside ...`.

    chat                answers, by OpenAI's protocol (`serving.api`)
    scores              a teacher's log-probabilities, as SGLang gives them: `/generate` with `return_logprob`
                        a reward model's scores: `/score`, conversations in, one number for each out

The model decides which of the two scores it gives: a classifier is a reward model.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import numpy as np
import uvicorn
from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rollouts_core.config import EngineConfig
from rollouts_core.data.messages import message_from_data
from rollouts_core.data.tokenized import Example
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.errors import RolloutsError
from rollouts_core.inference.families import is_reward_model
from rollouts_core.inference.registry import embedded_engine
from rollouts_core.rewards.model import RewardModelSettings, load_scorer
from rollouts_core.serving.api import app_for
from rollouts_core.serving.talker import Talker
from rollouts_core.stages.job import prepare_torch
from rollouts_core.training.models import load_hf_model
from rollouts_core.training.policy import Policy
from rollouts_core.training.pytorch import score
from rollouts_core.training.reference import reference_model
from rollouts_core.types import Message

TOKENS_AT_ONCE = 16384
Asked = TypeVar("Asked")
Found = TypeVar("Found")


def main(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    device = prepare_torch(options.device)
    make = (_reward_app if is_reward_model(options.model_path) else _teacher_app) if options.scores else _chat_app
    app = make(options, device)
    for path in ("/health_generate", "/server_info"):
        app.add_api_route(path, _nothing)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


def _chat_app(options: argparse.Namespace, device: str) -> FastAPI:
    tokenizer = load_tokenizer(options.model_path)
    model = load_hf_model(options.model_path, options.dtype, device)
    config = EngineConfig(max_running_requests=options.max_running_requests)
    engine = embedded_engine(config, model, tokenizer, options.context_length)
    return app_for(Talker(options.name, tokenizer, engine, options.context_length, None))


def _teacher_app(options: argparse.Namespace, device: str) -> FastAPI:
    model = load_hf_model(options.model_path, options.dtype, device).requires_grad_(False)
    reference = reference_model(partial(score, Policy(model, entropy=False).eval()))

    def log_probs(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of all tokens except the first of each sequence."""
        examples = [Example(np.array(tokens, np.int32), np.ones(len(tokens), np.int32)) for tokens in sequences]
        return [values.tolist() for values in reference(examples, [_passes(examples)])]

    together, limits = Together(log_probs), (model.config.vocab_size, options.context_length)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": options.name, "object": "model", "owned_by": "rollouts"}]}

    @app.post("/generate")
    async def generate(request: Request) -> JSONResponse:
        tokens = (await request.json())["input_ids"]
        if problem := _problem(tokens, *limits):
            return JSONResponse({"error": problem}, 400)
        values = await together(tokens)
        pairs = [
            [None, tokens[0], None],
            *([value, token, None] for value, token in zip(values, tokens[1:], strict=True)),
        ]
        return JSONResponse({"meta_info": {"input_token_logprobs": pairs}})

    return app


def _reward_app(options: argparse.Namespace, device: str) -> FastAPI:
    settings = RewardModelSettings(
        options.model_path, dtype=options.dtype, device=device, max_length=options.context_length
    )
    scores = load_scorer(settings)

    def of_all(groups: list[list[list[Message]]]) -> list[list[float]]:
        return _split(scores([messages for group in groups for messages in group]), list(map(len, groups)))

    together = Together(of_all)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/score")
    async def scored(request: Request) -> JSONResponse:
        conversations = [list(map(message_from_data, messages)) for messages in (await request.json())["conversations"]]
        try:
            return JSONResponse({"scores": await together(conversations)})
        except RolloutsError as error:
            return JSONResponse({"error": str(error)}, 400)

    return app


class Together(Generic[Asked, Found]):
    """Work that is done for several at once: whoever comes while it goes on is in the next round."""

    def __init__(self, work: Callable[[list[Asked]], list[Found]]) -> None:
        self._work, self._lock = work, anyio.Lock()
        self._waiting: list[tuple[Asked, list[Found]]] = []

    async def __call__(self, asked: Asked) -> Found:
        answer: list[Found] = []
        self._waiting.append((asked, answer))
        async with self._lock:
            if not answer:
                round_, self._waiting = self._waiting, []
                found = await to_thread.run_sync(self._work, [one for one, _ in round_])
                for (_, place), value in zip(round_, found, strict=True):
                    place.append(value)
        return answer[0]


def _passes(examples: Sequence[Example]) -> list[list[int]]:
    passes: list[list[int]] = []
    room = 0
    for index, example in enumerate(examples):
        if not passes or len(example.tokens) > room:
            passes.append([])
            room = TOKENS_AT_ONCE
        passes[-1].append(index)
        room -= len(example.tokens)
    return passes


def _problem(tokens: Any, vocabulary: int, length: int) -> str:
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
        return "input_ids: one list of token ids, not empty"
    if len(tokens) > length:
        return f"input_ids: {len(tokens)} tokens, and max_length is {length}"
    return "" if min(tokens) >= 0 and max(tokens) < vocabulary else f"input_ids: the vocabulary has {vocabulary} tokens"


def _split(values: Sequence[float], sizes: Sequence[int]) -> list[list[float]]:
    ends = np.cumsum(sizes)
    return [list(values[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


async def _nothing() -> dict[str, Any]:
    return {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rollouts_core.serving.beside", description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--context-length", type=int, required=True)
    parser.add_argument("--max-running-requests", type=int, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--port", type=int, required=True)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
