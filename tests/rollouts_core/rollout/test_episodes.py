"""Episodes under training: exact tokens, whatever the template and the engine do, and one advantage for all of one."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from rollouts_core.config.algorithms import GRPO, PPO
from rollouts_core.config.model import TokenizerSpec
from rollouts_core.data.prompts import DataBuffer
from rollouts_core.data.tokenizers import train_tokenizer
from rollouts_core.data.turns import first_tokens, turn_format
from rollouts_core.environments.environment import Environment, Functions
from rollouts_core.environments.shipped.calculator import calculator
from rollouts_core.errors import RolloutsStalled
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.endpoints.engine import EngineEndpoint
from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.torch_engine import TorchEngine, copy_of
from rollouts_core.rewards.reward import Reward
from rollouts_core.rollout.episodes import Acting, Episode, play
from rollouts_core.rollout.groups import answer_from_data, answer_to_data
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.rollout.kept import read_batch, write_batch
from rollouts_core.rollout.manager import AsyncRolloutManager, GeneratedBatch
from rollouts_core.rollout.overlap import OverlappedRollouts
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.rollout.source import generating
from rollouts_core.training.advantages import compute_advantages, generalized_advantages
from rollouts_core.training.algorithms import Outcome, Recipe, recipe_of
from rollouts_core.training.episodes import episodes_of, join, split, turn_rewards, whole
from rollouts_core.training.objectives import Extras, create_rl_loss
from rollouts_core.training.pytorch import Optimization, create_pytorch_backend
from rollouts_core.training.rl import RLTrainingConfig, run_rl_training, with_advantages
from rollouts_core.training.rl_metrics import rollout_metrics
from rollouts_core.training.streams import to_streams
from rollouts_core.types import Message, Prompt, Sample, Status
from rollouts_core.types.episode import AgentState, Replied, StopReason
from tests.rollouts_core.data.test_templates import templates, tokenizer_with
from tests.rollouts_core.models import tiny_architecture, tiny_model

ALPHABET = '0123456789+*{}"<>_:, /abcdefghijklmnopqrstuvwxyzTRAB'
TOKENIZER = train_tokenizer(TokenizerSpec(kind="character"), [ALPHABET], 512)
CONFIG = RolloutConfig(batch_size=2, n_samples_per_prompt=2, max_new_tokens=200, temperature=1.0, seed=1)
ARCHITECTURE = tiny_architecture(vocab_size=len(TOKENIZER), max_position_embeddings=128)
CALL = '<tool_call>{"name":"calculate",  "arguments":{"expression":"12*3"}}</tool_call>'
DEADLINE = 30.0


def is_second_turn(request: GenerationRequest) -> bool:
    return any(token in request.stop_token_ids for token in request.prompt_tokens)


def encoded(text: str, tokenizer: Any = TOKENIZER) -> tuple[int, ...]:
    return (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)


@dataclass
class Speaks:
    """An engine that says what it is told to, a turn after the other, each token with the version it was made by."""

    turns: Sequence[str]
    tokenizer: Any = TOKENIZER
    weight_version: int = 0
    asked: list[GenerationRequest] = field(default_factory=list)
    aborts: Callable[[GenerationRequest], int | None] = lambda request: None

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        await anyio.lowlevel.checkpoint()
        turn = sum(request.prompt_tokens.count(token) for token in request.stop_token_ids)
        tokens = encoded(self.turns[turn], self.tokenizer)[len(request.generated) :]
        reason: Any = "stop"
        if (only := self.aborts(request)) is not None:
            tokens, reason = tokens[:only], "abort"
        versions = (self.weight_version,) * len(tokens)
        log_probs = tuple(-float(len(request.prompt_tokens) + n) for n in range(len(tokens)))
        return Completion(request.request_id, tokens, log_probs, versions, reason)

    async def abort(self, request_ids: Sequence[str]) -> None:
        pass


def prompts(environment: Environment, tokenizer: Any = TOKENIZER, count: int = 4) -> list[Prompt]:
    form = turn_format(tokenizer, [entry.schema for entry in environment.get_tools()])
    rows = [{"question": f"1{row}*3", "answer": "36"} for row in range(count)]
    states = [environment.begin(row) for row in rows]
    return [
        Prompt(state.messages, first_tokens(form, state.messages), row, place)
        for place, (state, row) in enumerate(zip(states, rows, strict=True))
    ]


def acting_in(environment: Environment, tokenizer: Any = TOKENIZER, **changes: Any) -> Acting:
    form = turn_format(tokenizer, [entry.schema for entry in environment.get_tools()])
    return replace(Acting(environment, form, 400, 4, 1.0), **changes)


def correct(sample: Sample) -> float:
    return float(sample.response == sample.prompt.metadata["answer"])


def manager_of(engine: Any, environment: Environment, tokenizer: Any = TOKENIZER, **changes: Any) -> Any:
    acting = acting_in(environment, tokenizer, **changes.pop("acting", {}))
    buffer = DataBuffer(prompts(environment, tokenizer), 0)
    made, config = changes.pop("kind", AsyncRolloutManager), replace(CONFIG, **changes.pop("config", {}))
    return made(engine, tokenizer, buffer, changes.pop("reward", correct), config, acting=acting, **changes)


def generated(manager: Any, steps: Sequence[int] = (1,)) -> list[GeneratedBatch]:
    async def make() -> list[GeneratedBatch]:
        with anyio.fail_after(DEADLINE):
            return [await manager.generate_batch(step) for step in steps]

    return anyio.run(make)


def test_what_the_engine_made_is_what_is_trained_on() -> None:
    """The call is written with spaces that the template would not write; they stay as they are."""
    engine = Speaks([CALL, "36"])
    (batch,) = generated(manager_of(engine, calculator()))
    sample = batch.samples[0]
    made = [encoded(CALL), encoded("36")]
    observed = encoded("<|tool|>36<|assistant|>")[:-1]
    assert sample.tokens == (*sample.prompt.tokens, *made[0], *observed, *made[1])
    zeros = (0,) * len(sample.prompt.tokens)
    assert sample.loss_mask == (*zeros, *(1,) * len(made[0]), *(0,) * len(observed), *(1,) * len(made[1]))
    second = len(sample.prompt.tokens) + len(made[0]) + len(observed)
    first = tuple(-float(len(sample.prompt.tokens) + n) for n in range(len(made[0])))
    assert sample.rollout_log_probs == (
        *first,
        *(0.0,) * len(observed),
        *(-float(second + n) for n in range(len(made[1]))),
    )
    assert len(sample.weight_versions) == len(sample.rollout_log_probs)
    assert (sample.response, sample.reward, sample.status) == ("36", 1.0, Status.COMPLETED)
    assert sample.tokens[:second] in {request.prompt_tokens for request in engine.asked}
    metrics = rollout_metrics(batch.samples)
    assert (metrics["episodes/turns"], metrics["tools/call_frequency"], metrics["tools/failure_frequency"]) == (2, 1, 0)
    assert (metrics["episodes/prefix_violations"], metrics["episodes/rewritten_turns"]) == (1.0, 0.0)


def test_a_template_that_rewrites_earlier_turns_splits_the_episode() -> None:
    """Qwen3's drops thoughts once the user has spoken again: each turn is trained behind what it was sampled behind."""
    tokenizer = tokenizer_with(templates()["trl/qwen3"])

    def again(message: Message, state: AgentState) -> Replied:
        return Replied((Message("user", "more"),)) if state.turn_idx == 1 else Replied()

    environment = Functions(lambda row: [Message("user", row["question"])], reply=again)
    engine = Speaks(["<think>\nRRR\n</think>\n\nAAA", "<think>\nTTT\n</think>\n\n36"], tokenizer)
    engine.turns = [engine.turns[0]] * 2 + [engine.turns[1]] * 4  # the user's turns end with the same token
    (batch,) = generated(manager_of(engine, environment, tokenizer, config={"max_new_tokens": 300}))
    first, second, *others = batch.samples
    assert (first.episode, second.episode, len(others)) == (0, 0, 6)
    assert first.reward == second.reward == 1.0
    text = tokenizer.decode(second.prompt.tokens)
    assert "AAA" in text
    assert "RRR" not in text
    assert sum(first.loss_mask) == len(encoded(engine.turns[0], tokenizer))
    assert sum(second.loss_mask) == len(encoded(engine.turns[-1], tokenizer))
    metrics = rollout_metrics(batch.samples)
    assert metrics["episodes/rewritten_turns"] == 1.0
    assert metrics["completions/mean_length"] == first.response_length + second.response_length


@pytest.mark.parametrize("kind", ["on_policy", "partial"])
def test_an_episode_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    """Killed and read from the journal, or aborted in the midst of its second turn and carried over."""
    environment, whole_batch = calculator(), generated(manager_of(Speaks([CALL, "36"]), calculator()))[0]
    if kind == "on_policy":
        journal = RolloutJournal(tmp_path)
        generated(manager_of(Speaks([CALL, "36"]), environment, journal=journal))
        silent = Speaks([])
        (again,) = generated(manager_of(silent, environment, journal=RolloutJournal(tmp_path)))
        assert not silent.asked
        assert [sample.tokens for sample in again.samples] == [sample.tokens for sample in whole_batch.samples]
        return
    stops = {"1/0/0": 1, "1/1/0": 1}

    def once(request: GenerationRequest) -> int | None:
        if not is_second_turn(request) or request.request_id not in stops:
            return None
        return stops.pop(request.request_id)

    config = {"max_staleness": 1, "batch_size": 1, "over_sampling_factor": 2.0}
    manager, later = (manager_of(Speaks([CALL, "36"], aborts=once), environment, config=config) for _ in range(2))
    (first,) = generated(manager)
    later.restore(json.loads(json.dumps(manager.state())))
    (second,) = generated(later, (2,))
    assert first.metrics["rollout/groups_carried"] > 0
    assert not stops
    for sample in (*first.samples, *second.samples):
        assert sample.tokens[len(sample.prompt.tokens) :] == whole_batch.samples[0].tokens[len(sample.prompt.tokens) :]


@pytest.mark.parametrize("followed", [False, True], ids=["in pieces", "followed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_says_what_the_whole_turn_says(temperature: float, followed: bool) -> None:
    """Over the embedded engine."""
    form = turn_format(TOKENIZER)
    model = tiny_model(architecture=ARCHITECTURE)
    state = AgentState((Message("user", "12*3"),))

    async def both() -> tuple[list[Any], Any]:
        engine = EmbeddedEngine(TorchEngine(model, 128, 4))
        await engine.update_weights(dict(model.named_parameters()), 0)
        follow = engine.follow if followed else None
        endpoint = EngineEndpoint(engine.generate, form, 128, "a", 7, temperature, follow=follow)
        return [piece async for piece in endpoint.stream(state, 50)], await endpoint.complete(state, 50)

    (*pieces, answered), whole = anyio.run(both)
    assert (answered.message, answered.sampled.tokens) == (whole.message, whole.sampled.tokens)
    assert answered.sampled.log_probs == pytest.approx(whole.sampled.log_probs, abs=1e-5)
    assert "".join(pieces) == whole.message.content
    assert len(pieces) > 1


def test_a_stream_tells_no_call_s_beginning() -> None:
    engine = Speaks(["it is hard, " + CALL])

    async def generate(request: GenerationRequest) -> Completion:
        whole = await engine.generate(request)
        left = request.max_new_tokens - len(request.generated)
        if left >= len(whole.tokens):
            return whole
        return replace(whole, tokens=whole.tokens[:left], log_probs=whole.log_probs[:left], finish_reason="length")

    form = turn_format(TOKENIZER, [entry.schema for entry in calculator().get_tools()])

    async def streamed() -> list[Any]:
        endpoint = EngineEndpoint(generate, form, 400, "a", 7)
        return [piece async for piece in endpoint.stream(AgentState((Message("user", "12*3"),)), None)]

    *pieces, answered = anyio.run(streamed)
    assert "".join(pieces).strip() == "it is hard,"
    assert answered.message.tool_calls[0].arguments == {"expression": "12*3"}


def test_half_a_turn_survives_its_record() -> None:
    engine = Speaks([CALL, "36"], aborts=lambda request: 1 if is_second_turn(request) else None)
    environment = calculator()
    (prompt, *_) = prompts(environment)

    async def ask(request: GenerationRequest, there: Completion | None) -> Completion:
        return await engine.generate(request)

    async def half() -> Episode:
        return await play(acting_in(environment), ask, prompt, "1/0/0", 7, None, CONFIG)

    episode = anyio.run(half)
    assert (episode.finish_reason, episode.half and len(episode.half.tokens)) == ("abort", 1)
    assert answer_from_data(json.loads(json.dumps(answer_to_data(episode)))) == episode


def test_overlapped_rollouts_play_episodes_too() -> None:
    manager = manager_of(Speaks([CALL, "36"]), calculator(), kind=OverlappedRollouts, config={"max_staleness": 1})

    async def first() -> GeneratedBatch:
        with anyio.fail_after(DEADLINE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(manager.run)
                batch: GeneratedBatch = await manager.next_batch(1)
                tasks.cancel_scope.cancel()
        return batch

    assert [sample.response for sample in anyio.run(first).samples] == ["36"] * 4


def test_what_is_ready_keeps_its_scores_over_a_restart() -> None:
    def turned(sample: Sample) -> Reward:
        return Reward(1.0, {"a": 2.0}, (0.5, float(sample.episode)))

    config = {"max_staleness": 2}
    made, later = (
        manager_of(Speaks([CALL, "36"]), calculator(), kind=OverlappedRollouts, config=config, reward=turned)
        for _ in range(2)
    )

    async def whole() -> tuple[GeneratedBatch, GeneratedBatch]:
        with anyio.fail_after(DEADLINE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.run)
                while len(made.state()["ready"]) < 2 * CONFIG.batch_size:
                    await anyio.sleep(0.01)
                later.restore(json.loads(json.dumps(made.state())))
                batches = await made.next_batch(1), await later.next_batch(1)
                tasks.cancel_scope.cancel()
        return batches

    one, other = anyio.run(whole)
    assert one.samples == other.samples
    assert one.samples[1].turn_rewards == (0.5, 1.0)


@pytest.mark.parametrize(
    ("turns", "changes", "status", "stop"),
    [
        ([CALL] * 9, {"acting": {"max_turns": 2}}, Status.TRUNCATED, StopReason.MAX_TURNS),
        ([CALL, CALL, "36"], {"acting": {"max_length": 130}}, Status.TRUNCATED, StopReason.MAX_TOKENS),
        (
            [CALL, CALL, "36"],
            {"config": {"max_new_tokens": len(encoded(CALL))}},
            Status.TRUNCATED,
            StopReason.MAX_TOKENS,
        ),
        (["<tool_call>no json</tool_call>", "36"], {}, Status.COMPLETED, StopReason.ANSWERED),
        (
            ['<tool_call>{"name": "other", "arguments": {}}</tool_call>', "36"],
            {},
            Status.COMPLETED,
            StopReason.ANSWERED,
        ),
    ],
)
def test_how_episodes_end(turns: list[str], changes: dict[str, Any], status: Status, stop: StopReason) -> None:
    (batch,) = generated(manager_of(Speaks(turns), calculator(), **changes))
    (sample, *_) = batch.samples
    assert sample.trajectory is not None
    assert (sample.status, sample.trajectory.final.stop) == (status, stop)
    assert len(sample.tokens) == len(sample.loss_mask) <= 400


def test_what_a_template_cannot_render_ends_its_episode_alone() -> None:
    """A call without a name, of which this template wants to know."""
    tokenizer = copy.deepcopy(TOKENIZER)
    unless = "{% for call in message.tool_calls or [] %}{% if not call.function.name %}{{ raise_exception('who?') }}"
    written = "{% endif %}" + tokenizer.chat_template.split("or [] %}")[2]
    tokenizer.chat_template = tokenizer.chat_template.split("{% for call in")[0] + unless + written
    (batch,) = generated(manager_of(Speaks(["<tool_call>none</tool_call>", "36"]), calculator(), tokenizer))
    assert {sample.status for sample in batch.samples} == {Status.FAILED}
    final = batch.samples[0].trajectory and batch.samples[0].trajectory.final
    assert final
    assert "who?" in final.error
    assert rollout_metrics(batch.samples)["episodes/stop/failed"] == 1.0


def test_an_environment_that_fails_is_named_and_does_not_hang() -> None:
    def breaks(message: Message, state: AgentState) -> Replied:
        raise KeyError("board")

    environment = Functions(lambda row: [Message("user", row["question"])], reply=breaks)
    with pytest.raises(RolloutsStalled, match="environment: KeyError: 'board'"):
        generated(manager_of(Speaks(["36"]), environment))


def test_an_environment_that_begins_otherwise_than_tokenized_is_told() -> None:
    seen = []

    def fickle(row: Mapping[str, Any]) -> Sequence[Message]:
        seen.append(row)
        return [Message("user", row["question"] if len(seen) <= 4 else "another")]

    with pytest.raises(RolloutsStalled, match="its begin gives other messages for the same row"):
        generated(manager_of(Speaks(["36"]), Functions(fickle)))


def test_batches_with_episodes_survive_parquet(tmp_path: Path) -> None:
    (batch,) = generated(
        manager_of(Speaks([CALL, "36"]), calculator(), reward=lambda s: Reward(1.0, {"a": 2.0}, (0.5, 0.0)))
    )
    write_batch(tmp_path / "b.parquet", list(batch.samples))
    assert read_batch(tmp_path / "b.parquet") == list(batch.samples)
    assert batch.samples[0].reward == 1.5


def test_engine_and_trainer_agree_on_every_token_of_every_turn() -> None:
    """A random model that talks nonsense for three turns: masks, places and log-probabilities are the trainer's."""

    def again(message: Message, state: AgentState) -> Replied:
        return Replied((Message("user", str(state.turn_idx)),)) if state.turn_idx < 3 else Replied()

    environment = Functions(lambda row: [Message("user", row["question"])], reply=again)
    model = tiny_model(architecture=ARCHITECTURE)
    recipe = recipe_of(PPO(), 60)
    backend = create_pytorch_backend(
        model, create_rl_loss(recipe, Extras()), Optimization(1e-3), temperature=1.0, critic=True
    )
    make_manager = partial(
        AsyncRolloutManager,
        tokenizer=TOKENIZER,
        data_buffer=DataBuffer(prompts(environment), 0),
        reward=lambda sample: Reward(0.0, turns=tuple(float(n) for n in range(sample.trajectory.final.turn_idx))),
        config=replace(CONFIG, max_new_tokens=60),
        acting=acting_in(environment, max_length=128),
    )
    config = RLTrainingConfig(3, recipe, max_new_tokens=60)
    with generating(lambda: EmbeddedEngine(TorchEngine(copy_of(model), 128, 16)), make_manager) as rollouts:
        steps = list(run_rl_training(backend, rollouts, config))
    for step in steps:
        assert step.metrics["sampling/sampling_logp_difference/max"] < 1e-4
        assert step.metrics["episodes/turns"] > 1
        for sample in step.samples:
            assert sample.trajectory is not None
            turns = sample.trajectory.final.sampled
            assert sum(sample.loss_mask) == sum(
                len(turn.tokens) for turn in turns if turn.continues or turn is turns[0]
            )


def parts(count: int, length: int, group: int, episode: int, reward: float, **changes: Any) -> list[Sample]:
    prompt = Prompt((), (1, 2), {}, 0)
    mask, zeros = (0, 0) + (1,) * length, (0.0,) * length
    one = Sample(prompt, "", (1,) * (2 + length), mask, zeros, (0,) * length, group, Status.COMPLETED, reward)
    return [replace(one, episode=episode, **changes)] * count


def test_a_split_episode_counts_once() -> None:
    """Its group's mean is over episodes, and each of its tokens has the episode's advantage."""
    samples = [*parts(3, 4, 0, 0, 1.0), *parts(1, 4, 0, 1, 0.0), *parts(1, 2, 0, 2, 0.0)]
    episodes = episodes_of(samples)
    assert episodes == [[0, 1, 2], [3], [4]]
    joined = [whole([samples[place] for place in places]) for places in episodes]
    assert [sample.response_length for sample in joined] == [12, 4, 2]
    assert all(len(sample.rollout_log_probs) == len(sample.tokens) - 2 for sample in joined)
    numbers = [np.arange(4.0), np.arange(4.0) + 4, np.arange(4.0) + 8, np.zeros(4), np.zeros(2)]
    again = split(join(numbers, episodes), [4, 4, 4, 4, 2], episodes)
    assert all((one == other).all() for one, other in zip(again, numbers, strict=True))
    expected = compute_advantages([1.0, 0.0, 0.0], [0, 0, 0])
    found = _advantages(samples, recipe_of(GRPO(), 10))
    assert [set(values) for values in found] == [{expected[0]}] * 3 + [{expected[1]}, {expected[2]}]


def test_rewards_of_turns_are_credited_to_their_turns() -> None:
    """By PPO: the returns of each token are what is still to come, turn by turn."""
    (batch,) = generated(
        manager_of(Speaks([CALL, "36"]), calculator(), reward=lambda sample: Reward(4.0, turns=(1.0, 2.0)))
    )
    sample = batch.samples[0]
    assert (sample.reward, sample.turn_rewards) == (7.0, (1.0, 2.0))
    first, second = len(encoded(CALL)), len(encoded("36"))
    rewards = np.zeros(first + second)
    rewards[first - 1], rewards[-1] = 1.0, 6.0
    _, expected = generalized_advantages(rewards, np.zeros(first + second))
    recipe = recipe_of(PPO(), 200)
    found = recipe.advantages(
        Outcome([sample], [4.0], [turn_rewards(sample, first + second)], [np.zeros(first + second)])
    )
    assert found.returns is not None
    assert np.allclose(found.returns[0], expected)


def _advantages(samples: list[Sample], recipe: Recipe) -> list[Any]:
    examples = with_advantages(to_streams(samples), samples, RLTrainingConfig(1, recipe))
    return [example.streams["advantages"] for example in examples]
