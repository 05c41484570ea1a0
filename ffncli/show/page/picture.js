// The drawing of a small block, alive: cells follow the numbers, say how they are made, are changed in place, and show
// the gradient; a walk goes through the steps one by one.
const SENTENCES = { // by op, what a step is for
  input: () => "One row per token: the numbers that enter the block.",
  linear: (step, block) => `Each number is a row of ${step.inputs[0]} times a column of the weights, ${block.widthOf(step.inputs[0])} products added up${step.weights.bias ? ", plus that column's bias" : ""}.`,
  activation: (step) => `The function is applied to every number of ${step.inputs[0]} by itself; it decides which hidden units speak.`,
  multiply: (step) => `${step.inputs.join(" and ")} are multiplied number by number: a gate lets a hidden unit through, or not.`,
  add: (step) => `${step.inputs.join(" and ")} are added number by number.`,
  norm: (step) => `Each row of ${step.inputs[0]} is scaled to a size of about 1.`,
  dropout: () => "Dropout does nothing when a model is used.",
  route: (step) => `Each token is sent to the experts with the largest numbers in ${step.inputs[0]}; a cell is what an expert counts for.`,
  received: (step) => `Expert ${step.expert} receives only the tokens that were sent to it.`,
  experts: () => "The outputs of each token's experts are added, each times its share of the route.",
};
const H = 1e-5; // a gradient is (loss at +H − loss at −H) / 2H

class Picture {
  constructor(root, live) {
    Object.assign(this, { live, svg: root.querySelector("svg.block"), rects: new Map(), texts: new Map(), gradients: null, at: -1 });
    this.svg.setAttribute("role", "group");
    this.svg.setAttribute("aria-label", "The block; the arrow keys move through a matrix, Enter changes a number");
    for (const text of this.svg.querySelectorAll("[data-text]")) this.texts.set(text.dataset.text, text);
    for (const rect of this.svg.querySelectorAll("[data-part]")) {
      this.rects.set(rect.dataset.part, rect);
      rect.addEventListener("pointerenter", () => { if (!this.held) this.point(rect.dataset.part); });
      if (!this.texts.has(rect.dataset.part)) continue; // a coloured cell is too small for a finger, and has a field below
      rect.setAttribute("tabindex", "-1");
      rect.setAttribute("role", "button");
      rect.addEventListener("focus", () => this.point(rect.dataset.part));
      rect.addEventListener("keydown", (event) => this.key(event, rect.dataset.part));
      rect.addEventListener("pointerdown", (event) => this.drag(event, rect.dataset.part));
    }
    this.rects.values().next().value?.setAttribute("tabindex", "0");
    const side = make("div", null, { class: "side" });
    this.said = make("p", "Point at a cell: the row and the column that make it light up, and the sum is written here. Click an input or a weight to change it.", { class: "said values", role: "status" });
    root.querySelector(".picture").append(side);
    side.append(this.walk(), this.said, this.field(), this.training(), this.formats(), this.curve = make("div", null, { class: "curve" }));
  }

  nameOf(part) { return this.rects.get(part).dataset.name || part; }

  widthOf(name) { return this.live.values[name].find(Boolean)?.length ?? 0; }

  place(part) { // [its name, row, column, the rows that hold it if it can be changed]
    const [, name, i, j] = /^(.*)\[(\d+),(\d+)\]$/.exec(part), { weights, inputs } = this.live;
    const tensor = weights[name], rows = tensor ? (Array.isArray(tensor[0]) ? tensor : [tensor]) : inputs[name];
    return { name, i: Number(i), j: Number(j), rows, part };
  }

  valueOf({ name, i, j, rows }) {
    if (rows) return rows[i]?.[j];
    const step = this.live.block.steps.find((one) => one.name === name), all = this.live.values[name];
    const here = step && step.expert !== undefined ? all.filter(Boolean) : all; // an expert's rows are its tokens'
    return here?.[i]?.[j];
  }

  refresh() {
    const most = new Map(), cells = [...this.rects].map(([part, rect]) => [rect, this.place(part)]);
    const number = (at) => (this.gradients ? this.gradients.get(at.part) : this.valueOf(at));
    for (const [, at] of cells) most.set(at.name, Math.max(most.get(at.name) || 0, Math.abs(number(at) || 0)));
    for (const [rect, at] of cells) {
      const value = number(at), text = this.texts.get(at.part);
      rect.classList.toggle("plus", value > 0);
      rect.classList.toggle("minus", value < 0);
      rect.setAttribute("fill-opacity", value ? (0.6 * Math.abs(value) / most.get(at.name)).toFixed(3) : 1);
      if (text) rect.setAttribute("aria-label", `${this.nameOf(at.part)} ${value === undefined ? "" : shownNumber(value)}`);
      if (text) text.textContent = value === undefined ? "" : Math.abs(value) < 10 ? value.toFixed(3) : Math.abs(value) < 100 ? value.toFixed(2) : value.toPrecision(3);
    }
    this.lossText.textContent = shownNumber(this.loss());
    this.drawCurve();
    if (this.pointed) this.point(this.pointed);
  }

  point(part) {
    this.pointed = part;
    const at = this.place(part), { steps } = this.live.block, step = steps.find((one) => one.name === at.name);
    const lit = new Set([part]);
    if (step && step.op !== "input") {
      for (const name of step.inputs) {
        const all = step.op === "linear" || step.op === "norm" || step.op === "route";
        for (let k = 0; k < this.widthOf(name); k++) if (all || k === at.j) lit.add(`${name}[${at.i},${k}]`);
      }
      for (const [kind, name] of Object.entries(step.weights)) {
        const rows = Array.isArray(this.live.weights[name][0]) ? this.live.weights[name].length : 1;
        for (let k = 0; k < rows; k++) lit.add(`${name}[${kind === "bias" ? 0 : k},${at.j}]`);
      }
    }
    for (const [name, rect] of this.rects) rect.classList.toggle("lit", lit.has(name));
    const gradient = this.gradients?.get(part), value = this.valueOf(at);
    if (this.gradients) this.said.textContent = `The loss changes by ${shownNumber(gradient)} per unit of ${this.nameOf(part)}.`;
    else if (at.rows) this.said.textContent = `${this.nameOf(part)} = ${shownNumber(value)}: click it, or press Enter, to change it.`;
    else if (step && step.expert === undefined && value !== undefined) this.said.textContent = explained(step, at.i, at.j, this.live.values, this.live.weights, this.live.chosen);
    else this.said.textContent = `${this.nameOf(part)} = ${shownNumber(value)}`;
    this.entry.disabled = !at.rows;
    this.entryLabel.textContent = at.rows ? `${this.nameOf(part)} ` : "A number to change: none chosen ";
    if (at.rows && document.activeElement !== this.entry) this.entry.value = String(Number(value.toPrecision(6)));
  }

  set(part, value) {
    const { rows, i, j } = this.place(part);
    if (!rows || !Number.isFinite(value)) return;
    rows[i][j] = value;
    this.gradients = null;
    this.live.update();
  }

  key(event, part) {
    const { name, i, j, rows } = this.place(part);
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) this.rects.get(`${name}[${i + step[0]},${j + step[1]}]`)?.focus();
    else if (rows && (event.key === "+" || event.key === "-")) this.set(part, Number((rows[i][j] + (event.key === "+" ? 0.1 : -0.1)).toPrecision(6)));
    else if (rows && event.key === "Enter") { this.entry.focus(); this.entry.select(); }
    else return;
    event.preventDefault();
  }

  drag(event, part) { // upwards is more
    const at = this.place(part), from = event.clientY, first = this.valueOf(at), rect = this.rects.get(part);
    rect.focus();
    if (!at.rows) return;
    this.held = true;
    rect.setPointerCapture(event.pointerId);
    const move = (to) => { if (Math.abs(to.clientY - from) > 2) this.set(part, Number((first + (from - to.clientY) / 50).toFixed(3))); };
    rect.addEventListener("pointermove", move);
    rect.addEventListener("pointerup", () => { this.held = false; rect.removeEventListener("pointermove", move); this.entry.focus(); this.entry.select(); }, { once: true });
  }

  field() {
    this.entry = make("input", null, { class: "number", type: "number", step: "any", disabled: "" });
    this.entryLabel = make("span", "A number to change: none chosen ");
    this.entry.addEventListener("input", () => { if (this.entry.value !== "") this.set(this.pointed, Number(this.entry.value)); });
    const label = make("label");
    label.append(this.entryLabel, this.entry);
    return label;
  }

  walk() {
    const steps = this.live.block.steps.filter((one) => one.expert === undefined), text = make("p", "", { class: "walk", role: "status" });
    const tools = make("div", null, { class: "tools" });
    const go = (by) => {
      this.at = (this.at + by + steps.length) % steps.length;
      const step = steps[this.at];
      text.textContent = `${this.at + 1} of ${steps.length}. ${step.op === "input" ? step.name : `${step.name} = ${step.formula}`}. ${SENTENCES[step.op](step, this)}`;
      for (const [part, rect] of this.rects) rect.classList.toggle("walked", part.startsWith(`${step.name}[`));
    };
    for (const [name, by] of [["Previous step", -1], ["Next step", 1]]) {
      const button = make("button", name, { type: "button" });
      button.addEventListener("click", () => go(this.at < 0 && by < 0 ? 0 : by));
      tools.append(button);
    }
    const box = make("div");
    box.append(tools, text);
    return box;
  }

  lossOf(shift) {
    const { block, inputs, weights, chosen } = this.live, out = compute(block, inputs, weights, chosen, shift);
    const last = out[block.steps[block.steps.length - 1].name];
    return sum(last.flat().map((v) => v * v)) / (last.length * last[0].length);
  }

  loss() { return this.lossOf(); }

  gradientOf(at) { // by the change of the loss on both sides
    if (!at.rows) return (this.lossOf({ ...at, by: H }) - this.lossOf({ ...at, by: -H })) / (2 * H);
    const row = at.rows[at.i], before = row[at.j], ends = [before + H, before - H].map((value) => { row[at.j] = value; return this.lossOf(); });
    row[at.j] = before;
    return (ends[0] - ends[1]) / (2 * H);
  }

  training() {
    const box = make("div", null, { class: "tools" }), rate = make("input", null, { class: "number", type: "number", step: "any", value: "0.1", "aria-label": "Learning rate" });
    this.lossText = make("output");
    const few = this.rects.size <= 1200, text = make("span", "", { role: "status" });
    const show = make("button", "Show the gradient", { type: "button", "aria-pressed": "false" }), train = make("button", "One training step", { type: "button" });
    const measure = () => new Map([...this.rects.keys()].map((part) => [part, this.place(part)]).filter(([, at]) => this.valueOf(at) !== undefined).map(([part, at]) => [part, this.gradientOf(at)]));
    show.addEventListener("click", () => {
      this.gradients = this.gradients ? null : measure();
      show.setAttribute("aria-pressed", String(this.gradients !== null));
      show.textContent = this.gradients ? "Show the values" : "Show the gradient";
      this.refresh();
    });
    train.addEventListener("click", () => {
      const before = this.loss(), gradients = measure();
      for (const [part, gradient] of gradients) {
        const { name, i, j, rows } = this.place(part);
        if (this.live.weights[name]) rows[i][j] -= Number(rate.value) * gradient;
      }
      this.gradients = null;
      this.live.update();
      text.textContent = `loss ${shownNumber(before)} → ${shownNumber(this.loss())}`;
    });
    box.append(make("span", "Loss (mean square of the output): "), this.lossText, ...(few ? [show, train, make("label", "rate "), rate, text] : []));
    return box;
  }

  formats() { // the weights rounded: to bf16, or to integers times one scale per matrix
    const select = make("select"), label = make("label", "Weights as "), names = { "": "they are", bf16: "bf16", int8: "8-bit integers", int4: "4-bit integers" };
    for (const [value, name] of Object.entries(names)) select.append(make("option", name, { value }));
    select.addEventListener("change", () => {
      if (!select.value) { this.exact = null; return this.live.reset(); }
      this.exact = this.exact || copied(this.live.weights);
      for (const [name, tensor] of Object.entries(copied(this.exact))) {
        const most = Math.max(...tensor.flat().map(Math.abs)), levels = select.value === "int4" ? 7 : 127;
        const rounded = (v) => (select.value === "bf16" ? toBf16(v) : most ? Math.round(v / most * levels) * most / levels : 0);
        this.live.weights[name].forEach((row, i) => {
          if (Array.isArray(row)) row.forEach((_, j) => { row[j] = rounded(tensor[i][j]); });
        });
      }
      this.live.update();
    });
    label.append(select);
    return label;
  }

  drawCurve() { // the activation with a point for each of its numbers
    const { block, values, weights, chosen } = this.live, step = block.steps.find((one) => one.op === "activation" && values[one.name].some(Boolean));
    if (!step) return;
    const points = values[step.inputs[0]].filter(Boolean).flat(), f = activated(step, weightsOf(step, weights), chosen);
    const low = Math.min(-3, ...points), high = Math.max(3, ...points), xs = Array.from({ length: 121 }, (_, k) => low + (high - low) * k / 120), ys = xs.map(f);
    const [bottom, top] = [Math.min(...ys), Math.max(...ys)], x = (v) => 8 + 304 * (v - low) / (high - low), y = (v) => 128 - 116 * (v - bottom) / (top - bottom || 1);
    const svg = (tag, attributes) => { const node = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v); return node; };
    const root = svg("svg", { viewBox: "0 0 320 136", role: "img", "aria-label": `${chosen[step.choice || step.name] || step.detail.function} with the numbers of ${step.inputs[0]} on it` });
    root.append(svg("path", { d: `M8 ${y(0)}H312M${x(0)} 8V128`, class: "axis" }), svg("path", { d: "M" + xs.map((v, k) => `${x(v).toFixed(1)} ${y(ys[k]).toFixed(1)}`).join("L"), class: "function" }));
    for (const v of points) root.append(svg("circle", { cx: x(v).toFixed(1), cy: y(f(v)).toFixed(1), r: 3.5 }));
    this.curve.replaceChildren(make("p", `${step.name} = ${chosen[step.choice || step.name] || step.detail.function}: a point for each number of ${step.inputs[0]}`, { class: "muted" }), root);
  }
}

function toBf16(value) { // to the nearest, ties to even
  const bits = new Uint32Array(new Float32Array([value]).buffer)[0], rounded = (bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000;
  return new Float32Array(new Uint32Array([rounded]).buffer)[0];
}
