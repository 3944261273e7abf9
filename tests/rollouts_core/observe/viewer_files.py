"""What the rollout viewer's scripts hold."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any


def index_of(viewer: Path) -> dict[str, Any]:
    content = (viewer / "data" / "index.js").read_text()
    index: dict[str, Any] = json.loads(content.removeprefix("listed(").removesuffix(");\n"))
    return index


def chunks_of(viewer: Path) -> list[list[dict[str, Any]]]:
    found = []
    for number, path in enumerate(sorted((viewer / "data").glob("chunk-*.js"))):
        packed = path.read_text().removeprefix(f'arrived({number}, "').removesuffix('");\n')
        found.append(json.loads(gzip.decompress(base64.b64decode(packed)))["rollouts"])
    return found


def rollout(number: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    return {
        "step": 1 + number // 8, "group": number // 4 % 2, "sample": number % 4, "reward": float(number % 2),
        "status": "completed", "stop": None, "tokens": [5, 6, 7], "loss_mask": [0, 1, 1], "advantages": [0.5, -1.5],
        "prompt": "p" * 500, "response": "</script>\u2028", "messages": [{"role": "assistant", "tool_calls": [call]}],
    }  # fmt: skip
