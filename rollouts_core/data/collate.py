"""Examples and samples to padded tensors."""

from collections.abc import Sequence

import numpy as np
import torch

from rollouts_core.data.tokenized import Example
from rollouts_core.training.backend import TrainBatch


def collate_batch(examples: Sequence[Example], normalizer: float) -> TrainBatch:
    """Pad on the right to the longest. Token 0 stands in padding, where mask and attention are 0."""
    shape = (len(examples), max(len(example.tokens) for example in examples))
    tokens, mask, attention = (np.zeros(shape, np.int64) for _ in range(3))
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        mask[row, : len(example.tokens)] = example.loss_mask
        attention[row, : len(example.tokens)] = 1
    mask[:, 0] = 0
    return TrainBatch(torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(attention), normalizer)


def learnt_tokens(examples: Sequence[Example]) -> int:
    """How many tokens have a loss; the first token of an example never has one."""
    return int(sum(example.loss_mask[1:].sum() for example in examples))
