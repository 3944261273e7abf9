"use strict";
// The list of runs: filtered by what is typed, two of them side by side. ROWS is in the page.

const chosen = [];
const body = document.getElementById("runs"), beside = document.getElementById("beside");
const filter = document.getElementById("filter");

function element(tag, text, classes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function time(seconds) {
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function path(values, low, high, width, height) {
  const across = width / Math.max(1, values.length - 1), room = high - low || 1;
  const up = (value) => high === low ? height / 2 : height - 2 - (height - 4) * (value - low) / room;
  return values.map((value, place) => `${place ? "L" : "M"}${(place * across).toFixed(1)} ${up(value).toFixed(1)}`).join("");
}

function drawing(curves, width, height) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const all = curves.flatMap((curve) => curve.values);
  const low = Math.min(...all), high = Math.max(...all);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("preserveAspectRatio", "none");
  for (const curve of curves) {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("d", path(curve.values, low, high, width, height));
    line.setAttribute("fill", "none");
    line.setAttribute("stroke", `var(--${curve.colour})`);
    line.setAttribute("stroke-width", "1.6");
    line.setAttribute("vector-effect", "non-scaling-stroke");
    svg.append(line);
  }
  return svg;
}

function row(run) {
  const made = element("tr");
  const box = element("input");
  box.type = "checkbox";
  box.setAttribute("aria-label", `compare ${run.id}`);
  box.checked = chosen.includes(run);
  made.classList.toggle("chosen", box.checked);
  box.addEventListener("change", () => { choose(run); });
  const name = element("td");
  const link = element(run.page ? "a" : "span", run.id);
  if (run.page) link.href = `${encodeURIComponent(run.id)}/report.html`;
  name.append(link);
  const state = element("td");
  state.append(element("span", run.state, `state ${run.state}`));
  if (run.stage) state.append(element("span", ` ${run.stage}`, "faint"));
  const curve = element("td");
  if (run.values.length) {
    curve.append(drawing([{ values: run.values, colour: "c0" }], 140, 26));
    curve.title = `${run.curve}: ${run.values[0].toPrecision(3)} to ${run.values[run.values.length - 1].toPrecision(3)}`;
  }
  const accuracy = run.accuracies.map(([point, share]) => `${point} ${share}`).join(", ");
  const first = element("td");
  first.append(box);
  made.append(first, name, state, element("td", run.started), element("td", time(run.seconds), "number"),
    element("td", accuracy), curve);
  return made;
}

function choose(run) {
  if (chosen.includes(run)) chosen.splice(chosen.indexOf(run), 1);
  else chosen.push(run);
  if (chosen.length > 2) chosen.shift();
  draw();
}

function compare() {
  beside.hidden = chosen.length < 2;
  if (beside.hidden) return;
  const [one, other] = chosen;
  const title = element("p");
  title.append(element("b", one.id, "first"), " beside ", element("b", other.id, "second"));
  const table = element("table");
  const points = [...new Set([...one.accuracies, ...other.accuracies].map(([point]) => point))];
  for (const point of points) {
    const line = element("tr");
    line.append(element("td", point));
    for (const run of chosen) {
      const found = run.accuracies.find(([name]) => name === point);
      line.append(element("td", found ? `${found[1]} (${found[2]})` : "", "number"));
    }
    table.append(line);
  }
  const curves = [[one, "c0"], [other, "c1"]].filter(([run]) => run.values.length && run.curve === one.curve)
    .map(([run, colour]) => ({ values: run.values, colour }));
  const parts = [title, table];
  if (curves.length) parts.push(element("p", one.curve, "faint"), drawing(curves, 600, 180));
  const hint = element("p", "All of both: ", "faint");
  hint.append(element("code", `rollouts report ${one.id} --against ${other.id}`));
  beside.replaceChildren(...parts, hint);
}

function draw() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const told = (run) => `${run.id} ${run.name} ${run.state}`.toLowerCase();
  body.replaceChildren(...ROWS.filter((run) => words.every((word) => told(run).includes(word))).map(row));
  compare();
}

filter.addEventListener("input", draw);
draw();
if (location.protocol !== "file:" && ROWS.some((run) => run.state === "Running")) {
  setTimeout(() => { if (!chosen.length && !filter.value) location.reload(); }, 10000);
}
