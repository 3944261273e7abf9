"""Data to Parquet, and the tokenizer that made it: `tokenizer/`, `demonstrations/*.parquet`, `prompts/*.parquet`, ...

Decision: a source is tokenized in shards of a fixed number of rows. A shard is written under another name and renamed
when it is whole; a killed stage goes on behind the shards that are there.
"""

import shutil
from collections.abc import Sequence
from typing import Any

from rollouts_core.data.sources import MAX_PROBLEMS, Row, load_rows
from rollouts_core.data.tokenized import count_rows, tokenize_examples, tokenize_prompts, write_table
from rollouts_core.data.tokenizers import load_tokenizer, save_tokenizer, train_tokenizer
from rollouts_core.errors import BadInput
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.work import Work
from rollouts_core.types import Message

SHARD_ROWS = 2000
TRAINING_ROLES = ("demonstrations", "prompts")
"""A tokenizer is made from these; the held-out rows stay unseen."""


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, TokenizeSpec), "the planner pairs this stage with its spec"
    rows = _load(work, spec)
    tokenizer = _tokenizer(work, spec, rows)
    shutil.copytree(work.scratch / "tokenizer", work.out / "tokenizer")
    summary: dict[str, float] = {"vocab_size": float(len(tokenizer))}
    shards = [(role, start) for role, loaded in rows.items() for start in range(0, len(loaded), SHARD_ROWS)]
    problems: list[str] = []
    for done, (role, start) in enumerate(shards, 1):
        shard = work.scratch / role / f"{start // SHARD_ROWS:05d}.parquet"
        try:
            if not shard.exists():
                write_table(_tokenize(role, rows[role][start : start + SHARD_ROWS], tokenizer, spec), shard)
        except BadInput as error:
            problems += error.problems
            if len(problems) >= MAX_PROBLEMS:
                break
        work.log.progress(done, len(shards))
    if problems:
        raise BadInput(problems, "data")
    for role, loaded in rows.items():
        (work.out / role).mkdir()
        for shard in sorted((work.scratch / role).glob("*.parquet")):
            (work.out / role / shard.name).hardlink_to(shard)
        counts = count_rows(work.out / role)
        counts["dropped"] = len(loaded) - counts["rows"]
        if not counts["rows"]:
            raise BadInput(f"data.{role}: every row is longer than data.max_length {spec.max_length}")
        summary |= {f"{role}/{name}": count for name, count in counts.items()}
        too_long = ", ".join(f"{counts[name]:,.0f} {name}" for name in ("cut", "dropped") if counts.get(name))
        told = f"; too long: {too_long}" if too_long else ""
        print(f"{role}: {counts['rows']:,.0f} rows, {counts['tokens']:,.0f} tokens{told}")
    return summary


def _tokenize(role: str, rows: Sequence[Row], tokenizer: Any, spec: TokenizeSpec) -> Any:
    if role == "demonstrations":
        return tokenize_examples(rows, tokenizer, spec.max_length, spec.overlong)
    return tokenize_prompts(rows, tokenizer, spec.max_length - 1, spec.overlong)


def _load(work: Work, spec: TokenizeSpec) -> dict[str, list[Row]]:
    """The rows of every source; the problems of all of them are raised together."""
    rows: dict[str, list[Row]] = {}
    problems: list[str] = []
    for role, source in spec.sources.items():
        try:
            rows[role] = load_rows(source, work.stage.external[role])
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(problems, "data")
    return rows


def _tokenizer(work: Work, spec: TokenizeSpec, rows: dict[str, list[Row]]) -> Any:
    """As it was saved, so that whoever resumes tokenizes with the same one."""
    saved = work.scratch / "tokenizer"
    if not saved.exists():
        unfinished = work.scratch / "tokenizer.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        save_tokenizer(_new_tokenizer(work, spec, rows), unfinished)
        unfinished.rename(saved)
    return load_tokenizer(str(saved), None, spec.tokenizer.trust_remote_code)


def _new_tokenizer(work: Work, spec: TokenizeSpec, rows: dict[str, list[Row]]) -> Any:
    if spec.tokenizer.kind == "pretrained":
        model = work.stage.external["model"]
        return load_tokenizer(model.location, model.identity.get("commit"), spec.tokenizer.trust_remote_code)
    loaded = (row for role in TRAINING_ROLES for row in rows.get(role, []))
    conversations = [row.messages or tuple(Message("text", text) for text in row.plain) for row in loaded]
    return train_tokenizer(spec.tokenizer, conversations, spec.max_length)
