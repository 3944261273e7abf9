"""What the servers of each engine are installed from, with GPUs and without."""

from importlib import import_module
from pathlib import Path

from infra.python_envs.engine import Packages

STANDINS = Path(__file__).parent / "standins"


def packages_of(kind: str, on_gpu: bool) -> Packages:
    """On a GPU the engine's own packages; without one a complete list of pins, and modules that stand in for what only
    a GPU build has."""
    engine = import_module(f"infra.servers.{kind}")
    if on_gpu:
        return Packages(engine.PACKAGES, engine.CHECK)
    pins = tuple((STANDINS / f"{kind}-cpu.txt").read_text().split())
    modules = {name: (STANDINS / name).read_text() for name in engine.MODULES}
    return Packages(pins, engine.CHECK, no_deps=True, files=modules)
