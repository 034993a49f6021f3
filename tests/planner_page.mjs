// The planner's page in a browser: node tests/planner_page.mjs, after docs/planner_page/make_page.py.
//
// It compares all numbers of 50 drawn inputs with `python -m startrail_jax.plan --json`, uses every control, and
// leaves screenshots in build/planner_page/. CHROMIUM names the browser, if it is not on the PATH.
import assert from "node:assert/strict";
import { execFile, execFileSync } from "node:child_process";
import fs from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import os from "node:os";
import path from "node:path";
import { promisify } from "node:util";

const ROOT = path.resolve(import.meta.dirname, "..");
const { chromium } = createRequire(`${ROOT}/build/npm/`)("playwright-core");
const PYTHON = `${ROOT}/.venv/bin/python`;
const SHOTS = `${ROOT}/build/planner_page`;
const GEMMA = {
  model_type: "gemma2", hidden_size: 3584, num_hidden_layers: 42, num_attention_heads: 16, num_key_value_heads: 8,
  head_dim: 256, intermediate_size: 14336, vocab_size: 256000, sliding_window: 4096,
};
const RUN = {
  kind: "gpt", seq_len: 32768, batch_size: 16, lora: { rank: 8 },
  model: { width: 2048, layers: 24, heads: 16, kv_heads: 4, head_dim: 128, mlp_width: 8192, vocab_size: 50304, dtype: "bfloat16" },
};

function browserPath() {
  for (const name of [process.env.CHROMIUM, "chromium", "google-chrome", "chromium-browser"].filter(Boolean)) {
    try {
      return execFileSync("which", [name], { encoding: "utf8" }).trim();
    } catch {}
  }
  throw new Error("A Chromium must be on the PATH; found none. Install it, such as with `apt install chromium`, or set CHROMIUM to its path.");
}

/** A server of the built pages; returns it and its address. */
async function serve() {
  const types = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".wasm": "application/wasm" };
  const server = http.createServer((request, reply) => {
    const name = new URL(request.url, "http://x").pathname.replace(/\/$/, "/index.html");
    const file = path.join(ROOT, "build/docs", name);
    if (!fs.existsSync(file)) return reply.writeHead(404).end();
    reply.writeHead(200, { "content-type": types[path.extname(file)] ?? "application/octet-stream" });
    fs.createReadStream(file).pipe(reply);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return [server, `http://127.0.0.1:${server.address().port}`];
}

/** Numbers in [0, 1) that a seed determines (mulberry32). */
function* drawn(seed) {
  for (;;) {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    yield ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  }
}

function inputs(count) {
  const numbers = drawn(0);
  const one = (...choices) => choices[Math.floor(numbers.next().value * choices.length)];
  return Array.from({ length: count }, () => {
    const model = one("gpt_3b", "gpt_7b", "dit_1b", "llama3_8b", "llama3_70b", "qwen3_8b", GEMMA, RUN);
    const state = {
      nodes: one(1, 2, 3, 4, 6, 8, 12, 16, 32), gpus: one(1, 2, 4, 8), gpu: one("a100_40", "a100_80", "h100", "h200", "b200"),
      port: one(10, 50, 100, 137.5, 400, 1600), tokens: one("8K", "32K", "100000", "128K", "512K", "2M"), batch: one(1, 2, 3, 8, 16),
    };
    return typeof model === "string" ? { ...state, model } : { ...state, model: "config.json", config: JSON.stringify(model) };
  });
}

/** All numbers and texts are equal, numbers up to rounding. */
function assertAlike(found, wanted, where) {
  if (typeof wanted === "number") {
    const close = Math.abs(found - wanted) <= 1e-9 * Math.abs(wanted);
    assert.ok(close, `${where}: ${found} in the browser, ${wanted} on a terminal`);
  } else if (wanted && typeof wanted === "object") {
    assert.deepEqual(Object.keys(found), Object.keys(wanted), where);
    for (const key of Object.keys(wanted)) assertAlike(found[key], wanted[key], `${where}.${key}`);
  } else assert.equal(found, wanted, where);
}

/** Goes to a state and waits for its answer: the plan, or the text of an error. */
async function answer(page, state) {
  await page.evaluate((hash) => new Promise((resolve) => {
    addEventListener("hashchange", resolve, { once: true });
    location.hash = hash;
  }), `${new URLSearchParams(Object.entries(state))}`);
  return settled(page);
}

async function settled(page) {
  await page.waitForSelector("body[aria-busy=false]", { timeout: 120_000 });
  if (await page.locator("#status.error").count()) return page.textContent("#status");
  return JSON.parse(await page.textContent("#json"));
}

async function onTerminal(command, config) {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "planner-"));
  if (config) {
    fs.mkdirSync(`${folder}/FOLDER`);
    fs.writeFileSync(`${folder}/FOLDER/config.json`, config);
  }
  const words = command.split(" ").slice(1);
  const run = promisify(execFile)(PYTHON, [...words, "--json"], { cwd: folder, maxBuffer: 1 << 26 }).catch((error) => error);
  const { stdout, stderr } = await run;
  fs.rmSync(folder, { recursive: true });
  return stdout ? JSON.parse(stdout) : stderr.trim();
}

async function compare(page) {
  const seconds = [];
  let refused = 0;
  for (const state of inputs(50)) {
    const began = performance.now();
    const found = await answer(page, state);
    seconds.push((performance.now() - began) / 1000);
    const wanted = await onTerminal(await page.textContent("#terminal"), state.config);
    if (typeof wanted === "string") refused += 1;
    assertAlike(found, wanted, JSON.stringify(state));
  }
  seconds.sort((a, b) => a - b);
  assert.ok(refused < 25);
  console.log(`50 drawn inputs (${refused} refused) have the numbers of the command; median ${seconds[25].toFixed(2)} s, at most ${seconds[49].toFixed(2)} s`);
}

async function useControls(page) {
  const terminal = () => page.textContent("#terminal");
  for (const name of ["nodes", "gpus", "port", "tokens", "batch"]) {
    const [field, before] = [await page.inputValue(`#${name}`), await terminal()];
    await page.locator(`[data-of=${name}]`).press(name === "batch" || name === "gpus" ? "ArrowLeft" : "ArrowRight");
    if (name === "batch" || (await page.inputValue(`#${name}`)) === field) await page.fill(`#${name}`, "2");
    await page.locator(`#${name}`).blur();
    assert.equal(typeof (await settled(page)), "object", name);
    assert.notEqual(await page.inputValue(`#${name}`), field);
    assert.notEqual(await terminal(), before, name);
  }
  for (const [name, value] of [["gpu", "h200"], ["model", "qwen3_8b"]]) {
    await page.selectOption(`#${name}`, value);
    const plan = await settled(page);
    assert.equal(plan[name === "gpu" ? "cluster" : "model"][name === "gpu" ? "gpu" : "name"].name ?? plan.model.name, value);
  }
  await page.setInputFiles("#file", { name: "config.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(GEMMA)) });
  await page.waitForFunction(() => document.getElementById("terminal").textContent.includes("FOLDER"));
  assert.equal((await settled(page)).model.head_dim, GEMMA.head_dim);
  await page.fill("#nodes", "256");
  await page.locator("#nodes").blur();
  await page.waitForFunction(() => document.getElementById("rings-scheme").textContent.includes("1024 GPUs are too many to draw"));
  assert.ok(await page.locator("figure").isHidden());
  await page.fill("#batch", "0");
  await page.locator("#batch").blur();
  assert.match(await settled(page), /--batch must be a positive whole number; got .0./);
  await page.fill("#batch", "1");
  await page.locator("#batch").blur();
  const plan = await settled(page);
  assert.ok((await page.textContent("#winner")).startsWith(plan.ranked[0].scheme));
  assert.equal(await page.textContent("#reason"), plan.reason);
  const copied = async (button) => {
    await page.locator(button).click();
    await page.waitForFunction(() => document.getElementById("copied").textContent);
    return page.evaluate(() => navigator.clipboard.readText());
  };
  assert.equal(await copied("[data-copies=command]"), plan.command);
  return [await copied("#link"), plan];
}

async function useRings(page) {
  const stage = () => page.textContent("#stage");
  await page.locator("#play").click();
  const paused = await stage();
  await page.locator("#next").click();
  assert.notEqual(await stage(), paused);
  await page.locator("#back").click();
  assert.equal(await stage(), paused);
  const scheme = await page.textContent("#rings-scheme");
  await page.locator("#baselines button").last().click();
  await page.waitForFunction((text) => document.getElementById("rings-scheme").textContent !== text, scheme);
}

async function useMap(page) {
  const done = () => page.waitForSelector("#map-progress", { state: "hidden", timeout: 300_000 });
  await done();
  const { ranked } = await settled(page);
  assert.ok((await page.locator("#map .here").textContent()).startsWith(ranked[0].scheme));
  const cell = page.locator("#map tbody tr").first().locator("button").last();
  const text = await cell.textContent();
  await cell.click();
  const plan = await settled(page);
  assert.deepEqual([plan.seq_len, plan.cluster.port_rate], [8 * 2 ** 20, 100e9]);
  assert.ok(text.startsWith(plan.ranked[0].scheme));
  await page.selectOption("#rows", "nodes");
  await done();
  assert.equal(await page.locator("#map .here").count(), 1);
}

const [server, address] = await serve();
const browser = await chromium.launch({ executablePath: browserPath(), args: ["--no-sandbox"] });
try {
  const url = `${address}/planner_page/`;
  fs.mkdirSync(SHOTS, { recursive: true });
  const context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"] });
  const page = await context.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(`${error}`));
  page.on("request", (request) => request.url().startsWith(address) || faults.push(request.url()));
  page.on("response", (reply) => reply.ok() || faults.push(`${reply.status()} ${reply.url()}`));
  const began = performance.now();
  await page.goto(url);
  const first = await settled(page);
  console.log(`first answer after ${((performance.now() - began) / 1000).toFixed(1)} s`);
  await useRings(page);
  await useMap(page);
  console.log(`two maps after ${((performance.now() - began) / 1000).toFixed(1)} s`);
  await compare(page);
  await answer(page, {});
  const [link, plan] = await useControls(page);
  await page.goto("about:blank");
  await page.goto(link);
  assertAlike(await settled(page), plan, "after a reload");
  assert.equal(page.url(), link);
  assert.deepEqual(faults, []);
  for (const colorScheme of ["light", "dark"]) {
    for (const width of [1280, 390]) {
      const shot = await browser.newPage({ viewport: { width, height: 900 }, colorScheme, reducedMotion: "reduce" });
      await shot.goto(url);
      assertAlike(await settled(shot), first, "the first plan");
      assert.equal(await shot.textContent("#play"), "Play");
      const wide = await shot.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `${wide} pixels too wide at ${width}`);
      await shot.waitForSelector("#map-progress", { state: "hidden", timeout: 300_000 });
      await shot.screenshot({ path: `${SHOTS}/${colorScheme}-${width}.png`, fullPage: true });
      await shot.close();
    }
  }
} finally {
  await browser.close();
  server.close();
}
