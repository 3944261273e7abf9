"""The page of a config's data: one self-contained HTML file."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from rollouts_core.observe.assets import asset
from rollouts_core.stages.preview import SourcePreview


def write_data_page(name: str, sources: Sequence[SourcePreview], path: Path) -> Path:
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = templates.get_template("data.html.j2").render(name=name, sources=sources, theme=Markup(asset("theme.css")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path
