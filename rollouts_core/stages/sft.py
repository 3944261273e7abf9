"""Supervised fine-tuning: the artifact is `policy/`, a Hugging Face model directory, and `metrics.jsonl`."""

from rollouts_core.data.example_rows import ExampleRows
from rollouts_core.data.tokenized import directories_of
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.stages.policies import start, trained_origin
from rollouts_core.stages.specs import SFTSpec
from rollouts_core.stages.steps import begin, make_policy
from rollouts_core.stages.workspace import Work
from rollouts_core.training.sft import SFTTrainingConfig, run_sft_training


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, SFTSpec), "the planner pairs this stage with its spec"
    training = spec.training
    examples = ExampleRows(directories_of(work.inputs["data"], "demonstrations"), work.near)
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    origin = trained_origin(work, spec, tokenizer)
    model = start(work, origin)
    backend = begin(work, spec, model, origin, examples.largest_token())
    settings = SFTTrainingConfig(training.steps, training.batch_size, spec.seed, training.tokens_per_pass, spec.weights)
    metrics = make_policy(
        work,
        backend,
        model,
        tokenizer,
        spec,
        lambda start: run_sft_training(backend, examples, settings, start, examples.sizes),
    )
    return {"loss": metrics["loss"]}
