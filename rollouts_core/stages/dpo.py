"""Direct preference optimization: the artifact is `policy/`, a Hugging Face model directory, and `metrics.jsonl`.

Partial work has the reference's log-probabilities beside the checkpoints: a policy that has begun to learn can no
longer compute them.
"""

from rollouts_core.data.example_rows import PreferenceRows
from rollouts_core.data.tokenized import directories_of
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.stages.policies import start, trained_origin
from rollouts_core.stages.specs import DPOSpec
from rollouts_core.stages.steps import begin, make_policy
from rollouts_core.stages.workspace import Work
from rollouts_core.training.dpo import DPOTrainingConfig, pairs_used, run_dpo_training
from rollouts_core.training.referred_pairs import ReferredPairs, keep_reference


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, DPOSpec), "the planner pairs this stage with its spec"
    training = spec.training
    pairs = PreferenceRows(directories_of(work.inputs["data"], "preferences"), work.near)
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    origin = trained_origin(work, spec, tokenizer)
    model = start(work, origin)
    backend = begin(work, spec, model, origin, pairs.largest_token())
    settings = DPOTrainingConfig(training.steps, training.batch_size, spec.seed, training.tokens_per_pass, spec.weights)
    used, kept = pairs_used(pairs.sizes, settings), work.scratch / "reference.float32"
    keep_reference(backend, pairs, used, settings.tokens_per_pass, kept)
    referred = ReferredPairs(pairs, used, kept)
    metrics = make_policy(
        work,
        backend,
        model,
        tokenizer,
        spec,
        lambda start: run_dpo_training(backend, referred, settings, start, pairs.sizes),
    )
    return {name: metrics[name] for name in ("loss", "rewards/accuracies")}
