"""What a result was made with: library versions, and a fingerprint of the code behind a stage, the modules of this
library that its module imports, directly or not.

Comments, docstrings and formatting do not count: each file is hashed as its syntax tree.
"""

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rollouts_core.store.digests import recalled, remember

PACKAGE = "rollouts_core"
COMMIT_VARIABLE = "ROLLOUTS_COMMIT"
SYNTAX = f"syntax of Python {sys.version_info[0]}.{sys.version_info[1]}"
"""Digests of syntax trees differ between versions of Python."""
ROOT = Path(__file__).parent.parent
WITHOUT_RESULTS = tuple(
    f"{PACKAGE}/{path}"
    for path in (
        "config/", "metrics/", "observe/", "store/", "concurrency.py", "errors.py", "loopback.py", "memory.py",
        "inference/http.py", "inference/replicas.py", "rollout/journal.py", "rollout/records.py", "stages/stage.py",
        "stages/workload.py", "stages/workspace.py", "training/flops.py",
    )
)  # fmt: skip
"""Code that moves bytes, counts and prints. What a config says enters keys, so code that reads configs is among it."""


def code_fingerprint(module: str) -> dict[str, str]:
    """Relative source path to digest, for the module and all library modules it reaches by import."""
    found: dict[str, str] = {}
    pending = [module]
    while pending:
        path = _source(pending.pop())
        if path is None or (name := path.relative_to(ROOT.parent).as_posix()) in found:
            continue
        found[name], imports = _read(path)
        pending += imports
    _remember_read()
    return dict(sorted(found.items()))


def changed_code(made_with: Mapping[str, str], today: Mapping[str, str]) -> tuple[str, ...]:
    """The files that differ between two fingerprints, those apart that can't change a result."""
    return tuple(
        path for path in sorted({*made_with, *today})
        if made_with.get(path) != today.get(path) and not path.startswith(WITHOUT_RESULTS)
    )  # fmt: skip


def source_digest(module: str) -> str:
    """The digest of one library module, without what it imports."""
    path = _source(module)
    assert path is not None, f"{module} is a module of this library"
    return _read(path)[0]


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of the distributions among `names` that are installed; importing none of them."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def git_commit() -> str | None:
    """The commit of this code, with + for uncommitted changes; None outside a checkout.

    Where the code was sent to a machine, the variable ROLLOUTS_COMMIT says it.
    """
    if sent := os.environ.get(COMMIT_VARIABLE):
        return sent
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"],
            cwd=here, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()


@cache
def _read(path: Path) -> tuple[str, tuple[str, ...]]:
    """Digest and imports; parsed once for each content, since that takes a second for a stage's files."""
    content = path.read_bytes()
    name = hashlib.sha256(content).hexdigest()
    if name not in _known():
        digest, imports = _parsed(content)
        _known()[name] = json.dumps([digest, imports])
        _new.append(name)
    digest, imports = json.loads(_known()[name])
    return digest, tuple(imports)


_new: list[str] = []
"""Contents that were parsed and are not remembered yet."""


def _remember_read() -> None:
    if _new:
        remember(SYNTAX, {name: _known()[name] for name in _new})
        _new.clear()


@cache
def _known() -> dict[str, str]:
    return recalled(SYNTAX)


def _parsed(content: bytes) -> tuple[str, tuple[str, ...]]:
    tree = ast.parse(content)
    imports: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    digest = hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
    return digest, tuple(name for name in imports if name.split(".")[0] == PACKAGE)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _source(module: str) -> Path | None:
    base = ROOT.parent.joinpath(*module.split("."))
    if base.is_dir():
        return base / "__init__.py"
    return base.with_suffix(".py") if base.with_suffix(".py").is_file() else None
