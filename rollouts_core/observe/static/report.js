"use strict";
// Draws the page's charts, again whenever their width or the colour scheme changes.
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];
const charts = JSON.parse(document.getElementById("charts").textContent);
const cards = charts.map((chart) => {
  const card = document.createElement("div");
  card.className = "card";
  const title = document.createElement("h3");
  title.textContent = chart.title;
  card.append(title);
  document.getElementById("plots").append(card);
  return { chart, card, width: 0, plot: null };
});

// A custom property keeps its light-dark() unresolved; a real property does not.
function resolved(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function shown(value) {
  if (value == null) return "";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
}

function aligned(curves) {
  return uPlot.join(curves.map((curve) => [curve.steps, curve.values]));
}

function draw(entry) {
  const { chart, card } = entry;
  const width = card.clientWidth - 28;
  if (width <= 0) return;
  if (entry.plot) entry.plot.destroy();
  const ink = resolved("--faint"), line = resolved("--line");
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const named = [...new Set(chart.curves.map((curve) => curve.name))];
  const series = chart.curves.map((curve) => ({
    label: curve.name + (curve.other ? " (other)" : ""),
    stroke: resolved(`--c${named.indexOf(curve.name) % 8}`),
    width: 1.6, dash: curve.other ? [5, 4] : undefined, spanGaps: true,
    points: { show: curve.steps.length < 3 }, value: (_, value) => shown(value),
  }));
  entry.plot = new uPlot({
    width, height: 190, series: [{ label: "step" }, ...series],
    scales: { x: { time: false }, y: chart.log_y ? { distr: 3 } : { range: around } },
    axes: [
      { ...axis, size: 28, incrs: STEPS },
      { ...axis, size: 52, values: (_, ticks) => ticks.map(shown) },
    ],
    cursor: { y: false, drag: { x: true, y: false } },
  }, aligned(chart.curves), card);
  entry.width = width;
}

// A curve that does not change stands in the middle; the library's own range for one of zeros goes up to 100.
function around(plot, low, high) {
  if (low == null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const room = Math.abs(low) / 10 || 1;
  return [low - room, high + room];
}

const redraw = () => cards.forEach(draw);
new ResizeObserver(() => cards.forEach((entry) => { if (entry.card.clientWidth - 28 !== entry.width) draw(entry); }))
  .observe(document.getElementById("plots"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
