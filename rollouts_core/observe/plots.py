"""Curves as SVG text, to stand inside a page."""

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

INK, GRID, COLOURS = "#374151", "#e5e7eb", ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#6b7280")

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def line_plot(title: str, x_label: str, curves: Curves, log_y: bool = False) -> str:
    """Curves by name, each with its x and y values."""
    figure, axes = _figure(title, x_label)
    for number, (name, (x, y)) in enumerate(curves.items()):
        again, colour = divmod(number, len(COLOURS))
        axes.plot(x, y, label=name, color=COLOURS[colour], linestyle="--" if again else "-", linewidth=1.5)
    if log_y:
        axes.set_yscale("log")
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return _svg(figure)


def stacked_plot(title: str, x_label: str, x: Sequence[float], layers: Mapping[str, Sequence[float]]) -> str:
    """Layers that add up, such as the phases of a step."""
    figure, axes = _figure(title, x_label)
    axes.stackplot(x, *layers.values(), labels=list(layers), colors=COLOURS, alpha=0.85, linewidth=0)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=2)
    return _svg(figure)


def interval_plot(title: str, points: Mapping[str, tuple[float, float, float]]) -> str:
    """A share per name, in percent, with the ends of its interval."""
    figure, axes = _figure(title, "")
    values = [point[0] for point in points.values()]
    below = [point[0] - point[1] for point in points.values()]
    above = [point[2] - point[0] for point in points.values()]
    bars = axes.bar(list(points), values, yerr=[below, above], color=COLOURS[0], ecolor=INK, capsize=6, width=0.5)
    axes.bar_label(bars, [f"{value:.1f} %" for value in values], padding=3, fontsize=9, color=INK)
    axes.set_ylim(0, 110)
    return _svg(figure)


def _figure(title: str, x_label: str) -> tuple[Figure, "mpl.axes.Axes"]:
    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, color=INK, loc="left", fontweight="bold")
    axes.set_xlabel(x_label, fontsize=8, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "rollouts"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg[svg.index("<svg") :], count=1)
