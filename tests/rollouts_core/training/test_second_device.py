"""The trainer and the engine on a second device type: nothing is left on the CPU, which waits as little as it may.

The second device is torch's `meta`; see `tests.rollouts_core.second_device`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config

from rollouts_core.config import LoRAConfig
from rollouts_core.config.algorithms import CISPO, GRPO, GSPO, PPO, RLOO, Algorithm, DrGRPO
from rollouts_core.data.tokenized import Example
from rollouts_core.inference.engine import GenerationRequest, Truncation
from rollouts_core.inference.torch_engine import TorchEngine
from rollouts_core.metrics.timing import PhaseTimer
from rollouts_core.training.algorithms import recipe_of
from rollouts_core.training.backend import LossFunction, TrainBatch, optimizer_step
from rollouts_core.training.collate import learnt, pack_batch
from rollouts_core.training.objectives import Extras, create_cross_entropy_loss, create_dpo_loss, create_rl_loss
from rollouts_core.training.optimizers import OptimizerName
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend, create_pytorch_backend
from tests.rollouts_core.models import CONTEXT, SHAPE, VOCABULARY, tiny_model
from tests.rollouts_core.second_device import DEVICE, SecondDevice
from tests.rollouts_core.training.test_packed import sequences

SMALL = SHAPE | {"max_position_embeddings": CONTEXT}
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, sliding_window=8),
}
STREAMS = ("advantages", "rollout_logprobs", "old_logprobs", "reference_logprobs", "old_values", "returns")
FULL = Extras(kl_coef=0.1, entropy_coef=0.01, correction="truncate")
PASSES = 3


def model(architecture: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(ARCHITECTURES[architecture], dtype=dtype)


def batch(shared: int = 6) -> TrainBatch:
    random = np.random.default_rng(0)
    return pack_batch(
        [
            Example(one.tokens, one.loss_mask, one.shared, {n: random.random(len(learnt(one))) for n in STREAMS})
            for one in sequences([9, 4, 12, 5], shared)
        ],
        30.0,
    )


def step(backend: PyTorchTrainingBackend, passes: int = PASSES) -> SecondDevice:
    """One optimizer step, watched."""
    with SecondDevice() as watched:
        metrics, stepped = optimizer_step(backend, [batch() for _ in range(passes)], PhaseTimer())
    assert all(isinstance(value, float | int) for value in (*metrics.values(), *stepped.values()))
    return watched


def rl(algorithm: Algorithm = GRPO(), extras: Extras = FULL) -> LossFunction:  # noqa: B008
    return create_rl_loss(recipe_of(algorithm, 16), extras)


@pytest.fixture(autouse=True)
def _fused_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's list of devices that have it leaves out `meta`."""
    adam = sys.modules[torch.optim.Adam.__module__]
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *args, **kwargs: None)


@pytest.mark.parametrize("loss", [create_cross_entropy_loss(), create_dpo_loss(0.1), rl()], ids=["sft", "dpo", "rl"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_step_waits_once(loss: LossFunction, optimizer: OptimizerName) -> None:
    """However many passes it takes."""
    backend = create_pytorch_backend(model(), loss, Optimization(1e-3, optimizer))
    assert step(backend).waits.total() == 1
    assert step(backend, 1).waits.total() == 1
    assert backend.weight_version == 2


@pytest.mark.parametrize(
    "options",
    [
        {"lora": LoRAConfig(rank=2)},
        {"activation_checkpointing": True},
        {"activation_checkpointing": "selective"},
        {"critic": True},
        {"temperature": 0.7, "lora": LoRAConfig(rank=2), "activation_checkpointing": True, "critic": True},
    ],
    ids=["lora", "checkpointing", "selective", "critic", "all"],
)
@pytest.mark.parametrize(("architecture", "dtype"), [("llama", torch.float32), ("gemma2", torch.bfloat16)])
def test_every_kind_of_step_stays_on_the_device(options: dict[str, Any], architecture: str, dtype: torch.dtype) -> None:
    backend = create_pytorch_backend(model(architecture, dtype), rl(PPO()), Optimization(1e-3), **options)
    assert step(backend).waits.total() == 1


@pytest.mark.parametrize("algorithm", [GRPO(), DrGRPO(), GSPO(), CISPO(), RLOO(), PPO()], ids=lambda a: a.kind)
def test_every_algorithm_stays_on_the_device(algorithm: Algorithm) -> None:
    backend = create_pytorch_backend(model(), rl(algorithm), Optimization(1e-3))
    assert step(backend).waits.total() == 1


def test_scores_weights_and_checkpoints_move_both_ways(tmp_path: Path) -> None:
    backend = create_pytorch_backend(model(), rl(), Optimization(1e-3))
    step(backend)
    with SecondDevice():
        scores = backend.score(batch()).result()
        assert scores.logprobs_M.device == DEVICE
        weights = {name: value.cpu() for name, value in backend.get_weights().result().items()}
        backend.load_weights(weights).result()
        backend.save(tmp_path).result()
    assert {value.device for value in backend.get_weights().result().values()} == {DEVICE}
    here = create_pytorch_backend(tiny_model(architecture=ARCHITECTURES["llama"]), rl(), Optimization(1e-3))
    here.load(tmp_path)
    assert here.weight_version == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_waits_once_for_each_token(architecture: str) -> None:
    """Requests of several lengths, some of them truncated, new weights between them."""
    with SecondDevice() as watched:
        own = model(architecture)
        engine = TorchEngine(own, CONTEXT, 4, cache_gib=0.1)
        before = watched.waits.total()
        steps = 0
        engine.submit(
            [
                GenerationRequest(f"r{n}", tuple(range(1, 4 + n)), 5, (), 1.0, n, truncation=Truncation(0.9, 5, 0.1))
                for n in range(6)
            ]
        )
        while engine.busy:
            done = engine.step()
            steps += 1
            for completion in done:
                assert all(0 <= token < VOCABULARY for token in completion.tokens)
            if steps == 3:
                engine.update_weights(dict(own.named_parameters()), 1)
    assert watched.waits.total() - before <= 2 * steps
