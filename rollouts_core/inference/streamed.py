"""An answer of SGLang that comes in pieces, so that the pieces are kept if the server dies.

Each event has the tokens since the one before (`--incremental-streaming-output`). Only the last event says which weight
version made which tokens. So of a broken answer the tokens are kept that came before the weights were changed: their
version is known.
"""

from dataclasses import dataclass, field
from typing import Any

from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.reading import reading

INTERVAL = 32
"""Tokens of an event."""


@dataclass
class Pieces:
    """The part of a streamed answer that has come so far."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[tuple[float, int]] = field(default_factory=list)
    """Log-probabilities as SGLang sends them: the value and the token."""
    known: int = 0
    """The number of tokens that are known to be made by the version that the answer began with."""
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, event: Any, same_weights: bool) -> None:
        """Raises `MalformedAnswer`."""
        with reading("an event", event):
            tokens = [int(token) for token in event["output_ids"]]
            log_probs = [(float(pair[0]), int(pair[1])) for pair in event["meta_info"]["output_token_logprobs"]]
        self.tokens += tokens
        self.log_probs += log_probs
        self.last = event
        if same_weights:
            self.known = len(self.tokens)

    def whole(self) -> dict[str, Any]:
        """The answer as it would have come in one piece."""
        meta = {**self.last.get("meta_info", {}), "output_token_logprobs": self.log_probs}
        return {"output_ids": self.tokens, "meta_info": meta}

    def kept(self, request: GenerationRequest, version: int) -> Completion | None:
        """The part to keep of an answer that broke off; None if no token had come."""
        known = min(self.known, len(self.log_probs))
        if not known:
            return None
        values = tuple(value for value, _ in self.log_probs[:known])
        return Completion(request.request_id, tuple(self.tokens[:known]), values, (version,) * known, "abort")
