"""An engine by its address: the real SGLang server generates for `rc.grpo`, and is given each step's weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rollouts_core as rc
from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.library.engines import kind_at
from tests.rollouts_core.inference.test_engines import CONTEXT, served_model
from tests.rollouts_core.models import character_tokenizer
from tests.servers import running_servers

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> rc.LanguageModel:
    return rc.LanguageModel(served_model().requires_grad_(True), character_tokenizer())


@pytest.fixture(scope="module")
def address(policy: rc.LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("served")
    policy.save(directory / "model")
    config = EngineConfig(kind="sglang", max_running_requests=64)
    with running_servers(directory, config, ServedModel(str(directory / "model"), "float32", CONTEXT)) as servers:
        yield SupervisedServers(servers.directory).ready().replicas[0].url


def test_a_server_generates_and_follows_the_weights(policy: rc.LanguageModel, address: str, tmp_path: Path) -> None:
    assert kind_at(address) == "sglang"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("12", "34", "56", "78")]
    config = rc.RLConfig(steps=3, batch_size=2, n_samples_per_prompt=4, max_new_tokens=8, learning_rate=1e-3)

    def reward(sample: rc.Sample) -> float:
        return float(len(set(sample.response)))

    versions, mismatch = [], []
    for step in rc.grpo(policy, rows, reward, config, engine=address):
        versions.append({version for sample in step.samples for version in sample.weight_versions})
        mismatch.append(step.metrics["sampling/sampling_logp_difference/mean"])
    assert versions == [{0}, {1}, {2}]
    assert max(mismatch) < 1e-4
