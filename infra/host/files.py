"""Files that others read while they are written."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def add_record(path: Path, record: dict[str, Any]) -> None:
    """A line of JSON at the end."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
