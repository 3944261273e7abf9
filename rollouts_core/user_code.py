"""Functions of users, named in the config: 'package.module:function' or 'file.py:function'.

Decision: such a function enters keys with the digest of its source file. So an edited function is a new experiment, and
the same function by another path is not.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollouts_core.errors import BadInput
from rollouts_core.store.identity import External


def identify_function(name: str, shipped: Mapping[str, Any], what: str) -> External:
    """Identity and location of a function. Raises `BadInput` when there is no such file or module."""
    if name in shipped:
        return External({"shipped": name}, name)
    source, function = _find(name, shipped, what)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    location = f"{source}:{function}" if ".py:" in name else name
    return External({"sha256": digest, "function": function}, location, (str(source),))


def load_function(location: str, shipped: Mapping[str, Any], what: str, kinds: tuple[type, ...] = ()) -> Any:
    """Import the function, or a value of one of these kinds. Raises `BadInput` when its module fails to import or
    lacks it."""
    if location in shipped:
        return shipped[location]
    source, name = _find(location, shipped, what)
    function = getattr(_import(location.rpartition(":")[0], source, what), name, None)
    if not callable(function) and not isinstance(function, kinds):
        raise BadInput(f"{what} {location}: {source} has no function {name!r}")
    return function


def _find(name: str, shipped: Mapping[str, Any], what: str) -> tuple[Path, str]:
    """Source file and function name of 'package.module:function' or 'file.py:function'."""
    place, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        own = f"a shipped one ({', '.join(shipped)}), " if shipped else ""
        raise BadInput(f"{what} {name!r}: write {own}'package.module:function' or 'file.py:function'")
    if place.endswith(".py"):
        source = Path(place).resolve()
    else:
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.origin:
            raise BadInput(f"{what} {name!r}: no module {place!r} can be imported")
        source = Path(spec.origin)
    if not source.is_file():
        raise BadInput(f"{what} {name!r}: no such file: {source}")
    return source, function


def _import(place: str, source: Path, what: str) -> ModuleType:
    """A module by its name, or a file on its own."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"{what}_{source.stem}", source)
        assert spec is not None and spec.loader is not None, f"{source} is a Python file"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{what} {source}: its import raised {type(error).__name__}: {error}") from error
    return module
