"""`rollouts chat` and `rollouts serve`, started as a person would."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from infra.host.system import free_port
from rollouts_core.training.exporting import save_policy
from tests.conftest import Done, until
from tests.rollouts_core.models import tiny_model
from tests.rollouts_core.rollout.test_episodes import ARCHITECTURE, TOKENIZER

Rollouts = Callable[..., Done]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(architecture=ARCHITECTURE)
    directory = tmp_path_factory.mktemp("a-run") / "policy"
    save_policy(model, TOKENIZER, directory, dict(model.named_parameters()))
    return directory


@pytest.mark.slow
def test_chat_answers_what_it_is_asked_and_two_side_by_side(rollouts: Rollouts, policy: Path) -> None:
    asked = ["--prompt", "12*3", "--max-new-tokens", "12", "--cpu"]
    alone = rollouts("chat", policy, *asked)
    assert alone.status == 0, alone.err
    answer = alone.out.strip()
    assert 0 < len(answer) <= 12
    both = rollouts("chat", policy.parent, "--against", policy, *asked)
    assert both.out.split("\n") == [f"{policy.parent}:", answer, f"{policy}:", answer, ""]


@pytest.mark.slow
def test_chat_reads_lines_and_goes_on(policy: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "chat", str(policy), "--max-new-tokens", "8", "--cpu"],
        input="1+2\n\n3+4\n/again\n1+2\n/quit\n5", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    first, second, again = done.stdout.splitlines()
    assert first == again != second


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing-there", "is not a model directory, nor a run or an artifact"), ("a-failed", "has no policy")],
)
def test_chat_without_a_policy_says_why(rollouts: Rollouts, tmp_path: Path, name: str, words: str) -> None:
    run = tmp_path / ".rollouts" / "runs" / "a-failed-run"
    run.mkdir(parents=True)
    (run / "run.json").write_text(
        '{"run_id": "a-failed-run", "name": "a", "state": "Failed", "started_at": "", "seconds": 1.0,'
        ' "flow_run_id": null, "stages": [{"name": "sft", "key": "0123", "state": "Failed"}],'
        ' "error": "sft failed: no space left"}'
    )
    done = rollouts("chat", name, "--prompt", "hi")
    assert done.status == 1
    assert words in done.err
    assert "Traceback" not in done.err
    if name == "a-failed":
        assert "none of its stages has trained one: sft failed: no space left" in done.err


@pytest.fixture
def serving(policy: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "flows.cli", "serve", str(policy), "--port", str(free_port()), "--cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.slow
def test_serve_answers_openai_s_client_until_it_is_interrupted(
    serving: "subprocess.Popen[str]", rollouts: Rollouts, policy: Path
) -> None:
    assert serving.stdout is not None
    said = serving.stdout.readline()
    url = next(word for word in said.split() if word.startswith("http")).rstrip(";")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=5)
    done = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "12*3"}], temperature=0, max_tokens=12
    )
    chatted = rollouts("chat", policy, "--prompt", "12*3", "--max-new-tokens", "12", "--cpu")
    assert (done.choices[0].message.content or "").strip() == chatted.out.strip()
    port = url.split(":")[2].split("/")[0]
    taken = rollouts("serve", policy, "--port", port)
    assert taken.status == 1 and f"--port {port}: another program uses it" in taken.err
    os.kill(serving.pid, signal.SIGINT)
    until(lambda: serving.poll() is not None, "the server to end", 30)
    assert "Traceback" not in (serving.stderr.read() if serving.stderr else "")
