"""The embedded engine: torch in this process, with a key-value cache and continuous batching.

A request waits until a row is free, is prefilled together with the others admitted in the same turn, and from then on
decodes one token per turn with everything that is running; its row is free again the moment it ends. It is what runs
where there is neither GPU nor SGLang, and the reference the other engines are compared with.

Decision: a request's tokens and log-probabilities are the same bits whichever requests share its batch, so that after a
kill the finished ones are kept and only the rest are generated again. Matrix products take another path when they have
a handful of rows, and attention when its columns end off a vector; so rows and columns come in whole tiles. On the CPU
this needs MKL_CBWR=AUTO as well (see `stages.job`), without which MKL's results depend on where its operands lie.

Legend: B requests of this forward pass, T their new tokens, V vocabulary, L cached columns.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from rollouts_core.errors import ContextOverflow, WeightMismatch
from rollouts_core.inference.engine import Completion, FinishReason, GenerationRequest
from rollouts_core.inference.kv_cache import RowCache
from rollouts_core.inference.sampling import sample_tokens, uniform_draws

TILE = 16
"""Rows and columns of a forward pass are padded to multiples of this."""


@dataclass
class _Running:
    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the last sampled token stands in the sequence."""
        return len(self.request.prompt_tokens) + len(self.tokens) - 1


class TorchEngine:
    """Serves a transformers causal language model. Not for several threads at once."""

    def __init__(self, model: nn.Module, max_length: int, max_running_requests: int = 256) -> None:
        """`max_length`: the context, prompt and answer together. The engine owns the model from here on."""
        self._model = model.eval()
        self._max_length = max_length
        self._rows = max_running_requests
        self._device = next(model.parameters()).device
        dtype = next(model.parameters()).dtype
        self._cache = RowCache(
            model.config, _round_up(max_running_requests), _round_up(max_length), dtype, self._device
        )
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
        finished = {completion.request_id: completion for completion in self.stream(requests)}
        return [finished[request.request_id] for request in requests]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        self.submit(requests)
        while self.busy:
            for completion in self.step():
                del self._finished[completion.request_id]
                yield completion

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests for `step`. Raises `ContextOverflow` and queues none when one does not fit."""
        for request in requests:
            needed = len(request.prompt_tokens) + request.max_new_tokens
            if needed > self._max_length or not request.prompt_tokens:
                raise ContextOverflow(
                    f"request {request.request_id}: prompt of {len(request.prompt_tokens)} tokens and an answer of "
                    f"{request.max_new_tokens} do not fit a context of {self._max_length}"
                )
        self._waiting.extend(_Running(request) for request in requests)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, make one token for everything that runs, and return what ended."""
        before = set(self._finished)
        admitted = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._rows - len(self._running)))]
        if self._running:
            self._decode()
        if admitted:
            self._prefill(admitted)
        self._retire()
        return [completion for name, completion in self._finished.items() if name not in before]

    def collect(self, request_id: str) -> Completion | None:
        """Take a finished request's completion, None while it is not finished."""
        return self._finished.pop(request_id, None)

    def abort(self, request_ids: Sequence[str]) -> None:
        ended = set(request_ids)
        for entry in [entry for entry in self._waiting if entry.request.request_id in ended]:
            self._waiting.remove(entry)
            self._finish(entry, "abort")
        for row in reversed(range(len(self._running))):
            if self._running[row].request.request_id in ended:
                self._finish(self._running[row], "abort")
                self._free(row)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        own = dict(self._model.named_parameters())
        if wrong := _differences(own, weights):
            raise WeightMismatch(f"weight version {version} does not fit the engine's model: " + "; ".join(wrong))
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        self._version = version

    def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file, device=str(self._device))
        own = set(dict(self._model.named_parameters()))
        self.update_weights({name: tensor for name, tensor in weights.items() if name in own}, version)

    def _prefill(self, admitted: list[_Running]) -> None:
        """Prompts are padded on the left, so that each one's last token stands in the last column."""
        first = len(self._running)
        lengths = [len(entry.request.prompt_tokens) for entry in admitted]
        longest = _round_up(max(lengths))
        tokens_BT = torch.zeros((len(admitted), longest), dtype=torch.long)
        for row, entry in enumerate(admitted):
            tokens_BT[row, longest - lengths[row] :] = torch.tensor(entry.request.prompt_tokens)
        positions_BT = torch.arange(longest)[None] - (longest - torch.tensor(lengths))[:, None]
        self._running += admitted
        self._forward(tokens_BT, positions_BT, first, admitted)

    def _decode(self) -> None:
        """Rows that nobody uses are padding, up to the next multiple of the tile."""
        rows = _round_up(len(self._running))
        tokens_BT = torch.zeros((rows, 1), dtype=torch.long)
        positions_BT = torch.full((rows, 1), -1)
        for row, entry in enumerate(self._running):
            tokens_BT[row], positions_BT[row] = entry.tokens[-1], entry.position
        self._forward(tokens_BT, positions_BT, 0, list(self._running))

    def _forward(
        self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, first_row: int, entries: list[_Running]
    ) -> None:
        """One forward pass and one sampled token for each entry. Negative positions are padding."""
        positions_BT = positions_BT.to(self._device)
        used = _round_up(int(positions_BT.max()) + 1)
        padding_BT = positions_BT < 0
        self._cache.aim(first_row, positions_BT.masked_fill(padding_BT, self._cache.length), used)
        visible_BTL = torch.arange(used, device=self._device) <= positions_BT.clamp(min=0)[..., None]
        dtype = self._cache.keys.dtype
        mask_B1TL = torch.zeros(visible_BTL.shape, dtype=dtype, device=self._device)
        mask_B1TL = mask_B1TL.masked_fill(~visible_BTL, torch.finfo(dtype).min)[:, None]
        logits_BV = self._model(
            input_ids=tokens_BT.to(self._device),
            position_ids=positions_BT.clamp(min=0),
            attention_mask=mask_B1TL,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=min(tokens_BT.shape[1], TILE),
        ).logits[: len(entries), -1]
        self._sample(logits_BV, entries)

    def _sample(self, logits_BV: torch.Tensor, entries: list[_Running]) -> None:
        seeds_B = np.array([entry.request.seed for entry in entries], np.uint64)
        counts_B = np.array([len(entry.tokens) for entry in entries], np.uint64)
        uniforms_B = torch.from_numpy(uniform_draws(seeds_B, counts_B)).to(self._device)
        temperatures_B = torch.tensor([entry.request.temperature for entry in entries], device=self._device)
        tokens_B, logprobs_B = sample_tokens(logits_BV, temperatures_B, uniforms_B)
        for entry, token, log_prob in zip(entries, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            entry.tokens.append(token)
            entry.log_probs.append(log_prob)
            entry.versions.append(self._version)

    def _retire(self) -> None:
        for row in reversed(range(len(self._running))):
            entry = self._running[row]
            if entry.tokens[-1] in entry.request.stop_token_ids:
                self._finish(entry, "stop")
            elif len(entry.tokens) == entry.request.max_new_tokens:
                self._finish(entry, "length")
            else:
                continue
            self._free(row)

    def _finish(self, entry: _Running, reason: FinishReason) -> None:
        self._finished[entry.request.request_id] = Completion(
            entry.request.request_id, tuple(entry.tokens), tuple(entry.log_probs), tuple(entry.versions), reason
        )

    def _free(self, row: int) -> None:
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last
            self._cache.move_row(len(self._running), row)


def _round_up(count: int) -> int:
    return -(-count // TILE) * TILE


def _differences(own: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> list[str]:
    missing = [f"lacks {name}" for name in own if name not in new]
    unknown = [f"has unknown {name}" for name in new if name not in own]
    shapes = [
        f"{name} is {tuple(new[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in new and new[name].shape != own[name].shape
    ]
    return (missing + unknown + shapes)[:5]
