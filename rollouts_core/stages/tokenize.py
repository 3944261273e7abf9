"""Data to Parquet, and the tokenizer that made it: `tokenizer/`, `demonstrations.parquet`, `prompts.parquet`, ..."""

from typing import Any

from rollouts_core.data.sources import Row, load_rows
from rollouts_core.data.tokenized import tokenize_examples, tokenize_prompts, write_table
from rollouts_core.data.tokenizers import load_tokenizer, save_tokenizer, train_tokenizer
from rollouts_core.errors import BadInput
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.work import Work

TRAINING_ROLES = ("demonstrations", "prompts")
"""A tokenizer is made from these; the held-out rows stay unseen."""


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, TokenizeSpec), "the planner pairs this stage with its spec"
    rows = _load(work, spec)
    tokenizer = _tokenizer(work, spec, rows)
    save_tokenizer(tokenizer, work.out / "tokenizer")
    summary: dict[str, float] = {"vocab_size": float(len(tokenizer))}
    for done, (role, loaded) in enumerate(rows.items(), 1):
        if role == "demonstrations":
            table = tokenize_examples(loaded, tokenizer, spec.max_length)
        else:
            table = tokenize_prompts(loaded, tokenizer, spec.max_length - 1)
        write_table(table, work.out / f"{role}.parquet")
        summary[f"{role}/rows"] = float(table.num_rows)
        summary[f"{role}/tokens"] = float(sum(table["length"].to_pylist()))
        work.log.progress(done, len(rows))
        print(f"{role}: {table.num_rows:,} rows, {summary[f'{role}/tokens']:,.0f} tokens")
    return summary


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
    if spec.tokenizer.kind == "pretrained":
        model = work.stage.external["model"]
        return load_tokenizer(model.location, model.identity.get("commit"), spec.tokenizer.trust_remote_code)
    conversations = [row.messages for role in TRAINING_ROLES for row in rows.get(role, [])]
    return train_tokenizer(spec.tokenizer, conversations, spec.max_length)
