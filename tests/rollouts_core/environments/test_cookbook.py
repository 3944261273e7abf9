"""The code of docs/environments.md, taken from the page and run."""

import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from flows.preflight import check_inputs
from rollouts_core.config.loading import load_config
from rollouts_core.environments.agent import RunConfig, run_agent
from rollouts_core.environments.registry import load_environment
from rollouts_core.rewards.functions import load_reward
from rollouts_core.types import Message, Prompt, Sample, Status
from rollouts_core.types.episode import AgentState, Answered
from tests.rollouts_core.models import character_tokenizer, tiny_model

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's two files, and rows for them; the model is a small one here."""
    environment, config = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    (tmp_path / "my_environment.py").write_text(environment)
    (tmp_path / "my_config.py").write_text(config.replace("Qwen/Qwen3-0.6B", str(model)))
    for name in ("rows", "heldout"):
        rows = [{"numbers": [n, 2, 3]} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Adds:
    """Right at first, and wrong at the end."""

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        return Answered(Message("assistant", str([4, 6, 0][state.turn_idx])))


def test_the_environment_is_thirty_lines_that_work(written: Path) -> None:
    lines = [line for line in (written / "my_environment.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
    environment = load_environment("my_environment.py:running_total")
    row = {"numbers": [4, 2, 3]}
    episode = anyio.run(run_agent, environment.begin(row), RunConfig(Adds(), environment))
    assert [message.content for message in episode.final.messages] == ["4", "4", "2", "6", "3", "0"]
    prompt = Prompt(episode.start.messages, (), row, 0)
    sample = Sample(prompt, "0", (), (), (), (), 0, Status.COMPLETED, trajectory=episode)
    reward: Any = load_reward("my_environment.py:reward")
    found = reward(sample)
    assert (found.turns, dict(found.components), found.total) == ((1.0, 1.0, 0.0), {"whole": 0.0}, 2.0)


def test_the_config_is_planned(written: Path) -> None:
    stages = check_inputs(load_config(written / "my_config.py"))
    assert [stage.name for stage in stages.stages] == ["tokenize", "rl-1", "rl-2", "evaluate-base", "evaluate-rl"]
    (written / "my_environment.py").write_text((written / "my_environment.py").read_text() + "\n# edited\n")
    again = check_inputs(load_config(written / "my_config.py"))
    assert [stage.key for stage in again.stages] != [stage.key for stage in stages.stages]
