"""What routers choose: looked at, prescribed, carried as bytes, told by engines and taken over by the trainer."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.errors import BadInput, MalformedAnswer
from rollouts_core.inference.engine import GenerationRequest
from rollouts_core.inference.routing import Routers, Routing, routers_of
from rollouts_core.inference.sglang import read_completion
from rollouts_core.inference.told_experts import NOT_TOLD, continued, from_text, to_text
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.training.backend import TokenScores
from rollouts_core.training.policy import create_policy
from rollouts_core.training.pytorch import score
from rollouts_core.training.streams import prepare_grpo_batch
from rollouts_core.types import Prompt, Sample, Status
from tests.rollouts_core.training.test_families import family, tells_choices

MIXTURES = ["qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss"]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
PROMPT = (3, 1, 4, 1, 5)


def routing_of(model: Any) -> Routing:
    routers = routers_of(model)
    assert routers is not None
    return Routing(routers)


def told(model: Any, generated: tuple[int, ...] = (), prompt: tuple[int, ...] = PROMPT) -> Any:
    """A greedy answer of the embedded engine, with its experts."""
    engine = TorchEngine(copy_of(model), 64, tells_experts=True)
    (completion,) = engine.generate([GenerationRequest("a", prompt, 12, (), temperature=0.0, generated=generated)])
    return completion


def sample_of(completion: Any) -> Sample:
    tokens = PROMPT + completion.tokens
    mask = (0,) * len(PROMPT) + (1,) * len(completion.tokens)
    versions = completion.weight_versions
    return Sample(
        Prompt((), PROMPT, {}, 0), "", tokens, mask, completion.log_probs, versions, 0, Status.COMPLETED,
        experts=completion.experts,
    )  # fmt: skip


def scores(model: Any, sample: Sample) -> TokenScores:
    return score(create_policy(model), prepare_grpo_batch([sample], [1.0]))


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_prescribed_experts_are_used_by_each_familys_own_rule(name: str) -> None:
    model = tells_choices(family(name))
    routing = routing_of(model)
    logits = model(TOKENS).logits
    rows = routing.rows()
    routing.prescribe(rows)
    assert torch.equal(model(TOKENS).logits, logits)
    others = (rows + 1) % 4
    routing.prescribe(others)
    assert not torch.allclose(model(TOKENS).logits, logits, atol=1e-3)
    assert torch.equal(routing.rows(), others)
    routing.prescribe(torch.full_like(rows, NOT_TOLD))
    assert torch.equal(model(TOKENS).logits, logits)


def test_models_without_experts_have_no_routers() -> None:
    assert routers_of(family("llama")) is None
    with pytest.raises(BadInput, match=r"engine\.replay_experts: llama has no experts"):
        TorchEngine(family("llama"), 64, tells_experts=True)


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(BadInput, match="from another model"):
        routing_of(family("qwen3_moe")).prescribe(torch.zeros(8, 3, dtype=torch.uint8))


@settings(deadline=None)
@given(st.sampled_from([4, 255, 256, 384]), st.integers(1, 5), st.randoms(use_true_random=False))
def test_rows_are_read_as_they_were_written(experts: int, tokens: int, random: Any) -> None:
    """A byte each, two where a byte does not tell all experts from no expert."""
    parts: dict[int, Any] = {layer: torch.nn.Linear(1, experts) for layer in (1, 2)}
    routers = Routers(parts, experts, 3, 4)
    chosen = torch.tensor([[[random.randrange(experts) for _ in range(3)] for _ in range(2)] for _ in range(tokens)])
    routing = Routing(routers)
    routing.prescribe(routers.rows_of(chosen))
    assert torch.equal(torch.stack(list(routing._prescribed.values()), 1), chosen)
    all_layers = torch.full((tokens, 4, 3), -7, dtype=torch.int32)
    all_layers[:, 1:3] = chosen
    assert routers.read_all_layers(all_layers.numpy(), tokens) == routers.rows_of(chosen).numpy().tobytes()


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_what_was_told_first_stays(first: bytes, later: bytes) -> None:
    assert from_text(continued(to_text(first), to_text(b"x" * len(first) + later))) == first + later


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_the_engine_tells_what_the_trainer_would_choose(name: str) -> None:
    model = tells_choices(family(name))
    completion = told(model)
    rows = np.frombuffer(from_text(completion.experts), np.uint8).reshape(len(PROMPT) + 11, -1)
    routing = routing_of(model)
    with torch.no_grad():
        model(torch.tensor([PROMPT + completion.tokens]))
    assert np.array_equal(rows, routing.rows()[:-1].numpy())


def test_an_answer_in_two_parts_tells_what_one_would() -> None:
    model = family("qwen3_moe")
    whole = told(model)
    rest = told(model, generated=whole.tokens[:5])
    assert whole.tokens == whole.tokens[:5] + rest.tokens
    assert rest.experts == whole.experts


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_replay_brings_the_trainer_back_to_the_engines_experts(name: str) -> None:
    """The trainer's routers are moved a little, as by a step or by other kernels: its own choices differ then."""
    model = tells_choices(family(name))
    sample = sample_of(told(model))
    moved = family(name)
    routers = routers_of(moved)
    assert routers is not None
    for router in routers.by_layer.values():
        router.weight.data += 0.05 * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1))
    replayed = scores(moved, sample).logprobs_M
    alone = scores(moved, Sample(**{**vars(sample), "experts": ""})).logprobs_M
    engine = torch.tensor(sample.rollout_log_probs)
    assert (replayed - engine).abs().max() < (alone - engine).abs().max() / 2


def test_sglangs_answer_without_experts_is_malformed() -> None:
    model = family("qwen3_moe")
    request = GenerationRequest("a", PROMPT, 1, ())
    meta = {
        "output_token_logprobs": [[-1.0, 7]], "completion_tokens": 1, "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "1", "start": 0, "end": 1}],
    }  # fmt: skip
    numbers = np.zeros((len(PROMPT), 2, 2), np.int32)
    answer = {"output_ids": [7], "meta_info": {**meta, "routed_experts": to_text(numbers.tobytes())}}
    assert len(from_text(read_completion(answer, request, routers_of(model)).experts)) == len(PROMPT) * 4
    for wrong in (numbers[:, :, :1], numbers[1:], numbers + 4, numbers - 1):
        answer["meta_info"]["routed_experts"] = to_text(wrong.tobytes())
        with pytest.raises(MalformedAnswer):
            read_completion(answer, request, routers_of(model))
    answer["meta_info"]["routed_experts"] = to_text(numbers.tobytes()[:-4])
    with pytest.raises(MalformedAnswer):
        read_completion(answer, request, routers_of(model))
