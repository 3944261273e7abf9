"""One call for SFT, DPO and GRPO: the same bits as the loop written out, resumed, and closed wherever it is left."""

import gc
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import rollouts_core as rc
from rollouts_core.config import CustomAlgorithm
from rollouts_core.inference.torch_engine import copy_of
from rollouts_core.library import training as training_module
from tests.answering import SSH, answering, ok

SHAPE = rc.ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=2, intermediate_size=64)
PAIRS = [(a, b) for a in range(4) for b in range(4)]
CONFIG = rc.RLConfig(
    steps=4, batch_size=4, n_samples_per_prompt=4, learning_rate=1e-2, max_new_tokens=3, checkpoint_every=2
)


def asked(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}+{b}="}]


ROWS = [{"messages": [*asked(a, b), {"role": "assistant", "content": f"{a + b}"}]} for a, b in PAIRS]
PROMPTS = [{"messages": asked(a, b), "answer": f"{a + b}"} for a, b in PAIRS]
PREFERENCES = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 1}"} for a, b in PAIRS]


@pytest.fixture(scope="module")
def made() -> rc.LanguageModel:
    return rc.create_model((f"{a}+{b}={a + b} 789" for a, b in PAIRS), SHAPE, max_length=16)


@pytest.fixture
def policy(made: rc.LanguageModel) -> rc.LanguageModel:
    return rc.LanguageModel(copy_of(made.model).requires_grad_(True), made.tokenizer)


def reward(sample: rc.Sample) -> float:
    return float(sample.response == sample.prompt.metadata["answer"])


def weights(policy: rc.LanguageModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.model.named_parameters()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sft_learns_and_saves_what_it_has_learnt(policy: rc.LanguageModel, tmp_path: Path) -> None:
    training = rc.sft(policy, ROWS, rc.SFTConfig(steps=30, batch_size=16, learning_rate=1e-2))
    losses = [step.metrics["loss"] for step in training]
    assert losses[-1] < losses[0] / 2
    training.save(tmp_path / "policy")
    loaded = rc.load_model(tmp_path / "policy")
    assert_same(weights(loaded), weights(policy))


@pytest.mark.parametrize("kind", ["rows", "generator", "file", "data set", "parquet"])
def test_data_come_as_a_script_has_them(kind: str, policy: rc.LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    data: dict[str, Any] = {
        "rows": ROWS, "generator": (row for row in ROWS), "file": tmp_path / "rows.jsonl",
        "data set": datasets.Dataset.from_list(ROWS), "parquet": str(tmp_path / "rows.parquet"),
    }  # fmt: skip
    found = rc.examples_from(data[kind], policy)
    expected = rc.examples_from(ROWS, policy)
    assert [example.tokens.tolist() for example in found] == [example.tokens.tolist() for example in expected]


def test_dpo_prefers_what_was_chosen(policy: rc.LanguageModel) -> None:
    training = rc.dpo(policy, PREFERENCES, rc.DPOConfig(steps=12, batch_size=8, learning_rate=1e-2))
    assert training.run()["rewards/accuracies"] == 1.0


def test_the_call_is_the_loop_written_out(policy: rc.LanguageModel, made: rc.LanguageModel) -> None:
    """Ten lines of it, as the page has them: to the last bit."""
    called = [step.metrics["reward"] for step in rc.grpo(policy, PROMPTS, reward, CONFIG)]
    model = rc.LanguageModel(copy_of(made.model).requires_grad_(True), made.tokenizer)
    buffer = rc.DataBuffer(rc.prompts_from(PROMPTS, model), seed=0)
    sampling = rc.RolloutConfig(batch_size=4, n_samples_per_prompt=4, max_new_tokens=3, temperature=1.0, seed=0)
    loss = rc.create_rl_loss(rc.recipe_of(rc.GRPO(), sampling.max_new_tokens))
    backend = rc.create_pytorch_backend(model.model, loss, rc.Optimization(learning_rate=1e-2))
    engine = rc.create_engine(model, max_length=16)
    written = []
    for step in range(1, CONFIG.steps + 1):
        prompts, buffer = buffer.get_prompts(sampling.batch_size)
        samples = rc.generate_samples(engine, model.tokenizer, prompts, sampling, step)
        rewards = [reward(sample) for sample in samples]
        batch = rc.prepare_grpo_batch(
            samples, rc.compute_advantages(rewards, [sample.group_index for sample in samples])
        )
        backend.forward_backward(batch)
        backend.optim_step().result()
        engine.update_weights(backend.get_weights().result(), backend.weight_version)
        written.append(sum(rewards) / len(rewards))
    assert written == pytest.approx(called)
    for name, value in weights(policy).items():
        torch.testing.assert_close(weights(model)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_with_a_directory_the_same_call_goes_on(
    stop: int, policy: rc.LanguageModel, made: rc.LanguageModel, tmp_path: Path
) -> None:
    expected = [step.metrics["reward"] for step in rc.grpo(policy, PROMPTS, reward, CONFIG)]
    for step in rc.grpo(copy(made), PROMPTS, reward, CONFIG, directory=tmp_path):
        if step.step == stop:
            break
    del step
    gc.collect()
    again = copy(made)
    rest = [step.metrics["reward"] for step in rc.grpo(again, PROMPTS, reward, CONFIG, directory=tmp_path)]
    begun = stop // CONFIG.checkpoint_every * CONFIG.checkpoint_every
    assert rest == expected[begun:]
    assert_same(weights(again), weights(policy))
    ended = copy(made)
    assert rc.grpo(ended, PROMPTS, reward, CONFIG, directory=tmp_path).run() == {}


def copy(made: rc.LanguageModel) -> rc.LanguageModel:
    return rc.LanguageModel(copy_of(made.model).requires_grad_(True), made.tokenizer)


def test_a_directory_of_another_experiment_is_refused(policy: rc.LanguageModel, tmp_path: Path) -> None:
    rc.sft(policy, ROWS, rc.SFTConfig(steps=2), directory=tmp_path).run()
    with pytest.raises(rc.BadInput, match=r"sft.learning_rate: it was begun with 2e-05, not 0.1"):
        rc.sft(policy, ROWS, rc.SFTConfig(steps=2, learning_rate=0.1), directory=tmp_path)


def test_other_data_and_another_model_are_refused_there(
    policy: rc.LanguageModel, made: rc.LanguageModel, tmp_path: Path
) -> None:
    config = rc.DPOConfig(steps=2, batch_size=8, learning_rate=1e-2, checkpoint_every=1)
    next(rc.dpo(policy, PREFERENCES, config, directory=tmp_path))
    with pytest.raises(rc.BadInput, match="data: it was begun with"):
        rc.dpo(copy(made), PREFERENCES[::-1], config, directory=tmp_path)
    with pytest.raises(rc.BadInput, match="model: it was begun with"):
        rc.dpo(policy, PREFERENCES, config, directory=tmp_path)  # trained meanwhile, and no longer the reference
    again = copy(made)
    assert len(list(rc.dpo(again, PREFERENCES, config, directory=tmp_path))) == 1
    whole = copy(made)
    rc.dpo(whole, PREFERENCES, config).run()
    assert_same(weights(again), weights(whole))


def test_an_algorithm_of_a_file_as_configs_name_it(policy: rc.LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def ones(samples):\n    return [1.0 for _ in samples]\n")
    config = replace(CONFIG, steps=1, algorithm=CustomAlgorithm(function=f"{tmp_path / 'own.py'}:ones"))
    (step,) = rc.grpo(policy, PROMPTS, reward, config)
    assert {float(value) for of in step.advantages for value in of} == {1.0}


def test_adapters_are_saved_with_what_they_add(policy: rc.LanguageModel, tmp_path: Path) -> None:
    backend = rc.BackendConfig(lora=rc.LoRAConfig(rank=2))
    training = rc.sft(policy, ROWS, rc.SFTConfig(steps=3, batch_size=8, learning_rate=1e-2), backend=backend)
    training.run()
    training.save(tmp_path / "policy")
    expected = training.backend.get_weights().result()
    assert_same({name: value.detach() for name, value in expected.items()}, weights(rc.load_model(tmp_path / "policy")))


def test_an_advantage_a_loss_and_an_optimizer_of_ones_own(policy: rc.LanguageModel) -> None:
    seen: list[str] = []

    def advantages(samples: Sequence[rc.Sample]) -> list[float]:
        seen.append("advantages")
        return [(sample.reward or 0.0) - 0.5 for sample in samples]

    def loss(scores: rc.TokenScores, batch: rc.TrainBatch) -> Any:
        seen.append("loss")
        assert batch.advantages_M is not None
        total = -(scores.logprobs_M * batch.advantages_M).sum()
        return total / batch.normalizer, {"policy_loss_sum": total.detach()}

    def optimizer(parameters: list[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
        seen.append("optimizer")
        return torch.optim.SGD(parameters, lr=learning_rate)

    before = weights(policy)
    config = replace(CONFIG, steps=1)
    (step,) = rc.grpo(policy, PROMPTS, reward, config, advantages=advantages, loss=loss, optimizer=optimizer)
    assert seen == ["optimizer", "advantages", "loss"]
    assert {float(value) for of in step.advantages for value in of} <= {-0.5, 0.5}
    assert any(not torch.equal(before[name], value) for name, value in weights(policy).items())


def test_a_sampler_of_ones_own(policy: rc.LanguageModel) -> None:
    engine = rc.create_engine(policy, max_length=16)
    sampling = rc.RolloutConfig(batch_size=4, n_samples_per_prompt=4, max_new_tokens=3, temperature=1.0, seed=0)
    steps = []

    def sampler(prompts: Sequence[rc.Prompt], step: int) -> list[rc.Sample]:
        steps.append(step)
        return rc.generate_samples(engine, policy.tokenizer, prompts, sampling, step)

    expected = next(iter(rc.grpo(policy, PROMPTS, reward, CONFIG)))
    found = next(iter(rc.grpo(policy, PROMPTS, reward, CONFIG, sampler=sampler)))
    assert steps == [1]
    assert [sample.tokens for sample in found.samples][:4] != []
    assert len(found.samples) == len(expected.samples)


def test_an_agent_is_trained_over_an_environment(made: rc.LanguageModel) -> None:
    def begin(row: Any) -> list[rc.Message]:
        return [rc.Message("user", f"{row['a']}+{row['b']}=")]

    environment = rc.Functions(begin)
    rows = [{"a": a, "b": b} for a, b in PAIRS]

    def length(sample: rc.Sample) -> float:
        assert sample.trajectory is not None
        return float(len(sample.response))

    training = rc.grpo(copy(made), rows, length, CONFIG, environment=environment, max_turns=2)
    assert len(list(training)) == CONFIG.steps


BAD: dict[str, tuple[Callable[[rc.LanguageModel], Any], str]] = {
    "no tokenizer": (lambda policy: rc.grpo(policy.model, PROMPTS, reward), "tokenizer: a model that is given"),
    "no model": (lambda policy: rc.grpo(3, PROMPTS, reward), "model: a int is neither a transformers model"),
    "texts": (lambda policy: rc.grpo(policy, ["2+2="], reward), "prompts: row 0 is a str"),
    "a number": (lambda policy: rc.grpo(policy, 7, reward), "prompts: a int can't be read as rows"),
    "nothing": (lambda policy: rc.grpo(policy, iter(()), reward), "prompts: there are no rows; a generator"),
    "arity": (lambda policy: rc.grpo(policy, PROMPTS, lambda a, b: 0.0), "reward: .* is called with \\(sample\\)"),
    "no function": (lambda policy: rc.grpo(policy, PROMPTS, 0.5), "reward: a float is neither a function"),
    "advantages": (
        lambda policy: rc.grpo(policy, PROMPTS, reward, advantages=lambda: [0.0]), "advantages: .*\\(samples\\)"
    ),
    "too long": (lambda policy: rc.grpo(policy, PROMPTS, reward, max_length=7), "max_length 7: the longest prompt"),
    "an engine": (lambda policy: rc.grpo(policy, PROMPTS, reward, CONFIG, engine=5), "engine: a int is neither"),
    "nobody there": (
        lambda policy: rc.grpo(policy, PROMPTS, reward, CONFIG, engine="http://127.0.0.1:9"), "engine: .*127.0.0.1:9"
    ),
    "roles": (lambda policy: rc.sft(policy, [{"messages": [{"role": "x", "content": ""}]}]), "data, row 0: "),
    "no pair": (lambda policy: rc.dpo(policy, ROWS), "data, row 0.*: has no 'chosen' and 'rejected'"),
    "both": (
        lambda policy: rc.sft(policy, ROWS, optimizer=lambda p, lr: None, directory="x"), "directory: the state of"
    ),
    "ranks": (lambda policy: rc.sft(policy, ROWS, backend=rc.BackendConfig(processes=4)), "backend.processes 4: here"),
    "sampler": (
        lambda policy: rc.grpo(policy, PROMPTS, reward, CONFIG, sampler=lambda prompts, step: [], engine="embedded"),
        "engine: your own sampler"
    ),
    "a file": (lambda policy: rc.sft(policy, "rows.csv"), "data: rows.csv is not a file of rows"),
}  # fmt: skip


@pytest.mark.parametrize("said", [SSH, ok(b"{", length=500), ok(b"[]"), ok(b'{"data": [1]}')])
def test_an_address_where_something_else_answers_is_refused(said: bytes, policy: rc.LanguageModel) -> None:
    with answering(said) as url, pytest.raises(rc.BadInput, match="does not answer as a server of models does"):
        rc.grpo(policy, PROMPTS, reward, CONFIG, engine=url)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_by_the_arguments_name(name: str, policy: rc.LanguageModel) -> None:
    call, message = BAD[name]
    with pytest.raises(rc.BadInput, match=message):
        call(policy)


def test_one_that_has_ended_is_not_gone_through_again(policy: rc.LanguageModel) -> None:
    training = rc.sft(policy, ROWS, rc.SFTConfig(steps=1, batch_size=4))
    training.run()
    with pytest.raises(rc.BadInput, match="has ended"):
        list(training)


@pytest.fixture
def alone() -> Callable[[], bool]:
    """Whether all threads that a test began have ended."""
    before = set(threading.enumerate())
    return lambda: not [t for t in threading.enumerate() if t not in before and "anyio" not in t.name.lower()]


OVERLAPPED = replace(CONFIG, rollouts=rc.RolloutsConfig(generation="overlapped", max_staleness=1))


@pytest.mark.parametrize("config", [CONFIG, OVERLAPPED], ids=["on_policy", "overlapped"])
def test_a_loop_that_is_left_leaves_nothing(
    config: rc.RLConfig, policy: rc.LanguageModel, alone: Callable[[], bool], tmp_path: Path
) -> None:
    for _step in rc.grpo(policy, PROMPTS, reward, config, directory=tmp_path):
        break
    gc.collect()
    assert alone() and not len(training_module._open)


def test_a_loop_that_an_exception_ended_is_closed_by_the_next(
    policy: rc.LanguageModel, made: rc.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, which keeps the last exception, and with it the loop's variables."""

    def cell() -> None:
        training = rc.grpo(policy, PROMPTS, reward, CONFIG)
        for _step in training:
            raise KeyboardInterrupt

    try:
        cell()
    except KeyboardInterrupt as error:
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__, raising=False)
    assert len(training_module._open) == 1
    training = rc.grpo(copy(made), PROMPTS, reward, CONFIG)
    assert list(training_module._open) == [training]
    training.close()


def test_a_batch_is_shown_as_text_and_as_html(policy: rc.LanguageModel) -> None:
    step = next(iter(rc.grpo(policy, PROMPTS, reward, CONFIG)))
    batch = rc.prepare_grpo_batch(step.samples, [float(of[0]) for of in step.advantages])
    one, other = rc.show(step, policy.tokenizer, most=10_000), rc.show(batch, policy.tokenizer, most=10_000)
    learnt = [line for line in one.lines if line[3]]
    assert len(learnt) == sum(sum(sample.loss_mask) for sample in step.samples)
    assert [line for line in other.lines if line[3]] == learnt
    assert {line[0] for line in learnt} == {str(number) for number in range(16)}
    few = rc.show(step.samples, most=3)
    assert few.left_out and len(few.lines) == 3
    assert "more tokens" in str(few) and "<th>advantage</th>" in few._repr_html_()
    with pytest.raises(rc.BadInput, match="batch: a int"):
        rc.show(3)  # type: ignore[arg-type]
