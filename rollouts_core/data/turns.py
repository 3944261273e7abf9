"""Conversations as tokens that grow turn by turn, and the tokens of a turn as what it says.

Decision: tokens that an engine generated are never encoded again. After them come the tokens that the template puts
before the next turn. These are found in the text of the whole conversation, after the end of the turn. If the template
now renders the earlier conversation differently from what the engine was given (many drop the thoughts of earlier
turns), nothing is guessed: the engine gets the conversation as it is rendered now, and the earlier turns are a sequence
of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts_core.data.calls import CallFormat, call_format
from rollouts_core.data.chat import encode_texts
from rollouts_core.data.rendering import (
    ChatFormat,
    Render,
    chat_format,
    common_prefix,
    end_of_turn,
    fitting_render,
    held_until,
)
from rollouts_core.errors import BadInput
from rollouts_core.types import Data, Message, ToolCall

THOUGHT = ("<think>", "</think>")
EXAMPLE = {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "array": ["text"], "object": {"text": 1}}
"""A value of each type that an argument may have."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class TurnFormat:
    """How a model's conversations are written, with the tools it has."""

    tokenizer: Any
    chat: ChatFormat
    render: Render
    tools: tuple[Data, ...]
    calls: CallFormat | None
    """None without tools."""
    thinks: bool
    """Whether thoughts are told apart from what is said."""

    stop: Tokens
    """The token that ends a turn, and the one that ends a turn with a call, if that is another."""


@dataclass(frozen=True)
class Given:
    """The tokens to give to the engine for a turn."""

    tokens: Tokens
    """Tokens after the turn before, if it `continues` that; else from the beginning."""
    continues: bool
    differs: bool
    """Whether encoding the conversation anew would give the engine other tokens."""


def turn_format(tokenizer: Any, tools: Sequence[Data] = ()) -> TurnFormat:
    """Raises `BadInput` where the template loses tools or calls, or it is not known how its model writes calls."""
    chat = chat_format(tokenizer)
    messages, call = _example(tools)
    render = fitting_render(chat, messages, tools)
    template = chat.template if isinstance(chat.template, str) else "".join(chat.template.values())
    written = _turn_text(chat, render, messages) if call else ""
    calls = call_format(written, [call]) if call else None
    if call and calls is None:
        raise BadInput(f"it is not known how this model calls tools; its chat template writes {written!r}")
    stop = stop_tokens(tokenizer)
    if call:
        stop = tuple(dict.fromkeys((*stop, *_ids(tokenizer, _ends(chat, _whole_turn(chat, render, messages))))))
    return TurnFormat(tokenizer, chat, render, tuple(tools), calls, THOUGHT[1] in template, stop)


def stop_tokens(tokenizer: Any) -> Tokens:
    """The tokens that end an answer: the end-of-sequence token, and the one that the chat template writes after a turn,
    which are two in some families (Gemma: `<eos>` and `<end_of_turn>`).

    Raises `BadInput` where a chat template ends no turn and there is no end of sequence: no model could learn to end.
    """
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return _stop_tokens(chat_format(tokenizer), tokenizer, own) if getattr(tokenizer, "chat_template", None) else own


def first_tokens(form: TurnFormat, messages: Sequence[Message]) -> Tokens:
    """A conversation ready for the assistant, encoded whole."""
    return _encoded(form, form.render(messages, prompt=True))


def next_tokens(form: TurnFormat, messages: Sequence[Message], before: Tokens) -> Given:
    """The tokens to add after `before`, which ends with the last turn of the assistant; or all, if they don't join."""
    turn = max(place for place, message in enumerate(messages) if message.role == "assistant")
    whole = form.render(messages, prompt=True)
    anew = _encoded(form, whole)
    differs = anew[: len(before)] != before
    behind = _behind(form, messages, turn, whole)
    if behind is None:
        return Given(anew, continues=False, differs=differs)
    return Given(_encoded(form, behind), continues=True, differs=differs)


def read_turn(form: TurnFormat, tokens: Tokens, turn: int) -> Message:
    """The message of a turn's tokens: its text, thoughts and calls. A call's id has the turn's number."""
    kept = tokens[:-1] if tokens and tokens[-1] in form.stop else tokens
    text = form.tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    thought = ""
    if form.thinks and THOUGHT[1] in text:
        thought, _, text = text.partition(THOUGHT[1])
        thought, text = thought.replace(THOUGHT[0], "").strip(), text.lstrip("\n")
    said, calls = form.calls.read(text) if form.calls else (text, ())
    numbered = tuple(
        ToolCall(call.name, call.arguments, f"call{turn:02d}{number:03d}", call.malformed)
        for number, call in enumerate(calls)
    )
    said = form.chat.special.sub("", said)
    return Message("assistant", said.rstrip() if numbered else said, numbered, thought)


def _behind(form: TurnFormat, messages: Sequence[Message], turn: int, whole: str) -> str | None:
    """The text behind a turn's end; None where the template renders what came before it, or its thoughts, anew."""
    given, upto = form.render(messages[:turn], prompt=True), form.render(messages[: turn + 1])
    held = held_until(upto, whole, form.chat.special)
    if not held or not whole.startswith(given):
        return None
    end = end_of_turn(upto, len(given), held, form.chat.special)
    return whole[end:] if messages[turn].reasoning in whole[len(given) : end] else None


def _stop_tokens(chat: ChatFormat, tokenizer: Any, own: Tokens) -> Tokens:
    messages, _ = _example(())
    turn = _whole_turn(chat, fitting_render(chat, messages), messages)
    if stops := tuple(dict.fromkeys((*own, *_ids(tokenizer, _ends(chat, turn))))):
        return stops
    raise BadInput(
        f"the tokenizer has no end-of-sequence token, and its chat template ends a turn without a special token "
        f"({turn[-20:]!r}): no model could learn to end its answer. Use the model's instruct version, or set an "
        "eos_token in its tokenizer_config.json"
    )


def _ends(chat: ChatFormat, text: str) -> list[str]:
    return [match.group() for match in chat.special.finditer(text) if match.end() == len(text)]


def _ids(tokenizer: Any, tokens: Sequence[str]) -> Tokens:
    return tuple(tokenizer.convert_tokens_to_ids(list(tokens)))


def _encoded(form: TurnFormat, text: str) -> Tokens:
    return tuple(encode_texts(form.tokenizer, [text])[0].tolist())


def _example(tools: Sequence[Data]) -> tuple[list[Message], ToolCall | None]:
    """A conversation with a call of the first tool, or none."""
    asks = Message("user", "question")
    if not tools:
        return [asks, Message("assistant", "answer"), Message("user", "again")], None
    function = tools[0]["function"]
    parameters = (function.get("parameters") or {}).get("properties") or {}
    arguments = {name: EXAMPLE.get(_type_of(form), "text") for name, form in parameters.items()}
    call = ToolCall(function["name"], arguments, "call00000")
    result = Message("tool", "result", name=call.name, tool_call_id=call.id)
    return [asks, Message("assistant", "", (call,)), result], call


def _type_of(form: Any) -> str:
    """The type in a JSON schema, which may name several types, or none."""
    return str(form.get("type")) if isinstance(form, Mapping) else ""


def _turn_text(chat: ChatFormat, render: Render, messages: Sequence[Message]) -> str:
    """The text that the assistant would have generated for its turn, which is the second message."""
    ended = _whole_turn(chat, render, messages)
    stops = [match.start() for match in chat.special.finditer(ended) if match.end() == len(ended)]
    return ended[: stops[0]] if stops else ended


def _whole_turn(chat: ChatFormat, render: Render, messages: Sequence[Message]) -> str:
    """The turn's text, with the special token that ends it if the template writes one."""
    given, upto = render(messages[:1], prompt=True), render(messages[:2])
    begins = common_prefix(upto, given)
    held = held_until(upto, render(messages, prompt=True), chat.special)
    return upto[begins : end_of_turn(upto, begins, held or len(upto), chat.special)]
