"""Several replicas of the embedded engine over HTTP: one with other weights, one that ends what it is asked."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from aiohttp import web
from anyio import to_thread

from infra.host.checksums import checksums_here
from rollouts_core.config import EngineConfig
from rollouts_core.errors import EngineRefused
from rollouts_core.inference import own_servers
from rollouts_core.inference.engine import GenerationRequest, ModelLimits
from rollouts_core.inference.http import JsonClient
from rollouts_core.inference.registry import embedded_engine
from rollouts_core.inference.replicas import FixedServers, Replica
from rollouts_core.inference.sglang import SGLangEngine
from rollouts_core.inference.transports import DiskTransport
from rollouts_core.inference.weights import checksum_of, shapes_of
from rollouts_core.serving.replica import app_for
from tests.rollouts_core.models import CONTEXT, VOCABULARY, character_tokenizer, tiny_model

Test = Callable[[SGLangEngine, list[str]], Awaitable[Any]]


@asynccontextmanager
async def replicas(count: int) -> AsyncIterator[list[str]]:
    """Their addresses; all in this process."""
    runners, urls = [], []
    try:
        for _ in range(count):
            made = embedded_engine(EngineConfig(), tiny_model(), character_tokenizer(), CONTEXT)
            runners.append(web.AppRunner(app_for(made)))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
        yield urls
    finally:
        for runner in runners:
            await runner.cleanup()


def weights_of(seed: int) -> Mapping[str, torch.Tensor]:
    return {name: value.detach() for name, value in tiny_model(seed).named_parameters()}


def request(name: str, tokens: int = 8, **changes: Any) -> GenerationRequest:
    return GenerationRequest(name, (3, 5, 7), tokens, (), seed=2**40 + 5, **changes)


def with_engine(tmp_path: Path, count: int, test: Test) -> Any:
    async def main() -> Any:
        async with replicas(count) as urls:
            limits = ModelLimits(CONTEXT, VOCABULARY, shapes_of(weights_of(0)))
            engine = own_servers.create(EngineConfig(), FixedServers(urls), limits, tmp_path)
            try:
                return await test(engine, urls)
            finally:
                await engine.aclose()

    return anyio.run(main)


def test_one_that_loads_other_weights_never_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    real = DiskTransport.place

    async def test(engine: SGLangEngine, urls: list[str]) -> None:
        await DiskTransport(other).bring([], weights_of(1), 1)
        mistaken = urls[1]

        def place(self: DiskTransport, replica: Replica, version: int) -> Path:
            return other / "version-1" if replica.url == mistaken else real(self, replica, version)

        monkeypatch.setattr(DiskTransport, "place", place)
        await engine.update_weights(weights_of(0), 1)
        for number in range(12):
            await engine.generate(request(f"r{number}"))
        assert set(engine.take_tokens()) == {urls[0], urls[2]}

    with_engine(tmp_path, 3, test)


def test_an_answer_has_the_same_tokens_wherever_it_goes_on(tmp_path: Path) -> None:
    async def test(engine: SGLangEngine, urls: list[str]) -> None:
        await engine.update_weights(weights_of(0), 1)
        whole = await engine.generate(request("whole", 20))
        for cut in (1, 7, 19):
            rest = await engine.generate(request(f"cut-{cut}", 20, generated=whole.tokens[:cut]))
            assert rest.tokens == whole.tokens[cut:]
            assert rest.log_probs == pytest.approx(whole.log_probs[cut:], abs=1e-5)

    with_engine(tmp_path, 2, test)


def test_what_a_leaving_replica_ends_goes_on_elsewhere_with_its_tokens(tmp_path: Path) -> None:
    """Not asked for by the caller, an abort is no end of the answer."""

    async def test(engine: SGLangEngine, urls: list[str]) -> None:
        await engine.update_weights(weights_of(0), 1)
        alone = await engine.generate(request("alone", 40))
        found = []
        client = JsonClient()

        async def ask() -> None:
            found.append(await engine.generate(request("moved", 40)))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.sleep(0.01)
            for url in urls:
                await client.call("POST", f"{url}/abort_request", {"abort_all": True}, deadline=5.0)
        await client.aclose()
        assert (found[0].tokens, found[0].finish_reason) == (alone.tokens, "length")

    with_engine(tmp_path, 2, test)


def test_replicas_tell_a_checksum_of_what_they_hold(tmp_path: Path) -> None:
    async def test(engine: SGLangEngine, urls: list[str]) -> None:
        told = [{"name": f"r{number}", "url": url, "state": "ready"} for number, url in enumerate(urls)]
        (tmp_path / "serve").mkdir()
        (tmp_path / "serve" / "servers.json").write_text(json.dumps({"replicas": told}))
        for version in (1, 2):
            await engine.update_weights(weights_of(version), version)
            found = await to_thread.run_sync(checksums_here, tmp_path, "serve")
            held = {"version": str(version), "checksum": checksum_of(weights_of(version))}
            assert found == [{"name": "r0", **held}, {"name": "r1", **held}]

    with_engine(tmp_path, 2, test)


def test_it_answers_nothing_before_it_has_weights_and_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    async def test(engine: SGLangEngine, urls: list[str]) -> None:
        client = JsonClient()
        told = await client.call("GET", f"{urls[0]}/model_info", deadline=5.0)
        assert told == {"weight_version": "-1"}
        with pytest.raises(EngineRefused, match="KeyError"):
            await client.call("POST", f"{urls[0]}/generate", {"rid": "x"}, deadline=5.0)
        await client.aclose()

    with_engine(tmp_path, 1, test)
