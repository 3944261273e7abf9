"""The rollout viewer: a directory of static files that opens from disk.

Decision: a page opened from disk may not fetch files, but it may load scripts. So an index of all rollouts (what lists
and filters need) is one script, and the rollouts themselves lie in scripts of a few each, loaded when they are looked
at: ten thousand rollouts open as fast as a few.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts_core.observe.assets import asset

VIEWER = "viewer"
"""Its directory in a run's results."""
CHUNK = 40
"""Rollouts in one script."""
PREVIEW = 160
"""Characters of prompt and answer that the list shows and the search reads."""
ASSETS = ("viewer.js", "uPlot.iife.min.js")
STYLES = ("uPlot.min.css", "theme.css", "viewer.css")

Record = Mapping[str, Any]


def write_viewer(results: Path, run_id: str) -> Path | None:
    """Write `viewer/index.html` and its data from a run's `rollouts.jsonl`; None where the run has none."""
    source = results / "rollouts.jsonl"
    if not source.is_file() or not source.stat().st_size:
        return None
    directory = results / VIEWER
    (directory / "data").mkdir(parents=True, exist_ok=True)
    with source.open() as lines:
        index = _write_chunks(directory / "data", (json.loads(line) for line in lines))
    content = {"run": run_id, "chunk": CHUNK, **index}
    (directory / "data" / "index.js").write_text(f"const INDEX = {json.dumps(content, separators=(',', ':'))};\n")
    (directory / "index.html").write_text(asset("viewer.html"))
    (directory / "viewer.css").write_text("".join(map(asset, STYLES)))
    for name in ASSETS:
        (directory / name).write_text(asset(name))
    return directory / "index.html"


def _write_chunks(directory: Path, records: Iterator[Record]) -> dict[str, list[Any]]:
    """Write the rollouts in chunks; the columns of the index come back."""
    columns: dict[str, list[Any]] = {name: [] for name in _summary({})}
    chunk: list[Record] = []
    written = 0
    for record in records:
        for name, value in _summary(record).items():
            columns[name].append(value)
        chunk.append(record)
        if len(chunk) == CHUNK:
            _write_chunk(directory, written, chunk)
            chunk, written = [], written + 1
    if chunk:
        _write_chunk(directory, written, chunk)
    return columns


def _write_chunk(directory: Path, number: int, chunk: Iterable[Record]) -> None:
    content = json.dumps(list(chunk), separators=(",", ":"))
    (directory / f"chunk-{number:05d}.js").write_text(f"arrived({number}, {content});\n")


def _summary(record: Record) -> dict[str, Any]:
    """What the index tells of a rollout."""
    advantages = record.get("advantages") or []
    messages = record.get("messages") or []
    return {
        "step": record.get("step"),
        "group": record.get("group"),
        "reward": record.get("reward"),
        "stop": record.get("stop") or record.get("status"),
        "learnt": sum(record.get("loss_mask") or []),
        "calls": sum(len(message.get("tool_calls") or []) for message in messages),
        "advantage": round(sum(advantages) / len(advantages), 4) if advantages else None,
        "prompt": (record.get("prompt") or "")[-PREVIEW:],
        "answer": (record.get("response") or "")[:PREVIEW],
    }
