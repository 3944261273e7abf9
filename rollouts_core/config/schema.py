"""What configs and stage specs are made of: frozen, validated dataclasses.

Decision: the type of a field says whether it is part of a result's identity or only of its execution.
`Operational[int]` marks a field that cannot change a result (log intervals, time limits, where it runs). All other
fields are identity, and enter stage keys. A reader of the class and the encoder of keys read the same line, so there is
no second list to keep up to date.

Decision: a part validates itself on construction and lists all its problems at once. Inside `collect_problems()`, a
part with problems notes them and is replaced by one with its valid fields. So one message has the problems of all parts
of a config.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from rollouts_core.errors import BadInput

T = TypeVar("T")


class _OperationalMark:
    """Found in a field's metadata when the field stays out of keys."""


Operational = Annotated[T, _OperationalMark()]


class _AddedMark:
    """Found in a field's metadata when the field came after artifacts had been made without it."""


Added = Annotated[T, _AddedMark()]
"""A field of the identity that enters a key only where it is not its default: keys from before the field do not change.

It must be so that the default means what was done before.
"""

MOST_DEVICES = 65_536
"""The largest number of GPUs, ranks, servers or nodes that a field takes: more is a typing error."""

UNION_TAGS: set[str] = set()
"""The `kind` values of unions, which pydantic puts into a problem's path and a person did not write.

`part` fills it.
"""

_collected: ContextVar[list[str] | None] = ContextVar("collected_problems", default=None)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def part(cls: type[T]) -> type[T]:
    """Make a class a part: frozen, keyword-only, unknown fields refused, no NaN or infinity.

    Raises `BadInput` with one line per problem when constructed with bad values.
    """
    settings = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        field_title_generator=lambda name, field: name,
        json_schema_extra=_in_order,
    )
    kinds = get_args(cls.__annotations__.get("kind"))
    if len(kinds) == 1:
        UNION_TAGS.add(kinds[0])
    made: Any = pydantic_dataclass(frozen=True, kw_only=True, config=settings)(cls)
    made.__init__ = _with_all_problems(made.__init__, cls.__name__)
    return made  # type: ignore[no-any-return]


@contextmanager
def collect_problems() -> Iterator[list[str]]:
    """While open, parts with problems note them in the yielded list instead of raising."""
    problems: list[str] = []
    token = _collected.set(problems)
    try:
        yield problems
    finally:
        _collected.reset(token)


def identity_fields(part_type: type) -> list[str]:
    """The names of the fields that enter a key."""
    return [field.name for field in fields(part_type) if not _has_mark(part_type, field.name, _OperationalMark)]


def identity_of(value: Any) -> dict[str, Any]:
    """The fields of a part that enter its key, by name."""
    part_type = type(value)
    found = {name: getattr(value, name) for name in identity_fields(part_type)}
    return {name: entry for name, entry in found.items() if not _is_left_out(part_type, name, entry)}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything in JSON data that is not an object with entries."""
    if isinstance(value, Mapping) and value:
        for name, entry in value.items():
            yield from leaves(entry, f"{path}.{name}" if path else name)
    else:
        yield path, value


def problem_lines(error: ValidationError, prefix: str = "") -> list[str]:
    """The problems of a validation error, a line each: the field's dotted path, what is wrong, and the value."""
    lines = []
    for detail in error.errors(include_url=False):
        path = ".".join([prefix] * bool(prefix) + [str(step) for step in detail["loc"] if step not in UNION_TAGS])
        lines += [f"{path}: {text}" if path else text for text in _explain(detail)]
    return lines


def or_raise(value: T, problems: list[str]) -> T:
    """The value; at the end of a part's validator. Raises `ValueError` with a line for each problem."""
    if problems:
        raise ValueError("\n".join(problems))
    return value


def one_of(schema: dict[str, Any]) -> None:
    """Rewrite the JSON schema of a union so that Prefect's form can switch from one alternative to another.

    The alternatives are also listed by kind: so the error of a value that lacks a field names that field.
    """
    by_kind: dict[str, Any] = {}
    for kind, reference in schema["discriminator"]["mapping"].items():
        is_kind = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
        by_kind = {"if": is_kind, "then": {"$ref": reference}, "else": by_kind}
    schema |= {"anyOf": schema.pop("oneOf"), **by_kind}


def _in_order(schema: dict[str, Any], cls: type) -> None:
    """Fields stand in a form as they stand in the class."""
    order = list(get_type_hints(cls))
    schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda field: order.index(field[0])))


def _is_left_out(part_type: Any, name: str, value: Any) -> bool:
    """Whether the field was added, and is as it was before it was there."""
    if not _has_mark(part_type, name, _AddedMark):
        return False
    return bool(value == part_type.__pydantic_fields__[name].get_default(call_default_factory=True))


def _has_mark(part_type: type, name: str, mark: type) -> bool:
    return any(isinstance(found, mark) for found in getattr(_hints(part_type)[name], "__metadata__", ()))


@cache
def _hints(part_type: type) -> dict[str, Any]:
    return get_type_hints(part_type, include_extras=True)


def _explain(detail: Any) -> list[str]:
    kind = detail["type"]
    if kind == "unexpected_keyword_argument" or kind == "extra_forbidden":
        return ["no such field"]
    if kind.startswith("missing"):
        return ["is required"]
    message: str = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return message.splitlines()
    message = message[0].lower() + message[1:]
    return [f"{message} (got {detail['input']!r})"]


def _with_all_problems(init: Callable[..., None], name: str) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        try:
            init(self, *args, **values)
        except ValidationError as error:
            lines = problem_lines(error, name)
            collected = _collected.get()
            if collected is None:
                raise BadInput(lines) from None
            collected += lines
            _stand_in(init, self, args, values, error, collected)

    return __init__


def _stand_in(
    init: Callable[..., None],
    value: Any,
    args: Any,
    values: dict[str, Any],
    error: ValidationError,
    collected: list[str],
) -> None:
    """Construct with the fields that were found right; raise what has been collected where that is not possible."""
    faulty = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
    kept = {name: entry for name, entry in values.items() if name not in faulty} if faulty else {}
    try:
        init(value, *args, **kept)
    except ValidationError as again:
        collected += [line for line in problem_lines(again) if not line.endswith("is required")]
        raise BadInput(collected) from None
