"""Packed rows against transformers' own forward pass on each sequence alone: scores and gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from rollouts_core.data.packing import best_fit
from rollouts_core.data.tokenized import Example
from rollouts_core.errors import BadInput
from rollouts_core.training import head as head_module
from rollouts_core.training.collate import learnt, learnt_tokens, pack_batch
from rollouts_core.training.head import Head, head_scores
from rollouts_core.training.packed import _Padded, padding_of
from rollouts_core.training.policy import Policy
from tests.rollouts_core.models import CONTEXT, SHAPE, VOCABULARY, tiny_model

SMALL = SHAPE | {"max_position_embeddings": CONTEXT}
ARCHITECTURES = {
    "qwen2": Qwen2Config(**SMALL),
    "qwen2 tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2 windows": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "llama": LlamaConfig(**SMALL),
}


def sequences(lengths: list[int], shared: int = 0, seed: int = 0) -> list[Example]:
    """Sequences that begin with the same `shared` tokens, the rest learnt but for every fifth token."""
    random = np.random.default_rng(seed)
    prompt = random.integers(1, VOCABULARY, shared)
    made = []
    for length in lengths:
        tokens = np.concatenate((prompt, random.integers(1, VOCABULARY, length))).astype(np.int32)
        mask = ((np.arange(len(tokens)) >= max(shared, 1)) & (np.arange(len(tokens)) % 5 != 4)).astype(np.int32)
        made.append(Example(tokens, mask, shared))
    return made


def alone(model: Any, example: Example, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(example.tokens.astype(np.int64))[None]
    logp = torch.log_softmax(model(tokens).logits[0].double() / temperature, -1)
    places = torch.from_numpy(learnt(example))
    chosen = logp[places - 1]
    return chosen.gather(1, tokens[0, places, None])[:, 0], -(chosen.exp() * chosen).sum(1)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("shared", [0, 7])
def test_scores_and_gradients_are_those_of_the_sequences_alone(architecture: str, shared: int) -> None:
    examples = sequences([3, 12, 5, 1, 9], shared) + sequences([6], 4, seed=1)
    model = tiny_model(architecture=ARCHITECTURES[architecture])
    model.set_attn_implementation("eager")
    expected = [alone(model, example, 0.8) for example in examples]
    loss_of = lambda logp, entropy: (logp.double() * 1.5 - entropy.double() * 0.3).sum()  # noqa: E731
    sum(loss_of(*scores) for scores in expected).backward()  # type: ignore[union-attr]
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    scores = Policy(model, 0.8)(pack_batch(examples, 1.0))
    loss_of(scores.logprobs_M, scores.entropy_M).backward()
    torch.testing.assert_close(scores.logprobs_M.double(), torch.cat([e[0] for e in expected]), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy_M.double(), torch.cat([e[1] for e in expected]), atol=2e-5, rtol=1e-5)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name], atol=2e-4, rtol=1e-4, msg=name)


def test_entropy_is_left_out_where_nothing_reads_it_and_changes_nothing() -> None:
    batch = pack_batch(sequences([3, 12, 5]), 1.0)
    gradients = []
    for entropy in (True, False):
        model = tiny_model()
        scores = Policy(model, entropy=entropy)(batch)
        assert (scores.entropy_M is None) != entropy
        scores.logprobs_M.sum().backward()
        gradients.append([value.grad for value in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_shared_prompt_is_computed_once() -> None:
    together = pack_batch(sequences([3, 4, 5], shared=10), 1.0)
    apart = pack_batch([replace(example, shared=0) for example in sequences([3, 4, 5], shared=10)], 1.0)
    assert (len(together.tokens_N), len(apart.tokens_N)) == (10 + 12, 30 + 12)
    assert torch.equal(together.targets_M, apart.targets_M)


def test_no_token_is_padding() -> None:
    examples = sequences([3, 40, 5, 17])
    batch = pack_batch(examples, 1.0)
    assert len(batch.tokens_N) == sum(len(example.tokens) for example in examples)
    assert len(batch.targets_M) == learnt_tokens(examples)


def test_what_others_of_the_row_say_changes_nothing() -> None:
    policy = Policy(tiny_model())
    one, *others = sequences([9, 4, 12])
    strangers = sequences([4, 12], seed=5)
    mine = slice(0, len(learnt(one)))
    with torch.no_grad():
        first, second = (policy(pack_batch([one, *rest], 1.0)).logprobs_M[mine] for rest in (others, strangers))
    assert torch.equal(first, second)


@pytest.mark.parametrize("elements", [1, 3 * VOCABULARY, 10**6])
@pytest.mark.parametrize(("divisor", "softcap", "biased"), [(1.0, None, False), (3.0, 2.5, True)])
def test_the_head_in_chunks_is_the_head_at_once(
    monkeypatch: pytest.MonkeyPatch, elements: int, divisor: float, softcap: float | None, biased: bool
) -> None:
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", elements)
    torch.manual_seed(0)
    own = [torch.randn(*shape, requires_grad=True) for shape in ((11, 8), (VOCABULARY, 8), (VOCABULARY,))]
    targets, upstream = torch.randint(0, VOCABULARY, (11,)), torch.randn(2, 11)
    head = Head(own[1], own[2] if biased else None, divisor, softcap)
    scores = head_scores(own[0], head, targets, 0.7)
    assert scores.entropy_M is not None
    (scores.logprobs_M * upstream[0] + scores.entropy_M * upstream[1]).sum().backward()
    direct = [value.detach().double().requires_grad_() for value in own]
    logits = (direct[0] @ direct[1].T + (direct[2] if biased else 0)) / divisor
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / 0.7, -1)
    wanted = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    (wanted[0] * upstream[0] + wanted[1] * upstream[1]).sum().backward()
    torch.testing.assert_close(scores.logprobs_M.double(), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy_M.double(), wanted[1], atol=1e-5, rtol=1e-5)
    for found, expected in list(zip(own, direct, strict=True))[: 3 if biased else 2]:
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad.double(), expected.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, attn_pdrop=0.1), "dropout"),
    ],
)
def test_models_that_compute_something_else_are_refused(config: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Policy(tiny_model(architecture=config)).train()(pack_batch(sequences([4]), 1.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=60), st.integers(20, 100))
def test_best_fit_loses_nothing_and_fills_bins(sizes: list[int], capacity: int) -> None:
    bins = best_fit(sizes, capacity)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in chosen) for chosen in bins]
    for total, chosen in zip(totals, bins, strict=True):
        assert total <= capacity or len(chosen) == 1
    assert len([total for total in totals if 2 * total <= capacity]) <= 1


def test_best_fit_wastes_little_of_a_pass() -> None:
    sizes = np.random.default_rng(0).lognormal(5, 0.8, 2000).astype(int).clip(1, 4096).tolist()
    bins = best_fit(sizes, 8192)
    assert 1 - sum(sizes) / (len(bins) * 8192) < 0.03


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.sampled_from([0, 5]))
def test_padding_is_what_attention_computes_beyond_the_tokens_there_are(lengths: list[int], shared: int) -> None:
    batch = pack_batch(sequences(lengths, shared), 1.0)
    cpu = torch.device("cpu")
    padding, rows = padding_of(batch.spans, cpu, torch.float32)
    blocks = _Padded(batch.spans, cpu)._blocks
    assert rows == sum(len(block.queries_RQ) for block in blocks)
    assert rows - padding == len(batch.tokens_N)
    assert padding_of(batch.spans, torch.device("cuda"), torch.bfloat16) == (0, len(batch.tokens_N))
