"""What each rank of a test does; `test_fsdp.py` starts it under torchrun: `on_ranks.py WHAT DIRECTORY`."""

import json
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from rollouts_core.config import LoRAConfig
from rollouts_core.config.algorithms import PPO
from rollouts_core.data.packing import best_fit
from rollouts_core.data.tokenized import Example
from rollouts_core.errors import NonFiniteGradient
from rollouts_core.stages.job import end_process
from rollouts_core.training import fsdp
from rollouts_core.training.algorithms import recipe_of
from rollouts_core.training.backend import LossFunction, TrainingBackend
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.fsdp import FSDPTrainingBackend, create_fsdp_backend, serve
from rollouts_core.training.objectives import Extras, create_cross_entropy_loss, create_rl_loss
from rollouts_core.training.optimizers import OptimizerName
from rollouts_core.training.origins import Origin
from rollouts_core.training.pytorch import Optimization
from rollouts_core.training.ranks import join_ranks, leave_ranks
from tests.rollouts_core.models import tiny_model
from tests.rollouts_core.training.test_packed import sequences

STEPS = 4
SUMMED = ("policy_loss_sum", "value_loss_sum", "entropy_sum", "kl_sum")


def optimization(optimizer: OptimizerName = "adamw") -> Optimization:
    return Optimization(1e-2, optimizer, max_grad_norm=0.5)


def train(
    backend: TrainingBackend, steps: range, tokens_per_pass: int = 30, replayed: bool = False
) -> list[dict[str, float]]:
    """Steps of eight sequences; as many passes as they take, odd numbers among them. `replayed`: two experts of each of
    two layers are prescribed for each token."""
    told = []
    for step in steps:
        examples = sequences([3, 9, 14, 5, 7, 11, 2, 6][: 8 - step % 3], seed=step)
        cuts = best_fit([len(example.tokens) for example in examples], tokens_per_pass)
        if replayed:
            examples = [replace(example, experts=_some_experts(example)) for example in examples]
        normalizer, total = float(learnt_tokens(examples)), sum(len(example.tokens) for example in examples)
        passes = [pack_batch([examples[i] for i in c], normalizer) for c in cuts]
        futures = [backend.forward_backward(replace(one, share=len(one.tokens_N) / total)) for one in passes]
        loss = sum(future.result()["loss_sum"] for future in futures)
        told.append({"loss": loss, **backend.optim_step().result()})
    return told


def _some_experts(example: Example) -> Any:
    first = np.asarray(example.tokens, np.uint8) % 4
    return np.stack([first, (first + 1) % 4, (first + 2) % 4, first], 1)


def main() -> None:
    what, directory = sys.argv[1], Path(sys.argv[2])
    torch.use_deterministic_algorithms(True)
    if what.endswith("apart"):
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        for does in ("save", "load"):  # where rank 0 says, there is nothing on another host
            fsdp._DOES[does] = partial(lambda method, helper, told: getattr(helper.own, method)(Path("/nowhere")), does)
    ranks = join_ranks(os.environ.get("ROLLOUTS_TEST_DEVICE", "cpu"))
    context, tensor, expert = map(int, os.environ.get("ROLLOUTS_TEST_LAYOUT", "1 1 1").split())
    ranks = replace(ranks, context=context, tensor=tensor, expert=expert)
    critic = what.endswith("grpo")
    loss = loss_of(what)
    dtype = torch.bfloat16 if what == "bfloat16" else torch.float32
    origin = origin_of(what, directory, ranks.rank)
    model = origin.blank() if origin else tiny_model(seed=ranks.rank).to(ranks.device, dtype)
    backend = create_fsdp_backend(
        model, loss, optimization("muon" if what.endswith("muon") else "adamw"), ranks, origin, critic=critic,
        activation_checkpointing=what.endswith("checkpointing"),
        lora=LoRAConfig(rank=4) if what.endswith("lora") else None, balanced=what.endswith("balanced"),
    )  # fmt: skip
    if not isinstance(backend, FSDPTrainingBackend):
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        serve(ranks, backend)
        leave_ranks()
        end_process(0)
    found: Any = rank_zero(what, backend, directory)
    (directory / "told.json").write_text(json.dumps(found))
    weights = {name: value.contiguous() for name, value in backend.get_weights().result().items()}
    save_file(weights, directory / "weights.safetensors")
    ranks.tell({"do": "end"})
    leave_ranks()
    end_process(0)


def loss_of(what: str) -> LossFunction:
    """RL's reads every stream there is, a critic's and entropies among them."""
    if not what.endswith("grpo"):
        return create_cross_entropy_loss()
    return create_rl_loss(recipe_of(PPO(), 8), Extras(kl_coef=0.1, entropy_coef=0.01, correction="token"))


def train_grpo(backend: TrainingBackend) -> list[dict[str, float]]:
    """Steps over sequences with prompts that answers share."""
    told = []
    for step in range(STEPS):
        examples = sequences([5, 9, 3, 12], seed=step, shared=7) + sequences([9], seed=step + 50)
        draw = np.random.default_rng(step)
        examples = [with_random_streams(example, draw) for example in examples]
        normalizer = float(learnt_tokens(examples))
        futures = [backend.forward_backward(pack_batch(part, normalizer)) for part in (examples[:4], examples[4:])]
        losses = {name: sum(future.result()[name] for future in futures) for name in SUMMED}
        told.append({"loss": losses["policy_loss_sum"], **losses, **backend.optim_step().result()})
    return told


def with_random_streams(example: Example, draw: np.random.Generator) -> Example:
    names = ("advantages", "rollout_logprobs", "old_logprobs", "reference_logprobs", "old_values", "returns")
    count = learnt_tokens([example])
    return replace(example, streams={name: draw.normal(-1.0, 0.3, count) for name in names})


def origin_of(what: str, directory: Path, rank: int) -> Origin | None:
    """Of blank models: their weights are read, by each rank or by the first alone, or drawn."""
    kind, _, how = what.partition("-")
    if kind not in ("read", "drawn"):
        return None
    config = AutoConfig.from_pretrained(directory / "model").to_dict()
    if kind == "drawn":
        return Origin(config, "float32", seed=5)
    there = rank == 0 or how != "by_first"
    return Origin(config, "float32", str(directory / ("model" if there else "nowhere")))


def rank_zero(what: str, backend: FSDPTrainingBackend, directory: Path) -> Any:
    if what.startswith(("resume", "read-resume")):
        backend.load(directory / "checkpoint")
        return train(backend, range(2, STEPS))
    if what == "score":
        batches = [pack_batch(sequences([4, 7], seed=seed), 1.0) for seed in range(3)]
        futures = [backend.score(batch) for batch in batches]
        return [future.result().logprobs_M.tolist() for future in futures]
    if what == "nonfinite":
        batches = [pack_batch(sequences([4, 7], seed=seed), 1.0) for seed in range(3)]
        batches[1] = replace(batches[1], normalizer=0.0)
        for batch in batches:
            backend.forward_backward(batch)
        with pytest.raises(NonFiniteGradient) as caught:
            backend.optim_step()
        return [batch.targets_M.tolist() for batch in caught.value.passes]
    if what == "load":
        weights = {name: value.clone() for name, value in tiny_model(seed=7).named_parameters()}
        backend.load_weights(weights)
        return []
    if what == "read-grpo":
        return train_grpo(backend)
    told = train(
        backend, range(2 if what.startswith(("save", "read-save")) else STEPS), replayed=what.endswith("replayed")
    )
    if what.endswith("lora"):
        backend.save_adapter(directory / "adapter")
    if what.startswith(("save", "read-save")):
        (directory / "checkpoint").mkdir()
        saving = backend.save(directory / "checkpoint")
        train(backend, range(2, STEPS))
        saving.result()
    return told


if __name__ == "__main__":
    main()
