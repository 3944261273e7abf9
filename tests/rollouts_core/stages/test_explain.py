"""What a plan says: why a stage is to run, and when cached work was made by other code."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config.loading import from_data
from rollouts_core.stages.explain import Explanation, explain, explain_stage
from rollouts_core.stages.plan import plan
from rollouts_core.stages.stage import VERSIONS, Stage, canonical_spec
from rollouts_core.store.fingerprint import ROOT, WITHOUT_RESULTS, changed_code, code_fingerprint
from rollouts_core.store.local import LocalStore
from rollouts_core.store.maker import making
from rollouts_core.store.manifest import Provenance

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def store(small_config: dict[str, Any], tmp_path: Path) -> LocalStore:
    """The store after the small config has run; its artifacts hold nothing but their provenance."""
    store = LocalStore(tmp_path / "store")
    for stage in plan(from_data(small_config)).stages:
        publish(store, stage)
    return store


def publish(store: LocalStore, stage: Stage) -> None:
    provenance = Provenance(
        version=stage.version,
        spec=canonical_spec(stage),
        inputs={role: artifact.key for role, artifact in stage.inputs.items()},
        external={role: external.identity for role, external in stage.external.items()},
        code=dict(code_fingerprint(stage.module)),
        git_commit=None,
        libraries={},
        host={},
        started_at="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        summary={},
    )
    with making(store, stage.artifact, 5) as place:
        assert place is not None
        place.publish(provenance)


def explained(config: dict[str, Any], store: LocalStore) -> dict[str, Explanation]:
    return {
        explanation.stage: explanation
        for explanation in explain(plan(from_data(config)), store, from_data(config).machine)
    }


def test_unchanged_everything_is_cached_and_nothing_is_to_be_said(
    small_config: dict[str, Any], store: LocalStore
) -> None:
    for explanation in explained(small_config, store).values():
        assert (explanation.state, explanation.lines()) == ("cached", [])


def test_in_an_empty_store_the_first_stage_says_so_and_the_others_whom_they_follow(
    small_config: dict[str, Any], tmp_path: Path
) -> None:
    found = explained(small_config, LocalStore(tmp_path / "empty"))
    assert {name: explanation.lines() for name, explanation in found.items()} == {
        "tokenize": ["no artifact of this kind is in the store"],
        "sft": ["follows tokenize"],
        "rl-1": ["follows sft"],
        "rl-2": ["follows rl-1"],
        "evaluate-base": ["follows tokenize"],
        "evaluate-sft": ["follows sft"],
        "evaluate-rl": ["follows rl-2"],
    }


def test_a_stage_is_not_explained_by_what_its_own_run_has_made(small_config: dict[str, Any], tmp_path: Path) -> None:
    """Of a first run that stopped behind its first segment."""
    store = LocalStore(tmp_path)
    stages = plan(from_data(small_config)).stages
    for stage in stages:
        if stage.name in ("tokenize", "sft", "rl-1", "evaluate-base"):
            publish(store, stage)
    found = explained(small_config, store)
    assert {name: e.lines() for name, e in found.items() if e.state == "to run"} == {
        "rl-2": ["follows rl-1"],
        "evaluate-sft": ["follows sft"],
        "evaluate-rl": ["follows rl-2"],
    }
    own = {stage.artifact.key: stage.name for stage in stages}
    (segment,) = (stage for stage in stages if stage.name == "rl-2")
    assert explain_stage(segment, store, own, own).lines() == ["follows rl-1"]


def test_code_that_cannot_change_a_result_is_not_reported(small_config: dict[str, Any], tmp_path: Path) -> None:
    store, stages = LocalStore(tmp_path), plan(from_data(small_config))
    assert stages.sft is not None
    publish(store, stages.sft)
    for changed, told in (
        ("rollouts_core/store/local.py", ()),
        ("rollouts_core/metrics/loggers.py", ()),
        ("rollouts_core/config/training.py", ()),
        ("rollouts_core/training/losses.py", ("rollouts_core/training/losses.py",)),
        ("rollouts_core/data/packing.py", ("rollouts_core/data/packing.py",)),
    ):
        made = store.manifest(stages.sft.artifact)
        assert changed in made.provenance.code
        assert changed_code({**made.provenance.code, changed: "0" * 16}, made.provenance.code) == told
    for path in WITHOUT_RESULTS:
        assert (ROOT.parent / path).exists()


def test_a_changed_field_is_named_with_its_old_and_new_value(small_config: dict[str, Any], store: LocalStore) -> None:
    small_config["sft"]["learning_rate"] = 0.004
    found = explained(small_config, store)
    (difference,) = found["sft"].because
    assert (difference.name, difference.old, difference.new) == ("sft.learning_rate", 0.003, 0.004)
    assert found["tokenize"].state == found["evaluate-base"].state == "cached"
    assert found["rl-1"].lines() == ["follows sft"]
    lines = [line for told in found.values() for line in told.lines()]
    assert len(lines) == len([told for told in found.values() if told.state == "to run"])


@pytest.mark.parametrize(
    ("change", "stage", "name"),
    [
        (lambda c: c["data"].update(max_length=14), "tokenize", "data.max_length"),
        (lambda c: c["model"].update(tokenizer="byte_bpe"), "tokenize", "model.tokenizer.kind"),
        (lambda c: c["model"].update(layers=2), "sft", "model.layers"),
        (lambda c: c["rl"].update(entropy_coef=0.3), "rl-1", "rl.entropy_coef"),
        (lambda c: c["rl"].update(algorithm={"kind": "grpo", "clip_high": 0.3}), "rl-1", "rl.algorithm.clip_high"),
        (lambda c: c["evaluation"].update(limit=3), "evaluate-rl", "evaluation.limit"),
    ],
)
def test_fields_are_called_as_in_the_config(
    small_config: dict[str, Any], store: LocalStore, change: Change, stage: str, name: str
) -> None:
    change(small_config)
    assert name in [difference.name for difference in explained(small_config, store)[stage].because]


def test_a_log_interval_changes_nothing(small_config: dict[str, Any], store: LocalStore) -> None:
    small_config["sft"]["log_every"] = 3
    assert {explanation.state for explanation in explained(small_config, store).values()} == {"cached"}


def test_a_changed_line_names_the_file(small_config: dict[str, Any], store: LocalStore, tmp_path: Path) -> None:
    changed = tmp_path / "prompts.jsonl"
    lines = Path(small_config["data"]["prompts"]["path"]).read_text().splitlines()
    changed.write_text("\n".join([*lines, lines[0]]) + "\n")
    small_config["data"]["prompts"]["path"] = str(changed)
    (difference,) = explained(small_config, store)["tokenize"].because
    assert difference.cause == "external"
    assert str(changed) in difference.name
    assert str(difference.old) != str(difference.new)


def test_a_stage_version_is_a_reason(
    small_config: dict[str, Any], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts_core.stages.plan.VERSIONS", {**VERSIONS, "sft": 7})
    (difference,) = explained(small_config, store)["sft"].because
    assert str(difference) == f"stage version: {VERSIONS['sft']} -> 7"


def test_cached_work_of_other_code_names_the_files_and_is_used(small_config: dict[str, Any], tmp_path: Path) -> None:
    store, stages = LocalStore(tmp_path), plan(from_data(small_config))
    assert stages.sft is not None
    publish(store, stages.sft)
    made = store.manifest(stages.sft.artifact)
    older = {**made.provenance.code, "rollouts_core/training/losses.py": "0" * 16, "rollouts_core/gone.py": "1" * 16}
    store.discard(stages.sft.artifact)
    with making(store, stages.sft.artifact, 5) as place:
        assert place is not None
        place.publish(replace(made.provenance, code=older))
    found = explained(small_config, store)["sft"]
    assert found.state == "cached"
    assert found.changed_code == ("rollouts_core/gone.py", "rollouts_core/training/losses.py")
    assert "--refresh sft" in "\n".join(found.lines())


def test_the_nearest_artifact_is_the_one_with_the_fewest_differences(
    small_config: dict[str, Any], store: LocalStore
) -> None:
    small_config["sft"] |= {"learning_rate": 0.004, "weight_decay": 0.1}
    near = plan(from_data(small_config)).sft
    assert near is not None
    publish(store, near)
    small_config["sft"]["weight_decay"] = 0.2
    found = explained(small_config, store)["sft"]
    assert found.nearest == near.artifact.directory
    assert [difference.name for difference in found.because] == ["sft.weight_decay"]
