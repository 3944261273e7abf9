"""Direct preference optimization: pairs from rows, the loss against transformers and TRL, and that it learns."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts_core.config import Jsonl, LoRAConfig
from rollouts_core.data.example_rows import PreferenceRows
from rollouts_core.data.sources import load_rows
from rollouts_core.data.tokenized import preferences_in, write_table
from rollouts_core.data.tokenizing import tokenize_examples, tokenize_preferences, tokenize_prompts
from rollouts_core.errors import BadInput
from rollouts_core.store.identity import identify_source
from rollouts_core.training import referred_pairs
from rollouts_core.training.dpo import (
    DPOTrainingConfig,
    Pair,
    pairs_used,
    reference_logprobs,
    run_dpo_training,
    with_reference,
)
from rollouts_core.training.objectives import create_dpo_loss
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.training.referred_pairs import ReferredPairs, keep_reference
from tests.rollouts_core.models import character_tokenizer, tiny_model
from tests.rollouts_core.training.test_packed import alone

BETA = 0.5


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [turn("user", "1+1="), turn("assistant", "9"), turn("user", "1+1=")]
RIGHT, WRONG = [turn("assistant", "2")], [turn("assistant", "33")]


def rows_of(directory: Path, *rows: dict[str, Any]) -> Any:
    path = directory / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Jsonl(path=path)
    return load_rows(source, identify_source(source))


def pairs_of(directory: Path, *rows: dict[str, Any]) -> list[Pair]:
    table = tokenize_preferences(rows_of(directory, *rows), character_tokenizer(), 40)
    write_table(table, directory / "preferences" / "0.parquet")
    return preferences_in(table)


def sums(count: int) -> list[dict[str, str]]:
    """Right answers above wrong ones of another length."""
    random = np.random.default_rng(0)
    numbers = random.integers(0, 5, (count, 2))
    return [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 1}{a}" if a % 2 else f"{a + b + 1}"}
        for a, b in numbers.tolist()
    ]


def backend(beta: float = BETA, **options: Any) -> PyTorchTrainingBackend:
    return create_pytorch_backend(tiny_model(), create_dpo_loss(beta), Optimization(1e-3), **options)


def trained(
    pairs: list[Pair], config: DPOTrainingConfig, on: PyTorchTrainingBackend | None = None
) -> list[dict[str, float]]:
    on = on or backend()
    pairs = with_reference(pairs, reference_logprobs(on, pairs, config.tokens_per_pass))
    return [step.metrics for step in run_dpo_training(on, pairs, config)]


def learnt_texts(pair: Pair) -> list[str]:
    return [character_tokenizer().decode(answer.tokens[answer.loss_mask == 1]) for answer in pair]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": RIGHT, "rejected": WRONG},
        {"chosen": ASKED + RIGHT, "rejected": ASKED + WRONG},
    ],
)
def test_only_the_answers_are_learnt_and_the_prompt_is_shared(row: dict[str, Any], tmp_path: Path) -> None:
    (pair,) = pairs_of(tmp_path, row)
    assert learnt_texts(pair) == ["2<|end|>", "33<|end|>"]
    assert {answer.shared for answer in pair} == {int(pair[0].loss_mask.argmax())}
    assert "9" in character_tokenizer().decode(pair[0].tokens[: pair[0].shared])


def test_a_plain_preference_ends_with_the_end_of_sequence(tmp_path: Path) -> None:
    (pair,) = pairs_of(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "33"})
    assert learnt_texts(pair) == ["2<|end|>", "33<|end|>"]
    assert pair[0].shared == 4


def test_a_preference_is_a_demonstration_of_its_chosen_answer_and_a_prompt(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, {"prompt": ASKED, "chosen": RIGHT, "rejected": WRONG, "answer": "2"})
    tokenizer = character_tokenizer()
    table = tokenize_examples(rows, tokenizer, 40)
    ids, mask = (np.array(table[name][0].as_py()) for name in ("input_ids", "loss_mask"))
    assert tokenizer.decode(ids[mask == 1]) == "2<|end|>"
    prompt = tokenize_prompts(rows, tokenizer, 40)
    assert prompt["messages"][0].as_py() == json.dumps(ASKED)
    assert json.loads(prompt["metadata"][0].as_py()) == {"answer": "2"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1", "chosen": "2"}, "has one of 'chosen' and 'rejected'"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, "are the same"),
        ({"prompt": [{"role": "user", "content": "1"}], "chosen": "2", "rejected": "3"}, "'prompt' is not text, as"),
        ({"prompt": ASKED, "chosen": RIGHT, "rejected": [turn("nobody", "2")]}, r"rejected\[0\] has no role"),
        ({"prompt": ASKED, "chosen": [], "rejected": WRONG}, "no list of messages under 'chosen', nor text"),
        ({"chosen": RIGHT, "rejected": WRONG}, "begin with different messages"),
        ({"prompt": "1+1=", "completion": "2"}, "no 'chosen' and 'rejected'"),
        ({"prompt": ASKED, "chosen": [turn("user", "2")], "rejected": WRONG}, "chosen: has no turn of the assistant"),
        ({"prompt": "1" * 40, "chosen": "2", "rejected": "3"}, "chosen: 42 tokens, longer than the 40"),
        ({"prompt": "1", "chosen": "2", "rejected": "x"}, "rejected: has characters"),
    ],
)
def test_faulty_preferences_are_named(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"p\.jsonl:1: .*{problem}"):
        pairs_of(tmp_path, row)


def test_too_long_a_preference_is_dropped_whole_where_it_may_be(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, {"prompt": "1", "chosen": "2", "rejected": "3" * 50}, *sums(1))
    assert tokenize_preferences(rows, character_tokenizer(), 40, "cut_right")["source_row"].to_pylist() == [1]


def test_the_loss_is_that_of_each_answer_alone(tmp_path: Path) -> None:
    """Against transformers' own forward pass of each answer, summed in float64, with another model as reference."""
    pairs = pairs_of(tmp_path, *sums(5))
    reference, policy = tiny_model(seed=7), tiny_model()
    answers = [answer for pair in pairs for answer in pair]
    pairs = with_reference(pairs, [alone(reference, answer, 1.0)[0].detach().numpy() for answer in answers])
    (step,) = run_dpo_training(backend(), pairs, DPOTrainingConfig(1, 5, seed=0, tokens_per_pass=25))
    rewards = [
        BETA * (alone(policy, answer, 1.0)[0].sum() - alone(reference, answer, 1.0)[0].sum()).item()
        for answer in answers
    ]
    margins = [chosen - rejected for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)]
    losses = [math.log(1 + math.exp(-margin)) for margin in margins]
    assert step.metrics["loss"] == pytest.approx(sum(losses) / 5, rel=1e-5)
    assert step.metrics["rewards/margins"] == pytest.approx(sum(margins) / 5, rel=1e-5)
    assert step.metrics["rewards/chosen"] == pytest.approx(sum(rewards[::2]) / 5, rel=1e-5)
    assert step.metrics["rewards/accuracies"] == sum(margin > 0 for margin in margins) / 5
    assert step.metrics["passes"] > 1


def test_passes_change_nothing_but_rounding(tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path, *sums(12))
    one, other = (trained(pairs, DPOTrainingConfig(6, 4, seed=0, tokens_per_pass=size)) for size in (1, 10_000))
    for name in ("loss", "grad_norm", "rewards/margins"):
        assert [step[name] for step in one] == pytest.approx([step[name] for step in other], rel=1e-3)


def test_it_begins_at_even_odds_and_comes_to_prefer_the_chosen(tmp_path: Path) -> None:
    steps = trained(pairs_of(tmp_path, *sums(24)), DPOTrainingConfig(60, 8, seed=0))
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert sum(step["rewards/accuracies"] for step in steps[-10:]) / 10 > 0.9
    assert steps[-1]["rewards/margins"] > 0.5


def test_only_pairs_that_will_be_seen_are_scored() -> None:
    used = pairs_used((100,), DPOTrainingConfig(3, 4, seed=0))
    assert len(set(used)) == len(used) == 12
    assert pairs_used((10,), DPOTrainingConfig(30, 4, seed=0)) == list(range(10))


def test_steps_are_those_of_trl(tmp_path: Path) -> None:
    """Four steps over all pairs: the same losses, margins and gradients' norms."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = sums(8)
    arguments = DPOConfig(
        output_dir=str(tmp_path / "trl"),
        beta=BETA,
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_length=40,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_grad_norm=1.0,
        disable_tqdm=True,
    )
    theirs = DPOTrainer(
        model=tiny_model(),
        ref_model=tiny_model(),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=character_tokenizer(),
    )
    theirs.train()
    logged = [entry for entry in theirs.state.log_history if "loss" in entry]
    ours = trained(pairs_of(tmp_path, *rows), DPOTrainingConfig(4, 8, seed=0))
    names = ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "rewards/rejected", "rewards/accuracies")
    for one, other in zip(ours, logged, strict=True):
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=2e-3, abs=1e-4)
    assert abs(ours[-1]["rewards/margins"]) > 0.01


def test_adapters_begin_at_their_reference(tmp_path: Path) -> None:
    steps = trained(pairs_of(tmp_path, *sums(8)), DPOTrainingConfig(5, 8, seed=0), backend(lora=LoRAConfig(rank=4)))
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("held_bytes", [10**6, -1])
def test_pairs_in_files_are_those_in_memory(held_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference scores them two at a time; only the used ones."""
    monkeypatch.setattr(referred_pairs, "TOGETHER", 2)
    in_memory, used = pairs_of(tmp_path, *sums(7)), [1, 2, 4, 5, 6]
    rows = PreferenceRows([tmp_path / "preferences"], tmp_path, held_bytes)
    on = backend()
    file = tmp_path / "reference.float32"
    keep_reference(on, rows, used, 100, file)
    referred = ReferredPairs(rows, used, file)
    assert (len(referred), rows.sizes) == (7, (7,))
    assert rows.largest_token() == max(int(answer.tokens.max()) for pair in in_memory for answer in pair)
    for index in used:
        expected = with_reference([in_memory[index]], reference_logprobs(on, [in_memory[index]], 100))[0]
        for answer, other in zip(referred[index], expected, strict=True):
            assert np.array_equal(answer.tokens, other.tokens)
            assert np.array_equal(answer.loss_mask, other.loss_mask)
            assert answer.shared == other.shared
            reference = answer.streams["reference_logprobs"]
            np.testing.assert_allclose(reference, other.streams["reference_logprobs"], atol=1e-5)


def test_a_reference_that_was_kept_is_not_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "reference.float32"
    pairs = pairs_of(tmp_path, *sums(2))
    keep_reference(backend(), pairs, [0, 1], 100, file)
    before = file.read_bytes()
    other = create_pytorch_backend(tiny_model(seed=5), create_dpo_loss(BETA), Optimization(1e-3))
    keep_reference(other, pairs, [0, 1], 100, file)
    assert file.read_bytes() == before
