"""Rows to tables of tokens: a shard at a time, its texts encoded together."""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollouts_core.config import Overlong
from rollouts_core.data.chat import Ids, Tokenized, encode_plain, encode_rendered, encode_texts
from rollouts_core.data.messages import messages_to_json
from rollouts_core.data.rendering import (
    ASSISTANT,
    ChatFormat,
    Rendered,
    chat_format,
    render_conversation,
    render_prompt,
)
from rollouts_core.data.sources import FaultyRow, FaultyRows, Row
from rollouts_core.data.tokenized import EXAMPLES, PREFERENCES, PROMPTS
from rollouts_core.errors import BadInput


def tokenize_examples(
    rows: Sequence[Row],
    tokenizer: Any,
    max_length: int,
    overlong: Overlong = "refuse",
    roles: Sequence[str] = ASSISTANT,
) -> pa.Table:
    """Demonstrations as a table, in which turns of these roles are learnt.

    What is too long is dealt with as `overlong` says, and then teaches something or is dropped. Raises `BadInput` for
    rows that are too long ("refuse"), unreadable or teach nothing.
    """
    made, faulty = _tokenized(rows, tokenizer, roles)
    unknown = tokenizer.unk_token_id
    kept: list[tuple[Row, Tokenized, int]] = []
    for row, example in made:
        full = len(example.ids)
        if full > max_length and overlong != "refuse":
            part = slice(0, max_length) if overlong == "cut_right" else slice(full - max_length, full)
            example = Tokenized(example.ids[part], example.mask[part])
            if overlong == "drop" or not example.mask[1:].any():
                continue
        problem = _problem(example.ids, unknown, max_length)
        if not problem and not example.mask[1:].any():
            problem = f"has no turn of the {' or '.join(roles)} to learn from" if row.messages else "teaches nothing"
        if problem:
            faulty.append(FaultyRow(row.place, problem))
        kept.append((row, example, full))
    _refuse(faulty)
    columns = {
        "input_ids": _lists([example.ids for _, example, _ in kept], np.int32),
        "loss_mask": _lists([example.mask for _, example, _ in kept], np.int8),
        "length": [len(example.ids) for _, example, _ in kept],
        "full_length": [full for _, _, full in kept],
        "source_row": [row.source_row for row, _, _ in kept],
    }
    return pa.table(columns, schema=EXAMPLES)


def tokenize_preferences(
    rows: Sequence[Row], tokenizer: Any, max_length: int, overlong: Overlong = "refuse"
) -> pa.Table:
    """Preferences as a table, both answers of a row with their prompt. One of which either is too long is dropped
    unless it is to be refused: the likelihood of half an answer is not the answer's. Raises `BadInput` as
    `tokenize_examples` does."""
    pairs, faulty = _pairs(rows, tokenizer)
    kept: list[tuple[Row, Tokenized, Tokenized]] = []
    for row, chosen, rejected in pairs:
        if max(len(chosen.ids), len(rejected.ids)) > max_length and overlong != "refuse":
            continue
        for name, example in (("chosen", chosen), ("rejected", rejected)):
            problem = _problem(example.ids, tokenizer.unk_token_id, max_length)
            if problem := problem or ("" if example.mask[1:].any() else "has no turn of the assistant"):
                faulty.append(FaultyRow(row.place, f"{name}: {problem}"))
        kept.append((row, chosen, rejected))
    _refuse(faulty)
    columns = {
        "chosen_ids": _lists([chosen.ids for _, chosen, _ in kept], np.int32),
        "chosen_mask": _lists([chosen.mask for _, chosen, _ in kept], np.int8),
        "rejected_ids": _lists([rejected.ids for *_, rejected in kept], np.int32),
        "rejected_mask": _lists([rejected.mask for *_, rejected in kept], np.int8),
        "length": [len(chosen.ids) + len(rejected.ids) for _, chosen, rejected in kept],
        "source_row": [row.source_row for row, *_ in kept],
    }
    return pa.table(columns, schema=PREFERENCES)


def tokenize_prompts(
    rows: Sequence[Row], tokenizer: Any, max_prompt_length: int, overlong: Overlong = "refuse"
) -> pa.Table:
    """Prompts as a table; an assistant's closing turn is left out, and what is too long is dropped unless it is to be
    refused: half a prompt asks nothing. Raises `BadInput` as `tokenize_examples` does."""
    chat, faulty, unknown = chat_format(tokenizer), list[FaultyRow](), tokenizer.unk_token_id
    asked: list[tuple[Row, str]] = []
    for row in rows:
        try:
            asked.append((row, render_prompt(chat, turns, row.tools) if (turns := prompt_of(row)) else row.plain[0]))
        except BadInput as error:
            faulty += [FaultyRow(row.place, problem) for problem in error.problems]
    kept: list[tuple[Row, Ids]] = []
    for (row, _), ids in zip(asked, encode_texts(tokenizer, [text for _, text in asked]), strict=True):
        if len(ids) > max_prompt_length and overlong != "refuse":
            continue
        if problem := _problem(ids, unknown, max_prompt_length) or ("" if len(ids) else "has no prompt"):
            faulty.append(FaultyRow(row.place, problem))
        kept.append((row, ids))
    _refuse(faulty)
    columns = {
        "input_ids": _lists([ids for _, ids in kept], np.int32),
        "length": [len(ids) for _, ids in kept],
        "source_row": [row.source_row for row, _ in kept],
        "messages": [messages_to_json(prompt_of(row)) for row, _ in kept],
        "metadata": [json.dumps(_metadata(row), default=str) for row, _ in kept],
    }
    return pa.table(columns, schema=PROMPTS)


@contextmanager
def collecting_seldom() -> Iterator[Callable[[], int]]:
    """While open, cyclic garbage is collected only when the yielded function is called, between shards.

    Rows are millions of small objects without cycles, and the collector would look through them again and again.
    """
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        gc.unfreeze()


def prompt_of(row: Row) -> Sequence[Any]:
    """The messages before the answer."""
    asked = row.messages[: row.given] if row.given else row.messages
    return asked[:-1] if asked and asked[-1].role == "assistant" else asked


def _metadata(row: Row) -> Mapping[str, Any]:
    """A prompt that is not a conversation is kept as text, for people to read."""
    return {**row.metadata, "prompt": row.plain[0]} if not row.messages else row.metadata


def _tokenized(
    rows: Sequence[Row], tokenizer: Any, roles: Sequence[str]
) -> tuple[list[tuple[Row, Tokenized]], list[FaultyRow]]:
    """The tokenized sequences in the order of the rows, some rows with several; and the rows that have problems."""
    chat, faulty = chat_format(tokenizer), list[FaultyRow]()
    plain = [row for row in rows if not row.messages]
    encoded_plain = dict(zip(map(id, plain), encode_plain(tokenizer, [row.plain for row in plain]), strict=True))
    rendered: list[tuple[Row, list[Rendered]]] = []
    for row in rows:
        try:
            rendered.append((row, _rendered(chat, row, roles)))
        except BadInput as error:
            faulty += [FaultyRow(row.place, problem) for problem in error.problems]
    encoded = iter(encode_rendered(tokenizer, [text for _, texts in rendered for text in texts]))
    made = []
    for row, texts in rendered:
        made += [(row, encoded_plain[id(row)])] if not row.messages else [(row, next(encoded)) for _ in texts]
    return made, faulty


def _pairs(rows: Sequence[Row], tokenizer: Any) -> tuple[list[tuple[Row, Tokenized, Tokenized]], list[FaultyRow]]:
    """Both answers of each preference, tokenized; and the rows that have problems."""
    faulty = [FaultyRow(row.place, "no 'chosen' and 'rejected'") for row in rows if row.rejected is None]
    answers = [answer for row in rows if row.rejected for answer in (row, row.rejected)]
    made, unreadable = _tokenized(answers, tokenizer, ASSISTANT)
    texts: dict[int, list[Tokenized]] = {}
    for answer, example in made:
        texts.setdefault(id(answer), []).append(example)
    pairs = []
    for row in rows:
        chosen, rejected = texts.get(id(row), []), texts.get(id(row.rejected), [])
        if len(chosen) == len(rejected) == 1:
            pairs.append((row, chosen[0], rejected[0]))
        elif chosen and rejected:
            faulty.append(FaultyRow(row.place, "the chat template renders the turns of its answer in several texts"))
    return pairs, faulty + unreadable


def _rendered(chat: ChatFormat, row: Row, roles: Sequence[str]) -> list[Rendered]:
    return render_conversation(chat, row.messages, row.tools, roles, row.given) if row.messages else []


def _lists(values: Sequence[npt.NDArray[Any]], dtype: type[np.integer[Any]]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    flat = np.concatenate(values) if values else np.array([], dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(dtype, copy=False)))


def _problem(ids: Ids, unknown: int | None, max_length: int) -> str:
    if len(ids) > max_length:
        return f"{len(ids)} tokens, longer than the {max_length} that the context allows: shorten or drop it"
    if unknown is not None and (ids == unknown).any():
        return "has characters that the tokenizer does not know"
    return ""


def _refuse(faulty: Sequence[FaultyRow]) -> None:
    if faulty:
        raise FaultyRows(faulty)
