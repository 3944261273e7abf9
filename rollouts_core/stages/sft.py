"""Supervised fine-tuning: the artifact is `policy/`, a Hugging Face model directory, and `metrics.jsonl`."""

import math
import shutil
from functools import partial

from rollouts_core.data.tokenized import read_examples
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.stages.specs import SFTSpec
from rollouts_core.stages.work import Work
from rollouts_core.training.checkpoint import last_checkpoint, new_checkpoint
from rollouts_core.training.losses import create_cross_entropy_loss
from rollouts_core.training.models import initial_policy, save_policy, seed_torch
from rollouts_core.training.pytorch import create_pytorch_backend
from rollouts_core.training.schedule import create_scheduler
from rollouts_core.training.sft import SFTTrainingConfig, run_sft_training


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, SFTSpec), "the planner pairs this stage with its spec"
    training = spec.training
    examples = read_examples(work.inputs["data"] / "demonstrations")
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    model = initial_policy(
        spec.model, work.stage.external.get("model"), tokenizer, spec.max_length, spec.seed, work.device
    )
    backend = create_pytorch_backend(
        model,
        create_cross_entropy_loss(),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        schedule=partial(
            create_scheduler, kind=training.schedule, warmup_steps=training.warmup_steps, num_steps=training.steps
        ),
    )
    seed_torch(spec.seed, "sft")
    start = 0
    if found := last_checkpoint(work.scratch / "checkpoints"):
        start, directory = found
        backend.load(directory)
        print(f"resuming after step {start}")
    work.log.covers(0, training.steps, start)
    settings = SFTTrainingConfig(training.steps, training.batch_size, training.gradient_accumulation, spec.seed)
    loss = math.nan
    for step in run_sft_training(backend, examples, settings, start):
        loss = step.metrics["loss"]
        last = step.step == training.steps
        if step.step % training.log_every == 0 or last:
            work.log.log(step.metrics, step.step)
        if step.step % training.checkpoint_every == 0 and not last:
            with new_checkpoint(work.scratch / "checkpoints", step.step) as directory:
                backend.save(directory)
    save_policy(model, tokenizer, work.out / "policy")
    shutil.copyfile(work.scratch / "metrics.jsonl", work.out / "metrics.jsonl")
    return {"loss": loss}
