"""What every engine promises, asked of each: the embedded one, SGLang's server, vLLM's server."""

import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig, EngineMachines
from rollouts_core.data.tokenized import Example
from rollouts_core.errors import BadInput, ContextOverflow, EngineUnavailable, OutsideVocabulary, WeightMismatch
from rollouts_core.inference import own_servers
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.engine import (
    Completion,
    GenerationRequest,
    InferenceEngine,
    ModelLimits,
    Truncation,
)
from rollouts_core.inference.registry import embedded_engine
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.inference.sampling import kept_tokens
from rollouts_core.inference.sglang import SGLangEngine
from rollouts_core.inference.transports import BroadcastTransport, DiskTransport, TensorTransport
from rollouts_core.inference.vllm import VLLMEngine
from rollouts_core.inference.weights import shapes_of
from rollouts_core.training.reference import reference_server
from tests.rollouts_core.models import VOCABULARY, character_tokenizer, tiny_model
from tests.servers import RunningServers, running_servers

SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
STREAMED = pytest.param("sglang-streamed", marks=pytest.mark.sglang)
KINDS = ("embedded", "own", SGLANG, STREAMED, VLLM)
"""own: the embedded engine as a server; streamed: answers come in pieces."""
SEEDED = ("embedded", "own", VLLM)
"""SGLang honours seeds on a GPU only."""
OWN = EngineConfig(
    kind="embedded", machines=EngineMachines(names=("elsewhere",)), max_running_requests=64, python=sys.executable
)
DEADLINE = 60.0
TOLERANCE = 1e-4
"""Of a log-probability in float32, between engine and trainer: the model is small and its logits large."""
PROMPT = (3, 5, 7, 9)
CONTEXT = 512
"""Long, so that requests are still under way when something happens to them."""
MOMENTS = (0.02, 0.05, 0.1, 0.2) * 5
"""Seconds after which something happens to requests to vLLM. `under_way` does not help there: while vLLM is busy on a
CPU, it answers the short request last."""
MANY = 64


def limits() -> ModelLimits:
    return ModelLimits(CONTEXT, VOCABULARY, shapes_of(weights_of(served_model())))


def served_model(seed: int = 0, tied: bool = False) -> Any:
    """As small as all three can serve: vLLM's attention on the CPU needs heads of 32."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return tiny_model(seed, config)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def log_probs_by(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> torch.Tensor:
    """As the trainer computes them."""
    sequence = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logp = torch.log_softmax(model(sequence).logits[0, :-1].float() / (temperature or 1.0), -1)
        return logp.gather(1, sequence[0, 1:, None])[len(prompt) - 1 :, 0]


@dataclass(frozen=True)
class Served:
    """An engine that can be made anew for each test; servers are shared."""

    kind: str
    make: Callable[[], InferenceEngine]

    def run(
        self, test: Callable[[InferenceEngine], Awaitable[Any]], version: int = 1, seconds: float = DEADLINE
    ) -> Any:
        """Run a coroutine with an engine that has the weights of `served_model()`."""

        async def main() -> Any:
            engine = self.make()
            try:
                with anyio.fail_after(seconds):
                    await engine.update_weights(weights_of(served_model()), version)
                    return await test(engine)
            finally:
                await engine.aclose()

        return anyio.run(main)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "model"
    served_model().save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


def _servers(kind: str, directory: Path, factory: pytest.TempPathFactory) -> Iterator[RunningServers]:
    arguments = ("--incremental-streaming-output",) if kind == "sglang" else ()
    config = OWN if kind == "own" else EngineConfig(kind=kind, max_running_requests=64, arguments=arguments)  # type: ignore[arg-type]
    with running_servers(factory.mktemp(kind), config, ServedModel(str(directory), "float32", CONTEXT)) as servers:
        yield servers


@pytest.fixture(scope="session")
def sglang_server(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServers]:
    yield from _servers("sglang", model_directory, tmp_path_factory)


@pytest.fixture(scope="session")
def vllm_server(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServers]:
    yield from _servers("vllm", model_directory, tmp_path_factory)


@pytest.fixture(scope="session")
def own_server(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServers]:
    yield from _servers("own", model_directory, tmp_path_factory)


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Served:
    kind: str = request.param
    if kind == "embedded":
        return Served(kind, lambda: embedded_engine(EngineConfig(), served_model(), character_tokenizer(), CONTEXT))
    fleet = SupervisedServers(request.getfixturevalue(f"{kind.partition('-')[0]}_server").directory)
    if kind.startswith("sglang"):
        streams = kind == "sglang-streamed"
        return Served("sglang", lambda: SGLangEngine(fleet, limits(), DiskTransport(tmp_path), streams=streams))
    if kind == "own":
        here = replace(OWN, machines=None)
        return Served(kind, lambda: own_servers.create(here, fleet, limits(), tmp_path))
    return Served(kind, lambda: VLLMEngine(fleet, limits(), "policy", DiskTransport(tmp_path)))


def request_of(name: str = "a", **changes: Any) -> GenerationRequest:
    return replace(GenerationRequest(name, PROMPT, 8, (), 0.0), **changes)


async def all_of(engine: InferenceEngine, requests: list[GenerationRequest]) -> list[Completion]:
    found: dict[str, Completion] = {}

    async def ask(request: GenerationRequest) -> None:
        found[request.request_id] = await engine.generate(request)

    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(ask, request)
    return [found[request.request_id] for request in requests]


def test_greedy_equals_transformers(served: Served) -> None:
    prompts = [PROMPT, (4,), tuple(range(2, 20)), (8, 8, 8)]
    requests = [request_of(str(n), prompt_tokens=prompt, max_new_tokens=20) for n, prompt in enumerate(prompts)]
    found = served.run(lambda engine: all_of(engine, requests))
    model = served_model()
    for prompt, completion in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt])
        expected = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=20, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert completion.tokens == tuple(expected[0, len(prompt) :].tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_log_probs_are_the_trainers(served: Served, temperature: float) -> None:
    requests = [request_of(str(seed), temperature=temperature, seed=seed, max_new_tokens=16) for seed in range(8)]
    for completion in served.run(lambda engine: all_of(engine, requests)):
        expected = log_probs_by(served_model(), PROMPT, completion.tokens, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)
        assert completion.weight_versions == (1,) * 16


@pytest.mark.parametrize("truncation", [Truncation(top_k=2), Truncation(top_p=0.4), Truncation(min_p=0.5)], ids=str)
def test_only_what_a_truncation_keeps_is_drawn(served: Served, truncation: Truncation) -> None:
    """And log-probabilities are the trainer's all the same; vLLM's are of what is kept, so configs refuse to train."""
    asked = request_of(temperature=0.9, max_new_tokens=24, truncation=truncation)
    requests = [replace(asked, request_id=str(seed), seed=seed) for seed in range(6)]
    found = served.run(lambda engine: all_of(engine, requests))
    for completion in found:
        sequence = torch.tensor([[*PROMPT, *completion.tokens]])
        with torch.no_grad():
            probs = torch.softmax(served_model()(sequence).logits[0, len(PROMPT) - 1 : -1].double() / 0.9, -1)
        for place, token in enumerate(completion.tokens):
            assert kept_tokens(probs[place], truncation)[token]
        if served.kind != "vllm":
            expected = log_probs_by(served_model(), PROMPT, completion.tokens, 0.9)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)
    assert len({completion.tokens for completion in found}) > 1


def test_stops_behind_a_text(served: Served) -> None:
    """Of two tokens, the second of which ends the answer."""
    whole = served.run(lambda engine: engine.generate(request_of(max_new_tokens=24)))
    decode = partial(character_tokenizer().decode, skip_special_tokens=False)
    texts = ["".join(decode([token]) for token in whole.tokens[place : place + 2]) for place in range(4, 23)]
    text = next(text for text in texts if re.fullmatch("[0-9+=]{2}", text))
    stopped = served.run(lambda engine: engine.generate(request_of(max_new_tokens=24, stop=("zzz", text))))
    upto = next(n for n in range(1, 25) if text in decode(list(whole.tokens[:n])))
    assert stopped.tokens == whole.tokens[:upto]
    assert stopped.finish_reason == "stop" and len(stopped.log_probs) == upto


@pytest.mark.parametrize("served", [SGLANG, VLLM], indirect=True)
def test_a_teachers_server_scores_as_its_model(served: Served, request: pytest.FixtureRequest) -> None:
    async def nothing(engine: InferenceEngine) -> None: ...

    served.run(nothing)
    fleet = SupervisedServers(request.getfixturevalue(f"{served.kind}_server").directory)
    url = fleet.ready().replicas[0].url
    sequences = [(*PROMPT, 8, 2, 6), (4, 5), tuple(range(2, 14))]
    examples = [Example(np.array(tokens), np.arange(len(tokens)) >= 1) for tokens in sequences]
    for tokens, found in zip(sequences, reference_server(url)(examples, []), strict=True):
        expected = log_probs_by(served_model(), tokens[:1], tokens[1:], 1.0)
        torch.testing.assert_close(torch.tensor(found).float(), expected, atol=TOLERANCE, rtol=0)
    with pytest.raises((BadInput, EngineUnavailable)):
        reference_server(url)([Example(np.array([2, VOCABULARY + 5]), np.ones(2))], [])


def test_stops_behind_a_stop_token(served: Served) -> None:
    whole = served.run(lambda engine: engine.generate(request_of(max_new_tokens=12)))
    stop = whole.tokens[4]
    first = whole.tokens.index(stop)
    stopped = served.run(lambda engine: engine.generate(request_of(max_new_tokens=12, stop_token_ids=(stop,))))
    assert stopped.tokens == whole.tokens[: first + 1]
    assert stopped.finish_reason == "stop" and len(stopped.log_probs) == first + 1


def test_ends_at_max_new_tokens(served: Served) -> None:
    found = served.run(lambda engine: engine.generate(request_of(max_new_tokens=3)))
    assert len(found.tokens) == 3 and found.finish_reason == "length"


def test_samples_of_a_group_differ(served: Served) -> None:
    group = [request_of(str(n), temperature=1.0, seed=n, session="group", max_new_tokens=16) for n in range(8)]
    found = served.run(lambda engine: all_of(engine, group))
    assert len({completion.tokens for completion in found}) > 4


@pytest.mark.parametrize("served", SEEDED, indirect=True)
def test_a_seed_gives_the_same_answer(served: Served) -> None:
    one = request_of(temperature=1.0, seed=11, max_new_tokens=16)
    other = request_of("b", temperature=1.0, seed=12, max_new_tokens=16)

    async def three(engine: InferenceEngine) -> list[Completion]:
        return [await engine.generate(request) for request in (one, other, one)]

    first, different, again = served.run(three)
    assert first.tokens == again.tokens != different.tokens


def test_goes_on_behind_what_is_there(served: Served) -> None:
    whole = served.run(lambda engine: engine.generate(request_of(max_new_tokens=12)))
    rest = served.run(lambda engine: engine.generate(request_of(max_new_tokens=12, generated=whole.tokens[:5])))
    assert rest.tokens == whole.tokens[5:]


def test_an_aborted_request_gives_what_it_has(served: Served) -> None:
    """vLLM may answer before it hears of the abort, because the model is small. Then it is asked again."""
    long = request_of(max_new_tokens=CONTEXT - len(PROMPT), temperature=1.0)

    async def abort_soon(engine: InferenceEngine) -> Completion:
        found: list[Completion] = []

        async def ask() -> None:
            found.append(await engine.generate(long))

        for moment in moments(served, engine):
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await moment()
                await engine.abort([long.request_id])
            if found[-1].finish_reason == "abort":
                break
        return found[-1]

    completion = served.run(abort_soon)
    assert completion.finish_reason == "abort" and len(completion.tokens) < long.max_new_tokens
    assert len(completion.log_probs) == len(completion.tokens)


def test_who_stops_waiting_has_aborted(served: Served) -> None:
    """The engine is free for others, under the same name too."""

    async def give_up(engine: InferenceEngine) -> Completion:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.generate, request_of(max_new_tokens=400, temperature=1.0))
            await under_way(engine)
            group.cancel_scope.cancel()
        return await engine.generate(request_of(max_new_tokens=4))

    assert len(served.run(give_up).tokens) == 4


def test_new_weights_come_between_two_tokens(served: Served) -> None:
    """Each token's log-probability is that of the weights it is said to be made by, over all tokens before it.

    vLLM may answer all before it hears of the weights. Then it is asked again, and given other ones.
    """
    requests = [request_of(str(n), temperature=1.0, seed=n, max_new_tokens=400) for n in range(4)]
    models = {1: served_model()}

    async def update(engine: InferenceEngine) -> list[Completion]:
        found: list[Completion] = []

        async def ask() -> None:
            found[:] = await all_of(engine, requests)

        for version, moment in enumerate(moments(served, engine), 2):
            models[version] = served_model(5 + version)
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await moment()
                await engine.update_weights(weights_of(models[version]), version)
            if len(versions_in(found)) > 1:
                break
        return found

    completions = served.run(update)
    newest = max(models)
    assert versions_in(completions) == {newest - 1, newest}
    for completion in completions:
        by_version = {
            version: log_probs_by(model, PROMPT, completion.tokens, 1.0).tolist() for version, model in models.items()
        }
        expected = [by_version[version][place] for place, version in enumerate(completion.weight_versions)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), torch.tensor(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [CONTEXT - 7, CONTEXT + 1])
def test_context_overflow_is_refused(served: Served, length: int) -> None:
    with pytest.raises(ContextOverflow, match=f"prompt of {length} tokens"):
        served.run(lambda engine: engine.generate(request_of(prompt_tokens=(3,) * length)))


def test_tokens_outside_the_vocabulary_are_refused(served: Served) -> None:
    with pytest.raises(OutsideVocabulary, match=f"token {VOCABULARY} "):
        served.run(lambda engine: engine.generate(request_of(prompt_tokens=(3, VOCABULARY))))


def test_weights_from_a_checkpoint(served: Served, tmp_path: Path) -> None:
    served_model(7).save_pretrained(tmp_path / "other")

    async def load(engine: InferenceEngine) -> Completion:
        await engine.update_weights_from_checkpoint(tmp_path / "other", 5)
        return await engine.generate(request_of(max_new_tokens=12))

    completion = served.run(load)
    expected = log_probs_by(served_model(7), PROMPT, completion.tokens, 0.0)
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)
    assert set(completion.weight_versions) == {5}


def test_weights_of_another_shape_are_refused(served: Served) -> None:
    wrong = {**weights_of(served_model()), "model.norm.weight": torch.ones(VOCABULARY)}

    async def refused(engine: InferenceEngine) -> Completion:
        with pytest.raises(WeightMismatch, match="version 2"):
            await engine.update_weights(wrong, 2)
        await engine.update_weights(weights_of(served_model()), 3)
        return await engine.generate(request_of())

    assert served.run(refused).weight_versions == (3,) * 8


def test_memory_is_given_away_and_taken_back(served: Served) -> None:
    async def sleep(engine: InferenceEngine) -> Completion:
        await engine.release_memory()
        await engine.resume_memory()
        await engine.update_weights(weights_of(served_model()), 2)
        return await engine.generate(request_of())

    assert served.run(sleep).weight_versions == (2,) * 8


@pytest.mark.sglang
@pytest.mark.parametrize("transport", ["disk", "tensor", "broadcast"])
def test_every_transport_gives_the_same_weights(transport: str, sglang_server: RunningServers, tmp_path: Path) -> None:
    """In several buckets: the limit is a few parameters."""
    limit, fleet = 20_000, SupervisedServers(sglang_server.directory)
    made: Mapping[str, Callable[[], Any]] = {
        "disk": lambda: DiskTransport(tmp_path, limit),
        "tensor": lambda: TensorTransport(1, limit),
        "broadcast": lambda: BroadcastTransport(fleet, 1, limit),
    }
    served = Served("sglang", lambda: SGLangEngine(fleet, limits(), made[transport]()))

    async def twice(engine: InferenceEngine) -> Completion:
        await engine.update_weights(weights_of(served_model(7)), 2)
        return await engine.generate(request_of(max_new_tokens=16))

    completion = served.run(twice)
    expected = log_probs_by(served_model(7), PROMPT, completion.tokens, 0.0)
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)
    assert set(completion.weight_versions) == {2}


@pytest.mark.vllm
@pytest.mark.parametrize("begin_empty", [False, True])
def test_vllm_computes_tied_layers_with_each_version(tmp_path: Path, begin_empty: bool) -> None:
    """Its output layer is its embedding. `begin_empty`: as on other machines, which have all files but the weights."""
    served_model(9, tied=True).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    if begin_empty:
        (tmp_path / "model" / "model.safetensors").unlink()
    started = ServedModel(str(tmp_path / "model"), "float32", CONTEXT, has_weights=not begin_empty)
    models = [served_model(seed, tied=True) for seed in range(3)]
    shapes = ModelLimits(CONTEXT, VOCABULARY, shapes_of(weights_of(models[0])))

    async def answers(fleet: SupervisedServers) -> list[Completion]:
        engine = VLLMEngine(fleet, shapes, "policy", DiskTransport(tmp_path), begin_empty=begin_empty)
        found = []
        try:
            for version, model in enumerate(models):
                await engine.update_weights(weights_of(model), version)
                found.append(await engine.generate(request_of(max_new_tokens=16)))
        finally:
            await engine.aclose()
        return found

    with running_servers(tmp_path / "servers", EngineConfig(kind="vllm"), started) as servers:
        found = anyio.run(answers, SupervisedServers(servers.directory))
    for model, completion in zip(models, found, strict=True):
        expected = log_probs_by(model, PROMPT, completion.tokens, 0.0)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("served", [SGLANG, VLLM], indirect=True)
def test_a_server_that_dies_under_a_request_is_started_again_and_given_the_weights(
    served: Served, request: pytest.FixtureRequest
) -> None:
    servers: RunningServers = request.getfixturevalue(f"{served.kind}_server")
    port = servers.told()["replicas"][0]["url"].rpartition(":")[2]

    async def killed(engine: InferenceEngine) -> Completion:
        said: list[Exception] = []

        async def ask(name: str) -> None:
            try:
                await engine.generate(request_of(name, max_new_tokens=500, temperature=1.0))
            except EngineUnavailable as error:
                said.append(error)

        async with anyio.create_task_group() as group:
            for number in range(MANY):
                group.start_soon(ask, str(number))
            await anyio.sleep(0.1)
            os.kill(process_with(port), signal.SIGKILL)
        assert said
        while not engine.wants_weights():
            await anyio.sleep(0.2)
        await engine.update_weights(weights_of(served_model()), engine.weight_version)
        return await engine.generate(request_of())

    assert served.run(killed, version=9, seconds=300.0).weight_versions == (9,) * 8


def process_with(argument: str) -> int:
    """The server's process: the one that was given this port."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if argument in arguments and "--port" in arguments:
                return int(entry.name)
    raise AssertionError(f"no process has {argument}")


def versions_in(completions: list[Completion]) -> set[int]:
    return {version for completion in completions for version in completion.weight_versions}


def moments(served: Served, engine: InferenceEngine) -> list[Callable[[], Awaitable[None]]]:
    """Waits until requests are under way, one for each try; one is enough but for vLLM."""
    if served.kind != "vllm":
        return [partial(under_way, engine)]
    return [partial(anyio.sleep, seconds) for seconds in MOMENTS]


async def under_way(engine: InferenceEngine) -> None:
    """Until some tokens have been made: as many as of a short answer that was asked for later."""
    if isinstance(engine, EmbeddedEngine):
        for _ in range(12):
            await anyio.lowlevel.checkpoint()
    else:
        await engine.generate(request_of("short", max_new_tokens=20))
