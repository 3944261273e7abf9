"""Conversations as text, through the tokenizer's chat template, and what of the text is learnt.

Decision: a template that marks what the assistant generates (`{% generation %}`) is believed. Otherwise each learnt
turn is found from renderings: the conversation up to it, ready for it to begin, and with it. A turn belongs to the text
of a later one only where that text holds it unchanged; a template that renders earlier turns differently once later
ones follow (many drop reasoning) gives such a turn a text of its own, ending with it. So what is learnt always stands
behind exactly what the model is given when it has to say it.

Decision: a turn ends with its last special token: the whitespace that templates put behind it is never generated, since
generation stops before. A template that leaves out what it was given (tools, calls, a turn) is refused by name.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from rollouts_core.data.messages import Data, message_to_data
from rollouts_core.errors import BadInput
from rollouts_core.types import Message

Span = tuple[int, int]
Messages = Sequence[Message]
ASSISTANT = ("assistant",)
STAND_IN = "\ue000"
"""A character of nobody's text."""


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer's chat template, and which of its tokens no text can hold."""

    tokenizer: Any
    special: re.Pattern[str]


@dataclass(frozen=True)
class Rendered:
    """A text to learn from: its characters within the spans."""

    text: str
    spans: tuple[Span, ...]


def chat_format(tokenizer: Any) -> ChatFormat:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    tokens = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    return ChatFormat(tokenizer, re.compile("|".join(map(re.escape, tokens)) or "(?!)"))


def render_conversation(
    chat: ChatFormat, messages: Messages, tools: Sequence[Data] = (), roles: Sequence[str] = ASSISTANT
) -> list[Rendered]:
    """The turns of these roles, each learnt once, mostly in one text. Raises `BadInput` when the template fails."""
    marked = tuple(roles) == ASSISTANT and has_generation_markers(_template(chat, tools))
    whole, render = _rendered(chat, messages, tools, marked)
    return [whole] if marked else _by_prefixes(whole.text, messages, roles, render, chat.special)


def render_prompt(chat: ChatFormat, messages: Messages, tools: Sequence[Data] = ()) -> str:
    """Ready for the assistant to go on from. Raises `BadInput` when the template fails."""
    _, render = _rendered(chat, messages, tools)
    return render(messages, prompt=True)


@lru_cache(maxsize=64)
def has_generation_markers(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _by_prefixes(
    whole: str, messages: Messages, roles: Sequence[str], render: "_Render", special: re.Pattern[str]
) -> list[Rendered]:
    """From the last turn to the first: a turn joins the text at hand where that holds it, and begins another else."""
    texts, spans = [whole], [list[Span]()]
    for index in reversed(range(len(messages))):
        if messages[index].role not in roles:
            continue
        upto = whole if index == len(messages) - 1 else render(messages[: index + 1])
        held = _held(upto, texts[-1], special)
        if not held:
            texts.append(upto)
            spans.append([])
        start = _start(messages, index, upto, render)
        spans[-1].append((start, _end(upto, start, held or len(upto), special)))
    learnt = [Rendered(text, tuple(reversed(found))) for text, found in zip(texts, spans, strict=True) if found]
    return learnt or [Rendered(whole, ())]


def _held(upto: str, text: str, special: re.Pattern[str]) -> int:
    """Up to where a text holds the beginning of a conversation; 0 where it does not.

    It may lack what the template puts behind the last turn of all: more special tokens, and whitespace.
    """
    if text.startswith(upto):
        return len(upto)
    same = _shared(upto, text)
    end = max((match.end() for match in special.finditer(upto) if match.end() <= same), default=0)
    return 0 if special.sub("", upto[end:]).strip() else end


def _start(messages: Messages, index: int, upto: str, render: "_Render") -> int:
    """Where the turn's own words begin: the assistant's, behind what the model is given to go on from.

    Where a template primes the model with words that the turn itself does not have (an opened thought), the turn
    begins where the two part, or where its rendering first depends on what it says; turns of others begin there, too.
    """
    before = upto
    if messages[index].role == "assistant":
        before = render(messages[:index], prompt=True)
        if upto.startswith(before):
            return len(before)
    other = replace(messages[index], content=STAND_IN + messages[index].content)
    return min(_shared(upto, before), _shared(upto, render([*messages[:index], other])))


def _end(upto: str, start: int, end: int, special: re.Pattern[str]) -> int:
    kept = upto[start:end].rstrip()
    last = max((match.end() for match in special.finditer(kept)), default=0)
    return start + len(kept) if last == len(kept) else end


def _shared(first: str, second: str) -> int:
    """How many first characters are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


Form = Callable[[Messages], list[dict[str, Any]]]


@dataclass(frozen=True)
class _Render:
    """Beginnings of one conversation through the template."""

    chat: ChatFormat
    tools: Sequence[Data]
    form: Form

    def __call__(self, messages: Messages, prompt: bool = False) -> str:
        return self.output(messages, add_generation_prompt=prompt).text if messages else ""

    def output(self, messages: Messages, **how: Any) -> Rendered:
        """With the spans that the template marks, if it is asked for them."""
        tokenizer, template = self.chat.tokenizer, _template(self.chat, self.tools)
        try:
            texts, spans = render_jinja_template(
                [self.form(messages)],
                list(self.tools) or None,
                chat_template=template,
                **how,
                **tokenizer.special_tokens_map,
            )
        except Exception as error:  # templates raise what they like
            raise BadInput(f"the chat template fails: {type(error).__name__}: {error}") from None
        return Rendered(texts[0], tuple((start, end) for start, end in spans[0] if start < end) if spans else ())


def _rendered(
    chat: ChatFormat, messages: Messages, tools: Sequence[Data], marked: bool = False
) -> tuple[Rendered, _Render]:
    """With the form of messages that the template takes. Raises `BadInput` when it takes none, or loses something."""
    problems = []
    for form in (_plain, _pasted, _blocks):
        render = _Render(chat, tools, form)
        try:
            whole = render.output(messages, return_assistant_tokens_mask=marked)
            if not (lost := _lost(whole.text, messages, tools, render)):
                return whole, render
            problems.append(f"the chat template leaves out {lost}")
        except BadInput as error:
            problems += error.problems
    raise BadInput(problems[0])


def _lost(text: str, messages: Messages, tools: Sequence[Data], render: _Render) -> str:
    """What the template passes over: a tool, a call, or the last turn's words; thoughts may be."""
    for name in (tool["function"]["name"] for tool in tools):
        if name not in text:
            return f"the tool {name}: its model knows none"
    calls = [call for message in messages for call in message.tool_calls]
    if calls:
        unknown = [replace(m, tool_calls=tuple(replace(c, name=STAND_IN) for c in m.tool_calls)) for m in messages]
        if render(unknown).count(STAND_IN) < len(calls):
            return f"the call of {calls[0].name}: its model calls no tools"
    said = messages[-1].content.rpartition("</think>")[2].strip()
    return "" if said in text else f"what the last turn says, {said[:40]!r}"


def _plain(messages: Messages) -> list[dict[str, Any]]:
    return [message_to_data(message) for message in messages]


def _pasted(messages: Messages) -> list[dict[str, Any]]:
    """For templates that paste arguments as text, and take a turn with content for one without calls."""
    data = _plain(messages)
    for message in data:
        for call in message.get("tool_calls", ()):
            call["function"] |= {"arguments": json.dumps(call["function"]["arguments"])}
            message["content"] = message["content"] or None
    return data


def _blocks(messages: Messages) -> list[dict[str, Any]]:
    """For templates of models that see: text as a list of one block."""
    return [data | {"content": [{"type": "text", "text": data["content"]}]} for data in _plain(messages)]


def _template(chat: ChatFormat, tools: Sequence[Data]) -> str:
    if isinstance(chat.tokenizer.chat_template, str):
        return chat.tokenizer.chat_template
    template: str = chat.tokenizer.get_chat_template(None, list(tools) or None)
    return template
