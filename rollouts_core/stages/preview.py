"""A preview of training data: rows tokenized as the tokenize stage does it, and not kept.

Decision: a preview reads the first rows of each source and no more, so that it answers in seconds whatever the size of
the data. It says how many it has read. The tokenizer is the cached one, or the model's own, or made from these rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from rollouts_core.config import Source
from rollouts_core.data.sources import FaultyRow, FaultyRows, Row, read_rows, told
from rollouts_core.data.token_text import token_pieces
from rollouts_core.data.tokenizers import load_tokenizer, train_tokenizer
from rollouts_core.data.tokenizing import tokenize_examples, tokenize_preferences, tokenize_prompts
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.tokenizer import LEARNT_FROM, beginning, texts_of
from rollouts_core.store.store import Store

BINS = 10


@dataclass(frozen=True)
class Piece:
    """A token as people read it."""

    text: str
    learnt: bool
    special: bool


@dataclass(frozen=True)
class Shown:
    """A sequence, token by token."""

    name: str
    """The row, counted from 0; for a preference also the answer."""
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class SourcePreview:
    role: str
    """demonstrations, preferences, prompts or heldout; those of a mixture numbered from 1."""
    rows: int
    """Read; further ones were not, where `more`."""
    more: bool
    sequences: int
    dropped: int
    """Rows that are too long, and left out as `data.overlong` says."""
    cut: int
    """Sequences that are too long, and cut."""
    tokens: int
    learnt: int
    """Tokens that are learnt; of prompts none."""
    lengths: Sequence[tuple[int, int, int]]
    """A histogram: from, to (tokens, the last one excluded) and how many sequences."""
    problems: Sequence[str]
    examples: Sequence[Shown]


def preview(stage: Stage, store: Store, rows: int, examples: int) -> list[SourcePreview]:
    """A preview of the first `rows` rows of each source, `examples` token by token. Raises `BadInput` as reading them
    does."""
    spec = stage.spec
    assert isinstance(spec, TokenizeSpec), "the plan's tokenize stage"
    read = {role: list(islice(_rows(stage, role, source), rows + 1)) for role, source in spec.sources.items()}
    tokenizer = _tokenizer(stage, spec, store, read)
    return [_previewed(role, found, rows, examples, tokenizer, spec) for role, found in read.items()]


def _rows(stage: Stage, role: str, source: Source) -> Iterator[Row | FaultyRow]:
    return read_rows(source, stage.external[role], beginning(stage, role))


def _tokenizer(stage: Stage, spec: TokenizeSpec, store: Store, read: dict[str, list[Row | FaultyRow]]) -> Any:
    trusted = spec.tokenizer.trust_remote_code
    if store.has(stage.artifact):
        return load_tokenizer(str(store.open(stage.artifact) / "tokenizer"), None, trusted)
    if spec.tokenizer.kind == "pretrained":
        model = stage.external["model"]
        return load_tokenizer(model.location, model.identity.get("commit"), trusted)
    learnt_from = [row for role, found in read.items() if role.startswith(LEARNT_FROM) for row in found]
    texts = (text for row in learnt_from if isinstance(row, Row) for text in texts_of(row))
    return train_tokenizer(spec.tokenizer, texts, spec.max_length)


def _previewed(
    role: str, found: Sequence[Row | FaultyRow], most: int, examples: int, tokenizer: Any, spec: TokenizeSpec
) -> SourcePreview:
    read = found[:most]
    faulty = [row for row in read if isinstance(row, FaultyRow)]
    good = [row for row in read if isinstance(row, Row)]
    table, refused = _table(role, good, tokenizer, spec)
    sequences = [*_sequences(table)]
    kept = len(set(table["source_row"].to_pylist()))
    full = table["full_length"].to_pylist() if "full_length" in table.column_names else []
    lengths = [len(ids) for _, ids, _ in sequences]
    return SourcePreview(
        role=role,
        rows=len(read),
        more=len(found) > most,
        sequences=len(sequences),
        dropped=len(good) - len({row.place for row in refused}) - kept,
        cut=sum(whole > length for whole, length in zip(full, table["length"].to_pylist(), strict=False)),
        tokens=sum(lengths),
        learnt=int(sum(int(mask[1:].sum()) for _, _, mask in sequences)),
        lengths=_histogram(lengths),
        problems=told([*faulty, *refused]),
        examples=[_shown(*sequence, tokenizer) for sequence in sequences[:examples]],
    )


def _table(role: str, rows: Sequence[Row], tokenizer: Any, spec: TokenizeSpec) -> tuple[pa.Table, Sequence[FaultyRow]]:
    """The rows as a table, without those that are refused, which come beside it."""
    try:
        return _tokenized(role, rows, tokenizer, spec), ()
    except FaultyRows as error:
        refused = {row.place for row in error.rows}
        return _tokenized(role, [row for row in rows if row.place not in refused], tokenizer, spec), error.rows


def _tokenized(role: str, rows: Sequence[Row], tokenizer: Any, spec: TokenizeSpec) -> pa.Table:
    if role.startswith("demonstrations"):
        return tokenize_examples(rows, tokenizer, spec.max_length, spec.overlong, spec.learnt_roles)
    if role.startswith("preferences"):
        return tokenize_preferences(rows, tokenizer, spec.max_length, spec.overlong)
    return tokenize_prompts(rows, tokenizer, spec.max_length - 1, spec.overlong)


def _sequences(table: pa.Table) -> Iterator[tuple[str, list[int], Any]]:
    """Name, token ids and loss mask of each."""
    for row in table.to_pylist():
        name = f"row {row['source_row']}"
        if "chosen_ids" in row:
            for answer in ("chosen", "rejected"):
                yield f"{name}, {answer}", row[f"{answer}_ids"], np.array(row[f"{answer}_mask"])
        else:
            yield name, row["input_ids"], np.array(row.get("loss_mask") or [0] * len(row["input_ids"]))


def _shown(name: str, ids: list[int], mask: Any, tokenizer: Any) -> Shown:
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    pieces = zip(token_pieces(tokenizer, ids), ids, mask, strict=True)
    return Shown(name, [Piece(text, bool(learnt), token in special) for text, token, learnt in pieces])


def _histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    if not lengths:
        return []
    first, last = min(lengths), max(lengths)
    step = -(-(last - first + 1) // BINS)
    begins = range(first, last + 1, step)
    return [(begin, begin + step, sum(begin <= length < begin + step for length in lengths)) for begin in begins]
