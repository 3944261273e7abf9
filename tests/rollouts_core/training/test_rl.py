"""The RL loop: mismatch, versions, metrics, and exactness of its stage across segments, processes and kills."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollouts_core.config.algorithms import GRPO, PPO, Algorithm
from rollouts_core.config.loading import from_data
from rollouts_core.data.prompts import DataBuffer
from rollouts_core.errors import BadInput
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.metrics.loggers import JSONLLogger, read_jsonl
from rollouts_core.rollout.generate import generate_rollout_batches, generate_samples
from rollouts_core.rollout.kept import read_batch
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.rollout.source import generating
from rollouts_core.stages.plan import Plan, plan
from rollouts_core.stages.replay import generate_again, replay
from rollouts_core.stages.workspace import make_stage, open_session
from rollouts_core.store.local import LocalStore
from rollouts_core.training.algorithms import recipe_of
from rollouts_core.training.objectives import Extras, create_rl_loss
from rollouts_core.training.policy import Policy
from rollouts_core.training.pytorch import Optimization, create_pytorch_backend
from rollouts_core.training.pytorch import score as score_batch
from rollouts_core.training.reference import Reference, reference_model
from rollouts_core.training.rl import RLStep, RLTrainingConfig, run_rl_training
from rollouts_core.types import Message, Prompt, Sample
from tests.rollouts_core.models import character_tokenizer, tiny_model
from tests.rollouts_core.references import ALGORITHMS

ROLLOUT = RolloutConfig(batch_size=6, n_samples_per_prompt=4, max_new_tokens=5, temperature=0.9, seed=3)


def prompts(count: int = 20) -> list[Prompt]:
    tokenizer = character_tokenizer()
    texts = [f"{index}+{index}=" for index in range(count)]
    return [Prompt((Message("user", t),), tuple(tokenizer(t)["input_ids"]), {}, i) for i, t in enumerate(texts)]


OWN = ("tokens_per_pass", "kl_in_reward", "recompute_old", "only_advantages")


def digits(sample: Sample) -> float:
    """More digits, more reward."""
    return float(sum(c.isdigit() for c in sample.response))


def train(
    steps: int,
    minibatches: int = 1,
    kl_coef: float = 0.0,
    learning_rate: float = 3e-3,
    algorithm: Algorithm = GRPO(),  # noqa: B008
    **changes: Any,
) -> list[RLStep]:
    model = tiny_model()
    recipe = recipe_of(algorithm, ROLLOUT.max_new_tokens)
    loss = create_rl_loss(recipe, Extras(kl_coef=kl_coef))
    backend = create_pytorch_backend(model, loss, Optimization(learning_rate), temperature=0.9, critic=recipe.critic)
    own = {name: changes.pop(name) for name in OWN if name in changes}
    config = RLTrainingConfig(steps, recipe, minibatches, max_new_tokens=ROLLOUT.max_new_tokens, **own)
    reference: Reference | None = changes.pop("reference", None)
    if kl_coef or config.kl_in_reward:
        reference = reference_model(partial(score_batch, Policy(tiny_model().requires_grad_(False), 0.9).eval()))
    make_manager = partial(
        AsyncRolloutManager,
        tokenizer=character_tokenizer(),
        data_buffer=DataBuffer(prompts(), 0),
        reward=changes.pop("reward", digits),
        config=replace(ROLLOUT, **changes),
    )
    with generating(lambda: EmbeddedEngine(TorchEngine(copy_of(model), 32, 16)), make_manager) as rollouts:
        return list(run_rl_training(backend, rollouts, config, reference))


def test_reward_rises_and_engine_and_trainer_agree_at_every_step() -> None:
    steps = train(25)
    first, last = (sum(step.metrics["reward"] for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.5
    for step in steps:
        assert step.metrics["sampling/sampling_logp_difference/mean"] < 1e-4
        assert step.metrics["sampling/sampling_logp_difference/max"] < 1e-4
        assert step.metrics["timing_s/unaccounted"] < step.metrics["timing_s/step"]


def test_every_sample_carries_the_version_that_made_it() -> None:
    for step in train(4, minibatches=2):
        versions = {version for sample in step.samples for version in sample.weight_versions}
        assert versions == {2 * (step.step - 1)}
        for sample in step.samples:
            assert len(sample.weight_versions) == len(sample.rollout_log_probs) == sum(sample.loss_mask)
            assert len(sample.tokens) == len(sample.loss_mask)


def test_the_mismatch_is_measured_before_the_first_update() -> None:
    steps = train(3, minibatches=3, learning_rate=0.05)
    assert all(step.metrics["sampling/sampling_logp_difference/mean"] < 1e-4 for step in steps)
    assert all(abs(step.metrics["sampling/importance_sampling_ratio/mean"] - 1) > 1e-4 for step in steps)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda a: a.kind)
@pytest.mark.parametrize("minibatches", [1, 3])
def test_answers_without_an_advantage_are_not_computed_and_change_nothing(
    algorithm: Algorithm, minibatches: int
) -> None:
    """Every other group has one reward; with three minibatches of two groups, each has one such group."""

    def half_constant(sample: Sample) -> float:
        return 0.1 if sample.group_index % 2 else digits(sample)

    changes: dict[str, Any] = {"algorithm": algorithm, "minibatches": minibatches, "reward": half_constant}
    whole, less = train(3, **changes), train(3, **changes, only_advantages=True)
    for one, other in zip(whole, less, strict=True):
        assert one.metrics["frac_tokens_without_gradient"] == 0
        for name in ("policy_loss", "grad_norm", "reward"):
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-3, abs=1e-5), name
    skipped = [step.metrics["frac_tokens_without_gradient"] for step in less]
    assert all(share > 0.3 for share in skipped) == (algorithm.kind not in ("reinforce_plus_plus", "ppo"))


def test_a_step_without_any_advantage_is_taken_and_measured() -> None:
    steps = train(2, reward=lambda sample: 1.0, only_advantages=True)
    assert [step.metrics["weight_version"] for step in steps] == [1, 2]
    for step in steps:
        assert step.metrics["grad_norm"] == 0
        assert step.metrics["frac_tokens_without_gradient"] > 0.9
        assert step.metrics["sampling/sampling_logp_difference/mean"] < 1e-4


def test_kl_is_zero_at_first_and_grows() -> None:
    steps = train(5, kl_coef=0.01, learning_rate=0.01)
    assert abs(steps[0].metrics["kl"]) < 1e-6
    assert steps[-1].metrics["kl"] > 1e-4


def test_passes_of_a_step_change_nothing_but_rounding() -> None:
    whole, cut = train(2), train(2, tokens_per_pass=25)
    for one, other in zip(whole, cut, strict=True):
        for name in ("policy_loss", "grad_norm", "entropy"):
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS.values(), PPO(value_coef=0.5)], ids=lambda a: a.kind)
def test_reward_rises_under_every_algorithm(algorithm: Algorithm) -> None:
    steps = train(25, algorithm=algorithm, kl_in_reward=0.0 if algorithm.kind == "maxrl" else 0.001)
    first, last = (sum(step.metrics["reward"] for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.3


def test_a_critic_learns() -> None:
    losses = [step.metrics["value_loss"] for step in train(40, algorithm=PPO(value_coef=1.0), learning_rate=0.01)]
    assert losses[-1] < losses[0] / 4


def test_prompts_are_taken_in_the_order_of_the_buffer() -> None:
    seen = [sample.prompt.source_row for step in train(5) for sample in step.samples[::4]]
    assert seen == [prompt.source_row for prompt in DataBuffer(prompts(), 0).get_prompts(30)[0]]


def test_a_prompt_that_stands_twice_in_a_batch_gets_other_samples_the_second_time() -> None:
    engine = TorchEngine(tiny_model(), 32, 16)
    (prompt,) = prompts(1)
    twice, once = (generate_samples(engine, character_tokenizer(), [prompt] * n, ROLLOUT, step=1) for n in (2, 1))
    assert [sample.tokens for sample in twice[:4]] == [sample.tokens for sample in once]
    assert [sample.tokens for sample in twice[4:]] != [sample.tokens for sample in once]


def test_rollout_batches_come_without_end() -> None:
    engine = TorchEngine(tiny_model(), 32, 16)
    batches = generate_rollout_batches(engine, character_tokenizer(), DataBuffer(prompts(), 0), digits, ROLLOUT)
    (first, after), (second, _) = next(batches), next(batches)
    assert len(first) == len(second) == 24
    assert after.sample_offset == 6
    assert all(sample.reward is not None for sample in first)


@pytest.fixture
def made(small_config: dict[str, Any], tmp_path: Path) -> tuple[Plan, LocalStore]:
    """A plan whose data and SFT are in the store."""
    stages, store = plan(from_data(small_config)), LocalStore(tmp_path / "store")
    assert stages.sft is not None
    make(store, stages.tokenize, stages.sft)
    return stages, store


def make(store: LocalStore, *stages: Any) -> None:
    """In one process, warm from one to the next."""
    with open_session() as session:
        for stage in stages:
            make_stage(stage, store, JSONLLogger(store.home / "followed.jsonl"), "cpu", session)


def state(store: LocalStore, stage: Any) -> Mapping[str, torch.Tensor]:
    directory = store.open(stage.artifact)
    files = [*(directory / "policy").glob("*.safetensors"), *(directory / "state").rglob("*.safetensors")]
    return {
        f"{file.relative_to(directory)}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_segment_begun_warm_cold_or_from_a_checkpoint_ends_with_the_same_bits(
    made: tuple[Plan, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, store = made
    first, second = stages.rl
    make(store, first, second)
    warm = state(store, second)
    rollouts = read_jsonl(store.open(second.artifact) / "rollouts.jsonl")

    shutil.rmtree(store.home / "artifacts" / second.artifact.directory)
    make(store, second)
    assert same(state(store, second), warm)

    shutil.rmtree(store.home / "artifacts" / second.artifact.directory)
    monkeypatch.setattr("rollouts_core.stages.rl.save_policy", fail)
    with pytest.raises(RuntimeError, match="after the last step"):
        make(store, second)
    monkeypatch.undo()
    assert list((store.home / "work").glob(f"{second.artifact.directory}.*/checkpoints/step-00000003"))
    make(store, second)
    assert same(state(store, second), warm)
    assert read_jsonl(store.open(second.artifact) / "rollouts.jsonl") == rollouts
    steps = [record["step"] for record in read_jsonl(store.open(second.artifact) / "metrics.jsonl")]
    assert steps == [3, 4]


def fail(*arguments: Any) -> None:
    raise RuntimeError("after the last step")


def test_one_long_segment_equals_two_short_ones(made: tuple[Plan, LocalStore], small_config: dict[str, Any]) -> None:
    stages, store = made
    make(store, *stages.rl)
    small_config["rl"]["steps_per_segment"] = 4
    (whole,) = plan(from_data(small_config)).rl
    make(store, whole)
    assert same(state(store, whole), state(store, stages.rl[-1]))


def test_kept_batches_replayed_give_the_same_losses_and_generated_again_the_same_samples(
    made: tuple[Plan, LocalStore], small_config: dict[str, Any], tmp_path: Path
) -> None:
    _, store = made
    small_config["rl"] |= {"rollouts": {"keep_batches": True}, "minibatches": 2, "kl_coef": 0.01}
    segments = plan(from_data(small_config)).rl
    make(store, *segments)
    for segment in segments:
        steps = list(replay(segment, store, tmp_path / segment.name, "cpu"))
        assert len(steps) == 2 and all(step.is_same for step in steps)
        assert all(len(step.recorded) == 4 for step in steps)
    ((file, reward),) = generate_again(segments[1], store, 1, tmp_path / "generated", "cpu")
    kept = read_batch(store.open(segments[1].artifact) / "batches" / file.name)
    assert read_batch(file) == kept
    assert reward == sum(sample.reward or 0.0 for sample in kept) / len(kept)


def test_only_what_was_kept_can_be_replayed(made: tuple[Plan, LocalStore], tmp_path: Path) -> None:
    stages, store = made
    make(store, stages.rl[0])
    with pytest.raises(BadInput, match=r"rl-1 kept no batches: run with rl\.rollouts\.keep_batches=true"):
        list(replay(stages.rl[0], store, tmp_path / "scratch", "cpu"))
    with pytest.raises(BadInput, match=r"rl-2 .* is not in this store"):
        list(replay(stages.rl[1], store, tmp_path / "scratch", "cpu"))


@pytest.mark.parametrize("generation", ["partial", "overlapped"])
def test_off_policy_segments_learn_within_their_bound_and_go_on(
    made: tuple[Plan, LocalStore], small_config: dict[str, Any], generation: str
) -> None:
    _, store = made
    rollouts = {
        "generation": generation, "max_staleness": 1, "correction": "truncate", "over_sampling_factor": 1.5,
        "filters": ["check_reasonable_length"],
    }  # fmt: skip
    small_config["rl"] |= {"rollouts": rollouts, "minibatches": 2}
    first, second = plan(from_data(small_config)).rl
    make(store, first)
    make(store, second)  # cold: what was under way is begun again
    lines = [line for stage in (first, second) for line in read_jsonl(store.open(stage.artifact) / "metrics.jsonl")]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["rollout/staleness/max"] <= 2 for line in lines), "one step is two versions"
    assert all("sampling/corrected_fraction" in line for line in lines)


def test_rl_begins_with_a_pretrained_model_and_its_reference(
    made: tuple[Plan, LocalStore], small_config: dict[str, Any], tmp_path: Path
) -> None:
    stages, store = made
    assert stages.sft is not None
    directory = shutil.copytree(store.open(stages.sft.artifact) / "policy", tmp_path / "pretrained")
    small_config |= {"sft": None, "model": {"kind": "pretrained", "name": str(directory)}}
    small_config["rl"]["kl_coef"] = 0.05
    later = plan(from_data(small_config))
    make(store, *later.stages)
    assert [stage.name for stage in later.stages] == ["tokenize", "rl-1", "rl-2", "evaluate-base", "evaluate-rl"]
    first, last = (read_jsonl(store.open(stage.artifact) / "metrics.jsonl") for stage in later.rl)
    assert abs(first[0]["kl"]) < 1e-6
    assert last[-1]["kl"] > 0
    moved = shutil.copytree(directory, tmp_path / "moved")
    small_config["model"]["name"] = str(moved)
    assert [stage.key for stage in plan(from_data(small_config)).stages] == [stage.key for stage in later.stages]


def test_the_policy_is_a_hugging_face_directory(made: tuple[Plan, LocalStore]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stages, store = made
    assert stages.sft is not None
    directory = store.open(stages.sft.artifact) / "policy"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    turns = [{"role": "user", "content": "1+1="}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, 6, len(tokenizer))


def test_the_manifest_tells_how_an_artifact_came_about(made: tuple[Plan, LocalStore]) -> None:
    stages, store = made
    assert stages.sft is not None
    provenance = store.manifest(stages.sft.artifact).provenance
    assert provenance.inputs == {"data": stages.tokenize.key}
    assert provenance.spec["training"]["learning_rate"] == 0.003
    assert "log_every" not in json.dumps(provenance.spec)
    assert "rollouts_core/training/losses.py" in provenance.code
    assert provenance.libraries["torch"]
    assert provenance.summary["loss"] > 0
