"""A policy served by vLLM: one server or several, spoken to by OpenAI's completions with token ids.

Decision: an update aborts the answers under way and asks for the rest of each, after the tokens that are there. vLLM's
completions do not say which weights made which token. So no request is open during an update, and each span has the
version under which it was asked for. A request may reach the server after the pause that should have aborted it, and be
answered under the new weights. So an answer that was open during an update and was not aborted by it is dropped and
asked for again.

There is no router before several servers: a request goes to the server of its session, otherwise to the one with the
fewest requests. Weights are sent only as files. A server must run with VLLM_SERVER_DEV_MODE=1, which opens these calls,
and with --logprobs-mode processed_logprobs: otherwise log-probabilities are those before the temperature. With that
option, the log-probabilities of a request with a truncation are over the tokens that the truncation kept, which the
trainer doesn't know; so configs that train refuse the two together.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from rollouts_core.config import EngineConfig
from rollouts_core.errors import EngineRefused, MalformedAnswer, WeightMismatch
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
from rollouts_core.inference.sglang import CONTROL_SECONDS, REQUEST_SECONDS, check_version
from rollouts_core.inference.transport_choice import file_transport
from rollouts_core.inference.transports import FileTransport
from rollouts_core.inference.weights import shapes_of
from rollouts_core.metrics.timing import PhaseTimer

if TYPE_CHECKING:
    import torch

LOAD_SECONDS = 600.0
READ_FILES = {"load_config": {"load_format": "auto"}}
SERVED_NAME = "policy"
"""How the servers call the model."""


def create(config: EngineConfig, fleet: Fleet, limits: ModelLimits, memory: Path) -> "VLLMEngine":
    """`memory`: a directory for weights on their way."""
    files = file_transport(config, fleet, memory)
    return VLLMEngine(
        fleet, limits, SERVED_NAME, files, config.start_minutes * 60, config.min_replicas,
        begin_empty=config.machines is not None,
    )  # fmt: skip


class VLLMEngine:
    """Speaks to the servers of one policy. Seeds are honoured by each server for the same batch."""

    def __init__(
        self,
        fleet: Fleet,
        limits: ModelLimits,
        model: str,
        files: FileTransport,
        start_seconds: float = 600.0,
        least: int = 1,
        begin_empty: bool = False,
    ) -> None:
        """`model`: the name the servers give it. `start_seconds`: how long to wait while fewer than `least` servers
        are there that could answer. `begin_empty`: they were started without weights."""
        self._members = Members(fleet, start_seconds, least)
        self._limits, self._model, self._files, self._begin_empty = limits, model, files, begin_empty
        self._http = JsonClient()
        self._timer = PhaseTimer()
        self._open = anyio.Event()
        self._open.set()
        self._asked = 0
        self._places: dict[str, tuple[Replica, str]] = {}
        """For each request under way: where it is, and under which name."""
        self._unwanted: set[str] = set()
        self._swaps: Counter[str] = Counter()
        """How often each replica, by address, was given weights."""

    @property
    def weight_version(self) -> int:
        return self._members.version

    def wants_weights(self) -> bool:
        return bool(self._members.newcomers())

    @property
    def sync_seconds(self) -> Mapping[str, float]:
        return self._timer.seconds | {f"bring/{name}": told.seconds for name, told in self._files.brought.items()}

    @property
    def sync_bytes(self) -> Mapping[str, int]:
        return {name: told.bytes for name, told in self._files.brought.items()}

    def take_tokens(self) -> Mapping[str, int]:
        return self._members.take_tokens()

    async def aclose(self) -> None:
        await self._files.aclose()
        await self._http.aclose()

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, self._limits)
        try:
            return await ask_until_ended(request, self._ask_once, partial(self._is_unwanted, request))
        finally:
            self._unwanted.discard(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            if name in self._places:
                self._unwanted.add(name)
                replica, known_as = self._places[name]
                await for_each([replica], partial(self._post, "/abort_requests", {"request_ids": [known_as]}))

    async def update_weights(self, weights: "Mapping[str, torch.Tensor]", version: int) -> None:
        weights = self._limits.renamed(weights)
        check_weights(shapes_of(weights), self._limits, version)
        bring = partial(self._files.bring, weights=weights, version=version)
        place = partial(self._files.place, version=version)
        await self._members.bring(version, Giving(partial(self._bring, bring), partial(self._swap, place)))

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        check_weights(shapes_in(path), self._limits, version)
        await self._members.bring(version, Giving(nothing_to_bring, partial(self._swap, lambda replica: path)))

    async def release_memory(self) -> None:
        problems = await for_each(self._members.servers().replicas, partial(self._post, "/sleep?level=2", {}))
        raise_first(problems)
        self._members.current = {}

    async def resume_memory(self) -> None:
        raise_first(await for_each(self._members.servers().replicas, partial(self._post, "/wake_up", {})))

    async def _ask_once(self, request: GenerationRequest) -> Completion:
        await self._open.wait()
        self._asked += 1
        rid = f"{request.request_id}~{self._asked}"
        with self._members.chosen(request.session) as replica:
            began, swaps = time.perf_counter(), self._swaps[replica.url]
            self._places[request.request_id] = (replica, f"cmpl-{rid}-0")
            try:
                completion = await self._answer(request, replica, rid)
            finally:
                self._places.pop(request.request_id, None)
            self._members.answered(replica, len(completion.tokens), time.perf_counter() - began)
            crossed = self._swaps[replica.url] - swaps
            if crossed == 0 or (
                crossed == 1 and completion.finish_reason == "abort" and not self._is_unwanted(request)
            ):
                return completion
            return Completion(request.request_id, (), (), (), "abort")

    def _is_unwanted(self, request: GenerationRequest) -> bool:
        return request.request_id in self._unwanted

    async def _answer(self, request: GenerationRequest, replica: Replica, rid: str) -> Completion:
        version, url = self.weight_version, f"{replica.url}/v1/completions"
        answer = await self._http.call("POST", url, self._body(request, rid), deadline=REQUEST_SECONDS)
        return read_completion(answer, request, version)

    async def _probe(self, request: GenerationRequest, replica: Replica) -> Completion:
        return await self._answer(request, replica, f"{request.request_id}~{self.weight_version}")

    async def _bring(self, bring: Step, replicas: Sequence[Replica]) -> Problems:
        self._timer = timer = PhaseTimer()
        with timer.phase("bring"):
            return await bring(replicas)

    async def _swap(self, place: Callable[[Replica], Path], replicas: Sequence[Replica]) -> Problems:
        timer, self._open = self._timer, anyio.Event()
        self._swaps.update(replica.url for replica in replicas)
        try:
            with timer.phase("pause"):
                problems = await for_each(replicas, partial(self._post, "/pause?mode=abort", {}))
            with timer.phase("send"):
                problems |= await for_each(without(replicas, problems), partial(self._load, place))
            with timer.phase("verify"):
                return problems | await self._members.probed(without(replicas, problems), self._limits, self._probe)
        finally:
            self._open.set()

    async def _load(self, place: Callable[[Replica], Path], replica: Replica) -> None:
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(place(replica))}}
        try:
            if self._begin_empty:  # its loader would make random weights
                await self._post("/collective_rpc", {"method": "update_config", "args": [READ_FILES]}, replica)
            await self._http.call("POST", f"{replica.url}/collective_rpc", load, deadline=LOAD_SECONDS)
        except EngineRefused as error:
            raise WeightMismatch(
                f"weight version {self.weight_version} is refused by {replica.name}: {error}"
            ) from None
        await self._post("/reset_prefix_cache", {}, replica)
        await self._post("/update_weight_version", {"new_version": str(self.weight_version)}, replica)
        told = await self._http.call("GET", f"{replica.url}/weight_info", deadline=CONTROL_SECONDS)
        check_version(replica, told, self.weight_version)
        await self._post("/resume", {}, replica)

    async def _post(self, path: str, body: Any, replica: Replica) -> None:
        await self._http.call("POST", f"{replica.url}{path}", body, deadline=CONTROL_SECONDS)

    def _body(self, request: GenerationRequest, rid: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "request_id": rid,
            "prompt": [*request.prompt_tokens, *request.generated],
            "max_tokens": request.max_new_tokens - len(request.generated),
            "temperature": request.temperature,
            "seed": request.seed % 2**31,
            "stop_token_ids": list(request.stop_token_ids),
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "top_p": request.truncation.top_p,
            "top_k": request.truncation.top_k,
            "min_p": request.truncation.min_p,
            "stop": list(request.stop),
            "repetition_penalty": 1.0,
        }


def read_completion(answer: Any, request: GenerationRequest, version: int) -> Completion:
    """The completion in an answer of /v1/completions to one prompt. Raises `MalformedAnswer`."""
    with reading(f"request {request.request_id}", answer):
        choice = answer["choices"][0]
        tokens = tuple(int(token) for token in choice["token_ids"])
        log_probs = tuple(float(value) for value in choice["logprobs"]["token_logprobs"]) if tokens else ()
        reason = choice["finish_reason"]
    if len(log_probs) != len(tokens) or reason not in ("stop", "length", "abort"):
        raise MalformedAnswer(
            f"request {request.request_id}: {len(tokens)} tokens, {len(log_probs)} log-probabilities, "
            f"finish reason {reason!r}"
        )
    return Completion(request.request_id, tokens, log_probs, (version,) * len(tokens), reason)
