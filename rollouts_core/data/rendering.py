"""Conversations as text, through the tokenizer's chat template, and what of the text is learnt.

Decision: if a template marks what the assistant generates (`{% generation %}`), its marks are used. Otherwise each
learnt turn is found from two renderings: the conversation up to the turn, with the generation prompt, and the
conversation with the turn. A turn is part of a later turn's text only if that text contains it unchanged. Many
templates drop the reasoning of earlier turns; such a turn gets a text of its own that ends with it. So a learnt turn
always follows exactly the text that the model is given when it generates the turn.

Decision: a turn ends with its last special token. The whitespace that templates add after it is never generated,
because generation stops before it. A template that leaves out what it was given (tools, calls, a turn) is refused by
name.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from rollouts_core.data.messages import REASONING, message_to_data
from rollouts_core.data.skeletons import MOST, Skeleton, never_looks, skeleton_of, stand_in
from rollouts_core.errors import BadInput
from rollouts_core.types import Data, Message

Span = tuple[int, int]
Messages = Sequence[Message]
ASSISTANT = ("assistant",)
STAND_IN = "\ue000"
"""A character of nobody's text."""


Shape = tuple[tuple[str, ...], int, tuple[tuple[str, bool], ...]]
"""The learnt roles, how many messages are given, and of each message its role and whether it has content."""


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer's chat template, and which of its tokens no text can hold."""

    template: str | Mapping[str, str]
    tokens: Mapping[str, str]
    """Tokens that templates know by name, such as `eos_token`."""
    special: re.Pattern[str]
    known: dict[Shape, tuple[Skeleton, ...]] = field(default_factory=dict)
    """Filled as shapes are met; empty for a shape that has to be rendered every time."""


@dataclass(frozen=True)
class Rendered:
    """A text to learn from: its characters within the spans."""

    text: str
    spans: tuple[Span, ...]


def chat_format(tokenizer: Any) -> ChatFormat:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    tokens = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
    return ChatFormat(tokenizer.chat_template, dict(tokenizer.special_tokens_map), pattern)


def render_conversation(
    chat: ChatFormat,
    messages: Messages,
    tools: Sequence[Data] = (),
    roles: Sequence[str] = ASSISTANT,
    given: int = 0,
) -> list[Rendered]:
    """The turns of these roles behind the first `given`, each learnt once, mostly in one text.

    Raises `BadInput` when the template fails.
    """
    if tools or any(message != Message(message.role, message.content) for message in messages):
        return _rendered_anew(chat, messages, tools, roles, given)
    shape = tuple(roles), given, tuple((message.role, bool(message.content)) for message in messages)
    if shape not in chat.known:
        chat.known[shape] = _skeletons(chat, shape)
    if not (skeletons := chat.known[shape]):
        return _rendered_anew(chat, messages, tools, roles, given)
    contents = [message.content for message in messages]
    return [Rendered(*skeleton.filled(contents)) for skeleton in skeletons]


def _skeletons(chat: ChatFormat, shape: Shape) -> tuple[Skeleton, ...]:
    """The skeletons of a shape of conversations; empty if it has none, and if the template fails on the stand-ins.

    A template that fails is reported with the row that it fails on.
    """
    roles, given, speakers = shape
    if len(speakers) > MOST or not never_looks(_template(chat, ())):
        return ()
    stand_ins = [Message(role, stand_in(n) if said else "") for n, (role, said) in enumerate(speakers)]
    try:
        texts = _rendered_anew(chat, stand_ins, (), roles, given)
    except BadInput:
        return ()
    found = [skeleton for text in texts if (skeleton := skeleton_of(text.text, text.spans))]
    return tuple(found) if len(found) == len(texts) else ()


def _rendered_anew(
    chat: ChatFormat, messages: Messages, tools: Sequence[Data], roles: Sequence[str], given: int
) -> list[Rendered]:
    marked = tuple(roles) == ASSISTANT and has_generation_markers(_template(chat, tools))
    whole, render = _rendered(chat, messages, tools, marked)
    if not marked:
        return _by_prefixes(whole.text, messages, roles, given, render, chat.special)
    asked = common_prefix(whole.text, render(messages[:given], prompt=True)) if given else 0
    return [Rendered(whole.text, tuple((max(start, asked), end) for start, end in whole.spans if end > asked))]


def render_prompt(chat: ChatFormat, messages: Messages, tools: Sequence[Data] = ()) -> str:
    """Ready for the assistant to go on from. Raises `BadInput` when the template fails."""
    _, render = _rendered(chat, messages, tools)
    return render(messages, prompt=True)


def fitting_render(chat: ChatFormat, messages: Messages, tools: Sequence[Data] = ()) -> "Render":
    """A `Render` with the form of messages that the template accepts.

    Raises `BadInput` if it accepts none, or leaves something out.
    """
    return _rendered(chat, messages, tools)[1]


@lru_cache(maxsize=64)
def has_generation_markers(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _by_prefixes(
    whole: str,
    messages: Messages,
    roles: Sequence[str],
    given: int,
    render: "Render",
    special: re.Pattern[str],
) -> list[Rendered]:
    """The sequences of a conversation whose template rewrites earlier turns, made from the last turn to the first.

    A turn joins the current text if that contains it; otherwise it begins another text.
    """
    texts, spans = [whole], [list[Span]()]
    for index in reversed(range(given, len(messages))):
        if messages[index].role not in roles:
            continue
        upto = whole if index == len(messages) - 1 else render(messages[: index + 1])
        held = held_until(upto, texts[-1], special)
        if not held:
            texts.append(upto)
            spans.append([])
        start = _start(messages, index, upto, render)
        spans[-1].append((start, end_of_turn(upto, start, held or len(upto), special)))
    learnt = [Rendered(text, tuple(reversed(found))) for text, found in zip(texts, spans, strict=True) if found]
    return learnt or [Rendered(whole, ())]


def held_until(upto: str, text: str, special: re.Pattern[str]) -> int:
    """Up to where a text holds the beginning of a conversation; 0 where it does not.

    It may lack what the template puts behind the last turn of all: more special tokens, and whitespace.
    """
    if text.startswith(upto):
        return len(upto)
    same = common_prefix(upto, text)
    end = max((match.end() for match in special.finditer(upto) if match.end() <= same), default=0)
    return 0 if special.sub("", upto[end:]).strip() else end


def _start(messages: Messages, index: int, upto: str, render: "Render") -> int:
    """The place in `upto` where the turn's own words begin: for the assistant, after the generation prompt.

    Where a template primes the model with words that the turn itself does not have (an opened thought), the turn
    begins where the two part, or where its rendering first depends on what it says; turns of others begin there, too.
    """
    before = upto
    if messages[index].role == "assistant":
        before = render(messages[:index], prompt=True)
        if upto.startswith(before):
            return len(before)
    other = replace(messages[index], content=STAND_IN + messages[index].content)
    return min(common_prefix(upto, before), common_prefix(upto, render([*messages[:index], other])))


def end_of_turn(upto: str, start: int, end: int, special: re.Pattern[str]) -> int:
    kept = upto[start:end].rstrip()
    last = max((match.end() for match in special.finditer(kept)), default=0)
    return start + len(kept) if last == len(kept) else end


def common_prefix(first: str, second: str) -> int:
    """How many first characters are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


Form = Callable[[Messages], list[dict[str, Any]]]


@dataclass(frozen=True)
class Render:
    """Beginnings of one conversation through the template."""

    chat: ChatFormat
    tools: Sequence[Data]
    form: Form

    def __call__(self, messages: Messages, prompt: bool = False) -> str:
        """Render with the template itself. What transformers does around it would double the time."""
        if not messages:
            return ""
        compiled, tools = _compile_jinja_template(_template(self.chat, self.tools)), list(self.tools) or None
        try:
            text: str = compiled.render(
                messages=self.form(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.chat.tokens,
            )
        except Exception as error:  # a template may raise any exception
            raise BadInput(f"the chat template fails: {type(error).__name__}: {error}") from None
        return text

    def marked(self, messages: Messages) -> Rendered:
        """The rendered conversation, with the spans that the template marks as generated."""
        template, tools = _template(self.chat, self.tools), list(self.tools) or None
        try:
            texts, spans = render_jinja_template(
                [self.form(messages)], tools, None, template, return_assistant_tokens_mask=True, **self.chat.tokens
            )
        except Exception as error:  # a template may raise any exception
            raise BadInput(f"the chat template fails: {type(error).__name__}: {error}") from None
        return Rendered(texts[0], tuple((start, end) for start, end in spans[0] if start < end))


def _rendered(
    chat: ChatFormat, messages: Messages, tools: Sequence[Data], marked: bool = False
) -> tuple[Rendered, Render]:
    """The rendered conversation, and the `Render` with the form of messages that the template accepts.

    Raises `BadInput` if it accepts none, or leaves something out.
    """
    problems = []
    for form in (_plain, _pasted, _blocks):
        render = Render(chat, tools, form)
        try:
            whole = render.marked(messages) if marked else Rendered(render(messages), ())
            if not (lost := _lost(whole.text, messages, tools, render)):
                return whole, render
            problems.append(f"the chat template leaves out {lost}")
        except BadInput as error:
            problems += error.problems
    raise BadInput(problems[0])


def _lost(text: str, messages: Messages, tools: Sequence[Data], render: Render) -> str:
    """What the template leaves out: a tool, a call, or the last turn's words. It may leave out thoughts."""
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
    """Thoughts under each of the names that templates have for them."""
    data = [message_to_data(message) for message in messages]
    for message in data:
        if "reasoning_content" in message:
            message |= dict.fromkeys(REASONING, message["reasoning_content"])
    return data


def _pasted(messages: Messages) -> list[dict[str, Any]]:
    """The form for templates that paste arguments as text, and that read a turn with content as one without calls."""
    data = _plain(messages)
    for message in data:
        for call in message.get("tool_calls", ()):
            call["function"] |= {"arguments": json.dumps(call["function"]["arguments"])}
            message["content"] = message["content"] or None
    return data


def _blocks(messages: Messages) -> list[dict[str, Any]]:
    """The form for templates of vision models: text as a list of one block."""
    return [data | {"content": [{"type": "text", "text": data["content"]}]} for data in _plain(messages)]


def _template(chat: ChatFormat, tools: Sequence[Data]) -> str:
    """A tokenizer may have several; one of them for tools."""
    if isinstance(chat.template, str):
        return chat.template
    return chat.template["tool_use"] if tools and "tool_use" in chat.template else chat.template["default"]
