"""The packages of each engine's servers, with GPUs and without."""

from importlib import import_module
from pathlib import Path

from infra.python_envs.engine import Packages

STANDINS = Path(__file__).parent / "standins"


def packages_of(kind: str, on_gpu: bool) -> Packages:
    """The packages of an engine. On a GPU these are its own; without one a complete list of pins, and modules that
    stand in for those that only a GPU build has."""
    engine = import_module(f"infra.servers.{kind}")
    if on_gpu:
        return Packages(engine.PACKAGES, engine.CHECK)
    pins = tuple((STANDINS / f"{kind}-cpu.txt").read_text().split())
    modules = {name: (STANDINS / name).read_text() for name in engine.MODULES}
    return Packages(pins, engine.CHECK, no_deps=True, files=modules)
