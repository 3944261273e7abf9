"""Reward functions: `(Sample) -> float`, shipped ones by name, a user's own by import path.

Decision: a user's reward enters keys through the digest of its source file, so that an edited reward is a new
experiment; naming the same function by another path is not.
"""

import hashlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from rollouts_core.errors import BadInput, RewardFailed
from rollouts_core.store.identity import External
from rollouts_core.types import Sample

RewardFunction = Callable[[Sample], float]


def exact_match(sample: Sample) -> float:
    """1.0 where the answer, stripped of white space, equals the row's `answer`; otherwise 0.0."""
    return float(sample.response.strip() == str(sample.prompt.metadata["answer"]).strip())


def contains_answer(sample: Sample) -> float:
    """1.0 where the row's `answer` occurs in the answer; otherwise 0.0."""
    return float(str(sample.prompt.metadata["answer"]).strip() in sample.response)


SHIPPED: dict[str, RewardFunction] = {"exact_match": exact_match, "contains_answer": contains_answer}


def identify_reward(name: str) -> External:
    """The identity and location of a reward. Raises `BadInput` when there is no such file or module."""
    if name in SHIPPED:
        return External({"shipped": name}, name)
    source, function = _find(name)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    location = f"{source}:{function}" if ".py:" in name else name
    return External({"sha256": digest, "function": function}, location, (str(source),))


def load_reward(location: str) -> RewardFunction:
    """Import the function. Raises `BadInput` when its module fails to import or lacks it."""
    if location in SHIPPED:
        return SHIPPED[location]
    source, name = _find(location)
    function = getattr(_import(location.rpartition(":")[0], source), name, None)
    if not callable(function):
        raise BadInput(f"reward {location}: {source} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def score(samples: Sequence[Sample], reward: RewardFunction, name: str) -> list[Sample]:
    """The samples with their rewards. Raises `RewardFailed`, naming row and answer, on an exception or a non-number."""
    return [replace(sample, reward=compute_reward(sample, reward, name)) for sample in samples]


def compute_reward(sample: Sample, reward: RewardFunction, name: str) -> float:
    """One sample's reward. Raises `RewardFailed` as `score` does."""
    place = f"reward {name} on source row {sample.prompt.source_row}, answer {sample.response!r}"
    try:
        value = reward(sample)
    except Exception as error:
        raise RewardFailed(f"{place}: raised {type(error).__name__}: {error}") from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardFailed(f"{place}: returned {value!r}, which is not a finite number")
    return float(value)


def _find(name: str) -> tuple[Path, str]:
    """Source file and function name of 'package.module:function' or 'file.py:function'."""
    place, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        shipped = ", ".join(SHIPPED)
        raise BadInput(
            f"reward {name!r}: write a shipped one ({shipped}), 'package.module:function' or 'file.py:function'"
        )
    if place.endswith(".py"):
        source = Path(place).resolve()
    else:
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.origin:
            raise BadInput(f"reward {name!r}: no module {place!r} can be imported")
        source = Path(spec.origin)
    if not source.is_file():
        raise BadInput(f"reward {name!r}: no such file: {source}")
    return source, function


def _import(place: str, source: Path) -> ModuleType:
    """A module by its name, or a file on its own."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"reward_{source.stem}", source)
        assert spec is not None and spec.loader is not None, f"{source} is a Python file"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"reward {source}: its import raised {type(error).__name__}: {error}") from error
    return module
