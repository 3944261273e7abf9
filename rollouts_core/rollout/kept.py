"""Batches as Parquet, one file a step: for inspection, and for training on them again without an engine.

Decision: a row is a sample, with every number that training reads, so a kept run replayed gives the same losses.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollouts_core.data.messages import messages_from_json, messages_to_json
from rollouts_core.environments.record import trajectory_from_data, trajectory_to_data
from rollouts_core.errors import BadInput
from rollouts_core.rollout.manager import GeneratedBatch
from rollouts_core.types import Prompt, Sample, Status

if TYPE_CHECKING:
    from rollouts_core.rollout.source import Weights

SCHEMA = pa.schema(
    {
        "group_index": pa.int32(),
        "source_row": pa.int64(),
        "messages": pa.string(),
        "metadata": pa.string(),
        "prompt_tokens": pa.list_(pa.int32()),
        "response": pa.string(),
        "response_tokens": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "rollout_log_probs": pa.list_(pa.float64()),
        "weight_versions": pa.list_(pa.int64()),
        "status": pa.string(),
        "reward": pa.float64(),
        "episode": pa.int32(),
        "rewards": pa.string(),
        "turn_rewards": pa.list_(pa.float64()),
        "trajectory": pa.string(),
        "experts": pa.string(),
    }
)


def keep_batch(directory: Path, step: int, samples: Sequence[Sample]) -> None:
    """Write a step's samples; whole or not at all."""
    write_batch(directory / file_of(step), samples)


def write_batch(path: Path, samples: Sequence[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    pq.write_table(pa.Table.from_pylist([_row(sample) for sample in samples], SCHEMA), unfinished)
    unfinished.replace(path)


def read_batch(path: Path) -> list[Sample]:
    """Raises `BadInput` when there is no such batch."""
    if not path.is_file():
        raise BadInput(f"there is no kept batch {path}: run with rl.rollouts.keep_batches")
    return [_sample(row) for row in pq.read_table(path, schema=SCHEMA).to_pylist()]


def file_of(step: int) -> str:
    return f"step-{step:08d}.parquet"


class KeptRollouts:
    """The batches of an earlier run. Fits `RolloutSource`; new weights are of no use to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def next_batch(self, step: int) -> GeneratedBatch:
        return GeneratedBatch(tuple(read_batch(self._directory / file_of(step))), {})

    def publish(self, weights: "Weights", version: int) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}


def _row(sample: Sample) -> dict[str, Any]:
    length = len(sample.prompt.tokens)
    return {
        "group_index": sample.group_index,
        "source_row": sample.prompt.source_row,
        "messages": messages_to_json(sample.prompt.messages),
        "metadata": json.dumps(dict(sample.prompt.metadata)),
        "prompt_tokens": sample.prompt.tokens,
        "response": sample.response,
        "response_tokens": sample.tokens[length:],
        "loss_mask": sample.loss_mask[length:],
        "rollout_log_probs": sample.rollout_log_probs,
        "weight_versions": sample.weight_versions,
        "status": sample.status.value,
        "reward": sample.reward,
        "episode": sample.episode,
        "rewards": json.dumps(dict(sample.rewards)),
        "turn_rewards": sample.turn_rewards,
        "trajectory": json.dumps(trajectory_to_data(sample.trajectory)) if sample.trajectory else None,
        "experts": sample.experts or None,
    }


def _sample(row: dict[str, Any]) -> Sample:
    messages = messages_from_json(row["messages"])
    prompt = Prompt(messages, tuple(row["prompt_tokens"]), json.loads(row["metadata"]), row["source_row"])
    return Sample(
        prompt=prompt,
        response=row["response"],
        tokens=prompt.tokens + tuple(row["response_tokens"]),
        loss_mask=(0,) * len(prompt.tokens) + tuple(row["loss_mask"]),
        rollout_log_probs=tuple(row["rollout_log_probs"]),
        weight_versions=tuple(row["weight_versions"]),
        group_index=row["group_index"],
        status=Status(row["status"]),
        reward=row["reward"],
        episode=row["episode"],
        rewards=json.loads(row["rewards"]),
        turn_rewards=tuple(row["turn_rewards"]),
        trajectory=trajectory_from_data(json.loads(row["trajectory"])) if row["trajectory"] else None,
        experts=row["experts"] or "",
    )
