"""The protocol of inference engines: token ids in; token ids, log-probabilities and weight versions out.

Decision: text never crosses this boundary, so nothing is decoded and encoded again between engine and trainer.

Decision: the protocol is asynchronous, and a call is one request. The engine decides about batches, and the rollout
manager decides which answers are still wanted. Between them are only a request, an answer, and a cancellation. A caller
that stops waiting has aborted its request.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import anyio

from rollouts_core.errors import ContextOverflow, EngineUnavailable, OutsideVocabulary, WeightMismatch
from rollouts_core.inference.told_experts import continued

if TYPE_CHECKING:
    import torch

    from rollouts_core.inference.routing import Routers

    Weights = Mapping[str, torch.Tensor]

FinishReason = Literal["stop", "length", "abort"]
ASK_AGAIN_SECONDS = 0.1


@dataclass(frozen=True)
class Truncation:
    """The tokens that may be drawn; all of them by default.

    First the `top_k` likeliest are kept; of those the fewest that together have `top_p` of their probability (nucleus
    sampling, arXiv 1904.09751); of those the ones with at least `min_p` of the likeliest one's (arXiv 2407.01082).
    """

    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0

    @property
    def keeps_all(self) -> bool:
        return self == EVERYTHING


EVERYTHING = Truncation()


@dataclass(frozen=True)
class GenerationRequest:
    request_id: str
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    """Length limit of the whole answer, with `generated`."""
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    """The request's draws follow from this alone, where the engine can do that; see each engine."""
    generated: tuple[int, ...] = ()
    """The answer's tokens that are there already, from an earlier try; generation goes on behind them."""
    truncation: Truncation = EVERYTHING
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the token that completes one is its last."""
    session: str = ""
    """Requests of one session go to the same replica, which has their common prefix in its cache."""


@dataclass(frozen=True)
class Completion:
    request_id: str
    tokens: tuple[int, ...]
    """The sampled tokens, after the request's `generated`; the stop token included."""
    log_probs: tuple[float, ...]
    """Per token, of softmax(logits / temperature) over the whole vocabulary, whatever `truncation` kept (greedy: under
    temperature 1): what the trainer computes."""
    weight_versions: tuple[int, ...]
    """Per token, the version of the weights that made it."""
    finish_reason: FinishReason
    experts: str = ""
    """Which experts each token of prompt and answer went through, all but the last (`inference.routing`, rows in
    base64); empty where the engine does not tell."""


@dataclass(frozen=True)
class ModelLimits:
    """The limits of requests, which are known before a request is sent."""

    max_length: int
    """The context: prompt and answer together."""
    vocab_size: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the model's weights, by name: for servers the files' names, otherwise the model's."""
    renamed: "Callable[[Weights], Weights]" = lambda weights: weights
    """Renames weights from the model's names to the names in `shapes`."""
    routers: "Routers | None" = None
    """For a mixture whose servers tell which experts tokens went through."""


class InferenceEngine(Protocol):
    """Serves one policy."""

    @property
    def weight_version(self) -> int:
        """The version that all of the engine has; -1 until weights were given."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request; many may be under way.

        Raises `ContextOverflow` or `OutsideVocabulary` before anything is generated, `EngineUnavailable` when the
        engine is away or breaks off, `EngineRefused` when it does not take the request, `MalformedAnswer` when what
        it says makes no sense.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests at once; they complete with what they have and finish reason 'abort'."""

    async def update_weights(self, weights: "Mapping[str, torch.Tensor]", version: int) -> None:
        """Replace the weights everywhere, and see that it was done. Requests under way go on with the new ones.

        Raises `WeightMismatch` and changes nothing when names or shapes differ, `EngineUnavailable` when no part of
        the engine could be brought to `version`.
        """

    async def update_weights_from_checkpoint(self, path: Path, version: int) -> None:
        """Replace the weights by those of a Hugging Face model directory. Raises as `update_weights` does."""

    def wants_weights(self) -> bool:
        """Whether a part of it waits for the current weights: a server that was started again."""

    @property
    def sync_seconds(self) -> "Mapping[str, float]":
        """Seconds of the last update, by phase; `bring/<machine>` of what went to other machines."""

    @property
    def sync_bytes(self) -> "Mapping[str, int]":
        """The bytes that the last update sent to each other machine."""

    def take_tokens(self) -> "Mapping[str, int]":
        """Tokens that each replica has made since this was asked last, by name; empty where there are none."""

    async def release_memory(self) -> None:
        """Give the device's memory to the trainer beside it; no request may be under way."""

    async def resume_memory(self) -> None:
        """Take it back. Weights must be given again before anything is generated."""

    async def aclose(self) -> None:
        """End connections; servers are not this object's."""


def joined(before: Completion | None, after: Completion) -> Completion:
    """An answer with what was there of it before."""
    if before is None:
        return after
    return replace(
        after,
        tokens=before.tokens + after.tokens,
        log_probs=before.log_probs + after.log_probs,
        weight_versions=before.weight_versions + after.weight_versions,
        experts=continued(before.experts, after.experts),
    )


async def ask_until_ended(
    request: GenerationRequest,
    ask: Callable[[GenerationRequest], Awaitable[Completion]],
    is_unwanted: Callable[[], bool],
) -> Completion:
    """Ask for the rest of an answer again and again, behind the tokens that are there: a server may end a request that
    is still wanted, as one does that is about to leave. Raises what `ask` raises while there is no token to lose."""
    made = Completion(request.request_id, (), (), (), "abort")
    while True:
        try:
            made = joined(made, await ask(replace(request, generated=request.generated + made.tokens)))
        except EngineUnavailable:
            if not made.tokens:
                raise
        if made.finish_reason != "abort" or is_unwanted():
            return made
        await anyio.sleep(ASK_AGAIN_SECONDS)


def check_request(request: GenerationRequest, limits: ModelLimits) -> None:
    """Raises `ContextOverflow` or `OutsideVocabulary`: some servers die of what these refuse."""
    length = len(request.prompt_tokens)
    if length + request.max_new_tokens > limits.max_length or not length:
        raise ContextOverflow(
            f"request {request.request_id}: prompt of {length} tokens and an answer of "
            f"{request.max_new_tokens} do not fit a context of {limits.max_length}"
        )
    tokens = (*request.prompt_tokens, *request.generated)
    if wrong := [token for token in tokens if not 0 <= token < limits.vocab_size]:
        raise OutsideVocabulary(
            f"request {request.request_id}: token {wrong[0]} is not in the model's vocabulary of {limits.vocab_size}: "
            "is the tokenizer another model's?"
        )


def check_weights(shapes: Mapping[str, tuple[int, ...]], limits: ModelLimits, version: int) -> None:
    """Raises `WeightMismatch`: a server that has begun to load wrong weights does not always come back."""
    own = limits.shapes
    wrong = [f"lacks {name}" for name in own if name not in shapes]
    wrong += [f"has unknown {name}" for name in shapes if name not in own]
    wrong += [
        f"{name} is {shapes[name]}, not {own[name]}" for name in own if name in shapes and shapes[name] != own[name]
    ]
    if wrong:
        raise WeightMismatch(f"weight version {version} does not fit the engine's model: " + "; ".join(wrong[:5]))


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in the safetensors of a model directory; reads only their headers."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found
