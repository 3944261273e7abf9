"""A run that pushes its policy, to a stand-in that speaks the hub's HTTP."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import Done
from tests.rollouts_core.observe.test_hub import REPOSITORY, TOKEN, StandInHub, hub  # noqa: F401


@pytest.mark.slow
def test_a_run_pushes_its_policy_with_a_card(
    rollouts: Callable[..., Done],
    config_file: Callable[..., Path],
    hub: StandInHub,  # noqa: F811
    tmp_path: Path,
) -> None:
    config = config_file(results={"hub": REPOSITORY}, rl=None)
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    lacking = rollouts("run", config, **environment, HF_TOKEN="")
    assert lacking.status == 1 and "results.hub: a push to me/sums needs a token in HF_TOKEN" in lacking.err

    done = rollouts("run", config, **environment, HF_TOKEN=TOKEN)
    assert done.status == 0, done.err
    assert hub.repositories == {REPOSITORY: True}
    assert hub.tokens == {f"Bearer {TOKEN}"}
    (policy,) = tmp_path.glob("outputs/*/policy")
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    for name, content in hub.files.items():
        (pushed / name).write_bytes(content)
    assert {file.name for file in policy.iterdir()} <= hub.files.keys() | {".gitattributes"}
    AutoModelForCausalLM.from_pretrained(pushed)

    card = hub.files["README.md"].decode()
    assert re.search(r"^---\nlibrary_name: transformers\n.*- sft\n---\n", card, re.DOTALL)
    run = policy.parent.name
    assert f"by run `{run}`" in card
    accuracies = json.loads((policy.parent / "evaluation" / "sft.json").read_text())["accuracy"]
    row = next(line for line in card.splitlines() if line.startswith("| after SFT"))
    assert f"| {100 * accuracies['mean']:.1f} % | {100 * accuracies['low']:.1f} to" in row
    assert "demonstrations: `demonstrations.jsonl`, content " in card
    assert "| `sft-" in card
    assert str(tmp_path) not in card
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.json*"))

    hub.refuses = 403
    refused = rollouts("run", config, **environment, HF_TOKEN=TOKEN)
    assert refused.status == 1
    assert "the hub refuses me/sums with status 403" in refused.err + refused.out
    assert "Traceback" not in refused.err
