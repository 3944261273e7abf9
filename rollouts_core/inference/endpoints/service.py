"""The settings of an endpoint, and the limit of its costs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollouts_core.errors import BadInput
from rollouts_core.types.episode import Usage


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens, in any currency."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, prompt_tokens: int, completion_tokens: int) -> Usage:
        cost = (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6
        return Usage(prompt_tokens, completion_tokens, cost)


@dataclass(frozen=True)
class Service:
    """A model behind an address."""

    url: str
    """For example `https://api.openai.com/v1`, `http://127.0.0.1:30000/v1`, or `served://NAME/v1` of the config's
    `served`."""
    model: str
    key_variable: str | None = None
    """The environment variable that holds the key; a key stands nowhere else."""
    temperature: float | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request, as the service knows them."""
    max_concurrent: int = 64
    tries: int = 5
    answer_seconds: float = 300.0
    """Deadline of one try, in seconds."""
    prices: Prices = Prices()
    budget: float | None = None
    """The limit of the costs of all requests together; requests that are under way when it is reached still finish."""

    def key(self) -> str | None:
        """Raises `BadInput` when the variable is not set."""
        if self.key_variable is None:
            return None
        if not (key := os.environ.get(self.key_variable)):
            raise BadInput(
                f"{self.url}: its key is read from the environment variable {self.key_variable}, which is not set"
            )
        return key
