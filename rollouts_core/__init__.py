"""Post-training of language models: data, rollouts, rewards, training, evaluation. Knows neither Prefect nor SSH.

    import rollouts_core as rc

Decision: the public names are listed once, in the stub beside this file, where type checkers and editors read them too.
A name is imported when it is first used. So importing this package costs nothing, and torch is imported only when it is
needed.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_public())
    if name not in _public():
        raise AttributeError(f"rollouts_core has no public {name!r}; dir(rollouts_core) lists what it has")
    value = getattr(import_module(_public()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_public())


@cache
def _public() -> dict[str, str]:
    """Name to module, as the stub imports them."""
    import ast

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: line.module or "" for line in imports for alias in line.names}
