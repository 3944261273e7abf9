"""Charts as a picture, for pages that cannot draw them."""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rollouts_core.observe.charts import Chart

INK, GRID, PAPER = "#374151", "#e5e7eb", "#ffffff"
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#6b7280")
COLUMNS = 2


def picture_of(charts: Sequence[Chart]) -> bytes:
    """A PNG of all charts, two beside each other. Raises ValueError when there are none."""
    if not charts:
        raise ValueError("there is nothing to draw")
    columns = min(COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(4.4 * columns, 2.4 * rows), layout="constrained", facecolor=PAPER)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for chart, axes in zip(charts, grid, strict=False):
        _draw(chart, axes)
    for axes in list(grid)[len(charts) :]:
        axes.set_axis_off()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=90)
    return picture.getvalue()


def _draw(chart: Chart, axes: Axes) -> None:
    for number, curve in enumerate(chart.curves):
        again, colour = divmod(number, len(COLOURS))
        axes.plot(curve.steps, curve.values, label=curve.name, color=COLOURS[colour], ls="--" if again else "-", lw=1.4)
    if chart.log_y:
        axes.set_yscale("log")
    if len(chart.curves) > 1:
        axes.legend(frameon=False, fontsize=7, labelcolor=INK)
    axes.set_title(chart.title, fontsize=9, color=INK, loc="left", fontweight="bold")
    axes.tick_params(labelsize=7, colors=INK, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
