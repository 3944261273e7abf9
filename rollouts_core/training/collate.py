"""Examples to the tensors of one pass.

Decision: no padding. Sequences are one after another in a row. A prompt that several sequences share is there once, and
each of these sequences adds only its own tokens.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rollouts_core.data.tokenized import Example
from rollouts_core.inference.told_experts import NOT_TOLD
from rollouts_core.training.backend import TrainBatch
from rollouts_core.training.packed import Span

Places = npt.NDArray[np.int64]


def pack_batch(examples: Sequence[Example], normalizer: float) -> TrainBatch:
    """Pack all examples into one pass; the batch has their streams."""
    sharing = Counter(key for example in examples if (key := _prompt(example)))
    row, positions, spans, sources, targets = [], [], [], [], []
    experts: list[tuple[int, Example, slice]] = []
    length, prompts = 0, dict[bytes, int]()
    for example in examples:
        key = _prompt(example)
        shared = example.shared if sharing[key] > 1 else 0
        if shared and key not in prompts:
            prompts[key] = length
            row.append(example.tokens[:shared])
            experts.append((shared, example, slice(0, shared)))
            positions.append(np.arange(shared))
            spans.append(Span(length, length + shared))
            length += shared
        prompt = prompts[key] if shared else 0
        own = len(example.tokens) - shared
        row.append(example.tokens[shared:])
        experts.append((own, example, slice(shared, None)))
        positions.append(np.arange(shared, shared + own))
        spans.append(Span(length, length + own, prompt, prompt + shared))
        places = learnt(example)
        sources.append(np.where(places <= shared, prompt, length - shared) + places - 1)
        targets.append(example.tokens[places])
        length += own
    counts = [len(source) for source in sources]
    streams = {
        f"{name}_M": torch.from_numpy(np.concatenate([e.streams[name] for e in examples]).astype(np.float32))
        for name in examples[0].streams
    }
    return TrainBatch(
        tokens_N=_longs(row),
        positions_N=_longs(positions),
        spans=tuple(spans),
        source_M=_longs(sources),
        targets_M=_longs(targets),
        sequence_M=torch.from_numpy(np.repeat(np.arange(len(examples)), counts)),
        sequences=len(examples),
        normalizer=normalizer,
        experts_NR=_experts([example for example in examples if example.experts is not None], experts),
        **streams,  # type: ignore[arg-type]
    )


def learnt(example: Example) -> Places:
    """Places of the learnt tokens; the first token never is one, since nothing predicts it."""
    places: Places = np.flatnonzero(example.loss_mask[1:]) + 1
    return places


def learnt_tokens(examples: Sequence[Example]) -> int:
    return int(sum(np.count_nonzero(example.loss_mask[1:]) for example in examples))


def _experts(telling: Sequence[Example], parts: Sequence[tuple[int, Example, slice]]) -> torch.Tensor | None:
    """Rows of all tokens, where anybody tells of some. `parts`: lengths, and whose tokens they are."""
    if not telling:
        return None
    assert telling[0].experts is not None
    width = telling[0].experts.shape[1]
    rows = [
        np.full((length, width), NOT_TOLD, np.uint8) if example.experts is None else example.experts[part]
        for length, example, part in parts
    ]
    return torch.from_numpy(np.concatenate(rows))


def _prompt(example: Example) -> bytes:
    """The key of sequences that may share their first tokens; empty for one that shares none."""
    return example.tokens[: example.shared].tobytes() if 0 < example.shared < len(example.tokens) else b""


def _longs(parts: Sequence[npt.NDArray[np.integer]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
