"""Direct preference optimization: the artifact is `policy/`, a Hugging Face model directory, and `metrics.jsonl`.

Partial work holds the reference's log-probabilities beside the checkpoints: a policy that has begun to learn can no
longer tell them.
"""

from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rollouts_core.data.tokenized import Floats, directories_of, read_preferences
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.stages.policies import start, trained_origin
from rollouts_core.stages.specs import DPOSpec
from rollouts_core.stages.steps import begin, make_policy
from rollouts_core.stages.workspace import Work
from rollouts_core.training.collate import learnt_tokens
from rollouts_core.training.configured import Backend
from rollouts_core.training.dpo import (
    DPOTrainingConfig,
    Pair,
    pairs_used,
    reference_logprobs,
    run_dpo_training,
    with_reference,
)


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, DPOSpec), "the planner pairs this stage with its spec"
    training = spec.training
    sources = [read_preferences(directory) for directory in directories_of(work.inputs["data"], "preferences")]
    pairs, sizes = list(chain(*sources)), list(map(len, sources))
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    origin = trained_origin(work, spec, tokenizer)
    model = start(work, origin)
    backend = begin(work, spec, model, origin, max(int(answer.tokens.max()) for answer in chain(*pairs)))
    settings = DPOTrainingConfig(training.steps, training.batch_size, spec.seed, training.tokens_per_pass, spec.weights)
    used = pairs_used(sizes, settings)
    for index, pair in zip(used, _referred(work, backend, [pairs[index] for index in used], settings), strict=True):
        pairs[index] = pair
    metrics = make_policy(
        work,
        backend,
        model,
        tokenizer,
        spec,
        lambda start: run_dpo_training(backend, pairs, settings, start, sizes),
    )
    return {name: metrics[name] for name in ("loss", "rewards/accuracies")}


def _referred(work: Work, backend: Backend, pairs: list[Pair], settings: DPOTrainingConfig) -> list[Pair]:
    """The pairs with the reference's log-probabilities, kept in the partial work; the backend is untrained yet."""
    kept = work.scratch / "reference.safetensors"
    if not kept.exists():
        print(f"the reference scores {len(pairs):,} preferences", flush=True)
        _keep(reference_logprobs(backend, pairs, settings.tokens_per_pass), kept)
    flat = load_file(kept)["logprobs"].double().numpy()
    counts = [learnt_tokens([answer]) for answer in chain(*pairs)]
    return with_reference(pairs, np.split(flat, np.cumsum(counts)[:-1]))


def _keep(logprobs: list[Floats], path: Path) -> None:
    """In float32, as they were computed."""
    unfinished = path.with_suffix(".unfinished")
    save_file({"logprobs": torch.from_numpy(np.concatenate(logprobs).astype(np.float32))}, unfinished)
    unfinished.rename(path)
