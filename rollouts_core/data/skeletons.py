"""Templates that look at who speaks and never at what is said: rendered once for each shape of conversation.

Decision: most of the time for a short conversation is rendering. If a template's syntax tree shows that no condition,
loop or assignment depends on contents (other than on whether there is one), then conversations with the same roles
differ only in their contents. So the template renders one conversation of stand-ins, and the contents of other
conversations are put in their places. Any other template renders every conversation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

FIRST, MOST = 0xE100, 200
"""The first stand-in, a character of nobody's text, and how many messages a shape may have."""
MARGIN = "\u2003"
"""Whitespace around a stand-in; where it is gone, the template trims contents."""
STAND_INS = re.compile(f"({MARGIN}?)([{chr(FIRST)}-{chr(FIRST + MOST)}])({MARGIN}?)")
TYPE_TESTS = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence")

Held = Literal["", "message", "content"]
"""What the value of an expression is: messages, contents, or something that doesn't depend on contents (empty)."""


@dataclass(frozen=True)
class Skeleton:
    """A text without its contents."""

    literals: tuple[str, ...]
    """Around and between the contents."""
    contents: tuple[tuple[int, bool], ...]
    """Which message's content stands there, and whether it is trimmed."""
    spans: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """Beginnings and ends, each as a literal and a place in it."""

    def filled(self, contents: Sequence[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text, and its spans."""
        put = [contents[number].strip() if trimmed else contents[number] for number, trimmed in self.contents]
        pieces = [piece for pair in zip(self.literals, [*put, ""], strict=True) for piece in pair]
        begins = [0, *accumulate(map(len, pieces))]
        return "".join(pieces), tuple(
            (begins[2 * start[0]] + start[1], begins[2 * end[0]] + end[1]) for start, end in self.spans
        )


def stand_in(number: int) -> str:
    """The content of a message that stands for all others."""
    return f"{MARGIN}{chr(FIRST + number)}{MARGIN}"


def skeleton_of(text: str, spans: Sequence[tuple[int, int]]) -> Skeleton | None:
    """The skeleton of a text of stand-ins; None where one was neither kept nor trimmed."""
    literals, contents, begins = [], [], [0]
    for found in STAND_INS.finditer(text):
        if bool(found[1]) != bool(found[3]):
            return None
        literals.append(text[begins[-1] : found.start()])
        contents.append((ord(found[2]) - FIRST, not found[1]))
        begins.append(found.end())
    literals.append(text[begins[-1] :])

    def place(at: int) -> tuple[int, int]:
        literal = max(number for number, begin in enumerate(begins) if begin <= at or number == 0)
        return literal, at - begins[literal]

    return Skeleton(tuple(literals), tuple(contents), tuple((place(start), place(end)) for start, end in spans))


@lru_cache(maxsize=64)
def never_looks(template: str) -> bool:
    """Whether the syntax tree shows that contents decide nothing."""
    tree = _compile_jinja_template(template).environment.parse(template)
    names = _Names({"messages"}, set())
    try:
        while True:
            known = len(names.messages) + len(names.contents)
            _statements(tree.body, names)
            if len(names.messages) + len(names.contents) == known:
                return True
    except _Looks:
        return False


class _Looks(Exception):
    """The template does something with contents."""


@dataclass(frozen=True)
class _Names:
    """The variables that hold messages, and those that hold contents; the walk over the syntax tree adds to both."""

    messages: set[str]
    contents: set[str]


def _statements(body: Sequence[nodes.Node], names: _Names) -> None:
    for node in body:
        match node:
            case nodes.Output():
                for part in node.nodes:
                    _output(part, names)
            case nodes.If():
                _condition(node.test, names)
                _statements([*node.body, *node.elif_, *node.else_], names)
            case nodes.For():
                if node.test is not None:
                    _condition(node.test, names)
                _bind(node.target, node.iter, names)
                _statements([*node.body, *node.else_], names)
            case nodes.Assign():
                _bind(node.target, node.node, names, assigned=True)
            case _:
                if any(name.name in names.messages | names.contents for name in node.find_all(nodes.Name)):
                    raise _Looks


def _bind(target: nodes.Node, value: nodes.Node, names: _Names, assigned: bool = False) -> None:
    held = _held(value, names)
    if not held:
        return
    if not isinstance(target, nodes.Name):
        raise _Looks
    if held == "message":
        names.messages.add(target.name)
    elif assigned:
        _output(value, names)
        names.contents.add(target.name)
    else:
        raise _Looks


def _output(node: nodes.Node, names: _Names) -> None:
    """Contents may be put out as they are, trimmed, joined to others, or one or the other of them."""
    if _is_content(node, names) or (isinstance(node, nodes.Name) and node.name in names.contents):
        return
    match node:
        case nodes.Filter(name="trim", args=[], kwargs=[]) if node.node is not None and _is_content(node.node, names):
            return
        case nodes.Add() | nodes.Concat():
            for part in node.iter_child_nodes():
                _output(part, names)
        case nodes.CondExpr():
            _condition(node.test, names)
            for branch in (node.expr1, node.expr2):
                if branch is not None:
                    _output(branch, names)
        case _:
            if _held(node, names):
                raise _Looks


def _condition(node: nodes.Node, names: _Names) -> None:
    """A content may be asked whether it is there, and no more."""
    if isinstance(node, nodes.And | nodes.Or | nodes.Not):
        for part in node.iter_child_nodes():
            _condition(part, names)
        return
    messages = isinstance(node, nodes.Name) and node.name in names.messages
    if _held(node, names) and not messages and not _is_content(node, names):
        raise _Looks


def _is_content(node: nodes.Node | None, names: _Names) -> bool:
    if not isinstance(node, nodes.Getattr | nodes.Getitem):
        return False
    return _key(node) == "content" and _held(node.node, names) == "message"


HELD: tuple[Held, ...] = ("", "message", "content")


def _held(node: nodes.Node, names: _Names) -> Held:
    match node:
        case nodes.Name():
            return "message" if node.name in names.messages else "content" if node.name in names.contents else ""
        case nodes.Getattr() | nodes.Getitem():
            return _held_by_part(node, names)
        case nodes.Filter(name="length" | "count") if node.node is not None and _held(node.node, names) == "message":
            return ""
        case nodes.Test() if node.name in TYPE_TESTS:
            return ""
        case nodes.Filter() | nodes.Call():
            of = [_held(part, names) for part in node.iter_child_nodes()]
            method = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr | nodes.Getitem)
            own = _held(node.node.node, names) if method else ""  # type: ignore[union-attr]
            return "content" if own or any(of) else ""
        case _:
            return max((_held(part, names) for part in node.iter_child_nodes()), key=HELD.index, default="")


def _held_by_part(node: nodes.Getattr | nodes.Getitem, names: _Names) -> Held:
    """How the template reads a message: everything except its content is the same for all of a shape."""
    key, of = _key(node), _held(node.node, names)
    if key in ("previtem", "nextitem"):
        return "message"
    if of != "message":
        return of or (_held(node.arg, names) if isinstance(node, nodes.Getitem) else "")
    if isinstance(key, str):
        return "content" if key == "content" else ""
    return "message" if isinstance(key, int) or _is_place(node) else "content"


def _is_place(node: nodes.Getattr | nodes.Getitem) -> bool:
    """A slice, or a number that is counted."""
    if not isinstance(node, nodes.Getitem):
        return False
    counted = isinstance(node.arg, nodes.Add | nodes.Sub) and isinstance(node.arg.right, nodes.Const)
    if counted and isinstance(node.arg.right.value, int):  # type: ignore[attr-defined]
        return True
    return isinstance(node.arg, nodes.Slice | nodes.Neg)


def _key(node: nodes.Getattr | nodes.Getitem) -> object:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None
