"""The public names, as they are now."""

import enum
import inspect
import re
from typing import Any

import rollouts_core as rc


def sentence_of(name: str) -> str:
    """The first of its docstring."""
    text = " ".join((inspect.getdoc(getattr(rc, name)) or "").split("\n\n")[0].split())
    return re.split(r"(?<!eq)(?<!sec)(?<=\.)\s+(?=[A-Z`])", text)[0]


def surface() -> dict[str, Any]:
    """Name to signature; of a class with its fields, methods and properties."""
    return {name: _described(getattr(rc, name)) for name in dir(rc)}


def _described(value: Any) -> Any:
    if not inspect.isclass(value):
        return _signature(value)
    if issubclass(value, enum.Enum):
        return [member.value for member in value]
    members = {
        name: "property" if isinstance(member, property) else _signature(getattr(value, name))
        for name, member in vars(value).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod))
    }
    return {"()": _signature(value), **dict(sorted(members.items()))}


def _signature(value: Any) -> str:
    """Names, kinds and defaults of its arguments; types stand in the code, where mypy checks them."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    told = []
    for parameter in parameters:
        kind = {"KEYWORD_ONLY": "*", "VAR_KEYWORD": "**", "VAR_POSITIONAL": "*args "}.get(parameter.kind.name, "")
        has_default = parameter.default is not inspect.Parameter.empty
        told.append(f"{kind}{parameter.name}{'=' + _default(parameter.default) if has_default else ''}")
    return f"({', '.join(told)})"


def _default(value: Any) -> str:
    simple = value is None or isinstance(value, bool | int | float | str | tuple)
    return repr(value) if simple else "..."
