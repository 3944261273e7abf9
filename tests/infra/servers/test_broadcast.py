"""Weights by broadcast to replicas of ours on two hosts, over the hosts' network."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from infra.servers import embedded
from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig, EngineMachines
from rollouts_core.inference import own_servers
from rollouts_core.inference.engine import GenerationRequest, ModelLimits
from rollouts_core.inference.sglang import SGLangEngine
from rollouts_core.inference.transports import BroadcastTransport
from rollouts_core.inference.weights import shapes_of
from tests.hosts import HostMachine
from tests.pools import running_pool, wait_for_replicas
from tests.rollouts_core.models import CONTEXT, VOCABULARY, character_tokenizer, tiny_model

Hosts = tuple[HostMachine, ...]
CONFIG = EngineConfig(
    kind="embedded", machines=EngineMachines(names=("any",)), replicas=2, weight_sync="broadcast",
    python=sys.executable, max_running_requests=8,
)  # fmt: skip


@contextmanager
def engine_on(hosts: Hosts, tmp_path: Path) -> Iterator[tuple[BlockingPortal, SGLangEngine]]:
    """One replica on each."""
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    entry = embedded.server(
        CONFIG, ServedModel(str(model), "float32", CONTEXT, has_weights=False), sys.executable, on_gpu=False
    )
    entry["environment"] = {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}

    def spec_of(host: HostMachine) -> dict[str, Any]:
        return {
            "replicas": [{"name": "replica-0", "devices": [], **entry}], "router": None, "start_seconds": 60.0,
            "hang_seconds": 60.0, "restarts": 2, "memory": f"/dev/shm/rollouts-test-{tmp_path.name}-{host.name}",
            "gate": {"drained": str(host.work / "drained")}, "network": host.address.rpartition(".")[0] + ".1",
        }  # fmt: skip

    limits = ModelLimits(CONTEXT, VOCABULARY, shapes_of(dict(tiny_model().named_parameters())))
    with running_pool(tmp_path / "jobs", hosts, spec_of) as (pool, _), start_blocking_portal() as portal:
        engine = portal.call(own_servers.create, CONFIG, wait_for_replicas(pool, len(hosts)), limits, tmp_path)
        yield portal, engine
        portal.call(engine.aclose)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in tiny_model(seed).named_parameters()}


def answers(portal: BlockingPortal, engine: SGLangEngine) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """To one question, asked so often that each replica gets it."""
    found = [portal.call(engine.generate, GenerationRequest(f"r{n}", (3, 5, 7), 8, (), seed=1)) for n in range(4)]
    assert {version for one in found for version in one.weight_versions} == {engine.weight_version}
    return [(one.tokens, one.log_probs) for one in found]


@pytest.mark.slow
def test_replicas_on_two_hosts_take_weights_by_broadcast_and_the_others_when_one_is_lost_on_the_way(
    three_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(three_hosts[:2], tmp_path) as (portal, engine):
        portal.call(engine.update_weights, weights_of(0), 1)
        assert {name for name, sent in engine.sync_bytes.items() if sent} == {"host-a", "host-b"}
        first = answers(portal, engine)
        portal.call(engine.update_weights, weights_of(5), 2)
        second = answers(portal, engine)
        assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
        real, lost = BroadcastTransport._broadcast, []

        async def broadcast(self: BroadcastTransport, *given: Any) -> int:
            if not lost:
                lost.extend(pid for pid in three_hosts[1].processes() if b"serving.replica" in command_line(pid))
                for pid in lost:
                    os.kill(pid, signal.SIGKILL)
            return await real(self, *given)

        monkeypatch.setattr(BroadcastTransport, "_broadcast", broadcast)
        portal.call(engine.update_weights, weights_of(0), 3)
        assert lost and answers(portal, engine) == first
        assert set(engine.sync_bytes) == {"host-a"}


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
