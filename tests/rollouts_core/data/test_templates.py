"""Every chat template that the installed TRL and transformers carry, against methods that know nothing of ours.

TRL has many templates twice, the second time with marks around what the assistant generates: two hands, one answer.
For all of them, the learnt text is held against the words of the conversation: all of the assistant's, nobody else's.
"""

import ast
import copy
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from jinja2 import TemplateError

from rollouts_core.config.model import TokenizerSpec
from rollouts_core.data.chat import encode_rendered
from rollouts_core.data.rendering import Rendered, chat_format, has_generation_markers, render_conversation
from rollouts_core.data.tokenizers import train_tokenizer
from rollouts_core.errors import BadInput
from rollouts_core.types import Message, ToolCall

SPECIAL = re.compile(
    r"<[|｜][^>\s'\"{}]*[|｜]>|</?s>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[/?INST\]|<(?:bos|eos)>|"
    r"<end_of_utterance>|<\|[A-Z_]+\|>"
)
END = re.compile(r"im_end|end_of_turn|eot|end▁of▁sentence|</s>|end_of_utterance|END_OF_TURN|turn\|>|<\|return\|>")
USER, ANSWER = Message("user", "UUU"), Message("assistant", "AAA")
CALL = Message("assistant", "", (ToolCall("FFF", {"x": "XXX"}, "call00001"),))
RESULT = Message("tool", "TTT", name="FFF", tool_call_id="call00001")
AGAIN = (Message("user", "VVV"), Message("assistant", "BBB"))
CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "one turn": (USER, ANSWER),
    "two turns": (USER, ANSWER, *AGAIN),
    "system": (Message("system", "SSS"), USER, ANSWER, *AGAIN),
    "thoughts": (USER, Message("assistant", "AAA", reasoning="RRR"), *AGAIN[:1], Message("assistant", "BBB")),
    "tools": (USER, CALL, RESULT, AGAIN[1]),
}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "e"}}, "required": ["x"]}
TOOLS = ({"type": "function", "function": {"name": "FFF", "description": "d", "parameters": PARAMETERS}},)
CANNOT: dict[str, str] = {
    "system": "System role not supported",
    "tools": "leaves out|must alternate|template fails",
}
"""What a template may refuse, and with which words."""


@lru_cache
def templates() -> dict[str, str]:
    trl = pytest.importorskip("trl")
    found = {
        f"trl/{file.stem}": file.read_text() for file in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
    }
    for file in (Path(transformers.__file__).parent / "models").rglob("*.py"):
        source = file.read_text()
        if "{%" not in source or "message" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if "{%" in text and "message" in text and "for" in text:
                found[f"transformers/{file.stem}:{node.lineno}"] = text  # type: ignore[attr-defined]
    return found


def tokenizer_with(template: str) -> Any:
    made = copy.deepcopy(BASE)
    tokens = sorted(set(SPECIAL.findall(template)))
    end = next((token for token in tokens if END.search(token)), "</s>")
    made.add_special_tokens({"additional_special_tokens": tokens, "eos_token": end, "bos_token": "<bos>"})
    made.chat_template = template
    return made


BASE = train_tokenizer(TokenizerSpec(kind="byte_bpe", vocab_size=300), ["hello"], 2048)


def rendered(name: str, what: str) -> list[Rendered] | None:
    """None where the template refuses what it may refuse."""
    chat = chat_format(tokenizer_with(templates()[name]))
    try:
        return render_conversation(chat, CONVERSATIONS[what], TOOLS if what == "tools" else ())
    except BadInput as error:
        if not re.search(CANNOT.get(what, "nothing"), str(error)):
            raise
        return None


@pytest.mark.parametrize("what", CONVERSATIONS)
def test_every_templates_learnt_text_is_what_the_assistant_says(what: str) -> None:
    checked = 0
    for name in templates():
        texts = rendered(name, what)
        if texts is None:
            continue
        learnt = "|".join(text.text[start:end] for text in texts for start, end in text.spans)
        said = [word for turn in CONVERSATIONS[what] if turn.role == "assistant" for word in words_of(turn)]
        assert [learnt.count(word) for word in said] == [1] * len(said), f"{name}: {learnt}"
        assert not re.search("UUU|VVV|SSS|TTT", learnt), f"{name}: {learnt}"
        checked += 1
    assert checked >= {"tools": 30}.get(what, 60)


@pytest.mark.parametrize("what", ["two turns", "thoughts"])
def test_behind_what_is_given_only_the_last_turn_is_learnt(what: str) -> None:
    """As it is where everything is learnt; marks may hold what the model is primed with as well."""
    for name in templates():
        chat = chat_format(tokenizer_with(templates()[name]))
        texts = rendered(name, what)
        if texts is None:
            continue
        (text,) = render_conversation(chat, CONVERSATIONS[what], given=3)
        learnt = [text.text[start:end] for start, end in text.spans]
        every = [texts[0].text[start:end] for start, end in texts[0].spans]
        assert "".join(every).endswith("".join(learnt)), name
        assert "".join(learnt).count("BBB") == 1 and "AAA" not in "".join(learnt), name


def words_of(turn: Message) -> list[str]:
    return [turn.content] if turn.content else ["XXX"]


@pytest.mark.parametrize("what", CONVERSATIONS)
def test_spans_are_what_trl_marks_where_both_render_the_same(what: str) -> None:
    """Apart from whitespace behind a turn, which is never generated, and headings, which the model is given."""
    compared = 0
    for name in templates():
        marked = f"{name}_training"
        if marked not in templates() or has_generation_markers(templates()[name]):
            continue
        ours, theirs = rendered(name, what), rendered(marked, what)
        if ours is None or theirs is None or len(ours) != 1 or ours[0].text != theirs[0].text:
            continue
        text = ours[0].text
        for turn, (start, end) in enumerate(ours[0].spans):
            around = [span for span in theirs[0].spans if span[0] <= start and end <= span[1] + 1]
            joined = around or [joined_up(theirs[0].spans, start, end)]
            before, behind = text[joined[0][0] : start], text[end : joined[-1][1]]
            assert not behind.strip(), f"{name}: behind the turn, {behind!r} is marked as well"
            assert before in given(name, what, turn), f"{name}: before the turn, {before!r} is marked as well"
        compared += 1
    assert compared >= {"tools": 6, "thoughts": 5}.get(what, 8), compared


def given(name: str, what: str, answer: int) -> str:
    """What the model goes on from to give an answer, by transformers alone."""
    made = tokenizer_with(templates()[name])
    messages = CONVERSATIONS[what]
    place = [index for index, message in enumerate(messages) if message.role == "assistant"][answer]
    for form in (plain, pasted, blocks):
        try:
            text: str = made.apply_chat_template(
                [form(turn) for turn in messages[:place]], tokenize=False, add_generation_prompt=True
            )
            return text
        except (TemplateError, TypeError):
            continue
    raise AssertionError(f"{name} takes no form of {what}")


def plain(turn: Message) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "FFF", "arguments": {"x": "XXX"}}}] if turn == CALL else []
    return {"role": turn.role, "content": turn.content} | ({"tool_calls": calls} if calls else {})


def pasted(turn: Message) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "FFF", "arguments": "{}"}}
    return {"role": "assistant", "content": "", "tool_calls": [call]} if turn == CALL else plain(turn)


def blocks(turn: Message) -> dict[str, Any]:
    return plain(turn) | {"content": [{"type": "text", "text": turn.content}]}


def joined_up(spans: tuple[tuple[int, int], ...], start: int, end: int) -> tuple[int, int]:
    """Spans that touch, as one."""
    inside = [span for span in spans if start <= span[0] and span[1] <= end + 1]
    assert inside, "nothing is marked there"
    return inside[0][0], inside[-1][1]


def test_masks_are_the_spans_in_tokens() -> None:
    """Token by token, from offsets."""
    for name in templates():
        made = tokenizer_with(templates()[name])
        texts = rendered(name, "two turns") or []
        for text, tokens in zip(texts, encode_rendered(made, texts), strict=True):
            offsets = made(text.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            slow = [int(any(start <= begin < end for start, end in text.spans)) for begin, _ in offsets]
            assert tokens.mask.tolist() == slow, name
