"""The schema of a deployment's form, with the deployment's own values for defaults.

Decision: Prefect's dialog for schedules begins with a schema's defaults, not with what the deployment was registered
with. It sends what was touched, and every null that it shows, touched or not: a schedule of a config with one null in
it would replace the whole config. So the schema of each deployment has its own values for defaults, and no null among
them: a field that is null begins empty, nothing is sent of it, and the schedule runs what the deployment runs.
"""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def filled_in(schema: Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a flow's parameters, of which some have `values`."""
    filled = {**schema, "properties": _properties(schema, values, schema.get("definitions", {}))}
    return _without_nulls(filled)  # type: ignore[no-any-return]


def _without_nulls(schema: Any) -> Any:
    """The schema without defaults that are null; defaults themselves are left as they are."""
    if isinstance(schema, Mapping):
        kept = {name: of for name, of in schema.items() if name != "default" or of is not None}
        return {name: of if name == "default" else _without_nulls(of) for name, of in kept.items()}
    return [_without_nulls(of) for of in schema] if isinstance(schema, list) else schema


def _properties(schema: Schema, values: Mapping[str, Any], definitions: Mapping[str, Schema]) -> dict[str, Schema]:
    return {
        name: _with_default(field, values.get(name, field.get("default")), definitions)
        for name, field in schema["properties"].items()
    }


def _with_default(field: Schema, value: Any, definitions: Mapping[str, Schema]) -> Schema:
    whole = _resolved(field, definitions)
    if value is None:
        return {**whole, "default": None}
    if "anyOf" in whole:
        alternatives = [
            _with_default(other, value, definitions) if _is_of(other, value, definitions) else other
            for other in whole["anyOf"]
        ]
        return {**whole, "anyOf": alternatives, "default": value}
    if whole.get("properties") and isinstance(value, Mapping):
        return {**whole, "properties": _properties(whole, value, definitions), "default": value}
    return {**whole, "default": value}


def _is_of(alternative: Schema, value: Any, definitions: Mapping[str, Schema]) -> bool:
    """Whether a value, which is not null, is one of this alternative of a union."""
    whole = _resolved(alternative, definitions)
    if "anyOf" in whole:
        return any(_is_of(other, value, definitions) for other in whole["anyOf"])
    if whole.get("type") == "null":
        return False
    if not isinstance(value, Mapping):
        return "properties" not in whole
    kind = whole.get("properties", {}).get("kind", {}).get("const")
    return "properties" in whole and kind == value.get("kind", kind)


def _resolved(field: Schema, definitions: Mapping[str, Schema]) -> dict[str, Any]:
    reference = field.get("$ref")
    if reference is None:
        return dict(field)
    return {**definitions[reference.rpartition("/")[2]], **{name: of for name, of in field.items() if name != "$ref"}}
