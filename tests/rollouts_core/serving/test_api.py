"""OpenAI's own client against the endpoint, over HTTP: chat, streams, tools, completions, and what is refused."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import httpx
import openai
import pytest
import torch
import uvicorn

from rollouts_core.config import EngineConfig
from rollouts_core.environments.shipped.calculator import calculator
from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.inference.registry import embedded_engine
from rollouts_core.serving.api import app_for
from rollouts_core.serving.talker import Talker
from tests.rollouts_core.models import tiny_model
from tests.rollouts_core.rollout.test_episodes import ARCHITECTURE, CALL, TOKENIZER, Speaks

ASKED: list[Any] = [{"role": "user", "content": "12*3"}]
TOOLS: list[Any] = [tool.schema for tool in calculator().get_tools()]
TOKENS = 24


@dataclass
class SpeaksInPieces(Speaks):
    """Gives no more tokens than asked for."""

    aborted: list[str] = field(default_factory=list)
    seconds: float = 0.0

    async def generate(self, request: GenerationRequest) -> Completion:
        try:
            await anyio.sleep(self.seconds)
        except anyio.get_cancelled_exc_class():
            self.aborted.append(request.request_id)
            raise
        whole = await super().generate(request)
        left = request.max_new_tokens - len(request.generated)
        if left >= len(whole.tokens):
            return whole
        return replace(whole, tokens=whole.tokens[:left], log_probs=whole.log_probs[:left], finish_reason="length")


@contextmanager
def served(make_engine: Callable[[], Any]) -> Iterator[str]:
    """The address of a server whose engine is made in its own event loop."""
    servers: list[uvicorn.Server] = []

    async def main() -> None:
        talker = Talker("a-run", TOKENIZER, make_engine(), 128, None)
        servers.append(uvicorn.Server(uvicorn.Config(app_for(talker), port=0, log_level="error")))
        await servers[0].serve()

    thread = threading.Thread(target=anyio.run, args=(main,))
    thread.start()
    try:
        while not (servers and servers[0].started):
            time.sleep(0.01)
        yield f"http://127.0.0.1:{servers[0].servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        servers[0].should_exit = True
        thread.join(30)


@contextmanager
def client_of(turns: Sequence[str]) -> Iterator[openai.OpenAI]:
    with served(lambda: SpeaksInPieces(turns)) as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def embedded() -> Iterator[openai.OpenAI]:
    """Of a random model."""
    model = tiny_model(architecture=ARCHITECTURE)
    with (
        served(lambda: embedded_engine(EngineConfig(), model, TOKENIZER, 128)) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


def greedy(prompt: str) -> str:
    """By transformers' forward pass."""
    model = tiny_model(architecture=ARCHITECTURE)
    begun = TOKENIZER(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    tokens = begun
    for _ in range(TOKENS):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        if tokens[0, -1] == TOKENIZER.eos_token_id:
            break
    text: str = TOKENIZER.decode(tokens[0, begun.shape[1] :], skip_special_tokens=True)
    return text


def test_chat_is_the_model_s_greedy_answer(embedded: openai.OpenAI) -> None:
    done = embedded.chat.completions.create(model="a-run", messages=ASKED, temperature=0, max_completion_tokens=TOKENS)
    prompt = TOKENIZER.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert done.choices[0].message.content == greedy(prompt)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(TOKENIZER(prompt)["input_ids"]), TOKENS)
    assert [model.id for model in embedded.models.list()] == ["a-run"]


def test_a_stream_says_the_same_piece_by_piece(embedded: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": ASKED, "temperature": 0, "max_tokens": TOKENS}
    whole = embedded.chat.completions.create(**asked)
    events = list(embedded.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [event.choices[0].delta.content for event in events if event.choices and event.choices[0].delta.content]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].message.content
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].usage == whole.usage


def test_several_answers_differ_and_a_seed_gives_them_again(embedded: openai.OpenAI) -> None:
    def said() -> list[str | None]:
        done = embedded.chat.completions.create(model="policy", messages=ASKED, n=4, seed=5, max_tokens=12)
        return [choice.message.content for choice in done.choices]

    first = said()
    assert first == said()
    assert len(set(first)) == 4


def test_completions_go_on_from_text_or_token_ids(embedded: openai.OpenAI) -> None:
    ids = TOKENIZER("12*", add_special_tokens=False)["input_ids"]
    prompts: list[Any] = ["12*", ids, ["12*", "3"]]
    texts = [
        [choice.text for choice in embedded.completions.create(
            model="policy", prompt=prompt, temperature=0, max_tokens=TOKENS
        ).choices]
        for prompt in prompts
    ]  # fmt: skip
    assert texts == [[greedy("12*")], [greedy("12*")], [greedy("12*"), greedy("3")]]


def test_a_call_is_told_as_one_and_its_result_is_gone_on_from() -> None:
    with client_of(["let us see, " + CALL, "it is 36"]) as client:
        first = client.chat.completions.create(model="policy", messages=ASKED, tools=TOOLS).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.tool_calls is not None
        call: Any = first.message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("calculate", '{"expression": "12*3"}')
        further = [*ASKED, first.message, {"role": "tool", "tool_call_id": call.id, "content": "36"}]
        second = client.chat.completions.create(model="policy", messages=further, tools=TOOLS).choices[0]
        assert (second.message.content, second.finish_reason) == ("it is 36", "stop")


def test_a_streamed_call_comes_whole() -> None:
    with client_of(["let us see, " + CALL]) as client:
        with client.chat.completions.stream(model="policy", messages=ASKED, tools=TOOLS) as stream:
            done = stream.get_final_completion()
        choice = done.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        assert choice.message.tool_calls[0].function.arguments == '{"expression": "12*3"}'
        assert (choice.message.content or "").strip() == "let us see,"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_is_not_part_of_what_is_told(stream: bool) -> None:
    """The engine ends behind it; the client's answer ends before it."""
    with client_of(["one two three"]) as client:
        done: Any = client.chat.completions.create(model="policy", messages=ASKED, stop=["thr", "x"], stream=stream)
        if stream:
            assert "".join(event.choices[0].delta.content or "" for event in done) == "one two "
        else:
            assert done.choices[0].message.content == "one two "


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": []}, "no list of messages under 'messages'"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: not supported here"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice: not supported here"),
        ({"messages": [{"role": "user", "content": "1" * 200}]}, "tokens, and the context 128"),
    ],
)
def test_what_is_refused_is_told_before_anything_is_generated(
    embedded: openai.OpenAI, changes: dict[str, Any], words: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            embedded.chat.completions.create(**{"model": "policy", "messages": ASKED, "stream": stream} | changes)
        assert words in str(caught.value)


def test_another_model_is_not_here(embedded: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="only 'a-run'"):
        embedded.chat.completions.create(model="gpt-4", messages=ASKED)


def test_other_names_of_this_host_are_not_answered_to(embedded: openai.OpenAI) -> None:
    answer = httpx.get(f"{embedded.base_url}models", headers={"Host": "evil.example"})
    assert answer.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_has_aborted(stream: bool) -> None:
    engines: list[SpeaksInPieces] = []

    def engine() -> SpeaksInPieces:
        engines.append(SpeaksInPieces(["a" * 100], seconds=0.2))
        return engines[0]

    with served(engine) as url:
        body = {"messages": ASKED, "stream": stream}
        if stream:
            with httpx.stream("POST", f"{url}/chat/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/chat/completions", json=body, timeout=0.1)
        end = time.monotonic() + 30
        while not engines[0].aborted and time.monotonic() < end:
            time.sleep(0.02)
        assert engines[0].aborted
