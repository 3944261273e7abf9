"""A segment of an RL run.

The artifact holds `policy/` (a Hugging Face model directory), `state/` (all that the next segment needs to go on
exactly), `metrics.jsonl` and `rollouts.jsonl` (some samples of every step; see `rollout.record_files`).

The segment begins at its own last checkpoint; or warm, if this process made the segment before; or at the state of the
artifact before. All three give the same bits.
"""

import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollouts_core.data.prompt_table import PromptTable
from rollouts_core.data.prompts import DataBuffer, check_room, check_vocabulary
from rollouts_core.data.tokenized import directories_of
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.inference.engine import InferenceEngine
from rollouts_core.inference.registry import engine_for, shares_device
from rollouts_core.metrics.health import Warnings
from rollouts_core.rewards.functions import load_reward
from rollouts_core.rollout.episodes import Acting
from rollouts_core.rollout.filters import load_filter
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.rollout.kept import keep_batch
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.managers import create_manager
from rollouts_core.rollout.overlap import OverlappedRollouts
from rollouts_core.rollout.record_files import RolloutRecord, keep_rollouts, record_files
from rollouts_core.rollout.records import sample_record
from rollouts_core.rollout.source import GeneratedRollouts, generating
from rollouts_core.stages.acting import acting_of
from rollouts_core.stages.backends import recipe_for, stage_backend
from rollouts_core.stages.leaving import checkpoint_or_leave
from rollouts_core.stages.policies import beginning_origin, start, trained_origin
from rollouts_core.stages.specs import RLSpec
from rollouts_core.stages.workspace import Work
from rollouts_core.store.identity import is_url
from rollouts_core.training.algorithms import Recipe
from rollouts_core.training.checkpoint import Checkpoints, last_checkpoint
from rollouts_core.training.configured import Backend, rl_loop
from rollouts_core.training.exporting import save_policy
from rollouts_core.training.fsdp import FSDPTrainingBackend
from rollouts_core.training.inspection import keeping_nonfinite
from rollouts_core.training.models import (
    check_context,
    check_teacher,
    seed_torch,
)
from rollouts_core.training.origins import origin_in
from rollouts_core.training.policy import Policy
from rollouts_core.training.pytorch import score as score_batch
from rollouts_core.training.reference import Reference, reference_backend, reference_model, reference_server
from rollouts_core.training.rl import run_rl_training
from rollouts_core.training.rl_state import load_rl, save_rl


@dataclass
class Trainer:
    """The live objects of an RL run, handed from segment to segment while the process lives."""

    model: Any
    tokenizer: Any
    backend: Backend
    recipe: Recipe
    reference: Reference | None
    rollouts: GeneratedRollouts
    journal: RolloutJournal


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, RLSpec), "the planner pairs this stage with its spec"
    trainer, begun = _resume(work, spec)
    work.log.covers(spec.start, spec.stop, begun)
    keep_rollouts(work.scratch, begun)
    record = RolloutRecord(work.scratch)
    metrics: dict[str, float] = {}
    warnings = Warnings()
    settings = rl_loop(spec.training, trainer.recipe, spec.stop)
    steps = run_rl_training(trainer.backend, trainer.rollouts, settings, trainer.reference, begun)
    with Checkpoints(work.scratch / "checkpoints") as checkpoints:
        for step in keeping_nonfinite(steps, work.scratch / "nonfinite"):
            metrics = step.metrics
            work.log.log(metrics, step.step)
            for warning in warnings.about(metrics, step.step):
                print(warning, flush=True)
            looked_at = slice(spec.training.log_samples)
            kept = zip(step.samples[looked_at], step.advantages[looked_at], strict=True)
            told = [sample_record(sample, advantages, trainer.tokenizer) for sample, advantages in kept]
            for rollout in told:
                record.log(rollout, step.step)
            work.log.rollouts(told, step.step)
            if spec.training.rollouts.keep_batches:
                keep_batch(work.scratch / "batches", step.step, step.samples)
            if step.step < spec.stop:
                is_due = (step.step - spec.start) % spec.training.checkpoint_every == 0
                save = partial(save_rl, trainer.backend, trainer.rollouts)
                checkpoint_or_leave(work, checkpoints, step.step, is_due, save)
            if (complete := checkpoints.completed()) is not None:
                trainer.journal.forget(complete)
    if spec.backend.lora is not None:
        trainer.backend.save_adapter(work.out / "adapter")
    save_policy(trainer.model, trainer.tokenizer, work.out / "policy", trainer.backend.get_weights().result())
    (work.out / "state").mkdir()
    save_rl(trainer.backend, trainer.rollouts, work.out / "state").result()
    for path in (work.scratch / "metrics.jsonl", *record_files(work.scratch)):
        shutil.copyfile(path, work.out / path.name)
    if spec.training.rollouts.keep_batches:
        shutil.copytree(work.scratch / "batches", work.out / "batches")
    work.session.warm[work.stage.key] = trainer
    return {"reward": metrics["reward"], "weight_version": metrics["weight_version"]} if metrics else {}


def _resume(work: Work, spec: RLSpec) -> tuple[Trainer, int]:
    """The trainer as it was after the step it returns."""
    policy = work.stage.inputs.get("policy")
    warm = work.session.warm.pop(policy.key, None) if policy else None
    trainer = warm if isinstance(warm, Trainer) else _create(work, spec)
    trainer.journal.move(work.scratch / "rollouts")
    if found := last_checkpoint(work.scratch / "checkpoints"):
        step, directory = found
        print(f"resuming after step {step}")
        load_rl(trainer.backend, trainer.rollouts, directory)
        return trainer, step
    if warm is None and spec.start > 0:
        load_rl(trainer.backend, trainer.rollouts, work.inputs["policy"] / "state")
    return trainer, spec.start


def _create(work: Work, spec: RLSpec) -> Trainer:
    """A trainer with the policy's weights and everything else at its beginning."""
    seed_torch(spec.seed, "rl")
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    origin = trained_origin(work, spec, tokenizer)
    model = start(work, origin)
    prompts = prompts_of(work)
    buffer = buffer_of(prompts, spec)
    check_room(prompts.longest, "rl.max_new_tokens", spec.training.max_new_tokens, spec.max_length)
    check_vocabulary(prompts.largest_token(), model.config.vocab_size)
    check_context(model, spec.max_length)
    journal = RolloutJournal(work.scratch / "rollouts")
    acting = acting_of(work.stage, spec.environment, tokenizer, spec.max_length)
    make_manager = partial(manager_for, work, spec, tokenizer, buffer, journal, acting)
    make_engine = partial(engine_for, spec.engine, model, tokenizer, spec.max_length, work.session.servers, work.device)
    colocated = shares_device(spec.engine, work.session.servers)
    same_thread = not spec.engine.has_servers and spec.training.rollouts.generation != "overlapped"
    rollouts = work.session.closing.enter_context(generating(make_engine, make_manager, colocated, same_thread))
    recipe = recipe_for(work.stage)
    backend = stage_backend(work, model, origin)
    reference = reference_for(work, spec, tokenizer, backend)
    return Trainer(model, tokenizer, backend, recipe, reference, rollouts, journal)


def prompts_of(work: Work) -> PromptTable:
    """The prompts of a source; those of a mixture one source after another, with rows counted through."""
    return PromptTable(directories_of(work.inputs["data"], "prompts"))


def buffer_of(prompts: PromptTable, spec: RLSpec) -> DataBuffer:
    return DataBuffer(prompts, spec.seed, sizes=prompts.sizes, weights=spec.weights)


def manager_for(
    work: Work,
    spec: RLSpec,
    tokenizer: Any,
    buffer: DataBuffer,
    journal: RolloutJournal | None,
    acting: Acting | None,
    engine: InferenceEngine,
) -> AsyncRolloutManager | OverlappedRollouts:
    """The rollout manager that makes the segment's batches."""
    location = work.stage.external["reward"].location
    reward = load_reward(location)
    places = {name: work.stage.external[name].location for name in work.stage.external if name.startswith("filter-")}
    filters = {location: load_filter(location) for _, location in sorted(places.items())}
    return create_manager(
        spec.training, spec.seed, tokenizer, buffer, reward, location, filters, journal, acting, engine
    )


def reference_for(work: Work, spec: RLSpec, tokenizer: Any, backend: Backend) -> Reference | None:
    """Scores tokens under the policy that RL began with, or a teacher; None where nothing asks for it.

    Ranks share its weights as they do the policy's.
    """
    teacher = work.stage.external.get("teacher")
    if teacher is None and not spec.training.kl_coef:
        return None
    if teacher is not None and is_url(teacher.location):
        return reference_server(teacher.location)
    if teacher is not None:
        origin = origin_in(teacher.location, spec.dtype, teacher.identity.get("commit"))
        check_teacher(origin.config["vocab_size"], tokenizer)
    else:
        origin = beginning_origin(work, spec, tokenizer)
    if isinstance(backend, FSDPTrainingBackend):
        return reference_backend(backend.referring_to(origin, spec.training.temperature))
    policy = Policy(origin.whole(work.device).requires_grad_(False), spec.training.temperature, entropy=False).eval()
    return reference_model(partial(score_batch, policy))
