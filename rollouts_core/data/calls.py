"""How models write the calls of tools, and how what they wrote is read.

Decision: the model's chat template decides how calls are written, and calls are read in the same format. A model with
an unknown format is refused before anything starts. A call that can't be read is a malformed call, and the model is
told so.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts_core.types import ToolCall

Written = tuple[str, tuple[ToolCall, ...]]
"""The text before the calls, and the calls without ids."""


@dataclass(frozen=True)
class CallFormat:
    """A way to write calls."""

    name: str
    read: Callable[[str], Written]
    """Reads the calls in a turn's text, with special tokens and without the stop token. Never raises."""


def call_format(text: str, calls: Sequence[ToolCall]) -> CallFormat | None:
    """The way of writing by which a turn's text says these calls; None where it is none of those known."""
    wanted = [(call.name, dict(call.arguments)) for call in calls]
    for known in FORMATS:
        found = known.read(text)[1]
        if [(call.name, dict(call.arguments)) for call in found if not call.malformed] == wanted:
            return known
    return None


def _marked_json(begin: str, end: str = "") -> Callable[[str], Written]:
    """`begin {"name": ..., "arguments": {...}} end`, once or several times, or one list of such objects."""

    def read(text: str) -> Written:
        before, *marked = text.split(begin)
        calls = [call for part in marked for call in _from_json(part.partition(end)[0] if end else part)]
        return before, tuple(calls)

    return read


def _bare_json(text: str) -> Written:
    """An object with a name is the whole turn, or stands behind a mark (Llama)."""
    before, _, rest = ("", "", text) if text.lstrip().startswith("{") else _behind_mark(text)
    if not re.match(r'\s*\{\s*"(name|type)"', rest):
        return text, ()
    return before.replace("<|python_start|>", ""), tuple(_from_json(rest))


def _behind_mark(text: str) -> tuple[str, str, str]:
    return text.partition("<|python_end|>" if "<|python_end|>" in text else "<|python_tag|>")


def _named_json(begin: str, between: str, end: str = "") -> Callable[[str], Written]:
    """`begin NAME between {...} end` (Mistral, DeepSeek)."""

    def read(text: str) -> Written:
        before, *marked = text.split(begin)
        return before, tuple(_named(part.partition(end)[0] if end else part, between) for part in marked)

    return read


def _parameters(text: str) -> Written:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3 Coder)."""
    before, *marked = text.split("<tool_call>")
    calls = []
    for part in marked:
        named = re.search(r"<function=([^>\s]+)>", part)
        pairs = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", part, re.S)
        calls.append(_valued(named[1], pairs) if named else _malformed(part))
    return before, tuple(calls)


def _pairs(text: str) -> Written:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM)."""
    before, *marked = text.split("<tool_call>")
    calls = []
    for part in marked:
        name = re.split(r"<arg_key>|</tool_call>", part)[0].strip()
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", part, re.S)
        calls.append(_valued(name, pairs) if name.isidentifier() else _malformed(part))
    return before, tuple(calls)


def _python(text: str) -> Written:
    """`<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>` (LFM2)."""
    before, *marked = text.split("<|tool_call_start|>")
    return before, tuple(call for part in marked for call in _from_python(part.partition("<|tool_call_end|>")[0]))


def _channel(text: str) -> Written:
    """` to=functions.NAME<|channel|>...<|message|>{...}`, the last of a turn's messages (gpt-oss)."""
    before, to, rest = text.rpartition("to=functions.")
    if not to:
        return text, ()
    name = re.match(r"[\w.-]*", rest)
    arguments = _decoded(rest.partition("<|message|>")[2])
    called = name[0] if name else ""
    return before.strip(), (ToolCall(called, arguments) if isinstance(arguments, dict) else _malformed(rest, called),)


def _quoted(text: str) -> Written:
    """`<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>` (Gemma)."""
    before, *marked = text.split("<|tool_call>")
    calls = []
    for part in marked:
        written = part.partition("<tool_call|>")[0]
        name, _, rest = written.removeprefix("call:").partition("{")
        pieces = ("{" + rest).split('<|"|>')  # every second one is text
        keyed = [re.sub(r"([{,]\s*)(\w+)\s*:", r'\1"\2":', piece) for piece in pieces[::2]]
        texts = [*map(json.dumps, pieces[1::2]), ""]
        arguments = _decoded("".join(part for pair in zip(keyed, texts, strict=False) for part in pair))
        calls.append(ToolCall(name, arguments) if isinstance(arguments, dict) else _malformed(written, name))
    return before, tuple(calls)


FORMATS = (
    CallFormat("tagged JSON", _marked_json("<tool_call>", "</tool_call>")),
    CallFormat("parameters", _parameters),
    CallFormat("pairs", _pairs),
    CallFormat("Mistral's list", _marked_json("[TOOL_CALLS]")),
    CallFormat("Mistral's arguments", _named_json("[TOOL_CALLS]", "[ARGS]")),
    CallFormat("Phi's list", _marked_json("<|tool_call|>", "<|/tool_call|>")),
    CallFormat("DeepSeek's", _named_json("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")),
    CallFormat("a list in Python", _python),
    CallFormat("Gemma's", _quoted),
    CallFormat("gpt-oss's channel", _channel),
    CallFormat("bare JSON", _bare_json),
)


def _from_json(text: str) -> Iterator[ToolCall]:
    text = text.strip()
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        value = None
    listed: Sequence[Any] = value if isinstance(value, list) and value else [value]
    for entry in listed:
        named = isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
        arguments = _object(entry.get("arguments", entry.get("parameters", {}))) if named else None
        if arguments is None:
            yield _malformed(text, entry["name"] if named else "")
        else:
            yield ToolCall(entry["name"], arguments)


def _from_python(text: str) -> Iterator[ToolCall]:
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        entries = listed.elts if isinstance(listed, ast.List) else [listed]
        yield from [_python_call(entry) for entry in entries]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield _malformed(text)


def _python_call(entry: ast.expr) -> ToolCall:
    if not isinstance(entry, ast.Call) or entry.args:
        raise ValueError("no call, or one whose arguments have no names")
    return ToolCall(ast.unparse(entry.func), {word.arg or "": ast.literal_eval(word.value) for word in entry.keywords})


def _named(text: str, between: str) -> ToolCall:
    name, _, rest = text.partition(between)
    if name.strip() == "function" and "\n" in rest:  # DeepSeek writes the kind, then the name
        name, _, rest = rest.partition("\n")
    name = re.split(r"\[CALL_ID\]", name)[0].strip()
    begins = rest.find("{")
    arguments = _decoded(rest[begins:]) if begins >= 0 else None
    return ToolCall(name, arguments) if isinstance(arguments, dict) else _malformed(rest, name)


def _valued(name: str, pairs: Sequence[tuple[str, str]]) -> ToolCall:
    """Values that are no JSON are text."""
    return ToolCall(name, {key: text if (value := _decoded(text)) is None else value for key, text in pairs})


def _malformed(text: str, name: str = "") -> ToolCall:
    return ToolCall(name, {}, malformed=text.strip() or "nothing")


def _object(value: Any) -> Mapping[str, Any] | None:
    found = _decoded(value) if isinstance(value, str) else value
    return found if isinstance(found, dict) else None


def _decoded(text: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text.strip())[0]
    except (ValueError, RecursionError):
        return None
