"""Supervised fine-tuning: the artifact is `policy/`, a Hugging Face model directory, and `metrics.jsonl`."""

from itertools import chain
from typing import Any

from rollouts_core.data.prompts import check_vocabulary
from rollouts_core.data.tokenized import directories_of, read_examples
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.stages.ranks import tell_build
from rollouts_core.stages.specs import SFTSpec
from rollouts_core.stages.steps import Backend, backend_of, make_policy
from rollouts_core.stages.work import Work
from rollouts_core.training.models import check_context, initial_policy, seed_torch
from rollouts_core.training.objectives import create_cross_entropy_loss
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
    settings = SFTTrainingConfig(training.steps, training.batch_size, spec.seed, training.tokens_per_pass, spec.weights)
    examples, sizes = list(chain(*sources)), list(map(len, sources))
    metrics = make_policy(
        work,
        backend,
        model,
        tokenizer,
        spec,
        lambda start: run_sft_training(backend, examples, settings, start, sizes),
    )
    return {"loss": metrics["loss"]}


def backend_for(model: Any, spec: SFTSpec, ranks: Any = None) -> Backend:
    return backend_of(model, create_cross_entropy_loss(), spec, ranks)
