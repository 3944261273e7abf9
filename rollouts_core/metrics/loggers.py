"""Metrics: one JSON object a line, under the names users know from TRL and verl."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from rollouts_core.types import Sample

Record = Mapping[str, Any]


class MetricsLogger(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step, counted from 1."""


class JSONLLogger:
    """Appends to a file; each line is flushed, so that whoever follows the file sees it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()


def answer_record(sample: Sample) -> dict[str, Any]:
    """The fields that every file of samples has: row, prompt, answer, reference and reward."""
    return {
        "source_row": sample.prompt.source_row,
        "prompt": sample.prompt.text,
        "response": sample.response,
        "answer": sample.prompt.metadata.get("answer"),
        "reward": sample.reward,
    }


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file, none when it is absent."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def end_lines(path: Path) -> None:
    """Drop what a killed process left half-written: it must not run into the next line."""
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def keep_steps(path: Path, last_step: int) -> None:
    """Drop what was logged after a step, and a half-written last line: training goes on from that step."""
    kept = [record for record in read_jsonl(path) if record["step"] <= last_step]
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept))
    unfinished.replace(path)
