"""Mixtures behind servers: new weights reach their experts, and they tell which experts tokens went through."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig
from rollouts_core.errors import BadInput
from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.file_names import named_as_in_files
from rollouts_core.inference.registry import server_engine
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.inference.routing import Routing, routers_of
from rollouts_core.inference.told_experts import from_text
from rollouts_core.inference.transports import buckets
from rollouts_core.inference.weights import LazyWeights, stored
from tests.rollouts_core.models import VOCABULARY, character_tokenizer
from tests.rollouts_core.training.test_families import family
from tests.servers import RunningServers, running_servers

CONTEXT = 512
PROMPT = (3, 5, 7, 9)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss", "llama"])
def test_weights_are_renamed_to_those_of_the_files(name: str, tmp_path: Path) -> None:
    model = family(name)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    renamed = named_as_in_files(model)(stored(model))
    assert set(renamed) == set(files)
    for file, value in renamed.items():
        assert torch.equal(value, files[file]), file


def test_each_weight_is_gathered_once_and_cut_into_buckets(tmp_path: Path) -> None:
    model = family("qwen3_moe")
    own, asked = stored(model), list[str]()

    def gather(name: str) -> torch.Tensor:
        asked.append(name)
        return own[name].detach()

    shapes = {name: tuple(value.shape) for name, value in own.items()}
    parts = list(buckets(named_as_in_files(model)(LazyWeights(shapes, gather)), 4000))
    assert sorted(asked) == sorted(own)
    model.save_pretrained(tmp_path)
    assert {name for part in parts for name in part} == set(load_file(tmp_path / "model.safetensors"))


def test_a_mixture_on_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"engine\.kind: qwen3_moe is a mixture of experts, and vLLM gives wrong log-probabilities"
    ):
        server_engine(EngineConfig(kind="vllm"), SupervisedServers(tmp_path), family("qwen3_moe"), CONTEXT, tmp_path)


def served_mixture(seed: int = 0) -> Any:
    """Heads of 32 and experts of 64, as SGLang computes them on the CPU."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT, initializer_range=0.2,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, pad_token_id=0,
        bos_token_id=None, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module", params=[pytest.param("sglang", marks=pytest.mark.sglang)])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineConfig, RunningServers]]:
    directory = tmp_path_factory.mktemp("mixture") / "model"
    served_mixture().save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    config = EngineConfig(kind=request.param, max_running_requests=16, replay_experts=True)
    model = ServedModel(str(directory), "float32", CONTEXT)
    with running_servers(tmp_path_factory.mktemp(request.param), config, model) as running:
        yield config, running


def test_new_experts_reach_servers_which_tell_what_they_chose(
    servers: tuple[EngineConfig, RunningServers], tmp_path: Path
) -> None:
    config, running = servers
    new = served_mixture(7)

    async def ask() -> Completion:
        fleet = SupervisedServers(running.directory)
        engine = server_engine(config, fleet, served_mixture(), CONTEXT, tmp_path)
        try:
            with anyio.fail_after(120):
                await engine.update_weights(stored(new), 2)
                return await engine.generate(GenerationRequest("a", PROMPT, 16, (), temperature=0.0))
        finally:
            await engine.aclose()

    completion = anyio.run(ask)
    sequence = torch.tensor([[*PROMPT, *completion.tokens]])
    routers = routers_of(new)
    assert routers is not None
    routing = Routing(routers)
    with torch.no_grad():
        logp = torch.log_softmax(new(sequence).logits[0, :-1], -1).gather(1, sequence[0, 1:, None])[:, 0]
    expected = logp[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-3, rtol=0)
    told = torch.frombuffer(bytearray(from_text(completion.experts)), dtype=torch.uint8)
    own = routing.rows()[:-1].view(-1, 2, 2)
    assert torch.equal(told.view(-1, 2, 2).sort().values, own.sort().values)
