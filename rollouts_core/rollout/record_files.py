"""The rollouts that a run keeps, in a directory: `rollouts.jsonl`, and before it `rollouts-00000.jsonl.xz` and so on.

Decision: a file longer than PART_BYTES is compressed, and a new one begun. So a short record is one file that any tool
reads, and a long one takes about 5 bytes a token instead of 40. xz comes with Python, finds repetitions over a whole
answer, and pandas and `datasets` know it by the file's name.

Steps ascend through the files. If a file is there both plain and compressed, the compressed one is complete.
"""

import json
import lzma
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

LATEST = "rollouts.jsonl"
PARTS = "rollouts-*.jsonl"
PACKED = ".xz"
PART_BYTES = 8 * 2**20
PRESET = 3
"""xz's preset: a window of 4 MiB, which holds several long answers."""


class RolloutRecord:
    """Appends to the record of a directory; each line is flushed, so that whoever follows the file sees it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _tidy(directory)
        self._directory = directory
        self._file: IO[str] = (directory / LATEST).open("a")

    def log(self, rollout: Mapping[str, Any], step: int) -> None:
        if self._file.tell() >= PART_BYTES:
            self._file.close()
            _pack_latest(self._directory)
            self._file = (self._directory / LATEST).open("a")
        self._file.write(json.dumps({"step": step, **rollout}, separators=(",", ":")) + "\n")
        self._file.flush()


def record_files(directory: Path) -> list[Path]:
    """The files of a record, the earliest first."""
    packed = sorted(directory.glob(PARTS + PACKED))
    plain = [path for path in sorted(directory.glob(PARTS)) if _packed(path) not in packed]
    return [*packed, *plain, *([directory / LATEST] if (directory / LATEST).is_file() else [])]


def read_rollouts(directory: Path) -> Iterator[dict[str, Any]]:
    """All complete records, in order; none if there is no file."""
    for path in record_files(directory):
        yield from map(json.loads, _lines(path))


def keep_rollouts(directory: Path, last_step: int) -> None:
    """Drop what was recorded after a step, and a half-written last line: training goes on from that step."""
    _tidy(directory)
    for path in reversed(record_files(directory)):
        lines = list(_lines(path))
        kept = [line for line in lines if json.loads(line)["step"] <= last_step]
        if path.suffix == PACKED and len(kept) == len(lines):
            return
        unfinished = directory / f"{LATEST}.unfinished"
        unfinished.write_text("".join(kept))
        unfinished.replace(directory / LATEST)
        if path.suffix == PACKED:
            path.unlink()


def append_record(directory: Path, later: Path) -> None:
    """Move the record of the directory `later` behind that of `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in record_files(later):
        latest = directory / LATEST
        if latest.is_file() and latest.stat().st_size and (path.suffix == PACKED or _is_full(latest)):
            _pack_latest(directory)
        if path.suffix == PACKED:
            path.replace(directory / _next_part(directory).with_suffix(f".jsonl{PACKED}").name)
            continue
        with latest.open("ab") as joined, path.open("rb") as more:
            shutil.copyfileobj(more, joined)
        path.unlink()


def _lines(path: Path) -> Iterator[str]:
    """The complete ones, with their ends."""
    with lzma.open(path, "rt") if path.suffix == PACKED else path.open() as file:
        yield from (line for line in file if line.endswith("\n"))


def _is_full(path: Path) -> bool:
    return path.stat().st_size >= PART_BYTES


def _pack_latest(directory: Path) -> None:
    part = _next_part(directory)
    (directory / LATEST).rename(part)
    _pack(part)


def _next_part(directory: Path) -> Path:
    return directory / f"rollouts-{len(list(directory.glob(PARTS + PACKED))):05d}.jsonl"


def _pack(part: Path) -> None:
    unfinished = part.with_suffix(".unfinished")
    with part.open("rb") as source, lzma.open(unfinished, "wb", preset=PRESET) as target:
        shutil.copyfileobj(source, target)
    unfinished.replace(_packed(part))
    part.unlink()


def _packed(part: Path) -> Path:
    return part.with_name(part.name + PACKED)


def _tidy(directory: Path) -> None:
    """Finish what a killed process had begun to compress."""
    for part in sorted(directory.glob(PARTS)):
        if _packed(part).exists():
            part.unlink()
        else:
            _pack(part)
