"""The embedded engine as a server, for a trainer on another machine: `python -m rollouts_core.serving.replica ...`.

Decision: it speaks the part of SGLang's protocol that the trainer uses, so the trainer's side is the same. A request
has two more fields, without which an answer would not have the bits that the trainer's own process gives it: the whole
seed, and which of the tokens are the answer's (`inference.own_servers`).

It has no weights until the trainer gives it some, and says so.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from aiohttp import web

from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.errors import MISSHAPEN, EngineError, RolloutsError, WeightMismatch
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.engine import Completion, GenerationRequest, Truncation
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.serving.receiving import Receiver
from rollouts_core.stages.job import prepare_torch
from rollouts_core.training.origins import origin_in

MOST_BYTES = 64 * 2**20
UNSENT = -1
NOT_NEEDED = (
    "pause_generation", "continue_generation", "release_memory_occupation", "resume_memory_occupation"
)  # fmt: skip
"""Weights change between two tokens; and the memory is nobody else's."""


def main(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    device = prepare_torch(options.device)
    model = copy_of(origin_in(options.model_path, options.dtype).blank(), device)
    decode = partial(
        load_tokenizer(options.model_path).decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    engine = TorchEngine(model, options.context_length, options.max_running_requests, None, decode)
    web.run_app(app_for(EmbeddedEngine(engine)), host="127.0.0.1", port=options.port, print=None, access_log=None)


def app_for(engine: EmbeddedEngine) -> web.Application:
    served = _Served(engine)
    app = web.Application(client_max_size=MOST_BYTES, middlewares=[_told])
    app.add_routes(
        [
            web.get("/health_generate", _nothing),
            web.get("/server_info", _nothing),
            web.get("/model_info", served.info),
            web.post("/generate", served.generate),
            web.post("/abort_request", served.abort),
            *(web.post(f"/{name}", _nothing) for name in NOT_NEEDED),
            web.post("/weights_checker", served.checksum),
            web.post("/update_weights_from_disk", served.update),
            web.post("/init_weights_update_group", served.join),
            web.post("/destroy_weights_update_group", served.leave),
            web.post("/begin_weight_update", served.begin),
            web.post("/update_weights_from_distributed", served.take_bucket),
            web.post("/end_weight_update", served.end),
        ]
    )
    return app


class _Served:
    """The engine, and what is under way."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._version = UNSENT
        self._running: set[str] = set()
        self._receiver = Receiver()
        self._coming = UNSENT
        """The version that is being broadcast."""

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self._version)})

    async def generate(self, request: web.Request) -> web.Response:
        asked = _asked(await request.json())
        if self._version == UNSENT:
            return web.json_response({"error": "it has no weights yet"}, status=503)
        self._running.add(asked.request_id)
        try:
            return web.json_response(_answer(await self._engine.generate(asked)))
        finally:
            self._running.discard(asked.request_id)

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        names = list(self._running) if body.get("abort_all") else [body["rid"]]
        await self._engine.abort([name for name in names if name in self._running])
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        """Between two tokens: nothing else turns in this loop meanwhile."""
        body = await request.json()
        version = int(body["weight_version"])
        await self._engine.update_weights_from_checkpoint(Path(body["model_path"]), version)
        self._version = version
        return web.json_response({"success": True})

    async def checksum(self, request: web.Request) -> web.Response:
        """The checksum in SGLang's form; computed between two tokens."""
        return web.json_response({"success": True, "per_engine_checksum": self._engine.checksum()})

    async def join(self, request: web.Request) -> web.Response:
        await self._receiver.join(await request.json())
        return web.json_response({"success": True})

    async def leave(self, request: web.Request) -> web.Response:
        self._receiver.leave(await request.json())
        return web.json_response({"success": True})

    async def begin(self, request: web.Request) -> web.Response:
        self._receiver.begin()
        return web.json_response({"success": True})

    async def take_bucket(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._coming = int(body["weight_version"])
        await self._receiver.take_bucket(body)
        return web.json_response({"success": True})

    async def end(self, request: web.Request) -> web.Response:
        await self._engine.update_weights(self._receiver.taken(), self._coming)
        self._version = self._coming
        return web.json_response({"success": True})


def _asked(body: dict[str, Any]) -> GenerationRequest:
    sampling, answered = body["sampling_params"], body["answered_tokens"]
    tokens = body["input_ids"]
    prompt = len(tokens) - answered
    return GenerationRequest(
        body["rid"],
        tuple(tokens[:prompt]),
        sampling["max_new_tokens"] + answered,
        tuple(sampling["stop_token_ids"]),
        sampling["temperature"],
        body["seed"],
        tuple(tokens[prompt:]),
        Truncation(sampling["top_p"], max(0, sampling["top_k"]), sampling["min_p"]),
        tuple(sampling["stop"]),
    )


def _answer(completion: Completion) -> dict[str, Any]:
    spans, start = [], 0
    for version, tokens in groupby(completion.weight_versions):
        end = start + len(list(tokens))
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return {
        "output_ids": completion.tokens,
        "meta_info": {
            "completion_tokens": len(completion.tokens),
            "output_token_logprobs": list(zip(completion.log_probs, completion.tokens, strict=True)),
            "weight_versions": spans,
            "finish_reason": {"type": completion.finish_reason},
        },
    }


async def _nothing(request: web.Request) -> web.Response:
    return web.json_response({})


@web.middleware
async def _told(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer status 400 to requests that the engine refuses."""
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    except (WeightMismatch, EngineError, RolloutsError) as error:
        return web.json_response({"error": str(error)}, status=400)
    except (*MISSHAPEN, RuntimeError) as error:
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rollouts_core.serving.replica", description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--context-length", type=int, required=True)
    parser.add_argument("--max-running-requests", type=int, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--port", type=int, required=True)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
