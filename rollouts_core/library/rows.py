"""Data of a script: rows, a file, or a data set of `datasets`.

Rows are what the pipeline's files hold (see `data.sources`): conversations, prompts and completions, preferences.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from rollouts_core.config import Arrow, Jsonl, Parquet
from rollouts_core.data.prompt_table import prompts_in
from rollouts_core.data.sources import Begin, FaultyRow, FaultyRows, Row, load_rows, rows_of
from rollouts_core.data.tokenized import Example, examples_in, preferences_in
from rollouts_core.data.tokenizing import tokenize_examples, tokenize_preferences, tokenize_prompts
from rollouts_core.errors import BadInput
from rollouts_core.library.models import LanguageModel
from rollouts_core.store.identity import identify_source
from rollouts_core.types import Prompt

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A JSONL, Parquet or Arrow file; or rows, of a list or of a data set."""
FILES = {".jsonl": Jsonl, ".json": Jsonl, ".parquet": Parquet, ".arrow": Arrow}
T = TypeVar("T")


def examples_from(data: Rows, policy: LanguageModel, argument: str = "data") -> list[Example]:
    """Examples of demonstrations. The assistant's turns are learnt. Raises `BadInput` with every row that can't be.

    Examples:
        >>> examples = rc.examples_from("demonstrations.jsonl", policy)
        >>> examples[0].tokens.shape == examples[0].loss_mask.shape
        True
    """
    rows = rows_from(data, argument)
    return _tokenized(examples_in, tokenize_examples, [row for row in rows if row.rejected is None], policy, argument)


def preferences_from(data: Rows, policy: LanguageModel, argument: str = "data") -> list[tuple[Example, Example]]:
    """Pairs of a chosen and a rejected answer. Raises `BadInput` with every row that can't be one.

    Examples:
        >>> rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
        >>> len(rc.preferences_from(rows, policy))
        1
    """
    rows = rows_from(data, argument)
    if others := [FaultyRow(row.place, "has no 'chosen' and 'rejected'") for row in rows if row.rejected is None]:
        raise FaultyRows(others)
    return _tokenized(preferences_in, tokenize_preferences, rows, policy, argument)


def prompts_from(
    data: Rows | Sequence[Prompt], policy: LanguageModel, argument: str = "prompts", begin: Begin | None = None
) -> list[Prompt]:
    """Prompts of rows. The other columns become metadata, which rewards read. `begin`: see `data.sources`.

    Raises `BadInput` with every row that can't be one.

    Examples:
        >>> rows = [{"messages": [{"role": "user", "content": "2+2="}], "answer": "4"}]
        >>> rc.prompts_from(rows, policy)[0].metadata["answer"]
        '4'
    """
    if isinstance(data, Sequence) and not isinstance(data, str) and data and isinstance(data[0], Prompt):
        return [one for one in data if isinstance(one, Prompt)]
    rows = rows_from(data, argument, begin)  # type: ignore[arg-type]
    return _tokenized(prompts_in, tokenize_prompts, rows, policy, argument)


def rows_from(data: Rows, argument: str, begin: Begin | None = None) -> list[Row]:
    """Checked rows. Raises `BadInput`, naming the argument, or the file and its lines."""
    if isinstance(data, str | Path):
        return _of_file(Path(data), argument, begin)
    if not isinstance(data, Iterable):
        raise BadInput(
            f"{argument}: a {type(data).__name__} can't be read as rows: give a list of dicts, a data set or a file"
        )
    values = list(data)
    if not values:
        raise BadInput(f"{argument}: there are no rows; a generator can be read only once")
    for place, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise BadInput(
                f"{argument}: row {place} is a {type(value).__name__}, not a dict: write "
                "{'messages': [{'role': 'user', 'content': ...}]}, or {'prompt': ...} for plain text"
            )
    return rows_of(values, argument, begin)


def _of_file(path: Path, argument: str, begin: Begin | None) -> list[Row]:
    if path.suffix not in FILES:
        known = ", ".join(FILES)
        raise BadInput(
            f"{argument}: {path} is not a file of rows ({known}); for a data set, pass what load_dataset gives"
        )
    source = FILES[path.suffix](path=path)
    return load_rows(source, identify_source(source), begin)


def _tokenized(
    read: Callable[[pa.Table], list[T]],
    tokenize: Callable[[Sequence[Row], Any, int], pa.Table],
    rows: Sequence[Row],
    policy: LanguageModel,
    argument: str,
) -> list[T]:
    if not rows:
        raise BadInput(f"{argument}: there are no rows of this kind")
    return read(tokenize(rows, policy.tokenizer, policy.longest))
