"""Files that others read while they are written."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a file atomically: a reader never sees a part of it."""
    write_text(path, json.dumps(value))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist or can't be read."""
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value


def write_text(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def add_record(path: Path, record: dict[str, Any]) -> None:
    """A line of JSON at the end."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
