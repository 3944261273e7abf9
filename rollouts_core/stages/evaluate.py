"""Held-out accuracy of one policy: the artifact is `accuracy.json` and `samples.jsonl`."""

import json
from dataclasses import asdict

from rollouts_core.data.prompts import check_room
from rollouts_core.data.tokenized import read_prompts
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.evaluation.accuracy import evaluate
from rollouts_core.inference.torch_engine import TorchEngine
from rollouts_core.observe.metrics import answer_record
from rollouts_core.rewards.functions import load_reward
from rollouts_core.stages.policies import first_policy
from rollouts_core.stages.specs import EvaluateSpec
from rollouts_core.stages.work import Work

RUNNING_REQUESTS = 256


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, EvaluateSpec), "the planner pairs this stage with its spec"
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    prompts = read_prompts(work.inputs["data"] / "heldout")[: spec.evaluation.limit]
    check_room(prompts, "evaluation.max_new_tokens", spec.evaluation.max_new_tokens, spec.max_length)
    engine = TorchEngine(first_policy(work, spec, tokenizer), spec.max_length, RUNNING_REQUESTS)
    location = work.stage.external["score"].location
    accuracy, samples = evaluate(
        engine, tokenizer, prompts, load_reward(location), location, spec.evaluation.max_new_tokens
    )
    work.log.progress(1, 1)
    (work.out / "accuracy.json").write_text(json.dumps({**asdict(accuracy), "accuracy": accuracy.value}))
    with (work.out / "samples.jsonl").open("w") as file:
        for sample in samples:
            file.write(json.dumps(answer_record(sample)) + "\n")
    print(f"accuracy {accuracy.value:.1%} (95 % interval {accuracy.low:.1%} to {accuracy.high:.1%})")
    return {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high, "total": float(accuracy.total)}
