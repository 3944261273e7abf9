"""A policy served by SGLang: one server, or several behind SGLang's router.

Decision: new weights come between two tokens. Replicas are paused with their requests pushed back into the queue
(`retract`), so that what they had cached under the old weights is computed again; each answer says which version made
which span.

Seeds are sent, and honoured only by servers started with --enable-deterministic-inference (a GPU and its attention
kernels; it does not start on the CPU). Elsewhere an answer is drawn from the server's own generator.

Where a request names stop tokens, the tokenizer's end-of-sequence token stops it as well: SGLang ignores both or none.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from rollouts_core.config import EngineConfig
from rollouts_core.errors import ContextOverflow, EngineRefused, EngineUnavailable, MalformedAnswer
from rollouts_core.inference.engine import (
    Completion,
    GenerationRequest,
    ModelLimits,
    ask_until_ended,
    check_request,
    check_weights,
    shapes_in,
)
from rollouts_core.inference.http import JsonClient
from rollouts_core.inference.members import (
    Giving,
    Members,
    Problems,
    Step,
    for_each,
    nothing_to_bring,
    raise_first,
    without,
)
from rollouts_core.inference.reading import reading
from rollouts_core.inference.replicas import Fleet, Replica
from rollouts_core.inference.routing import Routers
from rollouts_core.inference.streamed import INTERVAL, Pieces
from rollouts_core.inference.told_experts import from_text, to_text
from rollouts_core.inference.transport_choice import transport_for
from rollouts_core.inference.transports import WeightTransport, load_checkpoint
from rollouts_core.inference.weights import shapes_of
from rollouts_core.metrics.timing import PhaseTimer

if TYPE_CHECKING:
    import torch

CONTROL_SECONDS = 30.0
"""Deadline of a control request: pause, continue, abort, look."""
LOOK_SECONDS = 0.1
REQUEST_SECONDS = 24 * 3600.0
"""A deadline that is longer than those of who waits."""
OVERFLOW_WORDS = ("context length", "maximum context")


def create(config: EngineConfig, fleet: Fleet, limits: ModelLimits, memory: Path) -> "SGLangEngine":
    """`memory`: a directory for weights on their way."""
    transport = transport_for(config, fleet, memory)
    streams = config.machines is not None and limits.routers is None
    return SGLangEngine(fleet, limits, transport, config.start_minutes * 60, config.min_replicas, streams=streams)


class SGLangEngine:
    """Speaks to the servers of one policy."""

    def __init__(
        self,
        fleet: Fleet,
        limits: ModelLimits,
        transport: WeightTransport,
        start_seconds: float = 600.0,
        least: int = 1,
        further: Callable[[GenerationRequest], Mapping[str, Any]] = lambda request: {},
        streams: bool = False,
    ) -> None:
        """`start_seconds`: how long to wait while fewer than `least` servers are there that could answer. `further`:
        fields of a request that SGLang's have not. `streams`: answers come in pieces, so that those of a server that
        is lost go on elsewhere."""
        self._members = Members(fleet, start_seconds, least)
        self._limits, self._transport, self._further = limits, transport, further
        self._streams, self._swaps = streams, 0
        self._http = JsonClient()
        self._timer = PhaseTimer()
        self._places: dict[str, tuple[Replica | None, str]] = {}
        """For each request under way: where it is, if that is known, and under which name."""
        self._unwanted: set[str] = set()
        self._asked = 0

    @property
    def weight_version(self) -> int:
        return self._members.version

    def wants_weights(self) -> bool:
        return bool(self._members.newcomers())

    @property
    def sync_seconds(self) -> Mapping[str, float]:
        return self._timer.seconds | {f"bring/{name}": told.seconds for name, told in self._transport.brought.items()}

    @property
    def sync_bytes(self) -> Mapping[str, int]:
        return {name: told.bytes for name, told in self._transport.brought.items()}

    def take_tokens(self) -> Mapping[str, int]:
        return self._members.take_tokens()

    async def aclose(self) -> None:
        await self._transport.aclose()
        await self._http.aclose()

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, self._limits)
        try:
            return await ask_until_ended(request, self._ask_once, lambda: request.request_id in self._unwanted)
        finally:
            self._unwanted.discard(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            if name in self._places:
                self._unwanted.add(name)
                await self._abort(*self._places[name])

    async def update_weights(self, weights: "Mapping[str, torch.Tensor]", version: int) -> None:
        weights = self._limits.renamed(weights)
        check_weights(shapes_of(weights), self._limits, version)
        bring = partial(self._transport.bring, weights=weights, version=version)
        swap = partial(self._transport.swap, weights=weights, version=version)
        await self._members.bring(version, Giving(partial(self._bring, bring), partial(self._swap, swap)))

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        check_weights(shapes_in(path), self._limits, version)
        swap = partial(load_checkpoint, self._http, place=lambda replica: path, version=version)
        await self._members.bring(version, Giving(nothing_to_bring, partial(self._swap, swap)))

    async def release_memory(self) -> None:
        """Weights and cache go. The servers must run with --enable-memory-saver."""
        problems = await for_each(
            self._members.servers().replicas, partial(self._ask, "/release_memory_occupation", {})
        )
        self._members.current = {}
        raise_first(problems)

    async def resume_memory(self) -> None:
        raise_first(
            await for_each(self._members.servers().replicas, partial(self._ask, "/resume_memory_occupation", {}))
        )

    async def _ask_once(self, request: GenerationRequest) -> Completion:
        if router := self._members.servers().router:
            self._members.serving()
            return await self._answer(request, router, None)
        with self._members.chosen(request.session) as replica:
            began = time.perf_counter()
            completion = await self._answer(request, replica.url, replica)
            self._members.answered(replica, len(completion.tokens), time.perf_counter() - began)
            return completion

    async def _answer(self, request: GenerationRequest, address: str, replica: Replica | None) -> Completion:
        self._asked += 1
        rid = f"{request.request_id}~{self._asked}"
        self._places[request.request_id] = (replica, rid)
        headers = {"X-SMG-Routing-Key": request.session} if request.session else {}
        body = {**_body(request, rid), **self._further(request)}
        body |= {"return_routed_experts": True} if self._limits.routers else {}
        try:
            url = f"{address}/generate"
            if self._streams and replica:
                return await self._streamed(url, request, body)
            answer = await self._http.call("POST", url, body, deadline=REQUEST_SECONDS, headers=headers)
            return read_completion(answer, request, self._limits.routers)
        except EngineRefused as error:
            if any(words in str(error) for words in OVERFLOW_WORDS):
                raise ContextOverflow(f"request {request.request_id}: {error}") from None
            raise
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(CONTROL_SECONDS, shield=True):
                await self._abort(replica, rid)
            raise
        finally:
            if self._places.get(request.request_id) == (replica, rid):
                del self._places[request.request_id]

    async def _streamed(self, url: str, request: GenerationRequest, body: dict[str, Any]) -> Completion:
        """Piece by piece: one that breaks off is told as an answer that was ended."""
        body |= {"stream": True, "sampling_params": {**body["sampling_params"], "stream_interval": INTERVAL}}
        pieces, swaps, version = Pieces(), self._swaps, self.weight_version
        try:
            with anyio.fail_after(REQUEST_SECONDS):
                async for event in self._http.events(url, body):
                    pieces.add(event, self._swaps == swaps)
        except (EngineUnavailable, TimeoutError):
            if kept := pieces.kept(request, version):
                return kept
            raise
        return read_completion(pieces.whole(), request)

    async def _abort(self, replica: Replica | None, rid: str) -> None:
        """Abort a request. With a router nobody knows where it is, so all replicas are told; one that is away needs no
        message."""
        there = [replica] if replica else list(self._members.current.values())
        await for_each(there, partial(self._ask, "/abort_request", {"rid": rid}))

    async def _bring(self, bring: Step, replicas: Sequence[Replica]) -> Problems:
        self._timer = timer = PhaseTimer()
        with timer.phase("bring"):
            return await bring(replicas)

    async def _swap(self, swap: Step, replicas: Sequence[Replica]) -> Problems:
        """Pause, swap, look, go on. Returns who failed on the way."""
        timer = self._timer
        self._swaps += 1
        with timer.phase("pause"):
            problems = await for_each(replicas, partial(self._ask, "/pause_generation", {"mode": "retract"}))
        with timer.phase("send"):
            if paused := without(replicas, problems):
                problems |= await swap(paused)
        with timer.phase("verify"):
            problems |= await for_each(without(replicas, problems), self._go_on)
            problems |= await self._members.probed(without(replicas, problems), self._limits, self._probe)
            return problems | await for_each(without(replicas, problems), self._readmit)

    async def _probe(self, request: GenerationRequest, replica: Replica) -> Completion:
        return await self._answer(request, replica.url, replica)

    async def _go_on(self, replica: Replica) -> None:
        """Let it go on, if it has the weights it should have."""
        told = await self._http.call("GET", f"{replica.url}/model_info", deadline=CONTROL_SECONDS)
        check_version(replica, told, self.weight_version)
        await self._ask("/continue_generation", {}, replica)

    async def _readmit(self, replica: Replica) -> None:
        if router := self._members.servers().router:
            await self._join(router, replica)

    async def _join(self, router: str, replica: Replica) -> None:
        """Make the router send requests there; returns when it does."""
        if not await self._workers(router, replica):
            await self._http.call("POST", f"{router}/workers", {"url": replica.url}, deadline=CONTROL_SECONDS)
        with anyio.move_on_after(CONTROL_SECONDS):
            while True:
                if any(worker.get("is_healthy") for worker in await self._workers(router, replica)):
                    return
                await anyio.sleep(LOOK_SECONDS)
        raise EngineUnavailable(f"the router did not accept it within {CONTROL_SECONDS:g} s")

    async def _workers(self, router: str, replica: Replica) -> list[dict[str, Any]]:
        """The router's entries of a replica."""
        known = await self._http.call("GET", f"{router}/workers", deadline=CONTROL_SECONDS)
        with reading(router, known):
            return [worker for worker in known["workers"] if worker["url"] == replica.url]

    async def _ask(self, path: str, body: Any, replica: Replica) -> None:
        await self._http.call("POST", f"{replica.url}{path}", body, deadline=CONTROL_SECONDS)


def check_version(replica: Replica, told: Any, version: int) -> None:
    """Raises `EngineUnavailable` for a server that has other weights, `MalformedAnswer` for one that says nothing."""
    with reading(replica.url, told):
        there = told["weight_version"]
    if there != str(version):
        raise EngineUnavailable(f"has weight version {there} instead of {version}")


def _body(request: GenerationRequest, rid: str) -> dict[str, Any]:
    return {
        "rid": rid,
        "input_ids": [*request.prompt_tokens, *request.generated],
        "return_logprob": True,
        "sampling_params": {
            "temperature": request.temperature,
            "max_new_tokens": request.max_new_tokens - len(request.generated),
            "stop_token_ids": list(request.stop_token_ids),
            "ignore_eos": not request.stop_token_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": request.seed % 2**31,
            "top_p": request.truncation.top_p,
            "top_k": request.truncation.top_k or -1,
            "min_p": request.truncation.min_p,
            "stop": list(request.stop),
        },
    }


def read_completion(answer: Any, request: GenerationRequest, routers: Routers | None = None) -> Completion:
    """The completion in an answer of SGLang's /generate; with `routers`, also the experts. Raises `MalformedAnswer`."""
    with reading(f"request {request.request_id}", answer):
        meta = answer["meta_info"]
        pairs = meta["output_token_logprobs"][: meta["completion_tokens"]]
        tokens = tuple(int(pair[1]) for pair in pairs)
        log_probs = tuple(float(pair[0]) for pair in pairs)
        versions: list[int] = []
        for span in meta["weight_versions"] or ():
            versions += [int(span["version"])] * min(span["end"] - span["start"], len(tokens) + 1)
        reason = meta["finish_reason"]["type"]
        experts = _experts(meta, request, len(tokens), routers) if routers else ""
        told = tuple(answer["output_ids"])
    if told != tokens or len(versions) != len(tokens) or reason not in ("stop", "length", "abort"):
        raise MalformedAnswer(
            f"request {request.request_id}: {len(told)} tokens, {len(tokens)} log-probabilities, "
            f"{len(versions)} weight versions, finish reason {reason!r}"
        )
    return Completion(request.request_id, tokens, log_probs, tuple(versions), reason, experts)


def _experts(meta: Any, request: GenerationRequest, made: int, routers: Routers) -> str:
    """The experts of all tokens except the last. A request that was aborted may tell nothing."""
    told = meta.get("routed_experts")
    if not told and meta["finish_reason"]["type"] == "abort":
        return ""
    tokens = len(request.prompt_tokens) + len(request.generated) + made - 1
    return to_text(routers.read_all_layers(np.frombuffer(from_text(told), np.int32), tokens))
