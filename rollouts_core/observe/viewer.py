"""The rollout viewer: a directory of static files that opens from disk.

Decision: a page opened from disk may not fetch files, but it may load scripts. So the index of all rollouts (for lists
and filters) is one script, and the rollouts are in scripts of a few each, which are loaded when they are looked at: ten
thousand rollouts open as fast as a few. The content of such a script is compressed; browsers unpack gzip.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollouts_core.observe.assets import asset
from rollouts_core.rollout.record_files import read_rollouts

VIEWER = "viewer"
"""Its directory in a run's results."""
CHUNK = 40
CHUNK_TOKENS = 40_000
"""Rollouts in one script, at most; the last of them may go beyond the tokens."""
SHOWN = 1000
"""Log-probabilities are whole numbers of a thousandth."""
LEVEL = 4
"""gzip's level."""
PREVIEW = 160
"""Characters of prompt and answer that the list shows and the search reads."""
ASSETS = ("viewer.js", "uPlot.iife.min.js")
STYLES = ("uPlot.min.css", "theme.css", "viewer.css")

Record = Mapping[str, Any]


def write_viewer(results: Path, run_id: str) -> Path | None:
    """Write `viewer/index.html` and its data from a run's record of rollouts; None where the run has none."""
    viewer = Viewer(results, run_id)
    for record in read_rollouts(results):
        viewer.add(record)
    return viewer.write()


class Viewer:
    """Written again and again while rollouts are added; what is full is not written again."""

    def __init__(self, results: Path, run_id: str) -> None:
        self._directory, self._run_id = results / VIEWER, run_id
        self._columns: dict[str, list[Any]] = {name: [] for name in _summary({})}
        self._first: list[int] = []
        """For each chunk, the place of its first rollout."""
        self._chunk: list[Record] = []
        self._tokens = 0

    def add(self, record: Record) -> None:
        if not self._chunk:
            self._first.append(len(self._columns["step"]))
        for name, value in _summary(record).items():
            self._columns[name].append(value)
        self._chunk.append(record)
        self._tokens += len(record.get("tokens") or ())
        if len(self._chunk) == CHUNK or self._tokens >= CHUNK_TOKENS:
            self._write_chunk()
            self._chunk, self._tokens = [], 0

    def write(self, live: bool = False) -> Path | None:
        """A `live` one reads its index again by itself, where a server serves it."""
        if not self._first:
            return None
        data = self._directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        if self._chunk:
            self._write_chunk()
        content = {"run": self._run_id, "live": live, "chunks": self._first, **self._columns}
        _replace(data / "index.js", f"listed({json.dumps(content, separators=(',', ':'))});\n")
        (self._directory / "index.html").write_text(asset("viewer.html"))
        (self._directory / "viewer.css").write_text("".join(map(asset, STYLES)))
        for name in ASSETS:
            (self._directory / name).write_text(asset(name))
        return self._directory / "index.html"

    def _write_chunk(self) -> None:
        number = len(self._first) - 1
        content = gzip.compress(json.dumps(_packed(self._chunk), separators=(",", ":")).encode(), LEVEL, mtime=0)
        path = self._directory / "data" / f"chunk-{number:05d}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, f'arrived({number}, "{base64.b64encode(content).decode()}");\n')


def _packed(chunk: Sequence[Record]) -> dict[str, Any]:
    """Rollouts in a smaller form: each token's text once, log-probabilities rounded, no text that the messages have."""
    places: dict[tuple[int, str], int] = {}
    rollouts = []
    for record in chunk:
        told = dict(record)
        if record.get("messages"):
            told = {name: value for name, value in record.items() if name not in ("prompt", "response")}
        if "pieces" in record:
            pairs = zip(told.pop("tokens"), told.pop("pieces"), strict=True)
            told["at"] = [places.setdefault(pair, len(places)) for pair in pairs]
            told["rollout_log_probs"] = np.rint(np.multiply(record["rollout_log_probs"], SHOWN)).astype(int).tolist()
        rollouts.append(told)
    return {"pieces": list(places), "rollouts": rollouts}


def _replace(path: Path, content: str) -> None:
    """Write a file under another name and rename it, because a browser may be reading it."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(content)
    unfinished.replace(path)


def _summary(record: Record) -> dict[str, Any]:
    """The entry of a rollout in the index."""
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
