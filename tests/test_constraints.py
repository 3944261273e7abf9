"""The pins of constraints.txt are those that are wanted, and all of them."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
OF_EVERY_ENVIRONMENT = {"pip", "setuptools", "wheel"}
OF_CUDA = ("nvidia-", "cuda-", "triton")
"""Pinned by torch itself, where its build is one for GPUs."""


def pins() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted() -> set[str]:
    """Everything that the project and its extras need here, directly or not, as far as it is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    pending = [Requirement(line) for line in (*project["dependencies"], *(line for extra in extras for line in extra))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        need = pending.pop()
        known = (normal(need.name), frozenset(need.extras))
        if known in seen:
            continue
        try:
            further = [Requirement(line) for line in distribution(need.name).requires or ()]
        except PackageNotFoundError:
            continue
        seen.add(known)
        pending += [
            one
            for one in further
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *need.extras))
        ]
    return {name for name, _ in seen}


def test_every_pin_is_wanted_and_every_dependency_is_pinned() -> None:
    pinned = pins()
    if distribution("torch").version.partition("+")[0] != pinned["torch"].partition("+")[0]:
        pytest.skip("other versions than the pinned ones are installed")
    installed = {normal(found.metadata["Name"]) for found in distributions()}
    assert (pinned.keys() & installed) - wanted() == set()
    unpinned = wanted() - pinned.keys() - OF_EVERY_ENVIRONMENT - {"rollouts"}
    assert {name for name in unpinned if not name.startswith(OF_CUDA)} == set()
