"""Configs from and to files: Python (`config = PipelineConfig(...)`) or JSON, with `--set` overrides on top.

Decision: one message lists every problem of a config. Problems in plain data are set aside and the rest is checked
again. Otherwise a wrong type in one field would hide an impossible combination of others.
"""

import copy
import json
import runpy
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollouts_core.config import PipelineConfig
from rollouts_core.config.schema import UNION_TAGS, collect_problems, problem_lines
from rollouts_core.errors import BadInput
from rollouts_core.texts import HALF, has_half_characters

_adapter = TypeAdapter(PipelineConfig)


UNIONS = ("model", "data.demonstrations", "data.prompts", "data.heldout", "rl.algorithm")
"""Places in a config where `kind` chooses between parts that have different fields."""


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a config file and apply overrides such as `rl.steps=20`.

    Raises `BadInput` that lists every problem of the file and the overrides.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"no such config file: {path}")
    if path.suffix == ".py":
        config, problems = _from_python(path)
        if not overrides and config is not None and not problems:
            return config
        data = to_data(config) if config is not None else {}
    elif path.suffix == ".json":
        data, problems = _from_json(path), []
    else:
        raise BadInput(f"{path}: a config is a .py or a .json file")
    for override in overrides:
        problems += _apply(override, data)
    if data or not problems:
        config, found = _validated(data)
        problems += [problem for problem in found if problem not in problems]
    if problems or config is None:
        raise BadInput(problems, str(path))
    return config


def save_config(config: PipelineConfig, path: Path) -> None:
    """Write a config as JSON that `load_config` reads back to an equal value."""
    path.write_text(json.dumps(to_data(config), indent=2) + "\n")


def to_data(config: PipelineConfig) -> dict[str, Any]:
    """The config as plain JSON data."""
    data: dict[str, Any] = _adapter.dump_python(config, mode="json")
    return data


def from_data(data: dict[str, Any], where: str = "config") -> PipelineConfig:
    """The config of plain JSON data. Raises `BadInput` that lists every problem."""
    config, problems = _validated(data)
    if config is None:
        raise BadInput(problems, where)
    return config


def _from_python(path: Path) -> tuple[PipelineConfig | None, list[str]]:
    with collect_problems() as problems:
        try:
            config = runpy.run_path(str(path)).get("config")
        except BadInput as error:
            return None, problems or list(error.problems)
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line = frames[-1].lineno if frames else "?"
            return None, [*problems, f"line {line}: {type(error).__name__}: {error}"]
    if not isinstance(config, PipelineConfig):
        return None, [*problems, "defines no `config = PipelineConfig(...)`"]
    return config, problems


def _from_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path}: holds a {type(data).__name__}, not an object with a config's fields")
    return data


def _apply(override: str, data: dict[str, Any]) -> list[str]:
    """Set one `a.b=value` in place; the value is JSON, or else a string.

    Where another kind is another part, the fields of the old one go.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        return [f"--set {override}: write it as part.field=value"]
    *parents, name = path.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if data is None:
            return [f"--set {override}: {parent} is null here"]
        if not isinstance(data, dict):
            return [f"--set {override}: {parent} has no fields"]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if name == "kind" and ".".join(parents) in UNIONS and data.get(name) != value:
        data.clear()
    data[name] = value
    return []


def _validated(data: dict[str, Any]) -> tuple[PipelineConfig | None, list[str]]:
    if has_half_characters(data):
        return None, [f"a text {HALF}"]
    problems: list[str] = []
    seen: set[str] = set()
    emptied: set[str] = set()
    remaining = copy.deepcopy(data)
    config = None
    while config is None:
        try:
            config = _adapter.validate_python(remaining)
        except BadInput as error:
            return None, problems + list(error.problems)
        except ValidationError as error:
            found = problem_lines(error)
            begins = tuple(f"{part}{mark}" for part in emptied for mark in ".:")
            new = [line for line in found if line not in seen and not line.startswith(begins)]
            seen.update(new)
            problems += [line for line in new if not (problems and line.endswith("is required"))]
            if not new or not _set_aside(remaining, error, emptied):
                break
    return (None if problems else config), problems


def _set_aside(data: dict[str, Any], error: ValidationError, emptied: set[str]) -> bool:
    """Delete the values that were found wrong, of a whole part all but its kind. False when there are none.

    Parts that only their defaults now stand for are added to `emptied`: nothing more can be said of them.
    """
    deleted = False
    for detail in error.errors():
        *parents, name = [step for step in detail["loc"] if step not in UNION_TAGS] or [""]
        holder: Any = data
        for step in parents:
            holder = holder.get(step) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or name not in holder:
            continue
        value = holder.pop(name)
        if detail["type"] == "value_error" and isinstance(value, dict):
            emptied.add(".".join(map(str, (*parents, name))))
            holder[name] = {"kind": value["kind"]} if "kind" in value else {}
        deleted = True
    return deleted
