"""The result of each sample of an evaluation: a line of JSON each, and a table at the end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rollouts_core.data.messages import message_to_data
from rollouts_core.metrics.loggers import read_jsonl
from rollouts_core.types import Prompt, Sample

CORRECT = 1.0
"""A reward of this or more is of a correct answer."""

Place = tuple[int, int]
"""Source row, and number of the sample."""


@dataclass(frozen=True)
class Result:
    """An answer to a prompt with its reward, or the error instead."""

    source_row: int
    sample: int
    """Its number among the answers to the prompt, from 0."""
    prompt: str
    response: str
    answer: Any
    """The row's own."""
    reward: float | None
    """The reward; None if the answer or its scoring failed."""
    rewards: Mapping[str, float]
    status: str
    turns: int
    tool_calls: int
    tokens: int
    """Number of tokens that were written."""
    metadata: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] | None
    """The whole conversation, of an answer in an environment."""
    error: str = ""

    @property
    def place(self) -> Place:
        return self.source_row, self.sample

    @property
    def correct(self) -> bool:
        return self.reward is not None and self.reward >= CORRECT


def result_of(sample: Sample, number: int, error: str = "") -> Result:
    """The result of an answer, scored or not."""
    final = sample.trajectory.final if sample.trajectory else None
    return replace(
        failed_result(sample.prompt, number, error),
        response=sample.response,
        reward=sample.reward,
        rewards=dict(sample.rewards),
        status=str(sample.status),
        turns=final.turn_idx if final else 1,
        tool_calls=sum(len(message.tool_calls) for message in final.messages) if final else 0,
        tokens=final.usage.completion_tokens if final else sample.response_length,
        messages=[message_to_data(message) for message in final.messages] if final else None,
    )


def failed_result(prompt: Prompt, number: int, error: str) -> Result:
    """The result of an answer that never came."""
    return Result(
        source_row=prompt.source_row,
        sample=number,
        prompt=prompt.text,
        response="",
        answer=prompt.metadata.get("answer"),
        reward=None,
        rewards={},
        status="failed",
        turns=0,
        tool_calls=0,
        tokens=0,
        metadata=dict(prompt.metadata),
        messages=None,
        error=error,
    )


def write_results(results: Sequence[Result], directory: Path) -> None:
    """`samples.jsonl`, and `samples.parquet` with structured columns as JSON text."""
    import pyarrow as pa  # half a second that readers need not wait
    import pyarrow.parquet as pq

    with (directory / "samples.jsonl").open("w") as file:
        for result in results:
            file.write(json.dumps(asdict(result), default=str) + "\n")
    rows = [
        {name: _flat(value) if name in ("answer", "rewards", "metadata", "messages") else value for name, value in row}
        for row in (asdict(result).items() for result in results)
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "samples.parquet", compression="zstd")


def read_results(path: Path) -> list[Result]:
    """The results in a `samples.jsonl`."""
    return [result_from_line(line) for line in read_jsonl(path)]


def result_from_line(line: Mapping[str, Any]) -> Result:
    """The result in a line of JSON."""
    return Result(**{name: value for name, value in line.items() if name != "step"})


def _flat(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
