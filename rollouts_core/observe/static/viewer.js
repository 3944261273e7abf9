"use strict";
// State is what the filters say, which rollout is chosen, and how it is shown; everything on the page follows from it.
const ROW = 52;
const FULL_LOGPROB = 6; // nats at which the colour of an unlikely token is full
const KEPT_CHUNKS = 60;
const FOLLOW_SECONDS = 10;
const get = (id) => document.getElementById(id);
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
const number = (value) => (value == null ? "–" : String(+(+value).toPrecision(4)));
const signed = (value) => (value > 0 ? "+" : "") + number(value);

let INDEX = null, total = 0;
const state = { shown: [], chosen: null, view: "conversation", colour: "logprob", side: false };

// --- rollouts, loaded when they are looked at -----------------------------------------------------------------------
const chunks = new Map(), waiting = new Map();
async function arrived(number, packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { pieces, rollouts } = await new Response(unpacked).json();
  for (const of of rollouts) {
    of.tokens = of.at?.map((place) => pieces[place][0]);
    of.pieces = of.at?.map((place) => pieces[place][1]);
    of.rollout_log_probs = of.rollout_log_probs?.map((thousandths) => thousandths / 1000);
  }
  chunks.set(number, rollouts);
  if (chunks.size > KEPT_CHUNKS) chunks.delete(chunks.keys().next().value);
  waiting.get(number)?.(rollouts);
  waiting.delete(number);
}
function chunk(number, least) {
  if (chunks.get(number)?.length >= least) return Promise.resolve(chunks.get(number));
  return new Promise((resolve, reject) => {
    waiting.set(number, resolve);
    const script = make("script");
    script.src = `data/chunk-${String(number).padStart(5, "0")}.js${INDEX.live ? `?${total}` : ""}`;
    script.onload = () => script.remove();
    script.onerror = () => reject(new Error(`${script.src} is missing`));
    document.head.append(script);
  });
}
async function rollout(place) {
  let low = 0, high = INDEX.chunks.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (INDEX.chunks[middle] <= place) low = middle; else high = middle;
  }
  const at = place - INDEX.chunks[low];
  return (await chunk(low, at + 1))[at];
}

// --- filters --------------------------------------------------------------------------------------------------------
function wanted() {
  const form = new FormData(get("filters"));
  const bound = (name, otherwise) => (form.get(name) === "" ? otherwise : Number(form.get(name)));
  return {
    stepLow: bound("step-low", -Infinity), stepHigh: bound("step-high", Infinity),
    rewardLow: bound("reward-low", -Infinity), rewardHigh: bound("reward-high", Infinity),
    group: bound("group", null), stop: form.get("stop"), calls: form.has("calls"),
    text: form.get("text").toLowerCase(), order: form.get("order"),
  };
}
function fits(place, want) {
  const step = INDEX.step[place], reward = INDEX.reward[place] ?? 0;
  return step >= want.stepLow && step <= want.stepHigh && reward >= want.rewardLow && reward <= want.rewardHigh
    && (want.group === null || INDEX.group[place] === want.group) && (!want.stop || INDEX.stop[place] === want.stop)
    && (!want.calls || INDEX.calls[place] > 0)
    && (!want.text || INDEX.prompt[place].toLowerCase().includes(want.text) || INDEX.answer[place].toLowerCase().includes(want.text));
}
const ORDERS = {
  low: (a, b) => (INDEX.reward[a] ?? 0) - (INDEX.reward[b] ?? 0), high: (a, b) => (INDEX.reward[b] ?? 0) - (INDEX.reward[a] ?? 0),
  long: (a, b) => INDEX.learnt[b] - INDEX.learnt[a],
};
function filter() {
  get("list").scrollTop = 0;
  select();
}
function select() {
  const want = wanted();
  state.shown = [];
  for (let place = 0; place < total; place++) if (fits(place, want)) state.shown.push(place);
  if (ORDERS[want.order]) state.shown.sort(ORDERS[want.order]);
  get("count").textContent = `${state.shown.length.toLocaleString("en")} of ${total.toLocaleString("en")} rollouts`;
  get("space").style.height = `${state.shown.length * ROW}px`;
  drawRows();
  drawChart();
}

// --- the list: only the rows in sight exist -------------------------------------------------------------------------
function drawRows() {
  const list = get("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
  const last = Math.min(state.shown.length, first + Math.ceil(list.clientHeight / ROW) + 8);
  const rows = get("rows");
  rows.style.transform = `translateY(${first * ROW}px)`;
  rows.replaceChildren(...state.shown.slice(first, last).map(row));
}
function row(place) {
  const element = make("div", "row");
  element.setAttribute("role", "option");
  element.setAttribute("aria-selected", place === state.chosen);
  element.dataset.place = place;
  const facts = make("div"), reward = INDEX.reward[place];
  facts.append(make("span", "", `step ${INDEX.step[place]}`));
  if (INDEX.group[place] != null) facts.append(make("span", "faint", `group ${INDEX.group[place]}`));
  facts.append(make("span", "faint", INDEX.stop[place] ?? ""), make("span", "faint", `${INDEX.learnt[place]} tokens`));
  facts.append(make("span", `reward ${reward > 0 ? "right" : "wrong"}`, number(reward)));
  element.append(facts, make("div", "cut", `${INDEX.prompt[place].replaceAll("\n", " ")} → ${INDEX.answer[place].replaceAll("\n", " ")}`));
  return element;
}
function choose(place) {
  state.chosen = place;
  history.replaceState(null, "", `#${place}`);
  const at = state.shown.indexOf(place), list = get("list");
  if (at >= 0 && (at * ROW < list.scrollTop || (at + 1) * ROW > list.scrollTop + list.clientHeight))
    list.scrollTop = at * ROW - list.clientHeight / 2;
  drawRows();
  drawDetail();
}

// --- one rollout, or its group --------------------------------------------------------------------------------------
async function drawDetail() {
  if (state.chosen === null) return;
  const place = state.chosen;
  const places = state.side ? groupOf(place) : [place];
  const rollouts = await Promise.all(places.map(rollout));
  if (state.chosen !== place) return;
  const detail = get("detail");
  detail.className = state.side ? "side" : "";
  const most = Math.max(1e-9, ...rollouts.flatMap((of) => (of.advantages ?? []).map(Math.abs)));
  detail.replaceChildren(...rollouts.map((of, i) => article(of, places[i], most)));
  detail.scrollTop = 0;
  get("key").textContent = state.view === "tokens" ? KEYS[state.colour] : "";
}
function groupOf(place) {
  if (INDEX.group[place] == null) return [place];
  const found = [];
  for (let other = 0; other < total; other++)
    if (INDEX.step[other] === INDEX.step[place] && INDEX.group[other] === INDEX.group[place]) found.push(other);
  return found;
}
function article(of, place, most) {
  const element = make("article");
  const group = of.group == null ? "" : `, group ${of.group}`;
  element.append(make("h2", "", `Step ${of.step}${group}${of.sample == null ? "" : `, sample ${of.sample}`}`));
  const parts = Object.entries(of.rewards ?? {}).map(([name, value]) => `${name} ${number(value)}`);
  const facts = [
    `reward ${number(of.reward)}`, ...parts, INDEX.advantage[place] == null ? "" : `advantage ${signed(INDEX.advantage[place])}`,
    of.answer == null ? "" : `reference ${of.answer}`, of.stop ?? of.status, `${INDEX.learnt[place]} learnt tokens`, versions(of),
  ];
  element.append(make("p", "faint", facts.filter(Boolean).join(" · ")));
  if (state.view === "tokens" && of.pieces) element.append(tokens(of, most));
  else element.append(...(of.messages ?? plain(of)).map(message));
  return element;
}
function versions(of) {
  const all = of.weight_versions ?? [];
  if (!all.length) return "";
  const low = Math.min(...all), high = Math.max(...all);
  return low === high ? `weight version ${low}` : `weight versions ${low} to ${high}`;
}
const plain = (of) => [{ role: "user", content: of.prompt }, { role: "assistant", content: of.response }];
function message(of) {
  const element = make("div", `message ${of.role}`);
  element.append(make("b", "", of.role === "tool" ? `tool result${of.name ? `: ${of.name}` : ""}` : of.role));
  const thought = of.reasoning_content ?? of.reasoning;
  if (thought) element.append(make("div", "text thought", thought));
  if (of.content) element.append(make("div", "text", of.content));
  for (const call of of.tool_calls ?? []) {
    const made = call.function ?? call;
    const written = typeof made.arguments === "string" ? made.arguments : JSON.stringify(made.arguments);
    element.append(make("div", "text call", `${made.name}(${written})`));
  }
  return element;
}

// --- tokens ---------------------------------------------------------------------------------------------------------
const KEYS = {
  logprob: `redder: less likely when it was sampled (full at −${FULL_LOGPROB} nats)`, advantage: "green: made more likely by the step; red: less",
  mask: "blue: learnt; grey: given or observed", none: "",
};
function tokens(of, most) {
  const element = make("div", "tokens");
  const begin = of.tokens.length - of.rollout_log_probs.length;
  let learnt = 0, segment = null, kind = "";
  of.pieces.forEach((piece, at) => {
    const now = of.loss_mask[at] ? "learnt" : at < begin ? "given" : "observed";
    if (now !== kind) element.append((segment = make("span", (kind = now))));
    const told = { kind, logprob: of.rollout_log_probs[at - begin], advantage: of.loss_mask[at] ? of.advantages?.[learnt++] : undefined };
    const token = make("span", "", piece);
    token.style.background = paint(told, most);
    token.title = describe(of, at, told, of.weight_versions[at - begin]);
    segment.append(token);
  });
  return element;
}
function paint(told, most) {
  const share = (name, part) => `color-mix(in srgb, var(${name}) ${Math.round(100 * Math.min(1, part))}%, transparent)`;
  if (state.colour === "mask") return told.kind === "learnt" ? share("--c0", 0.3) : share("--c6", 0.18);
  if (told.kind !== "learnt" || state.colour === "none") return "";
  if (state.colour === "logprob") return share("--c4", 0.75 * (-told.logprob / FULL_LOGPROB));
  return told.advantage == null ? "" : share(told.advantage > 0 ? "--c2" : "--c4", (0.6 * Math.abs(told.advantage)) / most);
}
function describe(of, at, told, version) {
  const lines = [`${JSON.stringify(of.pieces[at])}  token ${of.tokens[at]}, ${told.kind}`];
  if (told.kind === "learnt") {
    lines.push(`log-probability ${number(told.logprob)} (${(100 * Math.exp(told.logprob)).toFixed(1)} %)`);
    if (told.advantage != null) lines.push(`advantage ${signed(told.advantage)}`);
    lines.push(`weight version ${version}`);
  }
  return lines.join("\n");
}

// --- mean reward by step, of all and of those that are shown; dragging chooses steps ----------------------------------
let chart = null;
function means(places) {
  const sums = new Map();
  for (const place of places) {
    const [sum, count] = sums.get(INDEX.step[place]) ?? [0, 0];
    sums.set(INDEX.step[place], [sum + (INDEX.reward[place] ?? 0), count + 1]);
  }
  const steps = [...sums.keys()].sort((a, b) => a - b);
  return [steps, steps.map((step) => sums.get(step)[0] / sums.get(step)[1])];
}
let everyone = null;
function resolved(name) {
  const probe = make("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
function drawChart() {
  everyone ??= means(INDEX.step.keys());
  const data = uPlot.join([everyone, means(state.shown)]);
  if (chart) return chart.setData(data);
  const axis = { stroke: resolved("--faint"), grid: { stroke: resolved("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  chart = new uPlot({
    width: get("chart").clientWidth - 32, height: 110, scales: { x: { time: false } },
    series: [{ label: "step" }, { label: "all", stroke: resolved("--c6"), width: 1, spanGaps: true }, { label: "shown", stroke: resolved("--c0"), width: 1.8, spanGaps: true }],
    axes: [{ ...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] }, { ...axis, size: 44 }], legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false } },
    hooks: { setSelect: [(plot) => {
      if (plot.select.width < 3) return;
      const form = get("filters");
      form["step-low"].value = Math.ceil(plot.posToVal(plot.select.left, "x"));
      form["step-high"].value = Math.floor(plot.posToVal(plot.select.left + plot.select.width, "x"));
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      filter();
    }] },
  }, data, get("chart"));
}
function redrawChart() {
  chart?.destroy();
  chart = null;
  drawChart();
}

// --- what a person does ---------------------------------------------------------------------------------------------
get("filters").addEventListener("input", filter);
get("filters").addEventListener("submit", (event) => event.preventDefault());
get("filters").addEventListener("reset", () => setTimeout(filter));
get("list").addEventListener("scroll", () => requestAnimationFrame(drawRows));
get("list").addEventListener("click", (event) => {
  const found = event.target.closest(".row");
  if (found) choose(Number(found.dataset.place));
});
document.addEventListener("keydown", (event) => {
  const move = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
  if (!move || event.target.closest("input, select")) return;
  event.preventDefault();
  const next = state.shown[state.shown.indexOf(state.chosen) + move];
  if (next !== undefined) choose(next);
});
document.querySelectorAll("[name=view]").forEach((radio) => radio.addEventListener("change", () => { state.view = radio.value; drawDetail(); }));
get("colour").addEventListener("change", () => {
  state.colour = get("colour").value;
  state.view = "tokens";
  document.querySelector("[name=view][value=tokens]").checked = true;
  drawDetail();
});
get("side").addEventListener("change", () => { state.side = get("side").checked; drawDetail(); });

// --- the index, which is read again while the run goes on -------------------------------------------------------------
function listed(index) {
  const first = INDEX === null, box = get("filters").stop;
  const stops = new Set([...box.options].map((option) => option.value));
  for (const stop of [...new Set(index.stop)].filter(Boolean).sort()) if (!stops.has(stop)) box.append(new Option(stop));
  [INDEX, total, everyone] = [index, index.step.length, null];
  get("run").textContent = index.run + (index.live ? " · running" : "");
  document.title = `Rollouts of ${index.run}`;
  select();
  if (index.live && location.protocol !== "file:") setTimeout(readAgain, 1000 * FOLLOW_SECONDS);
  if (!first) return;
  new ResizeObserver(() => { redrawChart(); drawRows(); }).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawChart);
  const asked = Number(location.hash.slice(1));
  choose(location.hash && asked < total ? asked : 0);
}
function readAgain() {
  const script = make("script");
  script.src = `data/index.js?${Date.now()}`;
  script.onload = () => script.remove();
  script.onerror = () => { script.remove(); setTimeout(readAgain, 1000 * FOLLOW_SECONDS); };
  document.head.append(script);
}
