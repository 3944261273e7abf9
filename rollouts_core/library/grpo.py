"""Reinforcement learning in one call: GRPO, and every other algorithm that `RLConfig.algorithm` names."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollouts_core.config import BackendConfig, CustomAlgorithm, Distillation, RLConfig
from rollouts_core.config.schema import identity_of
from rollouts_core.data.prompts import DataBuffer, check_tokens
from rollouts_core.data.turns import turn_format
from rollouts_core.environments.environment import Environment, beginning_of
from rollouts_core.environments.registry import check_environment
from rollouts_core.errors import BadInput
from rollouts_core.inference.torch_engine import copy_of
from rollouts_core.library.checks import (
    as_reward,
    make_deterministic,
    refuse_other_arity,
    refuse_ranks,
    refuse_unresumable,
)
from rollouts_core.library.engines import check_engine, maker_of
from rollouts_core.library.models import LanguageModel, as_language_model
from rollouts_core.library.rows import Rows, prompts_from
from rollouts_core.library.sampled import SampledRollouts, Sampler
from rollouts_core.library.training import Training, begin, digest_of, model_digest, with_checkpoints
from rollouts_core.rewards.reward import AnyReward
from rollouts_core.rollout.episodes import Acting
from rollouts_core.rollout.filters import identify_filter, load_filter
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.rollout.managers import create_manager
from rollouts_core.rollout.source import GeneratedRollouts, generating
from rollouts_core.training.algorithms import CustomAdvantages, Recipe, own_advantages, recipe_of
from rollouts_core.training.backend import LossFunction
from rollouts_core.training.configured import Backend, backend_for, rl_loop
from rollouts_core.training.models import check_context, seed_torch
from rollouts_core.training.optimizers import OwnOptimizer
from rollouts_core.training.policy import Policy
from rollouts_core.training.pytorch import score as score_batch
from rollouts_core.training.reference import Reference, reference_model
from rollouts_core.training.rl import RLStep, run_rl_training
from rollouts_core.training.rl_state import load_rl, save_rl
from rollouts_core.types import Prompt
from rollouts_core.user_code import load_function

DEFAULT, DEFAULT_BACKEND = RLConfig(), BackendConfig()
CALL_SECONDS = 30.0
"""Deadline of a tool's call."""


def grpo(
    model: Any,
    prompts: Rows | Sequence[Prompt],
    reward: AnyReward | str,
    config: RLConfig = DEFAULT,
    *,
    tokenizer: Any = None,
    engine: Any = None,
    sampler: Sampler | None = None,
    environment: Environment | None = None,
    max_turns: int = 8,
    max_length: int | None = None,
    advantages: CustomAdvantages | None = None,
    loss: LossFunction | None = None,
    optimizer: OwnOptimizer | None = None,
    backend: BackendConfig = DEFAULT_BACKEND,
    directory: str | Path | None = None,
    seed: int = 0,
    deterministic: bool = False,
    progress: bool = True,
) -> Training[RLStep]:
    """Train a model by rewards for its answers; its steps come one after another.

    `model`: a name, a directory, a `LanguageModel` or a transformers model with its `tokenizer`. `prompts`: rows, a
    file or a data set; further columns of a row are what `reward` finds in `sample.prompt.metadata`. `reward`: a
    function of a sample, async or not, a `GroupReward`, an `OpenReward` or the name of a shipped one. `engine`:
    None or "embedded" for one in this process, the address of an SGLang or vLLM server, or a function that makes one.
    `sampler` takes an engine's place: (prompts, step) in, a group of unscored samples for each prompt out.
    `environment`: what answers happen in, with tools and several turns. `max_length`: tokens of the longest prompt and
    answer together. `advantages`, `loss`, `optimizer`: functions that take the place of the algorithm's and the
    config's. `directory`: where checkpoints go; the same call goes on from there. `deterministic`: torch's
    deterministic algorithms. Raises `BadInput`, naming the argument.

    Examples:
        >>> rows = [{"messages": [{"role": "user", "content": "2+2="}], "answer": "4"}]
        >>> def reward(sample):
        ...     return float(sample.prompt.metadata["answer"] in sample.response)
        >>> for step in rc.grpo("Qwen/Qwen2.5-0.5B-Instruct", rows, reward, rc.RLConfig(steps=10)):
        ...     print(step.metrics["reward"])
    """
    refuse_ranks(backend)
    refuse_unresumable(optimizer, directory)
    scored = as_reward(reward)
    if advantages is not None:
        refuse_other_arity("advantages", advantages, "samples")
    elif isinstance(config.algorithm, CustomAlgorithm):
        advantages = load_function(config.algorithm.function, {}, "algorithm")
    if sampler is not None:
        if engine is not None:
            raise BadInput("engine: your own sampler replaces it; leave one of the two out")
        refuse_other_arity("sampler", sampler, "prompts", "step")
        if not callable(scored):
            raise BadInput("reward: with your own sampler it must be a function of a sample")
    if isinstance(config.algorithm, Distillation):
        raise BadInput("config.algorithm: a teacher needs the pipeline; here, give `advantages`")
    check_engine(engine)
    make_deterministic(deterministic)
    policy = as_language_model(model, tokenizer)
    begun = None if environment is None else beginning_of(environment)
    asked = prompts_from(prompts, policy, begin=begun)
    check_tokens((prompt.tokens for prompt in asked), policy.model.config.vocab_size)
    longest = max(len(prompt.tokens) for prompt in asked)
    room = max_length or (
        min(policy.longest, longest + config.max_new_tokens) if environment is None else policy.longest
    )
    check_context(policy.model, room)
    if longest + (config.max_new_tokens if environment is None else 1) > room:
        raise BadInput(
            f"max_length {room}: the longest prompt has {longest} tokens; with answers of "
            f"{config.max_new_tokens} it does not fit"
        )
    place = Path(directory) if directory is not None else None
    refers = place is not None and bool(config.kl_coef)
    told = {"rl": identity_of(config), "seed": seed, "prompts": digest_of(prompt.tokens for prompt in asked)}
    start, checkpoint = begin(place, {**told, "model": model_digest(policy.model, weights=refers)})
    recipe = recipe_of(config.algorithm, config.max_new_tokens, advantages)
    if advantages is not None:
        recipe = replace(recipe, advantages=own_advantages(advantages))
    reference = _reference(policy, config)
    seed_torch(seed, "rl")
    trainer = backend_for(config, backend, policy.model, recipe, loss=loss, optimizer=optimizer)
    what = _Run(
        policy=policy, trainer=trainer, recipe=recipe, reference=reference, config=config, reward=scored,
        buffer=DataBuffer(asked, seed), seed=seed, room=room, directory=place, start=start, checkpoint=checkpoint,
        acting=None if environment is None else _acting(environment, policy, room, max_turns),
    )  # fmt: skip
    return Training(policy, trainer, _steps(what, engine, sampler), config.steps, "reward" if progress else "")


@dataclass(frozen=True)
class _Run:
    """The parts of a training that its steps use."""

    policy: LanguageModel
    trainer: Backend
    recipe: Recipe
    reference: Reference | None
    config: RLConfig
    reward: AnyReward
    buffer: DataBuffer
    seed: int
    room: int
    directory: Path | None
    start: int
    checkpoint: Path | None
    acting: Acting | None


def _steps(run: _Run, engine: Any, sampler: Sampler | None) -> Generator[RLStep, None, None]:
    with ExitStack() as stack:
        on_policy = run.config.rollouts.generation == "on_policy" and sampler is None
        journal = RolloutJournal(run.directory / "rollouts") if run.directory is not None and on_policy else None
        rollouts = _sampled(run, sampler) if sampler else stack.enter_context(_generated(run, engine, journal))
        if run.checkpoint is not None:
            load_rl(run.trainer, rollouts, run.checkpoint)
        loop = rl_loop(run.config, run.recipe, run.config.steps)
        yield from with_checkpoints(
            run_rl_training(run.trainer, rollouts, loop, run.reference, run.start),
            run.directory,
            run.config.checkpoint_every,
            run.config.steps,
            partial(save_rl, run.trainer, rollouts),
            journal.forget if journal else lambda step: None,
        )


@contextmanager
def _generated(run: _Run, engine: Any, journal: RolloutJournal | None) -> Iterator[GeneratedRollouts]:
    filters = {name: load_filter(identify_filter(name).location) for name in run.config.rollouts.filters}
    make_manager = partial(
        create_manager, run.config, run.seed, run.policy.tokenizer, run.buffer, run.reward, _name(run.reward), filters,
        journal, run.acting,
    )  # fmt: skip
    with maker_of(engine, run.policy, run.room) as (make_engine, here):
        same_thread = here and run.config.rollouts.generation != "overlapped"
        with generating(make_engine, make_manager, same_thread=same_thread) as rollouts:
            yield rollouts


def _sampled(run: _Run, sampler: Sampler) -> SampledRollouts:
    assert callable(run.reward), "seen before"
    return SampledRollouts(sampler, run.buffer, run.reward, run.config.batch_size, _name(run.reward))


def _name(reward: AnyReward) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


def _acting(environment: Environment, policy: LanguageModel, room: int, max_turns: int) -> Acting:
    check_environment(environment)
    form = turn_format(policy.tokenizer, [tool.schema for tool in environment.get_tools()])
    return Acting(environment, form, room, max_turns, CALL_SECONDS)


def _reference(policy: LanguageModel, config: RLConfig) -> Reference | None:
    """The policy as it is now, where the config asks for a KL term."""
    if not config.kl_coef:
        return None
    frozen = Policy(copy_of(policy.model), config.temperature, entropy=False).eval()
    return reference_model(partial(score_batch, frozen))
