"""Plans: which config field reaches which stage, and what planning costs."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.preflight import check_inputs, checked
from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import from_data
from rollouts_core.stages.plan import plan
from rollouts_core.stages.stage import stage_from_data, stage_to_data
from rollouts_core.store.fingerprint import code_fingerprint

ALL = {"tokenize", "sft", "rl-1", "rl-2", "evaluate-base", "evaluate-sft", "evaluate-rl"}


def keys(data: dict[str, Any]) -> dict[str, str]:
    return {stage.name: stage.key for stage in plan(from_data(data)).stages}


@pytest.mark.parametrize(
    ("part", "field", "value", "expected"),
    [
        (None, "seed", 5, ALL - {"tokenize"}),
        ("model", "hidden_size", 64, ALL - {"tokenize"}),
        ("model", "tokenizer", "byte_bpe", ALL),
        ("data", "max_length", 16, ALL),
        ("sft", "learning_rate", 0.5, {"sft", "rl-1", "rl-2", "evaluate-sft", "evaluate-rl"}),
        ("sft", "log_every", 7, set()),
        ("sft", "checkpoint_every", 7, set()),
        ("rl", "learning_rate", 0.5, {"rl-1", "rl-2", "evaluate-rl"}),
        ("rl", "kl_coef", 0.1, {"rl-1", "rl-2", "evaluate-rl"}),
        ("rl", "log_samples", 1, set()),
        ("evaluation", "limit", 3, {"evaluate-base", "evaluate-sft", "evaluate-rl"}),
        ("machine", "device", "cpu", set()),
        ("store", "path", "/tmp/elsewhere", set()),
    ],
)
def test_a_field_reaches_the_stages_it_can_change(
    small_config: dict[str, Any], part: str | None, field: str, value: Any, expected: set[str]
) -> None:
    before = keys(small_config)
    if part is None:
        small_config[field] = value
    else:
        small_config[part] = small_config.get(part, {}) | {field: value}
    after = keys(small_config)
    assert {name for name in after if after[name] != before[name]} == expected


def test_more_steps_keep_the_segments_there_are(small_config: dict[str, Any]) -> None:
    before = keys(small_config)
    small_config["rl"]["steps"] = 5
    after = keys(small_config)
    assert set(after) - set(before) == {"rl-3"}
    assert {name for name in before if after[name] != before[name]} == {"evaluate-rl"}


def test_a_moved_file_is_the_same_input_and_a_changed_line_another(
    small_config: dict[str, Any], tmp_path: Path
) -> None:
    before = keys(small_config)
    source = Path(small_config["data"]["heldout"]["path"])
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(source.read_bytes())
    small_config["data"]["heldout"]["path"] = str(moved)
    assert keys(small_config) == before
    moved.write_bytes(source.read_bytes() + source.read_bytes().splitlines()[0] + b"\n")
    assert keys(small_config)["tokenize"] != before["tokenize"]


def test_an_edited_reward_is_another_experiment(small_config: dict[str, Any], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    small_config["rl"]["reward"] = f"{reward}:score"
    reward.write_text("def score(sample): return 1.0\n")
    before = keys(small_config)
    reward.write_text("def score(sample): return 0.0\n")
    after = keys(small_config)
    assert {name for name in after if after[name] != before[name]} == {"rl-1", "rl-2", "evaluate-rl"}


def test_stages_travel_as_data(small_config: dict[str, Any]) -> None:
    for stage in plan(from_data(small_config)).stages:
        data = stage_to_data(stage)
        assert stage_from_data(data) == stage
        with pytest.raises(ValueError, match="its key here is"):
            stage_from_data(data | {"version": 99})


def test_planning_loads_neither_torch_nor_prefect() -> None:
    program = (
        "import sys, flows.cli; assert flows.cli.main(['plan', 'configs/arithmetic.py']) == 0; "
        "assert not {'torch', 'transformers', 'prefect', 'datasets', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)


def test_the_fingerprint_sees_code_and_not_comments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "rollouts_core"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    (package / "main.py").write_text("from rollouts_core.helper import double\n\nprint(double(3))\n")
    monkeypatch.setattr("rollouts_core.store.fingerprint.ROOT", package)

    def now() -> dict[str, str]:
        from rollouts_core.store import fingerprint

        fingerprint._read.cache_clear()
        return code_fingerprint("rollouts_core.main")

    before = now()
    assert {"rollouts_core/main.py", "rollouts_core/helper.py"} <= set(before)
    (package / "helper.py").write_text(
        '"""Says."""\n\n\ndef double(x):  # twice\n    """Twice x."""\n    return (2 * x)\n'
    )
    assert now() == before
    (package / "helper.py").write_text("def double(x):\n    return 3 * x\n")
    assert {name for name, digest in now().items() if digest != before[name]} == {"rollouts_core/helper.py"}


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "flows.cli", "plan", "configs/arithmetic.py"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_shell_completes_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in ("lineage", "deploy", "--against"))


def test_a_flow_takes_over_the_plan_that_its_command_has_checked(pipeline_config: PipelineConfig) -> None:
    with checked(pipeline_config) as stages:
        assert check_inputs(pipeline_config) is stages
        assert check_inputs(replace(pipeline_config, seed=7)) != stages
    assert check_inputs(pipeline_config) is not stages
