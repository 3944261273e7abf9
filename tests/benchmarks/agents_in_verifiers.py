"""The same episodes in verifiers: `python agents_in_verifiers.py URL time|memory`, in an environment that has it.

Its multi-turn environment's own `rollout`, without scoring, over its own OpenAI client; as many at once as ours.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["NO_KEY"] = "none"
EPISODES, TURNS, LIVE = 256, 3, 1024


def main(url: str, what: str) -> None:
    import verifiers as vf
    from datasets import Dataset
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.types import ClientConfig

    class Talk(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [vf.UserMessage(content="go on")]

    rows = Dataset.from_list([{"question": f"question {number}", "answer": ""} for number in range(EPISODES)])
    environment = Talk(dataset=rows, max_turns=TURNS, rubric=vf.Rubric(funcs=[lambda completion: 0.0]))
    inputs = [dict(row) for row in environment.get_dataset()]

    def client() -> Any:
        return OpenAIChatCompletionsClient(ClientConfig(api_base_url=url, api_key_var="NO_KEY"))

    async def turn_ms() -> float:
        asked = client()
        for _ in range(2):
            began = time.perf_counter()
            states = await asyncio.gather(*(environment.rollout(row, asked, "m") for row in inputs))
            seconds = time.perf_counter() - began
        assert all(len(state["trajectory"]) == TURNS and not state["error"] for state in states)
        return 1000 * seconds / (EPISODES * TURNS)

    async def live_kib() -> float:
        asked = client()
        waiting = [asyncio.create_task(environment.rollout(inputs[0], asked, "m")) for _ in range(LIVE // 4)]
        await asyncio.sleep(3)
        before = resident_kib()
        waiting += [asyncio.create_task(environment.rollout(inputs[0], asked, "m")) for _ in range(LIVE)]
        await asyncio.sleep(5)
        found = (resident_kib() - before) / LIVE
        for task in waiting:
            task.cancel()
        return found

    found = {"turn_ms": asyncio.run(turn_ms())} if what == "time" else {"kib": asyncio.run(live_kib())}
    print(json.dumps(found))


def resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
