"""Some rollouts of a step as short text, to show while a run goes on.

Decision: they are sent with the metrics, which come from every machine anyway. Only the beginning of long answers is
shown, so that the line stays short; the record, which comes with the results, has everything that is kept.
"""

import base64
import json
import lzma
from collections.abc import Mapping, Sequence
from typing import Any

MOST_TOKENS = 16_000

Rollout = Mapping[str, Any]


def encode_glimpse(rollouts: Sequence[Rollout]) -> str:
    """The first of them, as many as have `MOST_TOKENS` together, and one at least."""
    shown: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        tokens += len(rollout["tokens"])
        if shown and tokens > MOST_TOKENS:
            break
        shown.append(rollout)
    return base64.b64encode(lzma.compress(json.dumps(shown).encode(), preset=1)).decode()


def decode_glimpse(text: str) -> list[dict[str, Any]]:
    rollouts: list[dict[str, Any]] = json.loads(lzma.decompress(base64.b64decode(text)))
    return rollouts
