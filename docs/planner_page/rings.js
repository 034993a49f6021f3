// Draws the GPUs of a setting on their nodes, and plays the stages of a forward pass of attention.
"use strict";
const MOST_DRAWN = 512; // GPUs
const MOST_MOVING = 2000; // Of more messages in a stage, only every n-th is drawn.

function svg(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

/** Where each GPU lies: nodes on a circle, and the GPUs of a node on a smaller one, turned alike. */
function places(nodes, perNode) {
  const node = nodes === 1 ? 290 : Math.min(115, 300 / (1 + 1 / Math.sin(Math.PI / nodes))) * 0.97;
  const out = nodes === 1 ? 0 : 300 - node, ring = perNode === 1 ? 0 : node * 0.68;
  const gap = perNode === 1 ? node : ring * Math.sin(Math.PI / perNode);
  const centres = [], gpus = [];
  for (let n = 0; n < nodes; n++) {
    const turn = (2 * Math.PI * n) / nodes - Math.PI / 2;
    centres.push([out * Math.cos(turn), out * Math.sin(turn)]);
    for (let k = 0; k < perNode; k++) {
      const angle = turn + (2 * Math.PI * (k + 0.5)) / perNode;
      gpus.push([centres[n][0] + ring * Math.cos(angle), centres[n][1] + ring * Math.sin(angle)]);
    }
  }
  return { node, centres, gpus, radius: Math.max(1.5, Math.min(16, node * 0.28, gap * 0.75)) };
}

class Rings {
  constructor(element, say) {
    [this.element, this.say] = [element, say];
    this.calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.playing = !this.calm;
  }

  /** Shows a setting: `pass` is what `answers.forward_pass` returns. */
  show(pass, nodes, perNode) {
    cancelAnimationFrame(this.frame);
    this.element.replaceChildren();
    Object.assign(this, { pass, at: 0, start: undefined });
    const { node, centres, gpus, radius } = places(nodes, perNode);
    Object.assign(this, { gpus, radius });
    for (const [cx, cy] of centres) svg("circle", { class: "node", cx, cy, r: node }, this.element);
    const path = (numbers) => "M" + numbers.map((n) => gpus[n].map((x) => x.toFixed(1)).join(",")).join("L");
    // Of a device: number, ring, group, team, head.
    const sets = (same) => Object.values(Object.groupBy(pass.devices, (device) => same.map((i) => device[i]).join()))
      .map((set) => set.map((device) => device[0]));
    const teams = sets([1, 2, 4]).filter((team) => team.length > 1).map(path).join("");
    svg("path", { class: "teams", d: teams, "stroke-width": 2.5 * radius }, this.element);
    const width = Math.max(0.6, radius / 8), [one] = sets([2, 3, 4]);
    for (const pairs of pass.hops.map((move) => pass.moves[move])) {
      for (let i = 0; i < pairs.length; i += 2) {
        const bold = one.includes(pairs[i]);
        svg("path", { class: bold ? "ring one" : "ring", d: path([pairs[i], pairs[i + 1]]), "stroke-width": bold ? 3 * width : width }, this.element);
      }
    }
    this.lines = svg("path", { class: "lines", "stroke-width": Math.max(0.6, radius / 7) }, this.element);
    const active = new Set(pass.devices.map((device) => device[0]));
    gpus.forEach(([cx, cy], n) => {
      svg("circle", { class: active.has(n) ? "gpu" : "idle", cx, cy, r: radius }, this.element);
      if (radius > 9) svg("text", { x: cx, y: cy, "font-size": radius * (gpus.length > 100 ? 0.75 : 0.95) }, this.element).textContent = n;
    });
    this.moving = svg("path", { class: "moving" }, this.element);
    this.enter(0);
    if (this.playing) this.play();
  }

  /** Begins a stage. */
  enter(at) {
    const { stages, moves } = this.pass;
    this.at = (at + stages.length) % stages.length;
    const { text, kind, move } = stages[this.at];
    const pairs = move === null ? [] : moves[move], every = Math.ceil(pairs.length / 2 / MOST_MOVING);
    this.ways = [];
    for (let i = 0; i < pairs.length; i += 2 * every) this.ways.push([this.gpus[pairs[i]], this.gpus[pairs[i + 1]]]);
    for (const each of [this.lines, this.moving]) each.style.stroke = `var(--${kind})`;
    const crowd = this.ways.length > 3 * this.pass.devices.length;
    this.moving.setAttribute("stroke-width", Math.max(2, this.radius * (crowd ? 0.35 : 0.8)));
    this.lines.setAttribute("d", this.ways.map(([a, b]) => `M${a}L${b}`).join(""));
    this.start = undefined;
    this.draw(this.playing ? 0 : 0.6);
    this.say(text, this.at + 1, stages.length, this.playing);
  }

  /** Draws the messages of the stage after a part of their way. */
  draw(part) {
    const eased = part * part * (3 - 2 * part);
    const at = (a, b) => `${(a[0] + eased * (b[0] - a[0])).toFixed(1)},${(a[1] + eased * (b[1] - a[1])).toFixed(1)}`;
    this.moving.setAttribute("d", this.ways.map(([a, b]) => `M${at(a, b)}h0`).join(""));
  }

  play() {
    cancelAnimationFrame(this.frame);
    this.playing = true;
    const rounds = this.pass.stages.length, wait = 800;
    const tick = (now) => {
      this.start ??= now;
      const time = now - this.start, travel = Math.max(500, Math.min(1800, 20000 / rounds));
      if (time > travel + wait) this.enter(this.at + 1);
      else this.draw(Math.min(1, time / travel));
      this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
    this.say(this.pass.stages[this.at].text, this.at + 1, rounds, true);
  }

  pause() {
    cancelAnimationFrame(this.frame);
    this.playing = false;
  }

  step(by) {
    this.pause();
    this.enter(this.at + by);
  }
}
