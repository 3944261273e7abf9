"""Data to Parquet, and the tokenizer that made it: `tokenizer/`, `demonstrations/*.parquet`, `prompts/*.parquet`, ...

Decision: a source is tokenized in shards of a fixed number of rows, which are read one after another. A shard is
written under another name and renamed when it is complete; a stage that was killed makes only the missing shards.

Decision: several processes may make the shards. Each such part is a stage of its own, with its own artifact, and so is
the tokenizer that they share. This stage takes the parts that it finds and makes the rest. So its artifact is the same
for any number of parts; only the time depends on them.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollouts_core.data.sources import MAX_PROBLEMS, FaultyRow, FaultyRows, RowShard, row_shards
from rollouts_core.data.tokenized import count_rows, write_table
from rollouts_core.data.tokenizing import (
    collecting_seldom,
    tokenize_examples,
    tokenize_preferences,
    tokenize_prompts,
)
from rollouts_core.data.turns import turn_format
from rollouts_core.environments.registry import load_environment
from rollouts_core.errors import BadInput
from rollouts_core.stages import tokenizer as tokenizer_stage
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.tokenize_parts import parts_of
from rollouts_core.stages.tokenizer import beginning
from rollouts_core.stages.workspace import Work

SHARD_ROWS = 2000


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, TokenizeSpec), "the planner pairs this stage with its spec"
    tokenizer_maker, parts = parts_of(work.stage)
    if files := work.found(tokenizer_maker.artifact):
        shutil.copytree(files / "tokenizer", work.scratch / "tokenizer", dirs_exist_ok=True)
    for part in parts:
        if files := work.found(part.artifact):
            _take_over(files, work.scratch)
    tokenizer = tokenizer_stage.tokenizer_of(work, spec)
    shutil.copytree(work.scratch / "tokenizer", work.out / "tokenizer")
    rows = make_shards(work, spec, tokenizer, lambda shard: True)
    summary: dict[str, float] = {"vocab_size": float(len(tokenizer))}
    for role in spec.sources:
        _link(work.scratch / role, work.out / role)
        summary |= {f"{role}/{name}": count for name, count in _counts(work.out / role, rows[role], spec).items()}
    return summary


def make_shards(work: Work, spec: TokenizeSpec, tokenizer: Any, mine: Callable[[int], bool]) -> dict[str, int]:
    """The shards that lack, of those that are asked for; how many rows each source has.

    Raises `BadInput` listing the problems of all sources, up to a limit.
    """
    rows: dict[str, int] = {}
    problems, faulty = _environment_problems(work, tokenizer), list[FaultyRow]()
    done = 0
    for role in spec.sources:
        rows[role] = 0
        try:
            with collecting_seldom() as collect:
                for shard in _shards(work, spec, role, mine):
                    rows[role] += shard.count
                    faulty += shard.faulty or _made(work, spec, role, shard, tokenizer)
                    if len(faulty) >= MAX_PROBLEMS:
                        raise FaultyRows(faulty, [*problems, "further rows were not read"])
                    collect()
                    done = sum(-(-count // SHARD_ROWS) for count in rows.values())
                    work.log.progress(done, done + 1)
        except FaultyRows:
            raise
        except BadInput as error:
            problems += error.problems
    if faulty or problems:
        raise FaultyRows(faulty, problems)
    work.log.progress(done, done)
    return rows


def _environment_problems(work: Work, tokenizer: Any) -> list[str]:
    """Whether the tokenizer's template can speak of the environment's tools."""
    if "environment" not in work.stage.external:
        return []
    environment = load_environment(work.stage.external["environment"].location)
    try:
        turn_format(tokenizer, [tool.schema for tool in environment.get_tools()])
    except BadInput as error:
        return list(error.problems)
    return []


def _shards(work: Work, spec: TokenizeSpec, role: str, mine: Callable[[int], bool]) -> Iterator[RowShard]:
    source, external = spec.sources[role], work.stage.external[role]
    empty = True

    def wanted(shard: int) -> bool:
        return mine(shard) and not _file(work, role, shard).exists()

    for shard in row_shards(source, external, SHARD_ROWS, wanted, beginning(work.stage, role)):
        empty = False
        yield shard
    if empty:
        raise BadInput(f"{external.location or source}: the data set is empty")


def _made(work: Work, spec: TokenizeSpec, role: str, shard: RowShard, tokenizer: Any) -> tuple[FaultyRow, ...]:
    """Make a shard, unless it is there or not asked for; its faulty rows."""
    if not shard.rows:
        return ()
    try:
        if role.startswith("demonstrations"):
            table = tokenize_examples(shard.rows, tokenizer, spec.max_length, spec.overlong, spec.learnt_roles)
        elif role.startswith("preferences"):
            table = tokenize_preferences(shard.rows, tokenizer, spec.max_length, spec.overlong)
        else:
            table = tokenize_prompts(shard.rows, tokenizer, spec.max_length - 1, spec.overlong)
    except FaultyRows as error:
        return error.rows
    write_table(table, _file(work, role, shard.number))
    return ()


def _file(work: Work, role: str, shard: int) -> Path:
    return work.scratch / role / f"{shard:05d}.parquet"


def _take_over(files: Path, scratch: Path) -> None:
    for shard in files.glob("*/*.parquet"):
        kept = scratch / shard.relative_to(files)
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(shard, kept.with_suffix(".unfinished"))
            kept.with_suffix(".unfinished").rename(kept)


def _link(made: Path, out: Path) -> None:
    out.mkdir()
    for shard in sorted(made.glob("*.parquet")):
        (out / shard.name).hardlink_to(shard)


def _counts(directory: Path, rows: int, spec: TokenizeSpec) -> dict[str, float]:
    role, counts = directory.name, count_rows(directory)
    if not counts["rows"]:
        raise BadInput(f"data.{role}: every row is longer than data.max_length {spec.max_length}")
    counts["dropped"] = rows - counts.pop("source_rows")
    too_long = ", ".join(f"{counts[name]:,.0f} {name}" for name in ("cut", "dropped") if counts.get(name))
    told = f"; too long: {too_long}" if too_long else ""
    print(f"{role}: {counts['rows']:,.0f} rows, {counts['tokens']:,.0f} tokens{told}")
    return counts
