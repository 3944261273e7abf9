"""Stages killed anywhere, any number of times: the same bits, no prompt twice or skipped, no rollout made twice."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts_core.config.loading import from_data
from rollouts_core.data import tokenized
from rollouts_core.errors import AskedToLeave, BadInput
from rollouts_core.inference.engine import Completion
from rollouts_core.metrics.loggers import JSONLLogger, read_jsonl
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.stages import tokenize as tokenize_stage
from rollouts_core.stages.plan import Plan, plan
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.tokenize_parts import parts_of
from rollouts_core.stages.workspace import make_stage, open_session
from rollouts_core.store.local import LocalStore
from rollouts_core.training import checkpoint, pytorch

SLOW_BUT_FINE = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@dataclass
class Fate:
    """Kills at the given events, counted over all attempts."""

    kills: list[int]
    events: int = 0
    generated: Counter[str] = field(default_factory=Counter)
    """Request id to how often it was generated to its end."""

    def event(self) -> None:
        self.events += 1
        if self.events in self.kills:
            raise Killed


@contextmanager
def fated(kills: list[int]) -> Iterator[Fate]:
    """Between any two rollouts, before and after each update, and in the midst of every checkpoint."""
    fate = Fate(kills)
    note, step, save = RolloutJournal.note, pytorch.PyTorchTrainingBackend.optim_step, checkpoint._rng

    def noted(self: RolloutJournal, number: int, completion: Completion) -> None:
        note(self, number, completion)
        fate.generated[completion.request_id] += 1
        fate.event()

    def stepped(self: Any) -> Any:
        fate.event()
        result = step(self)
        fate.event()
        return result

    def saved() -> Any:
        fate.event()
        return save()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutJournal, "note", noted)
        patch.setattr(pytorch.PyTorchTrainingBackend, "optim_step", stepped)
        patch.setattr(checkpoint, "_rng", saved)
        yield fate


def make(stage: Stage, store: LocalStore, leave: Path | None = None) -> None:
    with open_session(leave=leave) as session:
        make_stage(stage, store, JSONLLogger(store.home / "followed.jsonl"), "cpu", session)


def make_through_kills(stage: Stage, store: LocalStore, kills: list[int]) -> Fate:
    with fated(kills) as fate:
        for _ in range(len(kills) + 1):
            try:
                make(stage, store)
            except Killed:
                continue
            break
    assert store.has(stage.artifact)
    return fate


def content(store: LocalStore, stage: Stage) -> dict[str, str]:
    """Everything that must not differ: file to digest, measured times left out."""
    entries = store.manifest(stage.artifact).files
    return {entry.path: entry.sha256 for entry in entries if not entry.path.endswith("metrics.jsonl")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], tuple[Plan, LocalStore]]:
    """The config's stages, made once without disturbance."""
    store = LocalStore(tmp_path_factory.mktemp("undisturbed"))

    def made(config: dict[str, Any]) -> tuple[Plan, LocalStore]:
        stages = plan(from_data(config))
        for stage in stages.stages:
            make(stage, store)
        return stages, store

    return made


@pytest.fixture
def config(small_config: dict[str, Any]) -> dict[str, Any]:
    small_config["sft"] |= {"steps": 12, "checkpoint_every": 4}
    small_config["rl"] |= {"steps": 5, "steps_per_segment": 5, "checkpoint_every": 2, "log_samples": 100}
    small_config["data"]["heldout"] = None
    return small_config


def test_a_stage_that_is_asked_to_leave_keeps_a_checkpoint_and_goes_on_to_the_same_bits(
    config: dict[str, Any], undisturbed: Callable[[dict[str, Any]], tuple[Plan, LocalStore]], tmp_path: Path
) -> None:
    """Asked before every step: each attempt takes one, and the next goes on behind it."""
    config["sft"]["checkpoint_every"] = config["rl"]["checkpoint_every"] = 100
    stages, whole = undisturbed(config)
    store, leave = LocalStore(tmp_path / "store"), tmp_path / "leave"
    make(stages.tokenize, store)
    assert stages.sft is not None
    for stage, steps in ((stages.sft, 12), (stages.rl[0], 5)):
        leave.touch()
        for step in range(1, steps):
            with pytest.raises(AskedToLeave, match=f"a checkpoint of step {step} is kept"):
                make(stage, store, leave)
        make(stage, store, leave)
        assert content(store, stage) == content(whole, stage)


TWICE = """
from rollouts_core.environments.environment import Functions
from rollouts_core.types.episode import Replied
from rollouts_core.environments.shipped.questions import questions
from rollouts_core.types import Message

def twice():
    def reply(message, state):
        return Replied((Message("user", "+1="),)) if state.turn_idx == 1 else Replied()

    return Functions(questions().messages, reply=reply)
"""


@pytest.fixture
def asking_twice(config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """RL on episodes of two turns."""
    (tmp_path / "twice.py").write_text(TWICE)
    config["environment"] = {"name": f"{tmp_path}/twice.py:twice"}
    config["data"]["max_length"] = 24
    config["rl"] |= {"max_new_tokens": 8}
    return config


@pytest.fixture
def preferring(config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """With DPO instead of RL: right sums above wrong ones."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b:02d}", "rejected": f"{a}{b}"} for a in range(1, 9) for b in (3, 5)
    ]
    (tmp_path / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"]["preferences"] = {"kind": "jsonl", "path": str(tmp_path / "preferences.jsonl")}
    config["dpo"] = {"steps": 12, "batch_size": 4, "learning_rate": 0.001, "checkpoint_every": 4, "log_every": 1}
    config["rl"] = None
    return config


def copied(store: LocalStore, stages: list[Stage], target: Path) -> LocalStore:
    """A store that holds only these artifacts, by links."""
    copy = LocalStore(target)
    for stage in stages:
        source = store.home / "artifacts" / stage.artifact.directory
        for path in source.rglob("*"):
            place = target / "artifacts" / stage.artifact.directory / path.relative_to(source)
            if path.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.hardlink_to(path)
    return copy


@SLOW_BUT_FINE
@given(kills=st.lists(st.integers(1, 110), max_size=4, unique=True))
def test_rl_killed_anywhere_ends_with_the_same_bits_and_every_rollout_is_made_once(
    config: dict[str, Any],
    undisturbed: Callable[[dict[str, Any]], tuple[Plan, LocalStore]],
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[int],
) -> None:
    stages, whole = undisturbed(config)
    (segment,) = stages.rl
    assert stages.sft is not None
    store = copied(whole, [stages.tokenize, stages.sft], tmp_path_factory.mktemp("killed"))
    fate = make_through_kills(segment, store, kills)
    assert content(store, segment) == content(whole, segment)
    assert set(fate.generated.values()) == {1}, "a finished rollout was thrown away, or made twice"
    assert len(fate.generated) == 5 * 4 * 4
    rollouts = read_jsonl(store.open(segment.artifact) / "rollouts.jsonl")
    trained = [(line["step"], line["source_row"]) for line in rollouts][::4]
    assert len({row for _, row in trained}) == len(trained) == 20, "a prompt was skipped or trained on twice"
    metrics = read_jsonl(store.open(segment.artifact) / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kills", [[2], [17, 40, 66], [100]])
def test_episodes_killed_anywhere_end_with_the_same_bits(
    asking_twice: dict[str, Any],
    undisturbed: Callable[[dict[str, Any]], tuple[Plan, LocalStore]],
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[int],
) -> None:
    stages, whole = undisturbed(asking_twice)
    (segment,) = stages.rl
    assert stages.sft is not None
    store = copied(whole, [stages.tokenize, stages.sft], tmp_path_factory.mktemp("killed"))
    fate = make_through_kills(segment, store, kills)
    assert content(store, segment) == content(whole, segment)
    assert set(fate.generated.values()) == {1}
    metrics = read_jsonl(store.open(segment.artifact) / "metrics.jsonl")
    assert max(line["episodes/turns"] for line in metrics) > 1
    assert max(line["sampling/sampling_logp_difference/max"] for line in metrics) < 1e-4


@SLOW_BUT_FINE
@given(kills=st.lists(st.integers(1, 30), max_size=4, unique=True))
def test_sft_killed_anywhere_ends_with_the_same_bits(
    config: dict[str, Any],
    undisturbed: Callable[[dict[str, Any]], tuple[Plan, LocalStore]],
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[int],
) -> None:
    stages, whole = undisturbed(config)
    assert stages.sft is not None
    store = copied(whole, [stages.tokenize], tmp_path_factory.mktemp("killed"))
    make_through_kills(stages.sft, store, kills)
    assert content(store, stages.sft) == content(whole, stages.sft)


@pytest.mark.parametrize("kills", [[1], [3, 9, 14], [10, 20]])
def test_dpo_killed_anywhere_ends_with_the_same_bits(
    preferring: dict[str, Any],
    undisturbed: Callable[[dict[str, Any]], tuple[Plan, LocalStore]],
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[int],
) -> None:
    """A policy resumed in the middle is still compared with the one that DPO began with."""
    stages, whole = undisturbed(preferring)
    assert stages.sft is not None and stages.dpo is not None
    store = copied(whole, [stages.tokenize, stages.sft], tmp_path_factory.mktemp("killed"))
    make_through_kills(stages.dpo, store, kills)
    assert content(store, stages.dpo) == content(whole, stages.dpo)
    metrics = read_jsonl(store.open(stages.dpo.artifact) / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize("shard", [1, 4, 9, 15])
def test_tokenization_goes_on_behind_the_finished_shards(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    monkeypatch.setattr(tokenize_stage, "SHARD_ROWS", 7)
    stage = plan(from_data(config)).tokenize
    whole, store = LocalStore(tmp_path / "whole"), LocalStore(tmp_path / "killed")
    make(stage, whole)
    write, written = tokenized.write_table, []

    def writing(table: Any, path: Path) -> None:
        if len(written) == shard:
            written.append("killed")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".unfinished").write_bytes(b"half")
            raise Killed
        written.append(f"{path.parent.name}/{path.name}")
        write(table, path)

    monkeypatch.setattr(tokenize_stage, "write_table", writing)
    with pytest.raises(Killed):
        make(stage, store)
    make(stage, store)
    assert len(set(written)) == len(written) == 16 + 1, "eight shards of each source, each written once"
    assert content(store, stage) == content(whole, stage)


def test_what_is_wrong_with_all_sources_is_told_together(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{\n{"messages": []}\n')
    (tmp_path / "p.parquet").write_text("no table")
    (tmp_path / "h.jsonl").write_text("[]\n")
    kinds = {"demonstrations": "jsonl", "prompts": "parquet", "heldout": "jsonl"}
    config["data"] |= {
        role: {"kind": kind, "path": str(tmp_path / f"{role[0]}.{kind}")} for role, kind in kinds.items()
    }
    with pytest.raises(BadInput) as caught:
        make(plan(from_data(config)).tokenize, LocalStore(tmp_path / "store"))
    expected = ("d.jsonl:1: not valid", "d.jsonl:2: no list", "h.jsonl:1: a list", "p.parquet: not a readable")
    assert len(caught.value.problems) == len(expected)
    assert all(words in problem for words, problem in zip(expected, caught.value.problems, strict=True))


def test_parts_are_taken_over_and_what_lacks_is_made(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, one, or none: the same artifact."""
    monkeypatch.setattr(tokenize_stage, "SHARD_ROWS", 7)
    config["data"]["tokenization"] = {"parts": 3}
    stage = plan(from_data(config)).tokenize
    tokenizer, parts = parts_of(stage)
    stores = [LocalStore(tmp_path / str(made)) for made in range(3)]
    for store, made in zip(stores, ([], [tokenizer, parts[1]], [tokenizer, *parts]), strict=True):
        for part in made:
            make(part, store)
        make(stage, store)
    assert [content(store, stage) for store in stores] == [content(stores[0], stage)] * 3
    shards = [[path.name for path in stores[2].open(part.artifact).rglob("*.parquet")] for part in parts]
    assert sum(map(len, shards)) == 16 and all(shards)


def test_the_position_in_prompts_is_not_the_count_of_tries(config: dict[str, Any], tmp_path: Path) -> None:
    """A step that was killed while it generated takes the same prompts again, not the next ones."""
    stages, store = plan(from_data(config)), LocalStore(tmp_path)
    assert stages.sft is not None
    for stage in (stages.tokenize, stages.sft):
        make(stage, store)
    make_through_kills(stages.rl[0], store, [3, 5, 7, 9])
    rows = [line["source_row"] for line in read_jsonl(store.open(stages.rl[0].artifact) / "rollouts.jsonl")]
    assert max(Counter(rows).values()) == 4


def test_a_line_half_written_at_the_kill_is_made_again_and_the_others_kept(tmp_path: Path) -> None:
    completion = Completion("5/0/0", (1, 2), (-0.1, -1 / 3), (7, 7), "stop")
    journal = RolloutJournal(tmp_path)
    journal.note(5, completion)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + b'{"step": 5, "request_id": "5/0/')
    again = RolloutJournal(tmp_path)
    assert again.finished(5, weight_version=7) == {"5/0/0": completion}
    assert again.finished(5, weight_version=8) == {}
    again.note(5, Completion("5/0/1", (3,), (-0.5,), (7,), "length"))
    assert set(RolloutJournal(tmp_path).finished(5, 7)) == {"5/0/0", "5/0/1"}
    again.forget(4)
    assert again.finished(5, 7)
    again.forget(5)
    assert not any(tmp_path.iterdir())
