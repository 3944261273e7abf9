"""Generation side by side, in one run: `python -m tests.benchmarks.generation [--device cuda]`, or `make generation`.

The same Qwen2 of 3.2M parameters in float32, 64 requests of 16 tokens in and 64 out, and a ragged mix: the embedded
engine, transformers' `generate`, SGLang and vLLM where they are installed, and the ceiling that follows from the
machine's matrix products alone. Medians of several turns are told. BENCHMARK_MODEL names another model's directory.

A server that waits for requests keeps a core busy, so each has the machine to itself while it is measured; what runs in
this process is measured before, between and after them.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import torch
from anyio.from_thread import start_blocking_portal
from transformers import AutoModelForCausalLM, Qwen2Config

from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig
from rollouts_core.inference.engine import GenerationRequest, InferenceEngine, ModelLimits
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.inference.sglang import SGLangEngine
from rollouts_core.inference.torch_engine import TorchEngine
from rollouts_core.inference.transports import DiskTransport
from rollouts_core.inference.vllm import VLLMEngine
from rollouts_core.inference.weights import shapes_of
from tests.rollouts_core.models import character_tokenizer
from tests.servers import ENGINES, running_servers

VOCABULARY, CONTEXT = 512, 160
REQUESTS, PROMPT, ANSWER = 64, 16, 64
REPEATS = 5
MODEL = "BENCHMARK_MODEL"

Requests = Sequence[GenerationRequest]
Runner = Callable[[Requests], object]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--without", nargs="*", default=[], help="sglang, vllm")
    options = parser.parse_args()
    made = model().to(options.device)
    loads = {"uniform": uniform(), "ragged": ragged(), "groups of 8": groups()}
    here: dict[str, Runner] = {"embedded": embedded(made), "generate": transformers_generate(made, options.device)}
    kinds = [kind for kind in ("sglang", "vllm") if (ENGINES / kind).exists() and kind not in options.without]
    timed = Timed(loads, {}, [])
    timed.run(here, options.repeats, options.device)
    for kind in kinds if options.device == "cpu" else []:
        with ExitStack() as stack:
            timed.run({kind: served(kind, made, stack)}, options.repeats, options.device)
        timed.run(here, options.repeats, options.device)
    tell(timed, [*here, *kinds], made)
    return 0


@dataclass(frozen=True)
class Timed:
    loads: dict[str, list[GenerationRequest]]
    seconds: dict[tuple[str, str], list[float]]
    """By load and engine."""
    flops: list[float]

    def run(self, runners: dict[str, Runner], repeats: int, device: str) -> None:
        """The first turn warms up and does not count."""
        for turn in range(repeats + 1):
            if len(runners) > 1:
                self.flops.append(matrix_flops(device))
            for load, requests in self.loads.items():
                for name, runner in runners.items():
                    began = time.perf_counter()
                    runner(requests)
                    if turn:
                        self.seconds.setdefault((load, name), []).append(time.perf_counter() - began)


def model() -> Any:
    """The small one, or the directory that BENCHMARK_MODEL names."""
    torch.manual_seed(0)
    if directory := os.environ.get(MODEL):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def uniform() -> list[GenerationRequest]:
    return [_request(row, PROMPT, ANSWER) for row in range(REQUESTS)]


def ragged() -> list[GenerationRequest]:
    """Prompts of 4 to 64 tokens, answers of 4 to 64."""
    lengths = torch.randint(4, 65, (REQUESTS, 2), generator=torch.Generator().manual_seed(1)).tolist()
    return [_request(row, prompt, answer) for row, (prompt, answer) in enumerate(lengths)]


def groups() -> list[GenerationRequest]:
    """Eight prompts of 64 tokens, eight short answers to each."""
    return [_request(row, 64, 16, seed=row // 8) for row in range(REQUESTS)]


def embedded(made: Any) -> Runner:
    import copy

    engine = TorchEngine(copy.deepcopy(made), CONTEXT, REQUESTS)
    return engine.generate


def transformers_generate(made: Any, device: str) -> Runner:
    @torch.inference_mode()
    def run(requests: Requests) -> None:
        """As a trainer without an engine would: one padded batch, with the log-probabilities that training needs."""
        longest = max(len(request.prompt_tokens) for request in requests)
        tokens = torch.zeros((len(requests), longest), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(requests):
            tokens[row, longest - len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
            mask[row, longest - len(request.prompt_tokens) :] = 1
        steps = max(request.max_new_tokens for request in requests)
        made.generate(
            tokens.to(device), attention_mask=mask.to(device), do_sample=True, top_k=0, pad_token_id=0,
            min_new_tokens=steps, max_new_tokens=steps, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip

    return run


def served(kind: str, made: Any, stack: ExitStack) -> Runner:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    made.save_pretrained(directory / "model")
    character_tokenizer().save_pretrained(directory / "model")
    config = EngineConfig(kind=kind, max_running_requests=REQUESTS)  # type: ignore[arg-type]
    served_model = ServedModel(str(directory / "model"), "float32", CONTEXT)
    servers = stack.enter_context(running_servers(directory / "jobs", config, served_model))
    fleet = SupervisedServers(servers.directory)
    limits = ModelLimits(CONTEXT, VOCABULARY, shapes_of(dict(made.named_parameters())))
    portal = stack.enter_context(start_blocking_portal())

    def make() -> InferenceEngine:
        if kind == "vllm":
            return VLLMEngine(fleet, limits, "policy", DiskTransport(directory))
        return SGLangEngine(fleet, limits, DiskTransport(directory))

    engine = portal.call(make)
    stack.callback(portal.call, engine.aclose)
    portal.call(engine.update_weights, dict(made.named_parameters()), 0)
    return lambda requests: portal.call(_all, engine.generate, requests)


async def _all(ask: Callable[[GenerationRequest], Awaitable[object]], requests: Requests) -> None:
    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(ask, request)


def matrix_flops(device: str) -> float:
    """Of large matrix products, per second."""
    one = torch.randn(1024, 1024, device=device)
    began = time.perf_counter()
    for _ in range(8):
        other = one @ one
    other[0, 0].item()
    return 8 * 2 * 1024**3 / (time.perf_counter() - began)


def tell(timed: Timed, names: list[str], made: Any) -> None:
    flops = statistics.median(timed.flops)
    parameters = sum(value.numel() for value in made.parameters())
    print(f"\nmatrix products: {flops / 1e9:.0f} GFLOP/s; ceiling: {flops / (2 * parameters):,.0f} tokens/s")
    print(f"{'':<14}" + "".join(f"{name:>12}" for name in names) + f"{'embedded / fastest other':>28}")
    for load, requests in timed.loads.items():
        tokens = sum(request.max_new_tokens for request in requests)
        speed = {name: tokens / statistics.median(timed.seconds[load, name]) for name in names}
        others = max(value for name, value in speed.items() if name != "embedded")
        row = "".join(f"{speed[name]:>12,.0f}" for name in names)
        print(f"{load:<14}{row}{speed['embedded'] / others:>28.2f}")


def _request(row: int, prompt: int, answer: int, seed: int | None = None) -> GenerationRequest:
    generator = torch.Generator().manual_seed(row if seed is None else seed)
    tokens = tuple(torch.randint(2, VOCABULARY, (prompt,), generator=generator).tolist())
    return GenerationRequest(f"{row}", tokens, answer, (), 1.0, row, session="" if seed is None else f"{seed}")


if __name__ == "__main__":
    sys.exit(main())
