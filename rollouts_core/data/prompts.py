"""The prompt buffer: prompts in seeded order, epoch after epoch, with a position that can be saved."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollouts_core.data.order import Places, epoch_order
from rollouts_core.data.prompt_table import PromptTable
from rollouts_core.data.tokenized import Ids
from rollouts_core.errors import BadInput
from rollouts_core.types import Prompt


@dataclass(frozen=True)
class DataBuffer:
    """Prompts in a seeded order, epoch after epoch, and a position in them.

    Immutable: taking prompts gives the next buffer.

    Examples:
        >>> taken, buffer = rc.DataBuffer(prompts, seed=0).get_prompts(2)
        >>> buffer.position()
        {'epoch_id': 0, 'sample_offset': 2}
    """

    prompts: Sequence[Prompt]
    seed: int
    epoch_id: int = 0
    sample_offset: int = 0
    sizes: tuple[int, ...] = ()
    """Sizes of the sources of a mixture, which follow one another in `prompts`."""
    weights: tuple[float, ...] = ()

    def get_prompts(self, n: int) -> tuple[list[Prompt], "DataBuffer"]:
        """The next n prompts and the buffer behind them. Within an epoch of its source no prompt comes twice."""
        taken: list[Prompt] = []
        buffer = self
        while len(taken) < n:
            order = buffer._order()[buffer.sample_offset : buffer.sample_offset + n - len(taken)]
            taken += [self.prompts[index] for index in order.tolist()]
            offset = buffer.sample_offset + len(order)
            full = offset == len(self.prompts)
            buffer = replace(buffer, epoch_id=buffer.epoch_id + full, sample_offset=0 if full else offset)
        return taken, buffer

    def position(self) -> dict[str, int]:
        return {"epoch_id": self.epoch_id, "sample_offset": self.sample_offset}

    def at(self, position: Mapping[str, int]) -> "DataBuffer":
        return replace(self, epoch_id=position["epoch_id"], sample_offset=position["sample_offset"])

    def _order(self) -> Places:
        return epoch_order(self.sizes or (len(self.prompts),), self.weights, self.seed, self.epoch_id)


def of_rows(prompts: Sequence[Prompt], rows: Collection[int]) -> dict[int, Prompt]:
    """Source row to prompt."""
    if isinstance(prompts, PromptTable):
        return prompts.of_rows(rows)
    return {prompt.source_row: prompt for prompt in prompts if prompt.source_row in rows}


def check_room(longest: int, field: str, max_new_tokens: int, max_length: int) -> None:
    """Raises `BadInput`, naming the config's field, when an answer may not fit behind the longest prompt's tokens."""
    if longest + max_new_tokens > max_length:
        raise BadInput(
            f"the longest prompt has {longest} tokens; with {field} {max_new_tokens} it does not fit "
            f"data.max_length {max_length}"
        )


def check_tokens(sequences: Iterable[Sequence[int] | Ids], vocab_size: int) -> None:
    """The same as `check_vocabulary`, for sequences in memory."""
    check_vocabulary(max(int(np.max(tokens)) for tokens in sequences), vocab_size)


def check_vocabulary(largest: int, vocab_size: int) -> None:
    """Raises `BadInput` when the data's largest token is none of the model's: some servers die of those."""
    if largest >= vocab_size:
        raise BadInput(
            f"the data contain token {largest}, and the model's vocabulary has {vocab_size}: "
            "tokenizer and model do not belong together"
        )
