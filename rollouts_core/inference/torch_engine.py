"""The inner part of the embedded engine: torch in this process, with a key-value cache and continuous batching.

A request waits until there is room for all its tokens, is prefilled together with the others admitted in the same turn,
and from then on decodes one token per turn with everything that is running; its row is free again the moment it ends.
Requests with one prompt, as a group's samples are, are prefilled once. It is what runs where there is neither GPU nor
SGLang, and the reference the other engines are compared with.

Decision: requests are admitted by tokens. Each is counted with its longest possible answer. So no running request must
give way to another and be prefilled again, which would change its bits. Memory is taken as answers grow.

Decision: running requests occupy rows 0 to n-1; when one ends, the last row moves into its place.

Decision: a request's tokens and log-probabilities are the same bits whichever requests share its batch, so that after a
kill the finished ones are kept and only the rest are generated again. So rows and columns come in whole tiles. On the
CPU this needs MKL_CBWR=AUTO as well (see `stages.job`), without which MKL's results depend on where its operands lie.

Decision: new weights make the cache of running requests invalid, so these are prefilled again before they go on.

Legend: B requests of this forward pass, V vocabulary.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollouts_core.errors import BadInput
from rollouts_core.inference.cache_rows import CacheRows
from rollouts_core.inference.devices import allocate, to_device
from rollouts_core.inference.engine import (
    Completion,
    FinishReason,
    GenerationRequest,
    ModelLimits,
    check_request,
    check_weights,
)
from rollouts_core.inference.families import problems_of
from rollouts_core.inference.fused import FusedDecoder, is_fusable
from rollouts_core.inference.routing import let_go
from rollouts_core.inference.row_cache import CachedDecoder
from rollouts_core.inference.sampling import sample_tokens, uniform_draws
from rollouts_core.inference.tiles import round_up
from rollouts_core.inference.told_experts import to_text
from rollouts_core.inference.weights import checksum_of, shapes_of, stored
from rollouts_core.memory import GIB, free_bytes

PREFILL_TOKENS = 16384
"""Prompts admitted in one turn, in tokens with their padding; at least one is."""
MARGIN = 8
"""Tokens before a stop text that are decoded with it: some give no text of their own."""
SHARE_OF_FREE = 1 / 3
"""Share of the free memory that keys and values may take; the trainer has the rest."""


class Decoder(Protocol):
    """A model with a cache of rows, which has room for what it is asked for."""

    device: torch.device
    cache: CacheRows

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights, by the names of the checkpoint."""

    def prefill(self, sequences: Sequence[Sequence[int]], first_row: int) -> torch.Tensor:
        """Read whole sequences into rows from `first_row` on; logits BV after each one's last token."""

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Add a token to each of rows 0 to B-1, at its own position. Returns logits BV."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; names and shapes have been checked."""


@dataclass
class _Running:
    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: bytearray = field(default_factory=bytearray)
    """Rows of all tokens that were read."""

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.prompt_tokens, *self.request.generated, *self.tokens)

    @property
    def most_columns(self) -> int:
        """Columns of its row when its answer has the longest length."""
        return round_up(len(self.request.prompt_tokens) + self.request.max_new_tokens)

    @property
    def drawn(self) -> int:
        """Tokens of the answer so far, those of earlier tries included."""
        return len(self.request.generated) + len(self.tokens)

    @property
    def position(self) -> int:
        """The place of the last sampled token in the sequence."""
        return len(self.request.prompt_tokens) + self.drawn - 1


class TorchEngine:
    """Serves a transformers causal language model. Not for several threads at once."""

    def __init__(
        self,
        model: Any,
        max_length: int,
        max_running_requests: int = 256,
        cache_gib: float | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        tells_experts: bool = False,
    ) -> None:
        """`max_length`: the context, prompt and answer together. The engine owns the model from here on.

        `cache_gib`: memory for keys and values; None: a third of what is free now. `decode`: text of token ids, for
        requests that stop at texts. `tells_experts`: completions say which experts tokens went through. Raises
        `BadInput` where the memory does not hold one request, where the model's attention is none that this computes,
        or where its experts can't be told.
        """
        if problems := problems_of(model.config.to_dict()):
            raise BadInput(problems)
        shapes = shapes_of(stored(model))
        self.limits = ModelLimits(max_length, model.config.vocab_size, shapes)
        self._rows, self._decode = max_running_requests, decode
        make: type[FusedDecoder] | type[CachedDecoder] = FusedDecoder if is_fusable(model) else CachedDecoder
        self._decoder: Decoder = make(model.eval().requires_grad_(False), max_length)
        self._telling = _telling(self._decoder, model) if tells_experts else None
        self._room = _tokens_that_fit(self._decoder, max_length, cache_gib)
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._finished: dict[str, Completion] = {}
        self._version = 0

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer all requests, in the order given. Raises as `check_request` does, before anything is generated."""
        finished = {completion.request_id: completion for completion in self.stream(requests)}
        return [finished[request.request_id] for request in requests]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Answer all requests, each as soon as it ends. Raises as `generate` does."""
        self.submit(requests)
        while self.busy:
            for completion in self.step():
                del self._finished[completion.request_id]
                yield completion

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests for `step`, or none when one is wrong."""
        for request in requests:
            check_request(request, self.limits)
            if request.stop and self._decode is None:
                raise BadInput(f"request {request.request_id} stops at texts, and the engine was made without `decode`")
        self._waiting.extend(_Running(request) for request in requests)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, make one token for everything that runs, and return what ended."""
        before = set(self._finished)
        admitted = self._admitted()
        if self._running or admitted:
            self._make_room(admitted)
        if self._running:
            tokens = [entry.tokens[-1] for entry in self._running]
            positions = [entry.position for entry in self._running]
            logits_BV = self._decoder.decode(tokens, positions)
            self._note_experts(self._running, [1] * len(positions))
            self._sample(logits_BV, self._running)
        if admitted:
            self._prefill(admitted)
        self._retire()
        return [completion for name, completion in self._finished.items() if name not in before]

    def collect(self, request_id: str) -> Completion | None:
        """Take a finished request's completion, None while it is not finished."""
        return self._finished.pop(request_id, None)

    def so_far(self, request_id: str) -> Completion | None:
        """The answer so far of a running request, as if it were aborted now; None if it does not run."""
        there = next((entry for entry in self._running if entry.request.request_id == request_id), None)
        return _completion(there, "abort") if there else None

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests at once; they complete with what they have."""
        ended = set(request_ids)
        for entry in [entry for entry in self._waiting if entry.request.request_id in ended]:
            self._waiting.remove(entry)
            self._finish(entry, "abort")
        for row in reversed(range(len(self._running))):
            if self._running[row].request.request_id in ended:
                self._finish(self._running[row], "abort")
                self._free(row)

    def checksum(self) -> str:
        """A checksum of the weights that it computes with."""
        return checksum_of(self._decoder.weights)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Raises `WeightMismatch` and changes nothing when names or shapes differ."""
        check_weights(shapes_of(weights), self.limits, version)
        self._decoder.load(weights)
        self._version = version
        self._waiting.extendleft(reversed(self._running))
        self._running = []

    def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        """Take the weights of a Hugging Face model directory."""
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file, device=str(self._decoder.device))
        own = self._decoder.weights
        if (
            not own.keys() <= weights.keys()
        ):  # transformers joins weights that are separate in the files, mostly experts
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
            weights = {name: value.detach() for name, value in stored(model).items()}
        self.update_weights({name: tensor for name, tensor in weights.items() if name in own}, version)

    def _admitted(self) -> list[_Running]:
        admitted: list[_Running] = []
        longest = 0
        columns = max((entry.most_columns for entry in self._running), default=0)
        while self._waiting and (rows := len(self._running) + len(admitted)) < self._rows:
            first = self._waiting[0]
            columns, longest = max(columns, first.most_columns), max(longest, round_up(len(first.sequence)))
            if rows and (rows + 1) * columns > self._room:
                break
            if admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _make_room(self, admitted: Sequence[_Running]) -> None:
        """Grow the cache for the tokens of this step."""
        there = [*self._running, *admitted]
        read = [round_up(len(entry.sequence)) for entry in admitted]
        columns = max([*read, *(entry.position + 1 for entry in self._running)])
        most = max(entry.most_columns for entry in there)
        self._decoder.cache.make_room(len(there), columns, self._rows, most, self._room)

    def _prefill(self, admitted: list[_Running]) -> None:
        """Prefill each different sequence once; other requests with the same sequence get a copy of its row."""
        sequences = list(dict.fromkeys(entry.sequence for entry in admitted))
        first = len(self._running)
        logits_UV = self._decoder.prefill(sequences, first)
        told = self._telling.experts([len(sequence) for sequence in sequences]) if self._telling else []
        source = {sequence: number for number, sequence in enumerate(sequences)}
        placed: list[_Running | None] = [None] * len(sequences)
        for entry in admitted:
            number = source[entry.sequence]
            if placed[number] is None:
                placed[number] = entry
            else:
                self._decoder.cache.copy_row(first + number, first + len(placed), len(entry.sequence))
                placed.append(entry)
        entries = [entry for entry in placed if entry is not None]
        for entry in entries if told else ():
            entry.experts += told[source[entry.sequence]][len(entry.experts) :]
        chosen = to_device(torch.tensor([source[entry.sequence] for entry in entries]), logits_UV.device)
        self._running += entries
        self._sample(logits_UV[chosen], entries)

    def _note_experts(self, entries: Sequence[_Running], lengths: Sequence[int]) -> None:
        if self._telling is not None:
            for entry, rows in zip(entries, self._telling.experts(lengths), strict=True):
                entry.experts += rows

    def _sample(self, logits_BV: torch.Tensor, entries: Sequence[_Running]) -> None:
        seeds_B = np.array([entry.request.seed for entry in entries], np.uint64)
        counts_B = np.array([entry.drawn for entry in entries], np.uint64)
        uniforms_B = to_device(torch.from_numpy(uniform_draws(seeds_B, counts_B)), logits_BV.device)
        temperatures_B = to_device(torch.tensor([entry.request.temperature for entry in entries]), logits_BV.device)
        truncations = [entry.request.truncation for entry in entries]
        tokens_B, logprobs_B = sample_tokens(logits_BV, temperatures_B, uniforms_B, truncations)
        told_2B = torch.stack((tokens_B.double(), logprobs_B.double())).tolist()  # waits for the device once
        for entry, token, log_prob in zip(entries, *told_2B, strict=True):
            entry.tokens.append(int(token))
            entry.log_probs.append(log_prob)
            entry.versions.append(self._version)

    def _retire(self) -> None:
        for row in reversed(range(len(self._running))):
            entry = self._running[row]
            if entry.tokens[-1] in entry.request.stop_token_ids or self._has_said_stop(entry):
                self._finish(entry, "stop")
            elif entry.drawn == entry.request.max_new_tokens:
                self._finish(entry, "length")
            else:
                continue
            self._free(row)

    def _has_said_stop(self, entry: _Running) -> bool:
        """Whether the answer contains a stop text. Only its end is decoded: the rest was looked at one token ago."""
        if not entry.request.stop or self._decode is None:
            return False
        longest = max(len(text.encode()) for text in entry.request.stop)
        said = self._decode([*entry.request.generated, *entry.tokens][-longest - MARGIN :])
        return any(text in said for text in entry.request.stop)

    def _finish(self, entry: _Running, reason: FinishReason) -> None:
        self._finished[entry.request.request_id] = _completion(entry, reason)

    def _free(self, row: int) -> None:
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last
            self._decoder.cache.copy_row(len(self._running), row, last.position)


def _completion(entry: _Running, reason: FinishReason) -> Completion:
    log_probs, versions, experts = tuple(entry.log_probs), tuple(entry.versions), to_text(bytes(entry.experts))
    return Completion(entry.request.request_id, tuple(entry.tokens), log_probs, versions, reason, experts)


def _telling(decoder: Decoder, model: Any) -> CachedDecoder:
    """Raises `BadInput` where nothing is known of experts."""
    if not isinstance(decoder, CachedDecoder) or not decoder.tell_experts():
        raise BadInput(f"engine.replay_experts: {model.config.model_type} has no experts whose routers are known")
    return decoder


def copy_of(model: Any, device: str = "cpu") -> Any:
    """The same model with its own weights, for an engine beside the trainer.

    A blank model's copy has memory for weights on `device`, and no values yet.
    """
    own = copy.deepcopy(model).requires_grad_(False)
    let_go(own)
    if not any(value.is_meta for value in own.parameters()):
        return own
    allocate(own, device)
    own.tie_weights()
    return own


def _tokens_that_fit(decoder: Decoder, max_length: int, cache_gib: float | None) -> int:
    """Raises `BadInput` where it is less than one request may have."""
    free, per_token = free_bytes(decoder.device), decoder.cache.bytes_per_token
    allowed = int(free * SHARE_OF_FREE if cache_gib is None else cache_gib * GIB)
    if allowed < (needed := round_up(max_length) * per_token):
        given = f"a third of the {free / GIB:.1f} GiB that are free" if cache_gib is None else "engine.cache_gib"
        raise BadInput(
            f"the embedded engine needs {needed / GIB:.2f} GiB for keys and values of one request of data.max_length "
            f"{max_length} ({per_token:,} bytes a token), and may take {allowed / GIB:.2f} GiB ({given}): lower "
            "data.max_length, set engine.cache_gib, or take a machine with more memory"
        )
    return allowed // per_token
