"""The tokenizer alone, for those who tokenize in parts: `tokenizer/`."""

import shutil
from collections.abc import Iterator
from typing import Any

from rollouts_core.data.sources import Begin, FaultyRow, FaultyRows, Row, read_rows
from rollouts_core.data.tokenizers import call_text, load_tokenizer, save_tokenizer, train_tokenizer
from rollouts_core.data.turns import stop_tokens
from rollouts_core.environments.environment import beginning_of
from rollouts_core.environments.registry import load_environment
from rollouts_core.errors import BadInput
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.workspace import Work

LEARNT_FROM = ("demonstrations", "preferences", "prompts")
"""A tokenizer is made from these; the held-out rows stay unseen."""
PROMPTS = ("prompts", "heldout")


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, TokenizeSpec), "the planner pairs this stage with its spec"
    tokenizer = tokenizer_of(work, spec)
    shutil.copytree(work.scratch / "tokenizer", work.out / "tokenizer")
    return {"vocab_size": float(len(tokenizer))}


def tokenizer_of(work: Work, spec: TokenizeSpec) -> Any:
    """The tokenizer as it was saved, so that a resumed stage uses the same one."""
    saved = work.scratch / "tokenizer"
    if not saved.exists():
        unfinished = work.scratch / "tokenizer.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        save_tokenizer(_new_tokenizer(work, spec), unfinished)
        unfinished.rename(saved)
    return load_tokenizer(str(saved), None, spec.tokenizer.trust_remote_code)


def beginning(stage: Stage, role: str) -> Begin | None:
    """The function that makes prompts from rows, if the config has an environment."""
    named = stage.external.get("environment")
    if named is None or not role.startswith(PROMPTS):
        return None
    return beginning_of(load_environment(named.location))


def _new_tokenizer(work: Work, spec: TokenizeSpec) -> Any:
    if spec.tokenizer.kind == "pretrained":
        model = work.stage.external["model"]
        tokenizer = load_tokenizer(model.location, model.identity.get("commit"), spec.tokenizer.trust_remote_code)
        stop_tokens(tokenizer)
        return tokenizer
    faulty, problems = list[FaultyRow](), list[str]()
    tokenizer = train_tokenizer(spec.tokenizer, _texts(work, spec, faulty, problems), spec.max_length)
    if faulty or problems:
        raise FaultyRows(faulty, problems)
    return tokenizer


def _texts(work: Work, spec: TokenizeSpec, faulty: list[FaultyRow], problems: list[str]) -> Iterator[str]:
    """The texts of every row. Problems of rows and sources are noted, so that all are told together."""
    for role, source in spec.sources.items():
        learnt = role.startswith(LEARNT_FROM)
        if not learnt and not faulty and not problems:
            continue
        try:
            for row in read_rows(source, work.stage.external[role], beginning(work.stage, role)):
                if isinstance(row, FaultyRow):
                    faulty.append(row)
                elif learnt:
                    yield from texts_of(row)
        except BadInput as error:
            problems += error.problems


def texts_of(row: Row) -> Iterator[str]:
    """All texts of a row, with its calls and the names of its tools."""
    yield from (message.content for message in row.messages)
    yield from (call_text(call) for message in row.messages for call in message.tool_calls)
    yield from (tool["function"]["name"] for tool in row.tools)
    yield from row.plain
    if row.rejected is not None:
        yield from texts_of(row.rejected)
