"""gc, pins, refresh, lineage and comparison over a store with some runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.config.loading import from_data
from rollouts_core.errors import BadInput, StoreError
from rollouts_core.housekeeping.compare import compare_runs
from rollouts_core.housekeeping.find import find_manifest
from rollouts_core.housekeeping.gc import collect_garbage, kept_runs, needed_artifacts
from rollouts_core.housekeeping.lineage import lineage, tree_lines
from rollouts_core.housekeeping.refresh import discard_stages, stages_to_refresh
from rollouts_core.observe import runs
from rollouts_core.observe.run_list import all_runs
from rollouts_core.observe.run_records import RunRecord
from rollouts_core.observe.runs import RunLog, open_run
from rollouts_core.stages.plan import Plan, plan
from rollouts_core.store.maker import making
from rollouts_core.store.manifest import ArtifactId
from rollouts_core.store.pins import pin, unpin
from rollouts_core.store.store import Store, open_store
from tests.rollouts_core.stages.test_explain import publish

Run = tuple[Plan, RunLog]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A local directory, unless a test asks for S3."""
    kind = getattr(request, "param", "local")
    return open_store(tmp_path / "home", request.getfixturevalue("s3_url") if kind == "s3" else None)


@pytest.fixture
def ran(store: Store, small_config: dict[str, Any]) -> Callable[..., Run]:
    """A run of the small config with another SFT learning rate; its artifacts hold only their provenance."""

    def run(rate: float, ended: bool = True) -> Run:
        config = from_data({**small_config, "sft": {**small_config["sft"], "learning_rate": rate}})
        stages = plan(config)
        log = open_run(store, config, [(stage.name, stage.key) for stage in stages.stages], None)
        for stage in stages.stages:
            if not store.has(stage.artifact):
                publish(store, stage)  # type: ignore[arg-type]
        if ended:
            log.end("Completed")
        return stages, log

    return run


def names(stages: Plan) -> set[str]:
    return {stage.artifact.directory for stage in stages.stages}


@pytest.mark.parametrize("store", ["local", "s3"], indirect=True)
def test_gc_keeps_the_last_run_of_a_name_and_what_it_shares(store: Store, ran: Callable[..., Run]) -> None:
    (old, _), (new, _) = ran(0.001), ran(0.002)
    assert collect_garbage(store, None, dry_run=True) == []
    planned = collect_garbage(store, 1, dry_run=True)
    assert {removal.name for removal in planned if removal.kind == "artifact"} == names(old) - names(new)
    assert set(store.directories()) == names(old) | names(new), "a dry run removes nothing"
    assert collect_garbage(store, 1, dry_run=False) == planned
    assert set(store.directories()) == names(new)
    assert collect_garbage(store, 1, dry_run=False) == []


def test_gc_never_takes_what_a_live_run_or_a_pin_needs(store: Store, ran: Callable[..., Run]) -> None:
    (pinned, _), (dropped, _), (live, at_work), (last, _) = ran(0.001), ran(0.002), ran(0.003, ended=False), ran(0.004)
    assert pinned.sft is not None
    pin(store.objects, pinned.rl[-1].artifact.directory, "the good one")
    collect_garbage(store, 1, dry_run=False)
    kept = set(store.directories())
    assert names(live) | names(last) <= kept
    ancestors = [pinned.tokenize, pinned.sft, *pinned.rl]
    assert {stage.artifact.directory for stage in ancestors} <= kept
    assert not (names(dropped) - names(live)) & kept
    at_work.end("Completed")
    assert unpin(store.objects, pinned.rl[-1].artifact.directory)
    collect_garbage(store, 1, dry_run=False)
    assert pinned.sft.artifact.directory not in store.directories()


def test_gc_removes_nothing_where_a_run_s_record_cannot_be_read(store: Store, ran: Callable[..., Run]) -> None:
    _, run = ran(0.001)
    (store.home / "runs" / run.run_id / "run.json").write_text("{")
    with pytest.raises(StoreError, match=f"can't be read: .*{run.run_id}"):
        collect_garbage(store, 1, dry_run=False)


def test_gc_leaves_what_is_being_made_and_takes_what_was_left_behind(store: Store) -> None:
    making_now, left = ArtifactId("sft", "a" * 64), ArtifactId("sft", "b" * 64)
    for kind in ("staging", "work", "damaged"):
        (store.home / kind / f"{left.directory}.1").mkdir(parents=True)
    with making(store, making_now, 5) as place:
        assert place is not None
        removed = {(removal.kind, removal.name) for removal in collect_garbage(store, 0, dry_run=False)}
        assert place.out.is_dir()
        assert place.scratch.is_dir()
    assert removed == {(kind, f"{left.directory}.1") for kind in ("staging", "work", "damaged")}


def test_runs_of_other_machines_are_seen_in_a_shared_store(
    s3_url: str, tmp_path: Path, small_config: dict[str, Any]
) -> None:
    there, here = open_store(tmp_path / "there", s3_url), open_store(tmp_path / "here", s3_url)
    stages = plan(from_data(small_config))
    publish(there, stages.tokenize)  # type: ignore[arg-type]
    open_run(there, from_data(small_config), [("tokenize", stages.tokenize.key)], None)
    collect_garbage(here, 0, dry_run=False)
    assert here.has(stages.tokenize.artifact)


record = st.builds(
    lambda name, number, state: RunRecord(f"{name}-{number}", name, state, f"{number:04}", 1.0, None, ()),
    st.sampled_from(["a", "b"]),
    st.integers(0, 9999),
    st.sampled_from(["Running", "Completed", "Failed", "Lost"]),
)


@given(st.lists(record, unique_by=lambda run: run.run_id), st.integers(0, 4), st.data())
def test_kept_runs(runs: list[RunRecord], keep: int, data: st.DataObject) -> None:
    runs = sorted(runs, key=lambda run: run.started_at, reverse=True)
    pinned = set(data.draw(st.lists(st.sampled_from([run.run_id for run in runs])))) if runs else set()
    kept = kept_runs(runs, keep, pinned)
    for name in ("a", "b"):
        assert [run for run in runs if run.name == name][:keep] == [run for run in kept if run.name == name][:keep]
    assert {run.run_id for run in runs if run.state == "Running"} | pinned <= {run.run_id for run in kept}
    assert kept_runs(runs, None, set()) == runs


def test_refresh_takes_a_stage_and_what_depends_on_it(small_config: dict[str, Any]) -> None:
    stages = plan(from_data(small_config))
    assert [stage.name for stage in stages_to_refresh(stages, ["rl-2"])] == ["rl-2", "evaluate-rl"]
    assert [stage.name for stage in stages_to_refresh(stages, ["evaluate"])] == [e.name for e in stages.evaluate]
    assert stages_to_refresh(stages, ["tokenize"]) == list(stages.stages)
    assert stages_to_refresh(stages, []) == []
    with pytest.raises(BadInput, match="to make again; there are evaluate, evaluate-base"):
        stages_to_refresh(stages, ["rl-9"])


def test_what_is_pinned_or_in_use_is_not_discarded(store: Store, ran: Callable[..., Run]) -> None:
    stages, log = ran(0.001, ended=False)
    assert stages.sft is not None
    with pytest.raises(BadInput, match=f"used by the live run {log.run_id}"):
        discard_stages([stages.sft], store, "another run")
    pin(store.objects, stages.sft.artifact.directory, "")
    with pytest.raises(BadInput, match="is pinned"):
        discard_stages([stages.sft], store, log.run_id)
    unpin(store.objects, stages.sft.artifact.directory)
    discard_stages([stages.sft], store, log.run_id)
    assert not store.has(stages.sft.artifact)


@pytest.mark.parametrize("store", ["local", "s3"], indirect=True)
def test_lineage_leads_back_to_files_runs_and_commits(store: Store, ran: Callable[..., Run]) -> None:
    stages, log = ran(0.001)
    found = lineage(store, stages.rl[-1].artifact.directory)
    assert [parent.role for parent in found.inputs] == ["data", "policy"]
    assert found.runs == [log.run_id]
    text = "\n".join(tree_lines(found))
    for name in (stages.tokenize.artifact.directory, "policy: sft-", "demonstrations:", "sha256"):
        assert name in text
    assert stages.sft is not None
    store.discard(stages.sft.artifact)
    assert "no longer in the store" in "\n".join(tree_lines(lineage(store, stages.rl[0].artifact.key)))


def test_an_artifact_is_found_by_name_key_and_path(store: Store, ran: Callable[..., Run]) -> None:
    stages, _ = ran(0.001)
    artifact = stages.tokenize.artifact
    path = f"somewhere/artifacts/{artifact.directory}/files/tokenizer"
    for name in (artifact.directory, artifact.key, artifact.key[:10], "tokenize", path):
        assert find_manifest(store, name).artifact == artifact
    with pytest.raises(BadInput, match="may be 2 artifacts"):
        find_manifest(store, "rl")
    with pytest.raises(BadInput, match="no artifact nothing"):
        find_manifest(store, "nothing")


def test_two_runs_differ_in_what_was_changed(store: Store, ran: Callable[..., Run]) -> None:
    (_, one), (_, other) = ran(0.001), ran(0.002)
    changes = compare_runs(store, one.run_id, other.run_id)
    assert ("config", "sft.learning_rate", 0.001, 0.002) in [(c.part, c.name, c.one, c.other) for c in changes]
    assert "tokenize" not in [change.name for change in changes]
    assert compare_runs(store, one.run_id, one.run_id) == []


def test_needed_artifacts_follow_inputs(store: Store, ran: Callable[..., Run]) -> None:
    stages, log = ran(0.001)
    log.record = replace(log.record, stages=log.record.stages[-1:])
    log.end("Completed")
    assert {stages.rl[-1].artifact.directory, stages.tokenize.artifact.directory} <= needed_artifacts(store, None)


def test_a_long_run_says_now_and_then_that_it_goes_on(
    store: Store, ran: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, log = ran(0.001, ended=False)
    before = log.record.updated_at
    log.touch()
    assert log.record.updated_at == before
    monkeypatch.setattr(runs, "TOUCH_SECONDS", -1.0)
    log.touch()
    assert log.record.updated_at > before
    assert [run.updated_at for run in all_runs(store)] == [log.record.updated_at]
    log.end("Completed")
