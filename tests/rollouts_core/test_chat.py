"""Loss masks against a slow independent method: which tokens change when only the assistant's words are kept."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.data.chat import compute_loss_mask, render_prompt, tokenize_conversation
from rollouts_core.data.tokenizers import load_tokenizer, save_tokenizer, train_tokenizer
from rollouts_core.errors import BadInput
from rollouts_core.stages.specs import TokenizerSpec
from rollouts_core.types import Message

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if message.role == 'assistant' and not loop.last %}[…]"
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
    texts = [(Message("user", "be kind hi you hello 2+2? four, \nsystemuserassistant" * 3),)]
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
    ids, mask = compute_loss_mask(made, messages)
    runs, previous = [], 0
    for token, learnt in zip(ids, mask, strict=True):
        if learnt and not previous:
            runs.append([])
        if learnt:
            runs[-1].append(token)
        previous = learnt
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
    ids, _ = compute_loss_mask(made, TURNS)
    prompt = render_prompt(made, TURNS[:-1])
    assert ids[: len(prompt)] == prompt
    assert made.decode(ids[len(prompt) :]) == "four, hello<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(BadInput, match="renders turn 2 differently"):
        tokenize_conversation(tokenizer("character", FORGETFUL), TURNS)


@pytest.mark.parametrize("kind", ["character", "byte_bpe"])
def test_made_tokenizers_survive_saving_and_keep_every_character(kind: str, tmp_path: Any) -> None:
    made = tokenizer(kind)
    save_tokenizer(made, tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    text = "be  kind\n2+2? hello"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert compute_loss_mask(loaded, TURNS) == compute_loss_mask(made, TURNS)


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
