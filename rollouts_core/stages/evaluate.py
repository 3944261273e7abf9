"""Held-out accuracy of one policy: the artifact is `accuracy.json`, `samples.jsonl` and `samples.parquet`.

Answers and scores from before a kill or a failure are kept, and not asked for again.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import anyio

from rollouts_core.config import EngineConfig
from rollouts_core.data.prompt_table import read_prompts
from rollouts_core.data.prompts import check_room
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.data.turns import stop_tokens
from rollouts_core.errors import RolloutsError
from rollouts_core.evaluation.journal import EvaluationJournal
from rollouts_core.evaluation.report import EvaluationReport, report_of
from rollouts_core.evaluation.results import Result, write_results
from rollouts_core.evaluation.run import EvaluationSettings, evaluate_prompts
from rollouts_core.inference.engine import Completion, GenerationRequest, InferenceEngine, Truncation
from rollouts_core.inference.registry import embedded_engine, engine_for
from rollouts_core.inference.weights import stored
from rollouts_core.rewards.functions import load_reward
from rollouts_core.rewards.scoring import ScoringSettings
from rollouts_core.rollout.answers import answer_of
from rollouts_core.rollout.episodes import Acting
from rollouts_core.rollout.groups import Answer, Group, answer_samples
from rollouts_core.rollout.outcomes import answer_group_member
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.stages.acting import acting_of
from rollouts_core.stages.policies import first_policy
from rollouts_core.stages.specs import EvaluateSpec, servers_of
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.workspace import Work
from rollouts_core.types import Prompt, Sample

TOLD = 50
"""How often progress is told of."""
ROUND = 0
"""Round of an evaluation's groups; those of training are counted from 1."""


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, EvaluateSpec), "the planner pairs this stage with its spec"
    wanted = spec.evaluation
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    prompts: Sequence[Prompt] = read_prompts(work.inputs["data"] / "heldout")
    if wanted.limit is not None:
        prompts = prompts[: wanted.limit]
    check_room(
        max(len(prompt.tokens) for prompt in prompts),
        "evaluation.max_new_tokens",
        wanted.max_new_tokens,
        spec.max_length,
    )
    acting = acting_of(work.stage, spec.environment, tokenizer, spec.max_length)
    results = anyio.run(partial(_results, work, spec, tokenizer, prompts, acting))
    report = report_of(results, wanted.pass_at, wanted.slices)
    _refuse_failures(report, len(results), wanted.failures_allowed)
    (work.out / "accuracy.json").write_text(json.dumps(asdict(report), indent=1))
    write_results(results, work.out)
    accuracy = report.accuracy
    print(f"accuracy {accuracy.mean:.1%} (95 % interval {accuracy.low:.1%} to {accuracy.high:.1%})")
    for problem in report.problems:
        print(f"not scored: {problem}")
    return {
        "accuracy": accuracy.mean,
        "low": accuracy.low,
        "high": accuracy.high,
        "total": float(report.prompts),
        "failed": float(report.failed),
        "reward": report.reward.mean,
        "tool_use": report.tool_use,
        **{f"pass@{k}": interval.mean for k, interval in report.pass_at.items()},
    }


async def _results(
    work: Work, spec: EvaluateSpec, tokenizer: Any, prompts: Sequence[Prompt], acting: Acting | None
) -> list[Result]:
    wanted, location = spec.evaluation, work.stage.external["score"].location
    engine = await _engine(work, spec, tokenizer)
    config = RolloutConfig(
        batch_size=len(prompts),
        n_samples_per_prompt=wanted.samples_per_prompt,
        max_new_tokens=wanted.max_new_tokens,
        temperature=wanted.temperature,
        seed=spec.seed,
        truncation=Truncation(wanted.top_p, wanted.top_k, wanted.min_p),
        stop=wanted.stop,
    )

    stop = stop_tokens(tokenizer)

    async def ask(request: GenerationRequest, there: Completion | None) -> Completion:
        return await answer_of(engine, request, there, config.sample_seconds, Counter())

    async def answer(prompt: Prompt, number: int) -> Answer:
        group = Group(ROUND, prompt.source_row, 0, prompt, (None,) * wanted.samples_per_prompt)
        return await answer_group_member(group, number, ask, config, stop, acting)

    def to_samples(prompt: Prompt, number: int, made: Answer) -> list[Sample]:
        return answer_samples(prompt, 0, number, made, tokenizer)

    def tell(done: int, total: int) -> None:
        if done == total or done % max(1, total // TOLD) == 0:
            work.log.progress(done, total)

    settings = EvaluationSettings(
        reward=load_reward(location),
        samples_per_prompt=wanted.samples_per_prompt,
        scoring=ScoringSettings(location, wanted.reward_seconds),
    )
    journal = EvaluationJournal(work.scratch)
    try:
        return await evaluate_prompts(prompts, answer, to_samples, settings, journal, tell)
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


async def _engine(work: Work, spec: EvaluateSpec, tokenizer: Any) -> InferenceEngine:
    """The engine with the policy's weights. All policies of the job use the same servers, one after the other."""
    config = servers_of(spec)
    if config is None:
        return embedded_engine(
            spec.evaluation.engine or EngineConfig(), first_policy(work, spec, tokenizer), tokenizer, spec.max_length
        )
    model = first_policy(work, spec, tokenizer, "cpu")
    engine = engine_for(config, model, tokenizer, spec.max_length, work.session.servers)
    await engine.update_weights(stored(model), _version(work.stage))
    return engine


def _version(stage: Stage) -> int:
    """Another one for each policy, so that nothing of the one before can be taken for it."""
    return int(stage.key[:8], 16)


def _refuse_failures(report: EvaluationReport, samples: int, allowed: float) -> None:
    """Raises `RolloutsError` with the first of them; a retry asks for those again, and for nothing else."""
    if report.failed > allowed * samples:
        listed = "".join(f"\n  - {problem}" for problem in report.problems)
        raise RolloutsError(
            f"{report.failed} of {samples} samples were not scored, and evaluation.failures_allowed is {allowed:g}; "
            f"the others are kept for a retry:{listed}"
        )
