"""Looks for input that is answered by a traceback instead of a message: `python -m tests.fuzz TARGET [SECONDS] [SEED]`.

Each target takes good input, changes it at random places, and hands it to the function that reads it. Allowed is what
that function promises: a value, or its own error with a message. Anything else is printed with the input that did it.
"""

import copy
import json
import os
import random
import string
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.inventory import load_inventory
from rollouts_core.config.loading import from_data, load_config, to_data
from rollouts_core.data.sources import rows_of
from rollouts_core.errors import RolloutsError
from rollouts_core.store.manifest import decode_manifest
from tests.addition import MODEL

SECONDS = 60.0
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -0.0, 1e308, float("nan"), float("inf"), "", " ", "x",
    "x" * 5000,
    "\0", "\ud800", "é漢🙂", "../..", "a:b", "{}", "[]", "null", "-1", "1e5", [], {}, [[]], [{}], [None], {"": None},
    {"kind": "jsonl"}, {"kind": "nothing"}, {"kind": 3}, {"kind": None, "path": []}, ["a", 1, None],
]  # fmt: skip
FILE = {"kind": "jsonl", "path": "rows.jsonl"}
CONFIG: dict[str, Any] = {
    "name": "fuzz", "model": dict(MODEL),
    "data": {"demonstrations": FILE, "preferences": FILE, "prompts": FILE, "heldout": FILE, "max_length": 12,
             "tokenization": {"parts": 2}},
    "sft": {"steps": 2}, "dpo": {"beta": 0.2}, "environment": {"name": "calculator"},
    "rl": {"steps": 4, "algorithm": {"kind": "grpo"}, "max_new_tokens": 3,
           "rollouts": {"generation": "partial", "max_staleness": 1}},
    "engine": {"kind": "sglang", "replicas": 2, "machines": {"names": ["gpu1"], "gpus": 2}},
    "backend": {"processes": 2, "lora": {"rank": 2}},
    "machine": {"kind": "ssh", "name": "gpu1", "gpus": 2, "device": "cpu"},
    "evaluation": {"max_new_tokens": 3, "pass_at": [1]},
    "served": [{"name": "judge", "model": {"kind": "pretrained", "name": "a/b"}}], "store": {"path": "x"},
    "results": {"artifacts": ["rl"]}, "tracking": {"tensorboard": True},
}  # fmt: skip
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], "answer": "2"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "1"}]},
                  {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
                  {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"}],
     "tools": [{"type": "function", "function": {"name": "add"}}]},
    {"prompt": "1+1=", "completion": "2"}, {"text": "1+1=2"}, {"prompt": "1", "chosen": "2", "rejected": "3"},
    {"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]},
    {"instruction": "a", "input": "b", "output": "c"}, {"conversations": [{"from": "human", "value": "a"}]},
]  # fmt: skip
MANIFEST: dict[str, Any] = {
    "artifact": {"stage": "sft", "key": "0" * 64}, "files": [{"path": "a/b", "size": 3, "sha256": "0" * 64}],
    "provenance": {"version": 1, "spec": {}, "inputs": {}, "external": {}, "code": {}, "git_commit": None,
                   "libraries": {}, "host": {}, "started_at": "", "seconds": 1.0, "summary": {}},
}  # fmt: skip
INVENTORY = {
    "gpu1": {"host": "a", "port": 22, "gpus": 2, "labels": ["x"], "jump": "gpu2", "slurm": {"hours": 1.5, "cpus": 2}},
    "gpu2": {"host": "b"},
}  # fmt: skip


def main(target: str, seconds: float = SECONDS, seed: int = 0) -> int:
    """Exit status 1 where something was found."""
    draw, end, tried, found = random.Random(seed), time.monotonic() + seconds, 0, 0
    while time.monotonic() < end and found < 10:
        tried += 1
        given = TARGETS[target][0](draw)
        try:
            TARGETS[target][1](given)
        except RolloutsError as error:
            if not str(error).strip():
                print("an error without a message", repr(given)[:2000])
                found += 1
        except Exception:
            found += 1
            traceback.print_exc()
            print(f"  {target}: {given!r:.2000}")
    print(f"{target}: {tried:,} inputs in {seconds:.0f} s, seed {seed}: {found} were answered by something else")
    return 1 if found else 0


def changed(value: Any, draw: random.Random) -> Any:
    """A copy with one to three places changed: replaced, removed, added, doubled or renamed."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(value))
        holder, key = draw.choice(places)
        match draw.randrange(5):
            case 0 | 1:
                holder[key] = _value(draw)
            case 2:
                del holder[key]
            case 3 if isinstance(holder, dict):
                holder[draw.choice(["", "kind", "x", "path", "name", "\0", "é"])] = _value(draw)
            case 4 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case _:
                holder[key] = [copy.deepcopy(holder[key])]
        if not list(_places(value)):
            break
    return value


def _value(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(VALUES))


def _places(value: Any) -> Any:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(inside):
        yield value, key
        yield from _places(part)


def _noise(draw: random.Random) -> str:
    return "".join(draw.choice(string.printable) for _ in range(draw.randint(0, 12)))


def _override(draw: random.Random) -> list[str]:
    """As `--set` has it."""

    def names(data: Any, before: str = "") -> list[str]:
        inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
        return [name for key, part in inside for name in (f"{before}{key}", *names(part, f"{before}{key}."))]

    value = draw.choice([*(json.dumps(value) for value in VALUES[:28] if value != "\ud800"), _noise(draw), "{", "[1,"])
    name = draw.choice([*names(CONFIG), _noise(draw), "rl..steps", ".", "rl.steps.x"])
    return [
        draw.choice([f"{name}={value}", name, f"={value}", f"{name}={value}={value}"])
        for _ in range(draw.randint(1, 3))
    ]


def _config(data: Any) -> None:
    config = from_data(data)
    assert from_data(to_data(config)) == config, "a config that is written and read again is another one"


def _set(overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**CONFIG, "served": [], "dpo": None, "environment": None}))
        load_config(path, overrides)


def _inventory(tables: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machines.toml"
        path.write_bytes(_toml(tables).encode(errors="surrogatepass"))
        os.environ["ROLLOUTS_MACHINES"] = str(path)
        load_inventory()


def _toml(tables: Any) -> str:
    lines = []
    for name, table in tables.items() if isinstance(tables, dict) else []:
        fields = table if isinstance(table, dict) else {}
        nested = {key: value for key, value in fields.items() if isinstance(value, dict)}
        lines.append(f"[{json.dumps(str(name))}]")
        lines += [f"{json.dumps(str(key))} = {json.dumps(value)}" for key, value in fields.items() if key not in nested]
        for key, value in nested.items():
            lines.append(f"[{json.dumps(str(name))}.{json.dumps(str(key))}]")
            lines += [f"{json.dumps(str(field))} = {json.dumps(entry)}" for field, entry in value.items()]
    return "\n".join(lines)


TARGETS: dict[str, tuple[Callable[[random.Random], Any], Callable[[Any], Any]]] = {
    "config": (lambda draw: changed(CONFIG, draw), _config),
    "set": (_override, _set),
    "rows": (
        lambda draw: [changed(draw.choice(ROWS), draw) for _ in range(3)],
        lambda rows: rows_of(rows, "rows.jsonl"),
    ),
    "manifest": (
        lambda draw: json.dumps(changed(MANIFEST, draw)).encode(errors="replace"),
        lambda content: decode_manifest(content, "a manifest"),
    ),
    "inventory": (lambda draw: changed(INVENTORY, draw), _inventory),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *(float(word) for word in sys.argv[2:3]), *(int(word) for word in sys.argv[3:4])))
