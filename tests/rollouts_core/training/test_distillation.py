"""On-policy distillation: its gradient, its teachers, and that the policy comes to say what the teacher says."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from infra.host.system import free_port
from rollouts_core.config import RLConfig
from rollouts_core.config.algorithms import Distillation
from rollouts_core.data.tokenized import Example
from rollouts_core.errors import BadInput, EngineUnavailable
from rollouts_core.stages.rl import reference_for
from rollouts_core.store.identity import External
from rollouts_core.training import reference as reference_module
from rollouts_core.training.algorithms import Outcome, recipe_of
from rollouts_core.training.models import check_teacher
from rollouts_core.training.policy import Policy
from rollouts_core.training.pytorch import score as score_batch
from rollouts_core.training.reference import reference_model, reference_server
from tests.rollouts_core.models import character_tokenizer, tiny_model
from tests.rollouts_core.training.test_rl import train

TEACHER = Distillation(teacher="here")


def test_its_expected_gradient_is_that_of_the_divergence() -> None:
    """Every next token, weighted by its probability; the other side differentiates the divergence itself."""
    torch.manual_seed(0)
    scores = torch.randn(9, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(9, dtype=torch.float64), 0)
    logp = torch.log_softmax(scores, 0)
    recipe = recipe_of(TEACHER, 1)
    penalties = [np.array([float(teacher[token] - logp[token].detach())]) for token in range(9)]
    advantages = recipe.advantages(Outcome([], [0.0] * 9, penalties)).advantages
    each = recipe.losses(logp, logp.detach(), torch.tensor(np.concatenate(advantages)), torch.arange(9), 9)
    (found,) = torch.autograd.grad((logp.detach().exp() * each).sum(), scores, retain_graph=True)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), scores)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_the_policy_comes_to_say_what_the_teacher_says() -> None:
    teacher = partial(score_batch, Policy(tiny_model(seed=7).requires_grad_(False), 0.9).eval())
    steps = train(60, algorithm=TEACHER, learning_rate=3e-3, reference=reference_model(teacher))
    first, last = (sum(step.metrics["kl"] for step in part) / 10 for part in (steps[:10], steps[-10:]))
    assert last < first / 2


def test_a_teacher_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_module, "TRIES", 1)
    with pytest.raises(EngineUnavailable, match="/v1/models"):
        reference_server(f"http://127.0.0.1:{free_port()}")([Example(np.arange(3), np.ones(3, np.int8))], [])


def test_a_teacher_is_all_that_is_read_behind_sft(tmp_path: Path) -> None:
    """The stage then names neither a model nor the policy that RL began with."""
    tiny_model().save_pretrained(tmp_path)
    work: Any = SimpleNamespace(
        stage=SimpleNamespace(external={"teacher": External({}, str(tmp_path))}), inputs={}, device="cpu"
    )
    spec: Any = SimpleNamespace(dtype="float32", model=None, training=SimpleNamespace(kl_coef=0.0, temperature=1.0))
    assert reference_for(work, spec, character_tokenizer(), None) is not None  # type: ignore[arg-type]


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match="a teacher shares its pupil's tokenizer"):
        check_teacher(tiny_model().config.vocab_size, [None] * 1000)
    check_teacher(tiny_model().config.vocab_size, character_tokenizer())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"kl_coef": 0.1}, "kl_coef 0.1: distillation has only its teacher"), ({"temperature": 0.5}, "scores at 1")],
)
def test_what_a_teacher_does_not_go_with(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        RLConfig(algorithm=Distillation(teacher="http://127.0.0.1:1"), **changes)
