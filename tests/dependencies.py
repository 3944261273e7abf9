"""What the project needs, directly or not: `python -m tests.dependencies` writes docs/dependencies.md.

Versions and licences are those of the packages that are installed, which are the ones of constraints.txt.
"""

import re
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dependencies.md"
US = "rollouts"
HEAD = """# Dependencies and their licences

Every package that rollouts and its extras need, directly or not, as `constraints.txt` pins it. *Needed by* names
rollouts, or up to three packages that need it. `python -m tests.dependencies` writes this page from the installed
packages.

Nearly all licences are permissive. The others: paramiko is LGPL-2.1. certifi, hypothesis, orjson, pathspec, shtab
and tqdm are MPL-2.0, some of them in part. text-unidecode may be used under the Artistic License. All are used as they
are published. [Security](security.md#dependencies) says which were looked at for known vulnerabilities.

| package | version | licence | needed by |
|---|---|---|---|
"""


def main() -> int:
    PAGE.write_text(page())
    return 0


def page() -> str:
    """The whole page."""
    versions, users = pins(), wanted()
    rows = [
        f"| {name} | {version.partition('+')[0]} | {licence(name)} | {', '.join(_first(users[name]))} |"
        for name, version in sorted(versions.items())
        if name in users
    ]
    return HEAD + "\n".join(rows) + "\n"


def pins() -> dict[str, str]:
    """Version of each package in constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted() -> dict[str, set[str]]:
    """Everything that the project and its extras need here, as far as it is installed, and by whom."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    lines = (*project["dependencies"], *(line for extra in extras for line in extra))
    pending = [(Requirement(line), US) for line in lines]
    seen: set[tuple[str, frozenset[str]]] = set()
    users: dict[str, set[str]] = defaultdict(set)
    while pending:
        need, user = pending.pop()
        name = normal(need.name)
        try:
            further = [Requirement(line) for line in distribution(need.name).requires or ()]
        except PackageNotFoundError:
            continue
        users[name].add(user)
        if (name, frozenset(need.extras)) in seen:
            continue
        seen.add((name, frozenset(need.extras)))
        pending += [
            (one, name)
            for one in further
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *need.extras))
        ]
    return users


def licence(name: str) -> str:
    """As the package says: an SPDX expression, else its classifiers, else the first line of its text."""
    told = distribution(name).metadata
    classifiers = [
        line.rpartition(" :: ")[2] for line in told.get_all("Classifier") or () if line.startswith("License")
    ]
    lines = (told.get("License") or "").strip().splitlines()
    return told.get("License-Expression") or "; ".join(classifiers) or (lines[0][:60] if lines else "none is told")


def _first(users: set[str]) -> list[str]:
    found = sorted(users, key=lambda user: (user != US, user))
    return found[:1] if found[0] == US else found[:3]


if __name__ == "__main__":
    sys.exit(main())
