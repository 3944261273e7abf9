"""Agent loops against a server that answers at once: `python -m tests.benchmarks.agents`.

Prints, as JSON: milliseconds per turn of 256 concurrent three-turn episodes, ours and verifiers' in turns in one run,
and of bare aiohttp requests; memory per live episode, ours and theirs; memory over 100,000 episodes. Verifiers runs in
an environment of its own (`make test-verifiers` builds it); without it, ours alone is measured.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from rollouts_core.environments.agent import RunConfig, run_agent
from rollouts_core.environments.environment import Functions
from rollouts_core.inference.endpoints.openai import openai_endpoint
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.types import Message
from rollouts_core.types.episode import AgentState, Answered, Replied, Usage

EPISODES, TURNS, ROUNDS = 256, 3, 5
LIVE = 1024
MANY, FIRST = 100_000, 20_000
HELD_SECONDS = 20.0
THEIRS = Path(__file__).parents[2] / ".engines" / "verifiers" / "bin" / "python"
HERE = Path(__file__).parent


def main() -> None:
    with server() as url:
        times: dict[str, list[float]] = {"ours": [], "aiohttp": []} | ({"verifiers": []} if THEIRS.exists() else {})
        for _ in range(ROUNDS):
            times["ours"].append(anyio.run(our_turn_ms, url))
            times["aiohttp"].append(anyio.run(bare_turn_ms, url))
            if "verifiers" in times:
                times["verifiers"].append(theirs(url, "time")["turn_ms"])
    told = {f"{name}_ms_per_turn": round(statistics.median(found), 3) for name, found in times.items()}
    if "verifiers" in times:
        told["verifiers_over_ours"] = round(
            statistics.median(other / own for own, other in zip(times["ours"], times["verifiers"], strict=True)), 2
        )
    with server("--hold", str(HELD_SECONDS)) as url:
        told["ours_kib_per_live_episode"] = round(anyio.run(our_live_kib, url), 1)
        if "verifiers" in times:
            told["verifiers_kib_per_live_episode"] = round(theirs(url, "memory")["kib"], 1)
    told |= anyio.run(growth)
    print(json.dumps(told, indent=1))


def environment() -> Functions:
    def reply(message: Message, state: AgentState) -> Replied:
        return Replied((Message("user", "go on"),)) if state.turn_idx < TURNS else Replied()

    return Functions(lambda row: [Message("user", row["question"])], reply=reply)


async def our_turn_ms(url: str) -> float:
    async with openai_endpoint(Service(url, "m", max_concurrent=EPISODES)) as endpoint:
        config = RunConfig(endpoint, environment())
        await episodes(config, EPISODES)
        began = time.perf_counter()
        await episodes(config, EPISODES)
        return 1000 * (time.perf_counter() - began) / (EPISODES * TURNS)


async def episodes(config: RunConfig, count: int) -> None:
    async def one(number: int) -> None:
        done = await run_agent(config.environment.begin({"question": f"question {number}"}), config)
        assert done.final.turn_idx == TURNS

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(one, number)


async def bare_turn_ms(url: str) -> float:
    """The same number of requests, each as large as a second turn's, and nothing done with the answers."""
    body = {"model": "m", "messages": [{"role": "user", "content": "question 100"}] * 3}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=EPISODES)) as session:

        async def turns() -> None:
            for _ in range(TURNS):
                async with session.post(f"{url}/chat/completions", json=body) as answer:
                    await answer.json()

        for _ in range(2):
            began = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for _ in range(EPISODES):
                    tasks.start_soon(turns)
        return 1000 * (time.perf_counter() - began) / (EPISODES * TURNS)


async def our_live_kib(url: str) -> float:
    """Of an episode that waits for its first answer, its connection included."""
    async with openai_endpoint(Service(url, "m", max_concurrent=2 * LIVE)) as endpoint:
        config = RunConfig(endpoint, environment())
        return await live_kib(lambda number: run_agent(config.environment.begin({"question": str(number)}), config))


async def live_kib(start: Callable[[int], Any]) -> float:
    """By how much LIVE more episodes, all of them waiting, make this process larger."""
    async with anyio.create_task_group() as tasks:
        for number in range(LIVE // 4):
            tasks.start_soon(start, number)
        await anyio.sleep(3)
        before = resident_kib()
        for number in range(LIVE):
            tasks.start_soon(start, number)
        await anyio.sleep(5)
        found = (resident_kib() - before) / LIVE
        tasks.cancel_scope.cancel()
    return found


async def growth() -> dict[str, float]:
    """Resident memory after the first episodes, and after many more."""

    class Speaks:
        async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
            await anyio.lowlevel.checkpoint()
            return Answered(Message("assistant", f"turn {state.turn_idx}"), Usage(10, 5))

    config = RunConfig(Speaks(), environment())
    sizes = []
    for count in (FIRST, MANY - FIRST):
        for _ in range(count // EPISODES):
            await episodes(config, EPISODES)
        gc.collect()
        sizes.append(resident_kib())
    return {
        f"mib_after_{FIRST}_episodes": round(sizes[0] / 1024, 1),
        f"mib_after_{MANY}_episodes": round(sizes[1] / 1024, 1),
    }


def resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def theirs(url: str, what: str) -> dict[str, float]:
    """Of verifiers, in its own process."""
    done = subprocess.run(
        [str(THEIRS), str(HERE / "agents_in_verifiers.py"), url, what],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "instant_server.py"), *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None, "it is a pipe"
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(30)


if __name__ == "__main__":
    main()
