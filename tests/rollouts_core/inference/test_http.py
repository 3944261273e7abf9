"""What is made of a server's answers that are late, wrong, or none; and of SGLang's and vLLM's, field by field."""

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from rollouts_core.errors import EngineRefused, EngineUnavailable, MalformedAnswer
from rollouts_core.inference import sglang, vllm
from rollouts_core.inference.engine import GenerationRequest
from rollouts_core.inference.http import JsonClient
from tests.answering import answering

REQUEST = GenerationRequest("r", (1, 2), 3, ())
Answer = tuple[int, bytes, float]


@pytest.fixture
def server() -> Iterator[Callable[[int, bytes, float], str]]:
    """A web server that answers as it is told: status, body, seconds to wait."""
    made: list[http.server.ThreadingHTTPServer] = []

    def serve(status: int, body: bytes, wait: float) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                time.sleep(wait)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        made.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{made[-1].server_port}/ask"

    yield serve
    for each in made:
        each.shutdown()
        each.server_close()


def ask(url: str, deadline: float = 5.0) -> Any:
    async def main() -> Any:
        client = JsonClient()
        try:
            return await client.call("POST", url, {"a": 1}, deadline=deadline)
        finally:
            await client.aclose()

    return anyio.run(main)


def test_an_answer_is_data_and_an_empty_one_is_none(server: Callable[..., str]) -> None:
    assert ask(server(200, b'{"b": 2}', 0.0)) == {"b": 2}
    assert ask(server(200, b"", 0.0)) is None


@pytest.mark.parametrize(
    ("status", "body", "wait", "kind", "said"),
    [
        (200, b"<html>", 0.0, MalformedAnswer, "this is not JSON: '<html>'"),
        (200, b"[" * 10**5, 0.0, MalformedAnswer, "this is not JSON"),
        (400, b"too long", 0.0, EngineRefused, "status 400: too long"),
        (404, b"", 0.0, EngineRefused, "status 404"),
        (500, b"boom", 0.0, EngineUnavailable, "status 500: boom"),
        (503, b"", 0.0, EngineUnavailable, "status 503"),
        (429, b"slow down", 0.0, EngineUnavailable, "status 429"),
        (200, b"{}", 2.0, EngineUnavailable, "no answer in 0.3 s"),
    ],
)
def test_what_goes_wrong_is_told_apart(
    server: Callable[..., str], status: int, body: bytes, wait: float, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        ask(server(status, body, wait), deadline=0.3 if wait else 5.0)


def test_nobody_there_is_unavailable() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(EngineUnavailable, match="ConnectError"):
        ask(f"http://127.0.0.1:{port}/ask")


def test_a_header_that_httpx_cannot_read_is_unavailable() -> None:
    moved = b"HTTP/1.1 307 OK\r\nLocation: /\r\nSet-Cookie: \xc3\xa9\r\nContent-Length: 0\r\n\r\n"
    with answering(moved) as url, pytest.raises(EngineUnavailable, match="UnicodeEncodeError"):
        ask(url)


def sglang_answer(**changes: Any) -> dict[str, Any]:
    meta = {
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "completion_tokens": 2,
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
        "finish_reason": {"type": "length", "length": 2},
    }
    return {"output_ids": [7, 8], "meta_info": {**meta, **changes}}


def test_sglangs_spans_become_a_version_for_each_token() -> None:
    completion = sglang.read_completion(sglang_answer(), REQUEST)
    assert completion.tokens == (7, 8) and completion.log_probs == (-0.5, -0.25)
    assert completion.weight_versions == (3, 4) and completion.finish_reason == "length"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"output_ids": [7, 8], "meta_info": {}},
        sglang_answer(weight_versions=[{"version": "default", "start": 0, "end": 2}]),
        sglang_answer(weight_versions=[{"version": "3", "start": 0, "end": 1}]),
        sglang_answer(weight_versions=None),
        sglang_answer(output_token_logprobs=[[-0.5, 7, None]]),
        sglang_answer(output_token_logprobs=[[None, 7, None], [-0.25, 8, None]]),
        sglang_answer(finish_reason={"type": "exploded"}),
        sglang_answer(finish_reason=None),
        {**sglang_answer(), "output_ids": [7, 9]},
        {"meta_info": sglang_answer()["meta_info"]},
        {**sglang_answer(), "output_ids": 7},
        sglang_answer(weight_versions=[{"version": "3", "start": 0, "end": 2**63}]),
        sglang_answer(output_token_logprobs=[[-0.5, float("inf"), None], [-0.25, 8, None]]),
        sglang_answer(output_token_logprobs=[[10**400, 7, None], [-0.25, 8, None]]),
    ],
)
def test_an_answer_that_makes_no_sense_is_malformed(answer: Any) -> None:
    with pytest.raises(MalformedAnswer, match="request r: "):
        sglang.read_completion(answer, REQUEST)


def vllm_answer(**changes: Any) -> dict[str, Any]:
    choice = {"token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop"}
    return {"choices": [{**choice, **changes}]}


def test_vllms_answer_has_the_version_it_was_asked_for_under() -> None:
    completion = vllm.read_completion(vllm_answer(), REQUEST, 5)
    assert completion.weight_versions == (5, 5) and completion.log_probs == (-0.5, -0.25)
    assert (
        vllm.read_completion(vllm_answer(token_ids=[], logprobs=None, finish_reason="abort"), REQUEST, 5).tokens == ()
    )


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"choices": []},
        vllm_answer(logprobs=None),
        vllm_answer(token_ids=None),
        vllm_answer(token_ids=[7]),
        vllm_answer(finish_reason="error"),
    ],
)
def test_vllms_answer_that_makes_no_sense_is_malformed(answer: Any) -> None:
    with pytest.raises(MalformedAnswer, match="request r: "):
        vllm.read_completion(answer, REQUEST, 5)
