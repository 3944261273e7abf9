"""Configs (JSON, Python, and what their schema allows), `--set`, data rows, manifests and inventories."""

import io
import json
import os
import random
import string
import tempfile
import tokenize
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from infra.inventory import load_inventory
from rollouts_core.config import Jsonl, PipelineConfig
from rollouts_core.config.loading import from_data, load_config, to_data
from rollouts_core.data.chat import encode_texts
from rollouts_core.data.sources import load_rows, rows_of
from rollouts_core.store.identity import External
from rollouts_core.store.manifest import decode_manifest
from tests.addition import MODEL
from tests.fuzz.changes import VALUES, any_value, changed, changed_bytes
from tests.fuzz.target import Target, function
from tests.rollouts_core.rollout.test_episodes import TOKENIZER

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
SMALL: dict[str, Any] = {
    "name": "small", "model": {"kind": "pretrained", "name": "a/b"}, "data": {**CONFIG["data"], "max_length": 2048},
}  # fmt: skip
SCHEMA: dict[str, Any] = TypeAdapter(PipelineConfig).json_schema()
EXAMPLES = ("arithmetic", "calculator", "smollm2")
TEXTS = ["a", "gpu1", "a/b", "rows.jsonl", "3", "0:30", "", "é", "x" * 300, "served://judge/v1", "s3://bucket/x", "~"]


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


def _config_file(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_bytes(content)
        load_config(path)


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


def _allowed(draw: random.Random) -> Any:
    """A small config with up to three parts as the schema allows them; now and then all of them."""
    parts = SCHEMA["properties"]
    if draw.random() < 0.2:
        return _by_schema(SCHEMA, draw)
    return {**SMALL, **{name: _by_schema(parts[name], draw) for name in draw.sample(list(parts), draw.randint(1, 3))}}


def _by_schema(schema: dict[str, Any], draw: random.Random) -> Any:
    """What the schema allows, most of the time: optional fields are there or not, numbers are at an edge."""
    if "$ref" in schema:
        return _by_schema(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], draw)
    if draw.random() < 0.01:
        return any_value(draw)
    if options := schema.get("anyOf", schema.get("oneOf")):
        return _by_schema(draw.choice(options), draw)
    if "const" in schema or "enum" in schema:
        return draw.choice(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "object":
            share, needed = draw.choice([0.05, 0.2, 0.5]), {"kind", *schema.get("required", ())}
            fields = {
                name: _by_schema(part, draw)
                for name, part in schema.get("properties", {}).items()
                if name in needed or draw.random() < share
            }
            further = schema.get("additionalProperties")
            return fields | ({draw.choice(TEXTS): _by_schema(further, draw)} if isinstance(further, dict) else {})
        case "array":
            count = schema.get("minItems", 0) + draw.randrange(3)
            return [_by_schema(schema.get("items", {}), draw) for _ in range(count)]
        case "integer" | "number":
            return _number(schema, draw)
        case "boolean":
            return draw.random() < 0.5
        case "null":
            return None
        case "string":
            return draw.choice(TEXTS)
    return any_value(draw)


def _number(schema: dict[str, Any], draw: random.Random) -> float:
    step = 1 if schema["type"] == "integer" else 0.25
    least = schema.get("minimum", schema.get("exclusiveMinimum", -1) + step)
    most = schema.get("maximum", schema.get("exclusiveMaximum", least + 2**40) - step)
    number: float = draw.choice([least, most, least + step, least + 4 * step])
    return number


def _python(draw: random.Random) -> str:
    """An example's source with up to three words of it changed for others, for values, or for nothing."""
    source = (Path(__file__).parents[2] / "configs" / f"{draw.choice(EXAMPLES)}.py").read_text()
    words = [(word.type, word.string) for word in tokenize.generate_tokens(io.StringIO(source).readline)]
    begins = next(
        place for place, word in enumerate(words) if word[1] == "PipelineConfig" and words[place + 1][1] == "("
    )
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(begins, len(words))
        other = draw.choice(words[begins:])
        value = (tokenize.NAME, repr(any_value(draw)).replace("inf", "float('inf')").replace("nan", "float('nan')"))
        words[place] = draw.choice([other, value, (tokenize.NAME, "")])
    return tokenize.untokenize(words)


def _read_python(source: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.py"
        path.write_bytes(source.encode(errors="surrogatepass"))
        load_config(path)


def _row_file(draw: random.Random) -> bytes:
    lines = [json.dumps(changed(draw.choice(ROWS), draw) if draw.random() < 0.5 else draw.choice(ROWS)) for _ in "abc"]
    return _damaged("\n".join(lines).encode(), draw)


def _read_row_file(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(content)
        rows = load_rows(Jsonl(path=path), External({}, str(path)))
        encode_texts(TOKENIZER, [message.content for row in rows for message in row.messages])


def _damaged(content: bytes, draw: random.Random) -> bytes:
    return changed_bytes(content, draw) if draw.random() < 0.4 else content


TARGETS: dict[str, Target] = {
    "config": function(lambda draw: changed(CONFIG, draw), _config),
    "config-file": function(lambda draw: changed_bytes(json.dumps(CONFIG).encode(), draw), _config_file),
    "schema": function(_allowed, _config),
    "python": function(_python, _read_python),
    "set": function(_override, _set),
    "rows": function(
        lambda draw: [changed(draw.choice(ROWS), draw) for _ in range(3)], lambda rows: rows_of(rows, "rows.jsonl")
    ),
    "row-files": function(_row_file, _read_row_file),
    "manifest": function(
        lambda draw: _damaged(json.dumps(changed(MANIFEST, draw)).encode(errors="replace"), draw),
        lambda content: decode_manifest(content, "a manifest"),
    ),
    "inventory": function(lambda draw: changed(INVENTORY, draw), _inventory),
}
