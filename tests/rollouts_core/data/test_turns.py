"""Conversations as tokens, over every chat template that TRL and transformers carry."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.data.calls import FORMATS
from rollouts_core.data.turns import TurnFormat, first_tokens, next_tokens, read_turn, stop_tokens, turn_format
from rollouts_core.errors import BadInput
from rollouts_core.types import Message, ToolCall
from tests.rollouts_core.data.test_templates import BASE, TOOLS, templates, tokenizer_with
from tests.rollouts_core.models import character_tokenizer

USER = Message("user", "UUU")
NO_WAY_KNOWN = ("trl/muse_glimmer", "trl/muse_glimmer_training")
TAGGED = next(entry for entry in FORMATS if entry.name == "tagged JSON")


def forms(tools: bool) -> dict[str, TurnFormat]:
    """Of every template that can speak of a tool, or of all."""
    found = {}
    for name, template in templates().items():
        try:
            found[name] = turn_format(tokenizer_with(template), TOOLS if tools else ())
        except BadInput as error:
            expected = "not known how this model calls" if name in NO_WAY_KNOWN else "leaves out|fails|alternate"
            if not re.search(expected, str(error)):
                raise
    return found


def spoken(form: TurnFormat, messages: list[Message], turn: Message) -> tuple[int, ...]:
    """What an engine would make of a turn as the template writes it, and stop."""
    before, whole = form.render(messages, prompt=True), form.render([*messages, turn])
    assert whole.startswith(before)
    text = whole[len(before) :].rstrip().removesuffix(form.tokenizer.eos_token)
    tokens = form.tokenizer(text, add_special_tokens=False)["input_ids"]
    ended = next((place for place, token in enumerate(tokens) if token in form.stop), len(tokens))
    return (*tokens[:ended], *(tokens[ended : ended + 1] or form.stop[:1]))


def test_an_answer_ends_with_the_end_of_sequence_or_with_what_the_template_ends_a_turn_with() -> None:
    found = {name: set(form.tokenizer.convert_ids_to_tokens(form.stop)) for name, form in forms(tools=False).items()}
    assert found["trl/phi3"] == {"</s>", "<|end|>"}
    assert found["trl/qwen3"] == {"<|im_end|>"}
    assert all(forms(tools=False)[name].tokenizer.eos_token in stops for name, stops in found.items())


def test_a_tokenizer_that_ends_nothing_is_refused() -> None:
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    tokenizer.eos_token = None
    with pytest.raises(BadInput, match="no model could learn to end its answer"):
        stop_tokens(tokenizer)


def test_a_call_is_read_back_from_what_the_template_writes() -> None:
    """Behind words of its own, too, where the template keeps them."""
    checked = 0
    for name, form in forms(tools=True).items():
        for said in ("", "AAA"):
            turn = Message("assistant", said, (ToolCall("FFF", {"x": "say {2} [3], 4"}, "call00001"),))
            try:
                tokens = spoken(form, [USER], turn)
            except AssertionError:
                continue  # primed with words that the turn does not have
            read = read_turn(form, tokens, 0)
            assert [(call.name, call.arguments) for call in read.tool_calls] == [
                ("FFF", turn.tool_calls[0].arguments)
            ], name
            checked += 1
    assert checked > 50


def test_what_comes_behind_a_turn_is_what_the_template_puts_there() -> None:
    """The engine's tokens with what follows say what the whole conversation says; or it is rendered anew, and told."""
    continued = 0
    for name, form in forms(tools=False).items():
        try:
            made = spoken(form, [USER], Message("assistant", "AAA"))
        except AssertionError:
            continue
        before = (*first_tokens(form, [USER]), *made)
        further = [USER, Message("assistant", "AAA"), Message("user", "VVV")]
        given, whole = next_tokens(form, further, before), first_tokens(form, further)
        if given.continues:
            continued += 1
            assert words(form, (*before, *given.tokens)) == words(form, whole), name
        else:
            assert given.tokens == whole, name
    assert continued > 55


def words(form: TurnFormat, tokens: tuple[int, ...]) -> str:
    """Without space, and without the token to stop with, which not every template puts behind a turn."""
    return "".join(form.tokenizer.decode(list(tokens)).replace(form.tokenizer.eos_token, "").split())


def test_tool_results_follow_the_engines_own_tokens() -> None:
    checked = 0
    for name, form in forms(tools=True).items():
        call = ToolCall("FFF", {"x": "XXX"}, "call00001")
        turn = Message("assistant", "", (call,))
        try:
            made = spoken(form, [USER], turn)
        except AssertionError:
            continue
        before = (*first_tokens(form, [USER]), *made)
        results = [USER, turn, Message("tool", "TTT", name="FFF", tool_call_id="call00001")]
        given = next_tokens(form, results, before)
        if given.continues:
            text = form.tokenizer.decode(list(given.tokens))
            assert "TTT" in text, name
            assert "XXX" not in text, name
            assert "UUU" not in text, name
            checked += 1
    assert checked > 25


def test_a_template_that_drops_thoughts_renders_the_conversation_anew() -> None:
    form = turn_format(tokenizer_with(templates()["trl/qwen3"]))
    thought = Message("assistant", "AAA", reasoning="RRR")
    made = spoken(form, [USER], thought)
    assert read_turn(form, made, 0) == thought
    messages = [USER, thought, Message("user", "VVV")]
    given = next_tokens(form, messages, (*first_tokens(form, [USER]), *made))
    assert not given.continues
    assert given.tokens == first_tokens(form, messages)
    assert "RRR" not in form.tokenizer.decode(list(given.tokens))


def test_thoughts_are_kept_while_tools_are_called() -> None:
    form = turn_format(tokenizer_with(templates()["trl/qwen3"]), TOOLS)
    turn = Message("assistant", "", (ToolCall("FFF", {"x": "1"}, "call00000"),), "RRR")
    made = spoken(form, [USER], turn)
    assert read_turn(form, made, 0) == turn
    results = [USER, turn, Message("tool", "TTT", name="FFF", tool_call_id="call00000")]
    assert next_tokens(form, results, (*first_tokens(form, [USER]), *made)).continues


def test_other_tokens_than_the_encoder_s_are_kept_and_told() -> None:
    """Spaces that the template would not write: encoded again, the call would be other tokens."""
    form = turn_format(tokenizer_with(templates()["trl/qwen2_5"]), TOOLS)
    text = '<tool_call>{"name":"FFF",  "arguments":{"x":"1"}}</tool_call>'
    made = (*form.tokenizer(text, add_special_tokens=False)["input_ids"], *form.stop)
    turn = read_turn(form, made, 0)
    assert turn.tool_calls == (ToolCall("FFF", {"x": "1"}, "call00000"),)
    results = [USER, turn, Message("tool", "TTT", name="FFF", tool_call_id="call00000")]
    given = next_tokens(form, results, (*first_tokens(form, [USER]), *made))
    assert (given.continues, given.differs) == (True, True)


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ("<tool_call>{}</tool_call>", "{}"),
        ('<tool_call>{"name": "f", "arguments": {</tool_call>', '{"name": "f", "arguments": {'),
        ("<tool_call>", "nothing"),
        ('<tool_call>[{"name": 3}]</tool_call>', '[{"name": 3}]'),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', '{"name": "f", "arguments": "x"}'),
    ],
)
def test_what_is_no_call_is_a_malformed_one(text: str, malformed: str) -> None:
    before, (call,) = TAGGED.read(f"words {text}")
    assert (before, dict(call.arguments), call.malformed) == ("words ", {}, malformed)


@given(st.text(alphabet="<>{}[]()\"'=:,|tool_cal/name function arg\\n5", max_size=80) | st.text(max_size=40), st.data())
def test_reading_never_raises(text: str, data: st.DataObject) -> None:
    marks = [
        "<tool_call>",
        "[TOOL_CALLS]",
        "<|tool_call_start|>",
        "<|tool_call>",
        "to=functions.",
        "<｜tool▁call▁begin｜>",
        "",
    ]
    for form in FORMATS:
        form.read(data.draw(st.sampled_from(marks)) + text)
        form.read("[" * 3000 + text)


def test_a_model_that_knows_no_tools_is_refused() -> None:
    tokenizer = tokenizer_with("{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}")
    with pytest.raises(BadInput, match="the chat template leaves out the tool FFF"):
        turn_format(tokenizer, TOOLS)
    with pytest.raises(BadInput, match="it is not known how this model calls tools; its chat template writes"):
        turn_format(tokenizer_with(templates()["trl/muse_glimmer"]), TOOLS)


def test_an_answer_that_is_no_utf_8_is_read_and_kept_as_tokens() -> None:
    """Half of a character's bytes: the text has a mark in its place, the tokens are what they were."""
    form = turn_format(BASE)
    (whole,) = (form.tokenizer("é", add_special_tokens=False)["input_ids"],)
    assert len(whole) == 2
    made = (whole[0], *form.tokenizer("A", add_special_tokens=False)["input_ids"], *form.stop)
    turn = read_turn(form, made, 0)
    assert turn == Message("assistant", "\ufffdA")
    given = next_tokens(form, [USER, turn, USER], (*first_tokens(form, [USER]), *made))
    assert (given.continues, given.differs) == (True, True)


def test_turns_without_special_tokens_of_others() -> None:
    """What a policy makes up of special tokens is not taken for the template's."""
    form = turn_format(character_tokenizer())
    user = form.tokenizer.convert_tokens_to_ids("<|user|>")
    one = form.tokenizer.convert_tokens_to_ids("1")
    assert read_turn(form, (one, user, one, *form.stop), 0) == Message("assistant", "11")
