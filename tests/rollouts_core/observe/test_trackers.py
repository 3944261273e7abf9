"""TensorBoard and W&B are given what a run announces, offline."""

import logging
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollouts_core.config import PipelineConfig, TrackingConfig
from rollouts_core.errors import BadInput
from rollouts_core.observe.trackers import check_tracking, trackers
from tasks.events import StageProgress, announce
from tasks.tracking import _Passing, tracking

WRITE_SECONDS = 30.0


def test_tensorboard_reads_what_was_announced(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    config = replace(pipeline_config, tracking=TrackingConfig(tensorboard=True))
    with tracking(config, "a-run", tmp_path):
        announce(StageProgress("sft", 1, 2, {"loss": 0.5}, 1))
        announce(StageProgress("rl-2", 1, 2, {"reward": 0.25}, 51))
        announce(StageProgress("tokenize", 1, 2, {}, 1))
    announce(StageProgress("sft", 2, 2, {"loss": 0.1}, 2))
    read = EventAccumulator(str(tmp_path / "tensorboard" / "a-run"))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["rl/reward", "sft/loss"]
    assert [(event.step, event.value) for event in read.Scalars("rl/reward")] == [(51, 0.25)]
    assert [event.step for event in read.Scalars("sft/loss")] == [1], "what is announced after the run is not its own"


def test_wandb_writes_its_file_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with trackers(TrackingConfig(wandb="a-project"), tmp_path, "a-run", {"seed": 3}) as found:
        found["wandb"].log({"rl/reward": 0.25}, 51)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + WRITE_SECONDS  # its own process flushes the file a moment after `finish`
    while b"rl/reward" not in file.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    written = file.read_bytes()
    for told in (b"rl/reward", b"0.25", b"rl/step", b"51"):
        assert told in written


def test_a_tracker_that_fails_stops_nothing(pipeline_config: PipelineConfig, tmp_path: Path) -> None:
    class Broken:
        calls = 0

        def log(self, metrics: object, step: int) -> None:
            Broken.calls += 1
            raise OSError("no space left")

    handler = _Passing({"broken": Broken()})
    record = logging.LogRecord("x", logging.INFO, "", 0, "", (), None)
    record.event = StageProgress("sft", 1, 2, {"loss": math.nan}, 1)
    handler.emit(record)
    handler.emit(record)
    assert Broken.calls == 1


def test_a_package_that_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"tracking\.wandb: needs the package wandb"):
        check_tracking(TrackingConfig(wandb="a-project"))
    check_tracking(TrackingConfig())
