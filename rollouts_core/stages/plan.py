"""The plan: the stages of a config. Both `rollouts plan` and the flow use this function.

Decision: keys hash what goes into a stage, never what came out, so every key is known before anything runs. Making a
plan reads and hashes the data files and imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rollouts_core.config import (
    Mixture,
    PipelineConfig,
    PretrainedModel,
    ScratchModel,
    Served,
    Source,
    SourceOrMixture,
)
from rollouts_core.config.algorithms import CustomAlgorithm, Distillation
from rollouts_core.config.model import TokenizerSpec
from rollouts_core.environments.registry import identify_environment
from rollouts_core.errors import BadInput
from rollouts_core.inference.published import MIXTURES_ON_VLLM, experts_of, heads_of, problems_with
from rollouts_core.rewards.functions import identify_reward
from rollouts_core.rollout.filters import identify_filter
from rollouts_core.stages.specs import DPOSpec, EvaluateSpec, RLSpec, ServeSpec, SFTSpec, TokenizeSpec
from rollouts_core.stages.stage import VERSIONS, Stage
from rollouts_core.store.identity import External, identify_model, identify_source, identify_teacher
from rollouts_core.user_code import identify_function

Externals = dict[str, External]


@dataclass(frozen=True)
class Plan:
    """The stages of one config, in order. Every stage's inputs come before it."""

    tokenize: Stage
    sft: Stage | None
    dpo: Stage | None
    rl: tuple[Stage, ...]
    evaluate: tuple[Stage, ...]
    served: tuple[Stage, ...] = ()
    """Models that RL and evaluation ask. They leave no artifact, so they are none of `stages`."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.tokenize, *(stage for stage in (self.sft, self.dpo) if stage), *self.rl, *self.evaluate)

    def during_rl(self, segment: Stage) -> tuple[Stage, ...]:
        """The evaluations of an RL segment's policy, which run while the next one is trained."""
        return tuple(point for point in self.evaluate if point.name == f"evaluate-{segment.name}")

    @property
    def after_training(self) -> tuple[Stage, ...]:
        """The evaluations that one job makes at the end."""
        early = [point.name for segment in self.rl for point in self.during_rl(segment)]
        return tuple(point for point in self.evaluate if point.name not in early)

    @property
    def chains(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of each heavy job: those that one process makes."""
        single = [(stage,) for stage in (self.sft, self.dpo) if stage]
        early = [self.during_rl(segment) for segment in self.rl]
        return tuple(chain for chain in (*single, self.rl, *early, self.after_training) if chain)


def plan(config: PipelineConfig) -> Plan:
    """Raises `BadInput` listing every data file, model, data set and reward that cannot be found."""
    external = _identify(config)
    tokenize = _tokenize(config, external)
    sft = _sft(config, external, tokenize)
    dpo = _dpo(config, external, tokenize, sft)
    served = tuple(_serve(served, external[served.url]) for served in config.served)
    external = external | {stage.name: External({"served": stage.key}, stage.name) for stage in served}
    rl = _rl(config, external, tokenize, dpo or sft)
    return Plan(tokenize, sft, dpo, rl, _evaluations(config, external, tokenize, sft, dpo, rl), served)


def evaluations_alone(plan: Plan) -> Plan:
    """Tokenization and evaluation, of policies that others have trained."""
    return Plan(plan.tokenize, None, None, (), plan.evaluate, plan.served)


def dependents(plan: Plan, changed: Sequence[Stage]) -> list[Stage]:
    """These stages and, in the plan's order, every stage that is made from one of them, directly or not."""
    keys = {stage.key for stage in changed}
    found = []
    for stage in plan.stages:
        if stage.key in keys or any(artifact.key in keys for artifact in stage.inputs.values()):
            keys.add(stage.key)
            found.append(stage)
    return found


def _tokenize(config: PipelineConfig, external: Externals) -> Stage:
    spec = TokenizeSpec(
        tokenizer=_tokenizer(config.model),
        sources=_sources(config),
        max_length=config.data.max_length,
        overlong=config.data.overlong,
        learnt_roles=config.data.learnt_roles if config.sft else ("assistant",),
        tokenization=config.data.tokenization,
    )
    outside = _pick(external, *spec.sources, "model", "environment")
    return Stage("tokenize", "tokenize", VERSIONS["tokenize"], spec, {}, outside)


def _sft(config: PipelineConfig, external: Externals, tokenize: Stage) -> Stage | None:
    if config.sft is None:
        return None
    spec = SFTSpec(
        model=config.model,
        training=config.sft,
        backend=config.backend,
        seed=config.seed,
        max_length=config.data.max_length,
        weights=_weights(config.data.demonstrations),
    )
    return Stage("sft", "sft", VERSIONS["sft"], spec, {"data": tokenize.artifact}, _pick(external, "model"))


def _dpo(config: PipelineConfig, external: Externals, tokenize: Stage, sft: Stage | None) -> Stage | None:
    if config.dpo is None:
        return None
    spec = DPOSpec(
        model=None if sft else config.model,
        training=config.dpo,
        backend=config.backend,
        seed=config.seed,
        dtype=config.model.dtype,
        max_length=config.data.max_length,
        weights=_weights(config.data.preferences),
    )
    inputs = {"data": tokenize.artifact} | ({"policy": sft.artifact} if sft else {})
    return Stage("dpo", "dpo", VERSIONS["dpo"], spec, inputs, _pick(external, *([] if sft else ["model"])))


def _rl(config: PipelineConfig, external: Externals, tokenize: Stage, begun: Stage | None) -> tuple[Stage, ...]:
    if config.rl is None:
        return ()
    segments: list[Stage] = []
    for start in range(0, config.rl.steps, config.rl.steps_per_segment):
        previous = segments[-1] if segments else begun
        beginning_needed = bool(config.rl.kl_coef or (config.backend.lora and segments))
        reference = {"reference": begun.artifact} if begun and beginning_needed else {}
        first_model = config.model if begun is None and (previous is None or beginning_needed) else None
        spec = RLSpec(
            model=first_model,
            training=config.rl,
            backend=config.backend,
            engine=config.engine,
            environment=config.environment,
            seed=config.seed,
            start=start,
            stop=min(start + config.rl.steps_per_segment, config.rl.steps),
            dtype=config.model.dtype,
            max_length=config.data.max_length,
            weights=_weights(config.data.prompts),
        )
        inputs = {"data": tokenize.artifact} | ({"policy": previous.artifact} if previous else {}) | reference
        filters = [role for role in external if role.startswith("filter-")]
        outside = _pick(
            external, "reward", "algorithm", "teacher", "environment", *filters, *_asked_by(config, "rl"),
            *(["model"] if first_model else []),
        )  # fmt: skip
        segments.append(Stage(f"rl-{len(segments) + 1}", "rl", VERSIONS["rl"], spec, inputs, outside))
    return tuple(segments)


def _serve(served: Served, model: External) -> Stage:
    """The stage of a served model. Its key does not depend on the stages that use it: their inputs name it."""
    spec = ServeSpec(served=replace(served, asked_by=("rl",)))
    return Stage(f"serve-{served.name}", "serve", VERSIONS["serve"], spec, {}, {"model": model})


def _asked_by(config: PipelineConfig, kind: str) -> list[str]:
    """The roles of the served models that stages of a kind ask."""
    return [f"serve-{served.name}" for served in config.served if kind in served.asked_by]


def _evaluations(
    config: PipelineConfig,
    external: Externals,
    tokenize: Stage,
    sft: Stage | None,
    dpo: Stage | None,
    rl: tuple[Stage, ...],
) -> tuple[Stage, ...]:
    if config.data.heldout is None:
        return ()
    stages = []
    points: list[tuple[str, Stage | None]] = [("base", None)]
    points += [("sft", sft)] if sft else []
    points += [("dpo", dpo)] if dpo else []
    points += [(segment.name, segment) for segment in rl[:-1]] if config.evaluation.during_rl else []
    points += [("rl", rl[-1])] if rl else []
    for point, policy in points:
        spec = EvaluateSpec(
            model=None if policy else config.model,
            evaluation=config.evaluation,
            environment=config.environment,
            dtype=config.model.dtype,
            seed=0 if policy else config.seed,
            max_length=config.data.max_length,
        )
        inputs = {"data": tokenize.artifact} | ({"policy": policy.artifact} if policy else {})
        asked = _asked_by(config, "evaluate")
        outside = _pick(external, "score", "environment", *asked, *([] if policy else ["model"]))
        stages.append(Stage(f"evaluate-{point}", "evaluate", VERSIONS["evaluate"], spec, inputs, outside))
    return tuple(stages)


def _identify(config: PipelineConfig) -> Externals:
    """Everything from outside, by role; all problems are collected before one is raised."""
    looks: dict[str, tuple[str, Callable[[], External]]] = {
        role: (f"data.{role}", partial(identify_source, source)) for role, source in _sources(config).items()
    }
    if isinstance(config.model, PretrainedModel):
        looks["model"] = ("model.name", partial(_whole_model, config.model))
    if config.rl is not None:
        looks["reward"] = ("rl.reward", partial(identify_reward, config.rl.reward))
        if isinstance(config.rl.algorithm, CustomAlgorithm):
            name = config.rl.algorithm.function
            looks["algorithm"] = ("rl.algorithm.function", partial(identify_function, name, {}, "algorithm"))
        if isinstance(config.rl.algorithm, Distillation):
            teacher = partial(identify_teacher, config.rl.algorithm.teacher, config.rl.algorithm.revision)
            looks["teacher"] = ("rl.algorithm.teacher", teacher)
        for number, name in enumerate(config.rl.rollouts.filters):
            looks[f"filter-{number}"] = (f"rl.rollouts.filters.{number}", partial(identify_filter, name))
    if config.environment is not None:
        looks["environment"] = ("environment.name", partial(identify_environment, config.environment.name))
    for served in config.served:
        looks[served.url] = (f"served.{served.name}.model.name", partial(identify_model, served.model))
    looks["score"] = ("evaluation.reward", partial(identify_reward, config.evaluation.reward))
    found: Externals = {}
    problems = _unsuited(config)
    for role, (where, look) in looks.items():
        try:
            found[role] = look()
        except BadInput as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
    if problems:
        raise BadInput(problems, f"config {config.name}")
    return found


def _whole_model(model: PretrainedModel) -> External:
    """Raises `BadInput` where a model that lies here can't be trained."""
    if problems := problems_with(model.name):
        raise BadInput(problems)
    return identify_model(model)


def _unsuited(config: PipelineConfig) -> list[str]:
    """The settings that a published model doesn't support, as far as its files are on this machine."""
    if not isinstance(config.model, PretrainedModel):
        return []
    heads, experts = heads_of(config.model.name), experts_of(config.model.name)
    problems = config.backend.parallel.problems_with(*heads, experts) if heads else []
    wanted = {
        "backend.balance_experts": config.backend.balance_experts,
        "engine.replay_experts": config.engine.replay_experts,
    }
    if experts and config.engine.kind == "vllm" and config.rl is not None:
        problems.append(f"engine.kind: the model is a mixture of experts, and {MIXTURES_ON_VLLM}")
    return problems + [f"{field}: the model has no experts" for field, on in wanted.items() if on and experts == 0]


def _sources(config: PipelineConfig) -> dict[str, Source]:
    roles: dict[str, SourceOrMixture | None] = {
        "demonstrations": config.data.demonstrations if config.sft else None,
        "preferences": config.data.preferences if config.dpo else None,
        "prompts": config.data.prompts if config.rl else None,
        "heldout": config.data.heldout,
    }
    found: dict[str, Source] = {}
    for role, source in roles.items():
        if isinstance(source, Mixture):
            found |= {f"{role}-{number}": weighted.source for number, weighted in enumerate(source.sources, 1)}
        elif source is not None:
            found[role] = source
    return found


def _weights(source: SourceOrMixture | None) -> tuple[float, ...]:
    return tuple(weighted.weight for weighted in source.sources) if isinstance(source, Mixture) else ()


def _tokenizer(model: ScratchModel | PretrainedModel) -> TokenizerSpec:
    if isinstance(model, PretrainedModel):
        return TokenizerSpec(kind="pretrained", trust_remote_code=model.trust_remote_code)
    return TokenizerSpec(kind=model.tokenizer, vocab_size=model.vocab_size if model.tokenizer == "byte_bpe" else None)


def _pick(external: Externals, *roles: str) -> Externals:
    return {role: external[role] for role in roles if role in external}
