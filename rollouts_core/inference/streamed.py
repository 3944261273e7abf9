"""An answer of SGLang's that comes in pieces, so that what was made of it outlives the server that made it.

Each event has the tokens since the one before (`--incremental-streaming-output`); only the last one says which weight
version made which tokens. So what is kept of a broken answer is what had come before the weights were changed: its
version is known.
"""

from dataclasses import dataclass, field
from typing import Any

from rollouts_core.errors import MalformedAnswer
from rollouts_core.inference.engine import Completion, GenerationRequest

INTERVAL = 32
"""Tokens of an event."""


@dataclass
class Pieces:
    """What has come."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)
    """As SGLang tells them: the value, the token, nothing."""
    known: int = 0
    """How many tokens were made by the version that the answer began with."""
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, event: Any, same_weights: bool) -> None:
        """Raises `MalformedAnswer`."""
        try:
            self.tokens += event["output_ids"]
            self.log_probs += event["meta_info"]["output_token_logprobs"]
        except (KeyError, TypeError) as error:
            raise MalformedAnswer(f"{error!r} in an event: {str(event)[:500]}") from None
        self.last = event
        if same_weights:
            self.known = len(self.tokens)

    def whole(self) -> dict[str, Any]:
        """The answer as it would have come in one piece."""
        meta = {**self.last.get("meta_info", {}), "output_token_logprobs": self.log_probs}
        return {"output_ids": self.tokens, "meta_info": meta}

    def kept(self, request: GenerationRequest, version: int) -> Completion | None:
        """What is left of an answer that broke off; None of one that had not begun."""
        if not self.known:
            return None
        tokens, log_probs = self.tokens[: self.known], self.log_probs[: self.known]
        values = tuple(float(pair[0]) for pair in log_probs)
        return Completion(request.request_id, tuple(tokens), values, (version,) * self.known, "abort")
