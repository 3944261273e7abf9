"""Engines on other machines: a sync beside rsync and beside one on this machine; tokens per second of many replicas.

`make benchmark`. Three network namespaces with an SSH server each stand for machines; all share this one's cores.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from transformers import AutoModelForCausalLM, Qwen2Config

from infra.servers import embedded
from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig, EngineMachines
from rollouts_core.inference import own_servers
from rollouts_core.inference.engine import GenerationRequest, ModelLimits
from rollouts_core.inference.replicas import Fleet, SupervisedServers
from rollouts_core.inference.sglang import SGLangEngine
from rollouts_core.inference.weights import shapes_of
from tests.hosts import HostMachine
from tests.pools import running_pool, wait_for_replicas
from tests.rollouts_core.models import character_tokenizer
from tests.servers import running_servers

pytestmark = pytest.mark.benchmark
VOCABULARY, CONTEXT = 512, 160
SIZES: Mapping[str, dict[str, int]] = {
    "3.2M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
    "142M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 11, "num_attention_heads": 16},
}
SYNCS = 6
STEP = 1e-6
"""A learning rate of RL, and so about what Adam changes a weight by."""
PHASES = ("bring", "pause", "send", "verify")
START_SECONDS = 300.0


def model_of(size: str) -> Any:
    torch.manual_seed(0)
    shape = SIZES[size]
    config = Qwen2Config(
        vocab_size=VOCABULARY, num_key_value_heads=shape["num_attention_heads"], max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, **shape,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def config_of(replicas: int = 1, weight_sync: Any = "disk") -> EngineConfig:
    return EngineConfig(
        kind="embedded", machines=EngineMachines(names=("any",)), replicas=replicas, max_running_requests=64,
        python=sys.executable, start_minutes=5.0, weight_sync=weight_sync,
    )  # fmt: skip


def spec_of(host: HostMachine, model: Path, replicas: int, memory: Path, dtype: Any = "float32") -> dict[str, Any]:
    served = ServedModel(str(model), dtype, CONTEXT, has_weights=False)
    entry = embedded.server(config_of(), served, sys.executable, on_gpu=False)
    entry["environment"] = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return {
        "replicas": [{"name": f"replica-{number}", "devices": [], **entry} for number in range(replicas)],
        "router": None, "start_seconds": START_SECONDS, "hang_seconds": 120.0, "restarts": 2, "memory": str(memory),
        "gate": {"drained": str(host.work / "drained")}, "network": host.address.rpartition(".")[0] + ".1",
    }  # fmt: skip


@contextmanager
def engine_over(
    fleet: Fleet, model: Any, config: EngineConfig, memory: Path
) -> Iterator[tuple[BlockingPortal, SGLangEngine]]:
    limits = ModelLimits(CONTEXT, VOCABULARY, shapes_of(dict(model.named_parameters())))
    with start_blocking_portal() as portal:
        engine = portal.call(own_servers.create, config, fleet, limits, memory)
        yield portal, engine
        portal.call(engine.aclose)


def saved(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_a_sync_to_another_machine_beside_one_here_and_rsync(
    size: str, dtype: Any, three_hosts: tuple[HostMachine, ...], tmp_path: Path
) -> None:
    """Files and broadcast to a host each; here, files in memory."""
    model, hosts = model_of(size), three_hosts[:2]
    directory = saved(model.to(getattr(torch, dtype)), tmp_path / "model")
    memory = Path("/dev/shm") / f"rollouts-benchmark-{tmp_path.name}"
    served = ServedModel(str(directory), dtype, CONTEXT)
    exact = {name: value.detach().float() for name, value in model.named_parameters()}

    def spec(host: HostMachine) -> dict[str, Any]:
        return spec_of(host, directory, 1, memory.with_name(f"{memory.name}-{host.name}"), dtype)

    found: dict[str, list[dict[str, float]]] = {"here": [], "over SSH": [], "broadcast": []}
    rsync: list[float] = []
    with (
        running_servers(tmp_path / "local", config_of(), served) as local,
        running_pool(tmp_path / "files", hosts[:1], spec) as (by_files, _),
        running_pool(tmp_path / "network", hosts[1:], spec) as (by_broadcast, _),
        engine_over(SupervisedServers(local.directory), model, EngineConfig(kind="embedded"), memory) as here,
        engine_over(wait_for_replicas(by_files, 1, START_SECONDS), model, config_of(), memory) as there,
        engine_over(
            wait_for_replicas(by_broadcast, 1, START_SECONDS), model, config_of(weight_sync="broadcast"), memory
        ) as network,
    ):
        for version in range(SYNCS):
            for value in exact.values():
                value += STEP * torch.randn_like(value)
            weights = {name: value.to(getattr(torch, dtype)) for name, value in exact.items()}
            for name, (portal, engine) in zip(found, (here, there, network), strict=True):
                began = time.perf_counter()
                portal.call(engine.update_weights, weights, version)
                sent = sum(engine.sync_bytes.values()) / 1e6
                found[name].append({**engine.sync_seconds, "whole": time.perf_counter() - began, "sent": sent})
            rsync.append(copied(memory / f"version-{version}", hosts[0]))
    megabytes = sum(value.nbytes for value in weights.values()) / 1e6
    print(f"\n{size}, {megabytes:.0f} MB in {dtype}; medians of {SYNCS - 1}, seconds")
    for name, syncs in found.items():
        phases = (*PHASES, "whole", "sent")
        medians = {phase: statistics.median(sync.get(phase, 0.0) for sync in syncs[1:]) for phase in phases}
        pause = sum(medians[phase] for phase in PHASES[1:])
        told = f", {medians['sent']:.1f} MB sent" if medians["sent"] else ""
        print(f"  {name}: brought in {medians['bring']:.3f}, paused {pause:.3f}, whole {medians['whole']:.3f}{told}")
        print("    brought, one by one: " + ", ".join(f"{sync.get('bring', 0.0):.3f}" for sync in syncs))
    print(f"  rsync of the same files over the same SSH server: {statistics.median(rsync[1:]):.3f}")


def test_what_has_changed_goes_over_a_slow_link(hosts: tuple[HostMachine, HostMachine], tmp_path: Path) -> None:
    """142M parameters of bfloat16 over 200 Mbit/s."""
    model, host = model_of("142M").to(torch.bfloat16), hosts[0]
    directory = saved(model, tmp_path / "model")
    memory = Path("/dev/shm") / f"rollouts-benchmark-{tmp_path.name}"
    exact = {name: value.detach().float() for name, value in model.named_parameters()}
    with (
        running_pool(tmp_path / "jobs", [host], lambda host: spec_of(host, directory, 1, memory, "bfloat16")) as (
            pool,
            _,
        ),
        engine_over(wait_for_replicas(pool, 1, START_SECONDS), model, config_of(), memory) as (portal, engine),
        host.slow(200_000),
    ):
        for version in range(4):
            portal.call(engine.update_weights, {name: value.bfloat16() for name, value in exact.items()}, version)
            sent, seconds = sum(engine.sync_bytes.values()) / 1e6, engine.sync_seconds["bring"]
            print(f"\nversion {version}: {sent:.1f} MB sent, brought in {seconds:.2f} s")
            for value in exact.values():
                value += STEP * torch.randn_like(value)


def copied(source: Path, host: HostMachine) -> float:
    """Seconds of rsync, into the other's memory."""
    target = f"/dev/shm/rollouts-benchmark-rsync-{host.namespace}"
    ssh = f"ssh -i {host.client_key} -o UserKnownHostsFile={host.known_hosts}"
    subprocess.run(["rm", "-rf", target], check=True)
    began = time.perf_counter()
    subprocess.run(["rsync", "-aW", "-e", ssh, f"{source}/", f"root@{host.address}:{target}/"], check=True)
    seconds = time.perf_counter() - began
    subprocess.run(["rm", "-rf", target], check=True)
    return seconds


@pytest.mark.parametrize("replicas", [1, 2, 4, 30])
def test_tokens_per_second_of_many_replicas(
    replicas: int, three_hosts: tuple[HostMachine, ...], tmp_path: Path
) -> None:
    """All share this machine's cores, so more replicas make no more tokens: what is seen is what sharing out costs."""
    model = model_of("3.2M")
    directory = saved(model, tmp_path / "model")
    shares = {host.name: len(range(place, replicas, 3)) for place, host in enumerate(three_hosts)}
    used = [host for host in three_hosts if shares[host.name]]
    requests = [
        GenerationRequest(
            f"r{number}", tuple((number + place) % VOCABULARY for place in range(16)), 64, (), seed=number
        )
        for number in range(64)
    ]

    def spec(host: HostMachine) -> dict[str, Any]:
        memory = Path("/dev/shm") / f"rollouts-benchmark-{tmp_path.name}-{host.name}"
        return spec_of(host, directory, shares[host.name], memory)

    async def generate(engine: SGLangEngine) -> None:
        async with anyio.create_task_group() as group:
            for request in requests:
                group.start_soon(engine.generate, request)

    with running_pool(tmp_path / "jobs", used, spec) as (pool, _):
        fleet = wait_for_replicas(pool, replicas, START_SECONDS)
        with engine_over(fleet, model, config_of(replicas), tmp_path) as (portal, engine):
            began = time.perf_counter()
            portal.call(engine.update_weights, dict(model.named_parameters()), 1)
            synced, rates = time.perf_counter() - began, []
            for _ in range(4):
                began = time.perf_counter()
                portal.call(generate, engine)
                rates.append(64 * 64 / (time.perf_counter() - began))
            made = engine.take_tokens()
    print(f"\n{replicas} replicas: {statistics.median(rates[1:]):.0f} tokens/s, first sync {synced:.2f} s")
    assert sum(made.values()) == 4 * 64 * 64 and len(made) == replicas
