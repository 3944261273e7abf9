"""The examples in docstrings run, with a tiny model under every name."""

import doctest
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rollouts_core as rc
from rollouts_core.library import models
from tests.rollouts_core.library.test_calls import PROMPTS, ROWS, SHAPE, reward

WITH_EXAMPLES = [name for name in dir(rc) if ">>>" in (inspect.getdoc(getattr(rc, name)) or "")]
QUICK = {
    "steps=100": "steps=2",
    "steps=50": "steps=2",
    "RLConfig(steps=10)": "RLConfig(steps=2, batch_size=2, max_new_tokens=3)",
}


@pytest.fixture(scope="module")
def policy() -> rc.LanguageModel:
    texts = [message["content"] for row in ROWS for message in row["messages"]]
    return rc.create_model([*texts, "+=0123456789"], SHAPE, max_length=16)


@pytest.fixture
def known(
    spoken_of: dict[str, Any], policy: rc.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load_model", lambda name: policy)
    monkeypatch.setattr(rc, "load_model", lambda name: policy, raising=False)
    Path("demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return dict(spoken_of)


@pytest.fixture(scope="module")
def spoken_of(policy: rc.LanguageModel) -> dict[str, Any]:
    """What examples speak of."""
    prompts = rc.prompts_from(PROMPTS, policy)
    sampling = rc.RolloutConfig(batch_size=2, n_samples_per_prompt=2, max_new_tokens=3, temperature=1.0, seed=0)
    engine = rc.create_engine(policy)
    config = rc.RLConfig(steps=1, batch_size=2, n_samples_per_prompt=2, max_new_tokens=3)
    loss = rc.create_cross_entropy_loss()
    samples = rc.generate_samples(engine, policy.tokenizer, prompts[:2], sampling, 1)
    return {
        "rc": rc, "torch": torch, "samples": samples, "group": [replace(sample, reward=1.0) for sample in samples],
        "policy": policy, "prompts": prompts, "sampling": sampling, "engine": engine, "reward": reward,
        "step": next(iter(rc.grpo(policy, PROMPTS, reward, config))), "examples": rc.examples_from(ROWS, policy),
        "backend": rc.create_pytorch_backend(policy.model, loss, rc.Optimization(learning_rate=1e-4)),
    }  # fmt: skip


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_an_example_runs(name: str, known: dict[str, Any]) -> None:
    """Where it says what comes, that comes."""
    text = inspect.getdoc(getattr(rc, name)) or ""
    for long, quick in QUICK.items():
        text = text.replace(long, quick)
    for example in doctest.DocTestParser().get_examples(text):
        if example.want:
            assert repr(eval(example.source, known)) == example.want.strip()
        else:
            exec(example.source, known)


def test_what_is_called_first_has_an_example() -> None:
    assert {"sft", "dpo", "grpo", "load_model", "create_model", "create_engine", "show"} <= set(WITH_EXAMPLES)
