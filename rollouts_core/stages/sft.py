"""Supervised fine-tuning: the artifact is `policy/`, a Hugging Face model directory, and `metrics.jsonl`."""

import math
import shutil
from itertools import chain
from typing import Any

from rollouts_core.data.prompts import check_vocabulary
from rollouts_core.data.tokenized import directories_of, read_examples
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.stages.ranks import tell_build
from rollouts_core.stages.specs import SFTSpec
from rollouts_core.stages.work import Work
from rollouts_core.training.checkpoint import Checkpoints, last_checkpoint
from rollouts_core.training.fsdp import FSDPTrainingBackend, create_backend
from rollouts_core.training.inspection import keeping_nonfinite
from rollouts_core.training.models import check_context, initial_policy, save_policy, seed_torch
from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend
from rollouts_core.training.schedule import create_scheduler
from rollouts_core.training.sft import SFTTrainingConfig, run_sft_training


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, SFTSpec), "the planner pairs this stage with its spec"
    training = spec.training
    sources = [read_examples(directory) for directory in directories_of(work.inputs["data"], "demonstrations")]
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    model = initial_policy(
        spec.model, work.stage.external.get("model"), tokenizer, spec.max_length, spec.seed, work.device
    )
    check_vocabulary((example.tokens for example in chain(*sources)), model.config.vocab_size)
    check_context(model, spec.max_length)
    if work.session.ranks:
        tell_build(work.session.ranks, work.stage, model)
    backend = backend_for(model, spec, work.session.ranks)
    seed_torch(spec.seed, "sft")
    start = 0
    if found := last_checkpoint(work.scratch / "checkpoints"):
        start, directory = found
        backend.load(directory)
        print(f"resuming after step {start}")
    work.log.covers(0, training.steps, start)
    settings = SFTTrainingConfig(training.steps, training.batch_size, spec.seed, training.tokens_per_pass, spec.weights)
    loss = math.nan
    steps = run_sft_training(backend, list(chain(*sources)), settings, start, list(map(len, sources)))
    with Checkpoints(work.scratch / "checkpoints") as checkpoints:
        for step in keeping_nonfinite(steps, work.scratch / "nonfinite"):
            loss = step.metrics["loss"]
            last = step.step == training.steps
            if step.step % training.log_every == 0 or last:
                work.log.log(step.metrics, step.step)
            if step.step % training.checkpoint_every == 0 and not last:
                checkpoints.begin(step.step, backend.save)
    if spec.backend.lora is not None:
        backend.save_adapter(work.out / "adapter")
    save_policy(model, tokenizer, work.out / "policy", backend.get_weights().result())
    shutil.copyfile(work.scratch / "metrics.jsonl", work.out / "metrics.jsonl")
    return {"loss": loss}


def backend_for(model: Any, spec: SFTSpec, ranks: Any = None) -> FSDPTrainingBackend | PyTorchTrainingBackend:
    training = spec.training
    optimization = Optimization(
        training.learning_rate,
        training.optimizer,
        training.weight_decay,
        training.max_grad_norm,
        create_scheduler(training.schedule, training.warmup_steps, training.steps),
    )
    return create_backend(
        model,
        create_cross_entropy_loss(),
        optimization,
        ranks,
        activation_checkpointing=spec.backend.activation_checkpointing,
        lora=spec.backend.lora,
    )
