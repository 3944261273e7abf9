"""Scripts and styles that pages are made of: ours, and uPlot, which draws charts (see its licence beside it)."""

from functools import cache
from importlib import resources


@cache
def asset(name: str) -> str:
    return (resources.files("rollouts_core.observe") / "static" / name).read_text()
