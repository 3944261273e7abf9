"""Inputs from outside, as trees: the places of the files of a stage's externals on a host.

Decision: they are named by their content. So the same file is sent once, and a host's job never reads a file that
somebody has edited there.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from infra.host.trees import Entry, tree_name
from infra.transfer.library import tree_of
from rollouts_core.stages.stage import Stage
from rollouts_core.store.identity import External, is_url


@dataclass(frozen=True)
class InputTree:
    """A file or directory from outside the store."""

    name: str
    root: Path
    entries: tuple[Entry, ...]
    inside: str
    """The part of the tree that is the input: a file's name; empty for a directory."""

    def path(self, inputs: str) -> str:
        """The path of the input in the directory `inputs` of all inputs."""
        return f"{inputs}/{self.name}/{self.inside}".rstrip("/")


def input_trees(external: External) -> list[InputTree]:
    """The trees of everything local that the external names."""
    return [_tree(Path(place)) for place in external.content if not is_url(place)]


def placed(stage: Stage, inputs: str) -> Stage:
    """The stage with the locations of its externals on a host, whose inputs are below `inputs`."""
    return replace(stage, external={role: _placed(external, inputs) for role, external in stage.external.items()})


def _placed(external: External, inputs: str) -> External:
    if not external.content or any(is_url(place) for place in external.content):
        return external
    moved: Mapping[str, str] = {place: _tree(Path(place)).path(inputs) for place in external.content}
    content = tuple(moved.values())
    if len(content) > 1:
        return replace(external, location=os.pathsep.join(content), content=content)
    place, target = next(iter(moved.items()))
    if external.location == place:
        return replace(external, location=target, content=content)
    function = external.location.rpartition(":")[2]
    return replace(external, location=f"{target}:{function}", content=content)


def tree_of_files(root: Path, files: Iterable[Path]) -> InputTree:
    """The input tree of some files below a directory."""
    entries = tree_of(root, sorted(files))
    return InputTree(tree_name(entries), root, tuple(entries), "")


def _tree(path: Path) -> InputTree:
    if path.is_file():
        return replace(tree_of_files(path.parent, [path]), inside=path.name)
    return tree_of_files(path, (file for file in path.rglob("*") if file.is_file()))
