// The controls and the results of the page. Every number comes from the planner, which worker.js runs.
"use strict";
const $ = (id) => document.getElementById(id);
const doubled = (first, count) => Array.from({ length: count }, (_, i) => first * 2 ** i);
const SLIDERS = {
  nodes: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128],
  gpus: [1, 2, 4, 8, 16],
  port: [10, 25, 50, 100, 200, 400, 800, 1600],
  tokens: [...doubled(8, 7).map((n) => `${n}K`), ...doubled(1, 5).map((n) => `${n}M`)],
  batch: doubled(1, 9),
};
const START = { nodes: "8", gpus: "8", gpu: "a100_80", port: "25", tokens: "128K", batch: "1", model: "llama3_8b", config: "" };
const MAP = { tokens: ["32K", "128K", "512K", "2M", "8M"], port: [25, 50, 100, 200, 400, 800], nodes: [1, 2, 4, 8, 16, 32, 64] };
const MINE = "config.json";
// Paul Tol's colours "light", which carry black text.
const COLORS = {
  "no sequence parallelism": "#dddddd", "Ring Attention": "#99ddff", "all-gather": "#bbcc33", Ulysses: "#77aadd",
  "LoongTrain / USP": "#44bb99", StarTrail: "#ee8866", "concentric rings": "#eedd88", teams: "#ffaabb", "2-D tiles": "#aaaa00",
};
const GIB = 2 ** 30;

// The worker.

let state = { ...START };
let worker, rings, answer, chosen = 0;
const waiting = new Map();
let number = 0;

function ask(name, argument) {
  return new Promise((resolve, reject) => {
    waiting.set(++number, { resolve, reject });
    worker.postMessage({ id: number, name, argument });
  });
}

function hear({ data: { id, answer, failure, progress } }) {
  if (progress) return say(progress);
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  failure === undefined ? resolve(answer) : reject(new Error(failure));
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", isError);
}

function argumentsOf({ nodes, gpus, gpu, port, tokens, batch, model, config }) {
  return { nodes, gpus_per_node: gpus, gpu, port: `${port}Gb/s`, model, seq_len: tokens, batch, ...(model === MINE && { config }) };
}

function terminalOf({ nodes, gpus, gpu, port, tokens, batch, model }) {
  const path = model === MINE ? "FOLDER/config.json" : model;
  return `python -m startrail_jax.plan --nodes ${nodes} --gpus-per-node ${gpus} --gpu ${gpu} --port ${port}Gb/s ` +
    `--model ${path} --seq-len ${tokens} --batch ${batch}`;
}

// What is to be done: the newest plan first, then cells of the map.

let wanted = true, cells = [], busy = false;
const known = new Map();

async function work() {
  if (busy) return;
  busy = true;
  try {
    while (wanted || cells.length) {
      if (wanted) await plan();
      else await fill(cells.shift());
    }
  } catch (error) {
    document.body.setAttribute("aria-busy", "false");
    say(`The planner failed: ${error.message}`, true);
  }
  busy = false;
}

const isBusy = () => document.body.getAttribute("aria-busy") === "true";

function change(changes) {
  state = { ...state, ...changes };
  cells = [];
  wanted = true;
  document.body.setAttribute("aria-busy", "true");
  say("Planning …");
  showState();
  history.replaceState(null, "", linkOf(state));
  work();
}

async function plan() {
  wanted = false;
  const asked = state, began = performance.now();
  const found = await ask("answer", JSON.stringify(argumentsOf(asked)));
  if (wanted) return; // The user has changed something since.
  document.body.setAttribute("aria-busy", "false");
  $("terminal").textContent = terminalOf(asked);
  $("result").hidden = Boolean(found.error);
  if (found.error) return say(found.error, true);
  const seconds = ((performance.now() - began) / 1000).toFixed(2);
  say(`${found.plan.num_candidates.toLocaleString("en")} settings were predicted in ${seconds} s.`);
  answer = found;
  showPlan();
  await choose(0);
  drawMap();
}

// The state, its link and its controls.

function linkOf(state) {
  return "#" + new URLSearchParams(Object.entries(state).filter(([key, value]) => key !== "config" || value));
}

function fromLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(Object.keys(START).map((key) => [key, given.get(key) ?? START[key]]));
}

function sizeOf(text) {
  const [, digits, unit] = /^([\d.]+)\s*([KMG]?)/i.exec(text) ?? [0, NaN, ""];
  return digits * 1024 ** " KMG".indexOf(unit.toUpperCase() || " ");
}

function showState() {
  for (const [key, value] of Object.entries(state)) {
    if (!$(key)) continue;
    if ($(key).tagName === "SELECT" && ![...$(key).options].some((x) => x.value === value)) $(key).add(new Option(value));
    if ($(key).value !== value) $(key).value = value;
    const slider = document.querySelector(`[data-of=${key}]`);
    if (!slider) continue;
    const sizes = SLIDERS[key].map((x) => Math.abs(Math.log(sizeOf(`${x}`) / sizeOf(value))));
    slider.value = sizes.indexOf(Math.min(...sizes));
    slider.setAttribute("aria-valuetext", value);
  }
}

function connect() {
  for (const key of ["nodes", "gpus", "port", "tokens", "batch", "gpu", "model"]) {
    $(key).addEventListener("change", () => change({ [key]: $(key).value.trim() }));
  }
  for (const slider of document.querySelectorAll("[data-of]")) {
    const key = slider.dataset.of;
    slider.max = SLIDERS[key].length - 1;
    slider.addEventListener("input", () => change({ [key]: `${SLIDERS[key][slider.value]}` }));
  }
  $("form").addEventListener("submit", (event) => event.preventDefault());
  const take = async (file) => file && change({ model: MINE, config: await file.text() });
  $("file").addEventListener("change", () => take($("file").files[0]));
  for (const type of ["dragover", "dragleave", "drop"]) {
    addEventListener(type, (event) => {
      event.preventDefault();
      $("form").classList.toggle("dropping", type === "dragover");
      if (type === "drop") take(event.dataTransfer.files[0]);
    });
  }
  addEventListener("hashchange", () => location.hash !== linkOf(state) && change(fromLink()));
  const copy = async (text) => {
    const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    $("copied").textContent = copied ? "Copied." : "The browser does not let this page copy text: select the text instead.";
    setTimeout(() => ($("copied").textContent = ""), 4000);
  };
  for (const button of document.querySelectorAll("[data-copies]")) {
    button.addEventListener("click", () => copy($(button.dataset.copies).textContent));
  }
  $("link").addEventListener("click", () => copy(location.href));
  $("back").addEventListener("click", () => rings.step(-1));
  $("next").addEventListener("click", () => rings.step(1));
  $("play").addEventListener("click", () => (rings.playing ? rings.step(0) : rings.play()));
  $("rows").addEventListener("change", () => (drawMap(), work()));
}

// The plan.

function make(name, attributes, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

function short(seconds) {
  return seconds >= 1 ? `${seconds.toPrecision(3)} s` : `${(1000 * seconds).toPrecision(3)} ms`;
}

function showPlan() {
  const { plan, labels, remarks } = answer, [winner] = plan.ranked;
  const limit = plan.options.memory_fraction * plan.cluster.gpu.memory_bytes;
  $("winner").textContent = winner.fits ? `${winner.scheme}: ${short(winner.seconds)} a step` : "Nothing fits the memory";
  $("reason").textContent = plan.reason ??
    `The setting with the least memory needs ${(winner.memory_bytes / GIB).toFixed(1)} GiB. Use fewer tokens, more nodes or a larger GPU.`;
  $("counts").textContent = `${plan.num_settings.toLocaleString("en")} settings of degrees and order. With ZeRO, ` +
    `rematerialisation, offload and tiles, there are ${plan.num_candidates.toLocaleString("en")} settings, of which ` +
    `${plan.num_fitting.toLocaleString("en")} fit ${(limit / GIB).toFixed(1)} GiB.`;
  $("notes").textContent = plan.advice.join(" ");
  $("limit").textContent = `${(limit / GIB).toFixed(1)} GiB`;
  const baselines = Object.entries(plan.baselines);
  const slowest = Math.max(...[...plan.ranked, ...Object.values(plan.baselines)].map((x) => x.seconds));
  const row = (choice, i, name) => {
    const { parts } = choice, waits = choice.exposed_seconds;
    const attention = parts.attention + parts["linear attention"];
    const split = { attention, products: parts.products, waits };
    split.other = choice.seconds - attention - parts.products - waits;
    const bar = make("div", { className: "bar" }, ...["attention", "products", "other", "waits"].map((kind) => {
      const part = make("i", { className: kind, title: `${kind}: ${short(split[kind])}` });
      part.style.width = `${(100 * split[kind]) / slowest}%`;
      return part;
    }));
    const memory = make("i", {});
    memory.style.width = `${Math.min(100, (100 * choice.memory_bytes) / limit)}%`;
    const chart = make("div", { className: "chart" }, bar, make("div", { className: "memory-bar" }, memory));
    const figures = make("div", { className: "figures" }, `${short(choice.seconds)}`,
      make("small", { textContent: `waits ${short(waits)}` }),
      make("small", { textContent: `${(100 * choice.mfu).toFixed(1)} % of peak, ${(choice.memory_bytes / GIB).toFixed(1)} GiB` +
        (choice.fits ? "" : ": DOES NOT FIT") }));
    const title = make("div", { className: "name" }, name, make("small", { textContent: labels[i] }));
    const button = make("button", { type: "button", onclick: () => isBusy() || choose(i) }, title, chart, figures);
    return make("li", {}, button);
  };
  $("ranked").replaceChildren(...plan.ranked.map((choice, i) => row(choice, i, choice.scheme)));
  $("baselines").replaceChildren(
    ...baselines.map(([name, choice], i) => row(choice, plan.ranked.length + i, name)),
    ...Object.entries(plan.illegal).map(([name, why]) => make("li", { className: "small" }, `${name} is not possible here: ${why}.`)),
  );
  $("command").textContent = plan.command;
  $("remarks").replaceChildren(...remarks.map((text) => make("li", { textContent: text })));
  $("json").textContent = JSON.stringify(plan, null, 2);
}

async function choose(i) {
  chosen = i;
  const { plan } = answer, choice = [...plan.ranked, ...Object.values(plan.baselines)][i];
  document.querySelectorAll(".bars button").forEach((button, j) => button.setAttribute("aria-pressed", j === i));
  const { ring, group, team, head, data, tensor } = choice.degrees, devices = ring * group * team * head;
  const { nodes, gpus_per_node } = plan.cluster, all = nodes * gpus_per_node;
  const own = ring === 1 ? "no ring" : `${devices / ring} ring${devices > ring ? "s" : ""} of ${ring} GPUs, ${ring - 1} hops`;
  const there = `Ring Attention has one ring of ${devices} GPUs, ${devices - 1} hops`;
  $("rings-scheme").textContent = `${choice.scheme}: ` +
    (devices === 1 ? "attention sends nothing." : ring === devices ? `${own}.` : `${own}. ${there}.`);
  const tooMany = all > MOST_DRAWN;
  document.querySelector("figure").hidden = tooMany;
  if (tooMany) return ($("rings-scheme").textContent += ` ${all} GPUs are too many to draw: choose at most ${MOST_DRAWN}.`);
  const notes = ["The picture shows the forward pass of the attention of one layer, with the GPUs in the order of the mesh."];
  if (data * tensor > 1) notes.push(`The pale GPUs do the same for ${data > 1 ? "other sequences" : ""}${data > 1 && tensor > 1 ? " and " : ""}${tensor > 1 ? "other heads" : ""}.`);
  if (plan.model.windows.some((x) => x !== null)) notes.push("Layers with a window may send only the keys that the window shows.");
  $("rings-note").textContent = notes.join(" ");
  const pass = await ask("rings", `${i}`);
  if (chosen === i) rings.show(pass, nodes, gpus_per_node);
}

// The map.

const keyOf = (state) => JSON.stringify(state);

function drawMap() {
  const rows = $("rows").value;
  const values = (key) => [...new Set([...MAP[key].map(String), state[key]])].sort((a, b) => sizeOf(a) - sizeOf(b));
  const columns = values("tokens");
  cells = [];
  const head = make("tr", {}, make("td", {}), ...columns.map((x) => make("th", { scope: "col", textContent: x })));
  const body = values(rows).reverse().map((y) => make("tr", {}, make("th", { scope: "row", textContent: rows === "port" ? `${y} Gb/s` : `${y} node${y === "1" ? "" : "s"}` }),
    ...columns.map((tokens) => {
      const there = { ...state, tokens, [rows]: y };
      const button = make("button", { type: "button", onclick: () => change({ tokens, [rows]: y }) }, "…");
      const cell = make("td", { className: keyOf(there) === keyOf(state) ? "here" : "" }, button);
      known.has(keyOf(there)) ? paint(button, known.get(keyOf(there))) : cells.push({ there, button });
      return cell;
    })));
  $("map").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  $("map-progress").max = cells.length;
  showProgress();
}

function showProgress() {
  $("map-progress").hidden = !cells.length;
  $("map-progress").value = $("map-progress").max - cells.length;
}

async function fill({ there, button }) {
  const found = await ask("fastest", JSON.stringify(argumentsOf(there)));
  known.set(keyOf(there), found);
  paint(button, found);
  showProgress();
}

function paint(button, found) {
  if (found.error) return Object.assign(button, { textContent: "no legal setting", title: found.error });
  const family = found.scheme.replace(/, C = \d+| x Ulysses/g, "");
  button.style.background = found.fits ? COLORS[family] : "";
  const degrees = Object.entries({ group: "g", ring: "r", team: "t", head: "h", tensor: "x" })
    .filter(([role]) => found.degrees[role] > 1).map(([role, letter]) => `${letter}${found.degrees[role]}`).join(" ");
  button.replaceChildren(...(found.fits
    ? [found.scheme, make("small", { textContent: `${degrees} ${Math.round(100 * found.mfu)}%` })]
    : [make("small", { textContent: "does not fit" })]));
}

async function start() {
  state = fromLink();
  showState();
  connect();
  if (location.protocol === "file:") {
    document.body.setAttribute("aria-busy", "false");
    return say("Browsers run Python only on pages from a web server. In the folder of the documentation, run\n" +
      "python -m http.server\nand open http://localhost:8000/planner_page/", true);
  }
  rings = new Rings($("rings"), (text, at, of, playing) => {
    $("stage").textContent = `${at} of ${of}. ${text}`;
    $("play").textContent = playing ? "Pause" : "Play";
  });
  worker = new Worker("worker.js");
  worker.onmessage = hear;
  worker.onerror = (event) => say(`The planner could not start: ${event.message}`, true);
  try {
    const { gpus, models } = await ask("names");
    $("gpu").replaceChildren(...gpus.map((x) => new Option(x)));
    $("model").replaceChildren(...[...models, ...(state.config ? [MINE] : [])].map((x) => new Option(x)));
    showState();
    history.replaceState(null, "", linkOf(state));
    await work();
  } catch (error) {
    document.body.setAttribute("aria-busy", "false");
    say(`The planner could not start: ${error.message}`, true);
  }
}

start();
