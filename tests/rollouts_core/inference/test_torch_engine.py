from pathlib import Path

import anyio
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from rollouts_core.errors import BadInput, ContextOverflow, WeightMismatch
from rollouts_core.inference.cache_rows import CacheRows, LayerShape
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.engine import GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.memory import GIB
from rollouts_core.training.weight_sync import sync_weights_to_engines
from tests.rollouts_core.models import CONTEXT, SHAPE, VOCABULARY, tiny_model

ARCHITECTURES = {
    "qwen2": None,
    "qwen3": Qwen3Config(head_dim=8, **SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(sliding_window=None, **SHAPE),
}
"""The last one runs through transformers' own forward pass."""


def requests(count: int, temperature: float = 1.0, max_new_tokens: int = 12) -> list[GenerationRequest]:
    """Prompts of different lengths."""
    random = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, VOCABULARY, (2 + index * 3 % 11,), generator=random).tolist() for index in range(count)]
    return [
        GenerationRequest(f"r{index}", tuple(prompt), max_new_tokens, (0,), temperature, seed=100 + index)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate_of_transformers(architecture: str) -> None:
    model = tiny_model(architecture=ARCHITECTURES[architecture])
    for request, completion in zip(
        requests(9), TorchEngine(copy_of(model), CONTEXT, 4).generate(requests(9, temperature=0.0)), strict=True
    ):
        prompt = torch.tensor([request.prompt_tokens])
        with torch.no_grad():
            expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0)
        assert list(completion.tokens) == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_plain_forward_pass(temperature: float) -> None:
    model = tiny_model()
    for request, completion in zip(
        requests(9), TorchEngine(model, CONTEXT, 4).generate(requests(9, temperature)), strict=True
    ):
        tokens = torch.tensor([request.prompt_tokens + completion.tokens])
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, len(request.prompt_tokens) - 1 : -1].double() / temperature
        expected = torch.log_softmax(logits, -1)[range(len(completion.tokens)), list(completion.tokens)]
        torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=1e-5, rtol=0)


def test_a_cache_grows_only_where_it_is_too_small() -> None:
    cache = CacheRows([LayerShape(1, 2, 2)], torch.float32, torch.device("cpu"))
    cache.make_room(64, 48, 256, 96, 10**6)
    assert (cache.rows, cache.columns) == (64, 48)
    cache.make_room(64, 49, 256, 96, 10**6)
    assert (cache.rows, cache.columns) == (64, 96)
    cache.make_room(65, 10, 256, 96, 10**6)
    assert (cache.rows, cache.columns) == (128, 96)


def test_draws_depend_neither_on_neighbours_nor_on_order() -> None:
    """What remains between batches is floating-point rounding."""
    model = tiny_model()
    alone = [TorchEngine(model, CONTEXT, 1).generate([request])[0] for request in requests(12)]
    together = TorchEngine(model, CONTEXT, 12).generate(requests(12))
    backwards = TorchEngine(model, CONTEXT, 5).generate(requests(12)[::-1])[::-1]
    for batch in (together, backwards):
        assert [completion.tokens for completion in batch] == [completion.tokens for completion in alone]
        difference = max(
            abs(a - b) for x, y in zip(batch, alone, strict=True) for a, b in zip(x.log_probs, y.log_probs, strict=True)
        )
        assert difference < 1e-5


def test_different_seeds_give_different_answers() -> None:
    request = requests(1, max_new_tokens=20)[0]
    copies = [GenerationRequest(f"{n}", request.prompt_tokens, 20, (), 1.0, seed=n) for n in range(20)]
    assert len({completion.tokens for completion in TorchEngine(tiny_model(), CONTEXT, 20).generate(copies)}) == 20


def test_ends_by_stop_token_or_by_length() -> None:
    completions = TorchEngine(tiny_model(), CONTEXT, 4).generate(requests(30))
    reasons = {completion.finish_reason for completion in completions}
    assert reasons == {"stop", "length"}
    for completion in completions:
        stopped = completion.finish_reason == "stop"
        assert (completion.tokens[-1] == 0) == stopped
        assert 0 not in completion.tokens[:-1]
        assert stopped or len(completion.tokens) == 12


def test_memory_is_taken_as_answers_grow_and_requests_wait_where_there_is_none() -> None:
    """Room for 3 rows of 32 tokens; each request may have 32."""
    model = tiny_model()
    wanted = [GenerationRequest(f"{n}", (1 + n, 2), 30, (), 1.0, seed=n) for n in range(8)]
    free = TorchEngine(copy_of(model), CONTEXT, 64)
    expected = free.generate(wanted)
    per_token = free._decoder.cache.bytes_per_token
    assert per_token == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    tight = TorchEngine(copy_of(model), CONTEXT, 64, cache_gib=3 * 32 * per_token / GIB)
    tight.submit(wanted)
    running, columns = set(), []
    while tight.busy:
        tight.step()
        running.add(len(tight._running))
        cache = tight._decoder.cache
        columns.append(cache.columns)
        assert cache.rows * cache.columns <= 3 * 32
    assert max(running) == 3
    assert (columns[0], columns[-1]) == (16, 32)
    assert [tight.collect(request.request_id) for request in wanted] == expected


def test_a_request_that_no_memory_holds_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadInput, match=r"needs 0\.00 GiB .* of data\.max_length 48 \(256 bytes a token\).*cache_gib"):
        TorchEngine(tiny_model(), CONTEXT, 4, cache_gib=47 * 256 / GIB)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs() -> None:
    engine = TorchEngine(tiny_model(), CONTEXT, 4)
    with pytest.raises(ContextOverflow, match="r1: prompt of 40 tokens and an answer of 12"):
        engine.generate([requests(1)[0], GenerationRequest("r1", (1,) * 40, 12, (0,))])
    assert not engine.busy


def test_abort_ends_running_and_waiting_requests_with_what_they_have() -> None:
    engine = TorchEngine(tiny_model(), CONTEXT, 2)
    untouched = TorchEngine(tiny_model(), CONTEXT, 2).generate([request_without_stop(2)])[0]
    engine.submit([request_without_stop(index) for index in range(4)])
    engine.step()
    engine.step()
    engine.abort(["n0", "n3"])
    while engine.busy:
        engine.step()
    running, waiting, survivor = (engine.collect(name) for name in ("n0", "n3", "n2"))
    assert running is not None
    assert waiting is not None
    assert survivor is not None
    assert (running.finish_reason, len(running.tokens)) == ("abort", 2)
    assert (waiting.finish_reason, waiting.tokens) == ("abort", ())
    assert survivor.tokens == untouched.tokens


def request_without_stop(index: int) -> GenerationRequest:
    return GenerationRequest(f"n{index}", (1 + index, 2), 8, (), 1.0, seed=index)


def test_weights_replaced_in_flight_are_recorded_per_token() -> None:
    engine = TorchEngine(tiny_model(), CONTEXT, 2)
    engine.submit([request_without_stop(0)])
    for _ in range(3):
        engine.step()
    engine.update_weights(dict(tiny_model(1).named_parameters()), 7)
    while engine.busy:
        engine.step()
    completion = engine.collect("n0")
    assert completion is not None
    assert completion.weight_versions == (0, 0, 0, 7, 7, 7, 7, 7)


def test_new_weights_are_used_and_wrong_ones_refused(tmp_path: Path) -> None:
    other = tiny_model(1)
    expected = TorchEngine(tiny_model(1), CONTEXT, 4).generate(requests(5))
    engine = TorchEngine(tiny_model(), CONTEXT, 4)
    with pytest.raises(WeightMismatch, match=r"embed_tokens\.weight is \(3, 3\), not"):
        engine.update_weights(dict(other.named_parameters()) | {"model.embed_tokens.weight": torch.zeros(3, 3)}, 1)
    assert engine.weight_version == 0
    other.save_pretrained(tmp_path)
    anyio.run(sync_weights_to_engines, [EmbeddedEngine(engine)], tmp_path, 1)
    assert [c.tokens for c in engine.generate(requests(5))] == [c.tokens for c in expected]
