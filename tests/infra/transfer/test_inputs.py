"""Outside inputs on a host: found by content, whatever they are."""

import os
from pathlib import Path

from infra.transfer.inputs import input_trees, placed
from rollouts_core.stages.specs import EvaluateSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.store.identity import External

PLACE = "/host/inputs"


def stage(external: External) -> Stage:
    spec = EvaluateSpec.__new__(EvaluateSpec)
    return Stage("evaluate-rl", "evaluate", 1, spec, {}, {"it": external})


def moved(external: External) -> External:
    return placed(stage(external), PLACE).external["it"]


def test_a_file_a_function_in_a_file_and_a_function_of_a_module(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def score(sample): return 1.0\n")
    (tree,) = input_trees(External({}, str(file), (str(file),)))
    target = f"{PLACE}/{tree.name}/reward.py"
    assert tree.path(PLACE) == target
    identity = {"sha256": "x"}
    assert moved(External(identity, str(file), (str(file),))) == External(identity, target, (target,))
    assert moved(External(identity, f"{file}:score", (str(file),))).location == f"{target}:score"
    assert moved(External(identity, "package.reward:score", (str(file),))).location == f"{target}:score"


def test_a_directory_and_several_files(tmp_path: Path) -> None:
    for name in ("a", "b", "deeper/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tree,) = input_trees(External({}, str(tmp_path), (str(tmp_path),)))
    assert [path for path, _, _ in tree.entries] == ["a", "b", "deeper/c"]
    assert moved(External({}, str(tmp_path), (str(tmp_path),))).location == f"{PLACE}/{tree.name}"
    files = (str(tmp_path / "a"), str(tmp_path / "b"))
    several = moved(External({}, os.pathsep.join(files), files))
    assert several.location == os.pathsep.join(several.content)
    assert [Path(place).name for place in several.content] == ["a", "b"]


def test_what_is_no_file_here_stays_as_it_is() -> None:
    for external in (External({"commit": "c"}, "org/model"), External({"shipped": "exact_match"}, "exact_match")):
        assert input_trees(external) == []
        assert moved(external) == external
    url = External({"checksum": "c"}, "s3://bucket/file", ("s3://bucket/file",))
    assert input_trees(url) == []
    assert moved(url) == url
