"""Tokenized data as Parquet: demonstrations (ids, loss mask, length, length before it was cut, source row) and prompts.

Rows keep their source row, so that whatever is trained on can be traced to a line of a file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rollouts_core.config import Overlong
from rollouts_core.data.chat import compute_loss_mask, plain_mask, plain_prompt, render_prompt
from rollouts_core.data.sources import MAX_PROBLEMS, Row
from rollouts_core.errors import BadInput
from rollouts_core.types import Message, Prompt

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

EXAMPLES = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("length", pa.int32()),
        ("full_length", pa.int32()),
        ("source_row", pa.int32()),
    ]
)
PROMPTS = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("source_row", pa.int32()),
        ("messages", pa.string()),
        ("metadata", pa.string()),
    ]
)


@dataclass(frozen=True)
class Example:
    """One sequence to train on; `loss_mask` is 1 where the model learns to say the token."""

    tokens: Ids
    loss_mask: Ids
    shared: int = 0
    """How many first tokens others of the batch may begin with, too."""
    streams: Mapping[str, Floats] = field(default_factory=dict)
    """Numbers for each learnt token, by the names of `TrainBatch`'s fields without their legend."""


def tokenize_examples(rows: Sequence[Row], tokenizer: Any, max_length: int, overlong: Overlong = "refuse") -> pa.Table:
    """Demonstrations as a table; what is too long is dealt with as `overlong` says, and then teaches something or is
    dropped. Raises `BadInput` for rows that are too long ("refuse"), unreadable or teach nothing."""
    columns: dict[str, list[Any]] = {name: [] for name in EXAMPLES.names}
    problems: list[str] = []
    for row in rows:
        try:
            ids, mask = (
                compute_loss_mask(tokenizer, row.messages) if row.messages else plain_mask(tokenizer, *row.plain)
            )
        except BadInput as error:
            problems += [f"{row.place}: {problem}" for problem in error.problems]
            continue
        full = len(ids)
        if full > max_length and overlong != "refuse":
            kept = slice(0, max_length) if overlong == "cut_right" else slice(full - max_length, full)
            ids, mask = ids[kept], mask[kept]
            if overlong == "drop" or not any(mask[1:]):
                continue
        problem = _problem(ids, tokenizer, max_length) or ("" if any(mask) else "has no assistant turn to learn from")
        if problem:
            problems.append(f"{row.place}: {problem}")
        for name, value in zip(EXAMPLES.names, (ids, mask, len(ids), full, row.source_row), strict=True):
            columns[name].append(value)
    _refuse(problems)
    return pa.table(columns, schema=EXAMPLES)


def tokenize_prompts(
    rows: Sequence[Row], tokenizer: Any, max_prompt_length: int, overlong: Overlong = "refuse"
) -> pa.Table:
    """Prompts as a table; an assistant's closing turn is left out, and what is too long is dropped unless it is to be
    refused: half a prompt asks nothing. Raises `BadInput` as `tokenize_examples` does."""
    columns: dict[str, list[Any]] = {name: [] for name in PROMPTS.names}
    problems: list[str] = []
    for row in rows:
        messages = row.messages[:-1] if row.messages and row.messages[-1].role == "assistant" else row.messages
        ids = render_prompt(tokenizer, messages) if messages else plain_prompt(tokenizer, row.plain[0])
        if len(ids) > max_prompt_length and overlong != "refuse":
            continue
        if problem := _problem(ids, tokenizer, max_prompt_length) or ("" if ids else "has no prompt"):
            problems.append(f"{row.place}: {problem}")
        turns = json.dumps([asdict(message) for message in messages])
        values = (ids, len(ids), row.source_row, turns, json.dumps(row.metadata, default=str))
        for name, value in zip(PROMPTS.names, values, strict=True):
            columns[name].append(value)
    _refuse(problems)
    return pa.table(columns, schema=PROMPTS)


def write_table(table: pa.Table, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    pq.write_table(table, unfinished, compression="zstd")
    unfinished.rename(path)


def read_shards(directory: Path, columns: list[str] | None = None) -> pa.Table:
    """All shards of a directory as one table, in their order."""
    return pa.concat_tables([pq.read_table(path, columns=columns) for path in sorted(directory.glob("*.parquet"))])


def count_rows(directory: Path) -> dict[str, float]:
    """Rows, tokens, and of demonstrations how many were cut."""
    table = read_shards(directory)
    lengths = np.asarray(table["length"])
    counts = {"rows": float(len(lengths)), "tokens": float(lengths.sum())}
    if "full_length" in table.column_names:
        counts["cut"] = float((np.asarray(table["full_length"]) > lengths).sum())
    return counts


def read_examples(directory: Path) -> list[Example]:
    table = read_shards(directory, ["input_ids", "loss_mask"])
    return [
        Example(np.asarray(ids, np.int32), np.asarray(mask, np.int32))
        for ids, mask in zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    ]


def read_prompts(directory: Path) -> list[Prompt]:
    return [
        Prompt(
            tuple(Message(**turn) for turn in json.loads(row["messages"])),
            tuple(row["input_ids"]),
            json.loads(row["metadata"]),
            row["source_row"],
        )
        for row in read_shards(directory).to_pylist()
    ]


def _problem(ids: list[int], tokenizer: Any, max_length: int) -> str:
    if len(ids) > max_length:
        return f"{len(ids)} tokens, longer than the {max_length} that the context allows: shorten or drop it"
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return "has characters that the tokenizer does not know"
    return ""


def _refuse(problems: list[str]) -> None:
    if problems:
        further = [f"and {len(problems) - MAX_PROBLEMS} more rows"] if len(problems) > MAX_PROBLEMS else []
        raise BadInput(problems[:MAX_PROBLEMS] + further, "data")
