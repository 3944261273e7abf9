"""The task that tests train on: sums of two one-digit numbers, and a model small enough to learn it in seconds."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROBLEMS = [(a, b) for a in range(10) for b in range(10)]
MODEL: dict[str, Any] = {
    "kind": "scratch", "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 64,
}  # fmt: skip


def write_addition(directory: Path, problems: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """A JSONL file per role; only demonstrations hold the answer's turn."""
    for role, chosen in problems.items():
        with (directory / f"{role}.jsonl").open("w") as file:
            for a, b in chosen:
                messages = [{"role": "user", "content": f"{a}+{b}="}]
                if role == "demonstrations":
                    messages.append({"role": "assistant", "content": f"{a + b:02d}"})
                file.write(json.dumps({"messages": messages, "answer": f"{a + b:02d}"}) + "\n")
