"""OpenAI's protocol as the real servers speak it: SGLang's and vLLM's own endpoints."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
import torch

from rollouts_core.errors import EngineRefused
from rollouts_core.inference.endpoints.openai import completions_endpoint, openai_endpoint
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.types import Message
from rollouts_core.types.episode import AgentState, Answered
from tests.rollouts_core.inference.test_engines import (  # noqa: F401
    SGLANG,
    VLLM,
    model_directory,
    served_model,
    sglang_server,
    vllm_server,
)
from tests.rollouts_core.models import character_tokenizer

TOKENS = 12
ASKED = AgentState((Message("user", "12+34="),))


@pytest.fixture(params=[SGLANG, VLLM])
def service(request: pytest.FixtureRequest) -> Service:
    servers = request.getfixturevalue(f"{request.param}_server")
    (replica,) = SupervisedServers(servers.directory).ready().replicas
    return Service(f"{replica.url}/v1", "policy", temperature=0.0, body={"ignore_eos": True})


def greedy(prompt: str) -> str:
    """By transformers."""
    tokenizer, model = character_tokenizer(), served_model()
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    for _ in range(TOKENS):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    text: str = tokenizer.decode(tokens[0, -TOKENS:], skip_special_tokens=True)
    return text


def prompt_of(state: AgentState) -> str:
    messages = [{"role": message.role, "content": message.content} for message in state.messages]
    text: str = character_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def within(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        with anyio.fail_after(60):
            return await work()

    return anyio.run(run)


async def answered(service: Service, streamed: bool) -> tuple[Answered, str]:
    async with openai_endpoint(service) as endpoint:
        if not streamed:
            whole = await endpoint.complete(ASKED, TOKENS)
            return whole, whole.message.content
        *pieces, last = [part async for part in endpoint.stream(ASKED, TOKENS)]
        assert isinstance(last, Answered)
        return last, "".join(map(str, pieces))


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_is_the_model_s_greedy_answer(service: Service, streamed: bool) -> None:
    done, text = within(partial(answered, service, streamed))
    assert done.message.content == text
    assert text.strip() == greedy(prompt_of(ASKED)).strip()
    assert (done.usage.completion_tokens, done.cut_off) == (TOKENS, True)
    assert done.usage.prompt_tokens == len(character_tokenizer()(prompt_of(ASKED))["input_ids"])


def test_completions_go_on_from_the_rendered_prompt(service: Service) -> None:
    async def work() -> Answered:
        async with completions_endpoint(service, prompt_of) as endpoint:
            return await endpoint.complete(ASKED, TOKENS)

    assert within(work).message.content.strip() == greedy(prompt_of(ASKED)).strip()


def test_what_the_server_refuses_is_told(service: Service) -> None:
    async def work() -> None:
        async with openai_endpoint(service) as endpoint:
            await endpoint.complete(ASKED, 100_000)

    with pytest.raises(EngineRefused, match="status 4"):
        within(work)
