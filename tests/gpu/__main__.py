"""Runs all parts, one behind the other: `python -m tests.gpu DIRECTORY [--dry] [--only PART ...]`.

Each part is a process with a deadline, so one that hangs costs itself. Results are written after each row, as
`gpu.json` and `gpu.md`, so the run may be stopped anywhere. Exit status 1 when a part failed or told a wrong result.
"""

import argparse
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu.rows import Row, read

PARTS = {
    "attention": 120, "engine": 100, "curves": 120, "resume": 80, "adapters": 50, "speed": 280, "grpo": 180,
    "ranks": 80, "served": 190,
}  # fmt: skip
"""Names of modules here, in the order of what matters, and the seconds that each may take: 1,200 in all."""
LAST_LINES = 12


@dataclass
class Result:
    part: str
    state: str = "runs"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.state == "done" and all(row.ok is not False for row in self.rows)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dry", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    machine = _machine()
    print(machine, flush=True)
    results: list[Result] = []
    for part in options.only:
        result = Result(part)
        results.append(result)
        _run(result, options.dry, lambda: _write(options.directory, machine, results))
        _write(options.directory, machine, results)
    return 0 if all(result.good for result in results) else 1


def _run(result: Result, dry: bool, on_row: Callable[[], None]) -> None:
    began = time.monotonic()
    command = [sys.executable, "-m", f"tests.gpu.{result.part}", "cpu" if dry else "cuda"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        for line in _lines(process, began + PARTS[result.part]):
            result.last_lines = [*result.last_lines, line][-LAST_LINES:]
            if row := read(line):
                result.rows.append(row)
                print(f"{result.part:<10} {_mark(row):<6} {row.name}: {row.value}", flush=True)
                on_row()
        late = process.poll() is None and time.monotonic() >= began + PARTS[result.part]
        if late:
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    result.seconds = round(time.monotonic() - began, 1)
    result.state = "done" if not status else f"ended with exit status {status}"
    if late:
        result.state = f"had not ended after {PARTS[result.part]} s"
    if result.state == "done":
        result.last_lines = []
    print(f"{result.part:<10} {result.state}, {result.seconds} s", *result.last_lines, sep="\n    ", flush=True)


def _lines(process: "subprocess.Popen[bytes]", end: float) -> Iterator[str]:
    """Until it ends or its time is over."""
    assert process.stdout is not None
    held = b""
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < end:
            if not waiting.select(timeout=max(0.0, end - time.monotonic())):
                return
            if not (got := os.read(process.stdout.fileno(), 65536)):
                return
            *lines, held = (held + got).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)


def _machine() -> str:
    code = "import torch, transformers; print('torch', torch.__version__, '| transformers', transformers.__version__, "
    code += "'|', torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return f"Python {platform.python_version()} | {done.stdout.strip() or done.stderr.strip()[-300:]}"


def _write(directory: Path, machine: str, results: list[Result]) -> None:
    told = {"machine": machine, "parts": [asdict(result) for result in results]}
    lines = [machine, "", "| part | what | result | |", "|---|---|---|---|"]
    for result in results:
        lines += [f"| {result.part} | {row.name} | {row.value} | {_mark(row)} |" for row in result.rows]
        if result.state not in ("runs", "done"):
            lines.append(f"| {result.part} | the part itself | {result.state} | **wrong** |")
    for name, content in (("gpu.json", json.dumps(told, indent=1)), ("gpu.md", "\n".join(lines) + "\n")):
        unfinished = directory / f".{name}"
        unfinished.write_text(content)
        unfinished.replace(directory / name)


def _mark(row: Row) -> str:
    return "" if row.ok is None else "ok" if row.ok else "**wrong**"


if __name__ == "__main__":
    sys.exit(main())
