"""Loss masks against a slow independent method: which tokens change when only the assistant's words are kept."""

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.config.model import TokenizerSpec
from rollouts_core.data.chat import Tokenized, encode_texts, tokenize_conversation
from rollouts_core.data.rendering import chat_format, render_prompt
from rollouts_core.data.tokenizers import load_tokenizer, save_tokenizer, train_tokenizer
from rollouts_core.errors import BadInput
from rollouts_core.types import Message

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if message.role == 'assistant' and not loop.last %}..."
    "{% else %}{{ message.role }}:{{ message.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TURNS = (
    Message("system", "be kind"),
    Message("user", "hi you"),
    Message("assistant", "hello"),
    Message("user", "2+2?"),
    Message("assistant", "four, hello"),
)


def tokenizer(kind: str, template: str | None = None) -> Any:
    texts = ["be kind hi you hello 2+2? four, \n:.systemuserassistant" * 3]
    made = train_tokenizer(TokenizerSpec(kind=kind, vocab_size=300 if kind == "byte_bpe" else None), texts, 512)
    if template == CHATML:
        made.add_special_tokens(
            {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
        )
    if template:
        made.chat_template = template
    return made


def masked_text(made: Any, messages: tuple[Message, ...]) -> list[str]:
    """The learnt runs of tokens, decoded one by one."""
    (only,) = tokenize_conversation(made, messages)
    return runs_of(made, only)


def runs_of(made: Any, tokenized: Tokenized) -> list[str]:
    pairs = zip(tokenized.ids.tolist(), tokenized.mask.tolist(), strict=True)
    runs = [[token for token, _ in run] for learnt, run in groupby(pairs, lambda pair: pair[1]) if learnt]
    return [made.decode(run) for run in runs]


@pytest.mark.parametrize("kind", ["character", "byte_bpe"])
@pytest.mark.parametrize(("template", "end"), [(None, "<|end|>"), (CHATML, "<|im_end|>")])
def test_assistant_turns_and_their_ends_are_learnt_and_nothing_else(kind: str, template: str | None, end: str) -> None:
    assert masked_text(tokenizer(kind, template), TURNS) == [f"hello{end}", f"four, hello{end}"]


words = st.text("abc hello+2", min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=4), st.booleans())
def test_any_number_of_turns(turns: list[tuple[str, str]], chatml: bool) -> None:
    made = BPE_CHATML if chatml else BPE
    messages = tuple(
        Message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)
    )
    end = "<|im_end|>" if chatml else "<|end|>"
    assert masked_text(made, messages) == [answer + end for _, answer in turns]


BPE, BPE_CHATML = tokenizer("byte_bpe"), tokenizer("byte_bpe", CHATML)


def test_a_prompt_is_the_beginning_of_the_conversation() -> None:
    made = tokenizer("character")
    ids = tokenize_conversation(made, TURNS)[0].ids.tolist()
    prompt = encode_texts(made, [render_prompt(chat_format(made), TURNS[:-1])])[0].tolist()
    assert ids[: len(prompt)] == prompt
    assert made.decode(ids[len(prompt) :]) == "four, hello<|end|>"


def test_a_turn_that_the_template_rewrites_later_is_learnt_from_a_text_of_its_own() -> None:
    made = tokenizer("character", FORGETFUL)
    last, first = tokenize_conversation(made, TURNS)
    assert (runs_of(made, last), runs_of(made, first)) == (["four, hello<|end|>"], ["hello<|end|>"])
    assert "hello" not in made.decode(last.ids[: -len("four, hello") - 1])
    assert made.decode(first.ids) == "system:be kind<|end|>user:hi you<|end|>assistant:hello<|end|>"


SILENT = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
BROKEN = "{{ raise_exception('only two turns') }}"


@pytest.mark.parametrize(
    ("template", "problem"), [(SILENT, "leaves out what the last turn says, 'four, hello'"), (BROKEN, "only two turns")]
)
def test_a_template_that_loses_turns_or_fails_is_named(template: str, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        tokenize_conversation(tokenizer("character", template), TURNS)


@pytest.mark.parametrize("kind", ["character", "byte_bpe"])
def test_made_tokenizers_survive_saving_and_keep_every_character(kind: str, tmp_path: Any) -> None:
    made = tokenizer(kind)
    save_tokenizer(made, tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    text = "be  kind\n2+2? hello"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    (again,), (first,) = (tokenize_conversation(which, TURNS) for which in (loaded, made))
    assert again.ids.tolist() == first.ids.tolist() and again.mask.tolist() == first.mask.tolist()


def test_byte_bpe_knows_every_character() -> None:
    made = tokenizer("byte_bpe")
    text = "žluťoučký 🐎 数学"
    assert made.decode(made(text)["input_ids"]) == text


def test_a_tokenizer_without_template_is_refused(tmp_path: Any) -> None:
    made = tokenizer("character")
    made.chat_template = None
    save_tokenizer(made, tmp_path)
    with pytest.raises(BadInput, match="no chat template"):
        load_tokenizer(str(tmp_path))
