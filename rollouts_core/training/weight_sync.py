"""New weights to several engines at once."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio

from rollouts_core.inference.engine import InferenceEngine


async def sync_weights_to_engines(engines: Sequence[InferenceEngine], checkpoint_path: Path, version: int) -> None:
    """Give engines the weights of a Hugging Face model directory, all at once. Raises what the first failure raises."""
    async with anyio.create_task_group() as group:
        for engine in engines:
            group.start_soon(partial(engine.update_weights_from_checkpoint, checkpoint_path, version))
