"""The prompt buffer: prompts in seeded order, epoch after epoch, with a position that can be saved."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollouts_core.data.order import epoch_order
from rollouts_core.data.tokenized import Ids
from rollouts_core.errors import BadInput
from rollouts_core.types import Prompt


@dataclass(frozen=True)
class DataBuffer:
    """Where in the prompts training stands. Immutable: taking prompts gives the next buffer."""

    prompts: Sequence[Prompt]
    seed: int
    epoch_id: int = 0
    sample_offset: int = 0
    sizes: tuple[int, ...] = ()
    """Of the sources of a mixture, which follow one another in `prompts`."""
    weights: tuple[float, ...] = ()

    def get_prompts(self, n: int) -> tuple[list[Prompt], "DataBuffer"]:
        """The next n prompts and the buffer behind them. Within an epoch of its source no prompt comes twice."""
        taken: list[Prompt] = []
        buffer = self
        while len(taken) < n:
            order = buffer._order()[buffer.sample_offset : buffer.sample_offset + n - len(taken)]
            taken += [self.prompts[index] for index in order]
            offset = buffer.sample_offset + len(order)
            full = offset == len(self.prompts)
            buffer = replace(buffer, epoch_id=buffer.epoch_id + full, sample_offset=0 if full else offset)
        return taken, buffer

    def position(self) -> dict[str, int]:
        return {"epoch_id": self.epoch_id, "sample_offset": self.sample_offset}

    def at(self, position: Mapping[str, int]) -> "DataBuffer":
        return replace(self, epoch_id=position["epoch_id"], sample_offset=position["sample_offset"])

    def _order(self) -> list[int]:
        return epoch_order(self.sizes or (len(self.prompts),), self.weights, self.seed, self.epoch_id)


def check_room(prompts: Sequence[Prompt], field: str, max_new_tokens: int, max_length: int) -> None:
    """Raises `BadInput`, naming the config's field, when an answer may not fit behind the longest prompt."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + max_new_tokens > max_length:
        raise BadInput(
            f"the longest prompt has {longest} tokens; with {field} {max_new_tokens} it does not fit "
            f"data.max_length {max_length}"
        )


def check_vocabulary(sequences: Iterable[Sequence[int] | Ids], vocab_size: int) -> None:
    """Raises `BadInput` when the data hold tokens that the model does not have: some servers die of them."""
    largest = max(int(np.max(tokens)) for tokens in sequences)
    if largest >= vocab_size:
        raise BadInput(
            f"the data hold token {largest}, and the model's vocabulary has {vocab_size}: "
            "tokenizer and model do not belong together"
        )
