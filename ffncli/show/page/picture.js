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

function cellText(value) { // in at most six characters, an integer without decimals
  if (Number.isInteger(value) && Math.abs(value) < 1000) return String(value);
  return Math.abs(value) < 10 ? value.toFixed(3) : Math.abs(value) < 100 ? value.toFixed(2) : value.toPrecision(3);
}

function joined(words) {
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}` : words[0] || "";
}

class Picture {
  constructor(root, live) {
    Object.assign(this, { live, drawing: root.querySelector(".block"), rects: new Map(), texts: new Map(), gradients: null, at: -1, moved: new Set() });
    this.drawing.setAttribute("role", "group");
    this.drawing.setAttribute("aria-label", "The block; the arrow keys move through a matrix, Enter changes a number");
    for (const text of this.drawing.querySelectorAll("[data-text]")) this.texts.set(text.dataset.text, text);
    for (const rect of this.drawing.querySelectorAll("[data-part]")) {
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
    const side = make("div", null, { class: "side" }), says = (name) => (this[name] = make("div", null, { class: name, role: "status" }));
    root.querySelector(".picture").append(side);
    this.said = make("p", "", { class: "said values", role: "status" });
    this.exercise = live.block.blanks && new Exercise(this, live.block.blanks);
    if (this.exercise) return side.append(this.exercise.box, this.said, this.walk());
    const hint = make("p", "Point at a cell to see how it is made. Click an input or a weight to change it.", { class: "muted" });
    side.append(hint, this.said, says("terms"), this.field(), says("glance"), this.training(), says("trained"), this.formats(), says("curve"), this.walk());
    this.pointed = `${live.block.steps[live.block.steps.length - 1].name}[0,0]`;
  }

  nameOf(part) { // `W2[3,0]`, `act[0,3]`; in an expert `expert 1: W2[3,0]`
    const { name, i, j } = this.place(part), inside = /^(.*)\.(\d+)\.(\w+)$/.exec(name) || /^()\S*?\[(\d+)\]$/.exec(name);
    const own = this.rects.get(part)?.dataset.name || `${inside && inside[3] ? inside[3] : name}[${i},${j}]`;
    return inside ? `${inside[1] && inside[1] !== "experts" ? `${inside[1]}, ` : ""}expert ${inside[2]}: ${own}` : own;
  }

  widthOf(name) { return this.live.values[name].find(Boolean)?.length ?? 0; }

  stepOf(name) { return this.live.block.steps.find((one) => one.name === name); }

  place(part) { // [its name, row, column, the rows that hold it if it can be changed]
    const [, name, i, j] = /^(.*)\[(\d+),(\d+)\]$/.exec(part), { weights, inputs } = this.live;
    const tensor = weights[name], rows = tensor ? (Array.isArray(tensor[0]) ? tensor : [tensor]) : inputs[name];
    return { name, i: Number(i), j: Number(j), rows, part };
  }

  valueOf({ name, i, j, rows }) { return rows ? rows[i]?.[j] : this.live.values[name]?.[i]?.[j]; }

  madeOf(step, i, j) { // the cells that a number is computed from; an expert's first steps read the token itself
    const parts = [], whole = ["linear", "norm", "route"].includes(step.op);
    step.inputs.forEach((name, at) => {
      const row = this.live.values[name][i], from = this.stepOf(name).op === "received" ? this.stepOf(name).inputs[0] : name;
      if (!row || (step.op === "experts" && at === 0 && !step.identity)) return;
      row.forEach((v, k) => {
        if (whole || (step.op === "experts" && at === 1 ? v !== 0 : k === Math.min(j, row.length - 1))) parts.push(`${from}[${i},${k}]`);
      });
    });
    for (const [kind, name] of Object.entries(step.weights)) {
      const rows = Array.isArray(this.live.weights[name][0]) ? this.live.weights[name].length : 1;
      for (let k = 0; k < rows; k++) parts.push(`${name}[${kind === "bias" ? 0 : k},${j}]`);
    }
    return parts;
  }

  refresh() {
    const most = new Map(), cells = [...this.rects].map(([part, rect]) => [rect, this.place(part)]), secret = this.exercise?.secret;
    const number = (at) => (secret?.has(at.part) ? undefined : this.gradients ? this.gradients.get(at.part) : this.valueOf(at));
    for (const [, at] of cells) most.set(at.name, Math.max(most.get(at.name) || 0, Math.abs(number(at) || 0)));
    const hidden = this.largestHidden();
    for (const [rect, at] of cells) {
      const value = number(at), text = this.texts.get(at.part), instead = secret?.has(at.part) ? this.exercise.textOf(at.part) : "";
      rect.classList.toggle("plus", value > 0);
      rect.classList.toggle("minus", value < 0);
      rect.classList.toggle("absent", value === undefined && !instead);
      rect.classList.toggle("largest", !secret && at.part === hidden);
      rect.classList.toggle("moved", this.moved.has(at.part));
      rect.setAttribute("fill-opacity", value ? (0.6 * Math.abs(value) / most.get(at.name)).toFixed(3) : 1);
      if (text) rect.setAttribute("aria-label", `${this.nameOf(at.part)} ${value === undefined ? instead || "empty" : shownNumber(value)}`);
      if (text) text.textContent = value === undefined ? instead : cellText(value);
    }
    for (const text of this.drawing.querySelectorAll("[data-note]")) text.textContent = this.noteOf(text.dataset.note);
    if (!this.exercise) {
      this.lossText.textContent = shownNumber(this.loss());
      this.drawCurve();
      this.atAGlance(hidden);
    }
    if (this.pointed) this.point(this.pointed);
  }

  chosenOf(step, i) { // the entries of a route that token i goes to
    return this.live.values[step.name][i].flatMap((v, e) => (v ? [[step.names[e], v]] : []));
  }

  noteOf(key) { // where a token goes, or which tokens an expert gets
    const [, name, i] = /^(.*)\[(\d+)\]$/.exec(key) || [];
    if (name) return `→ ${this.chosenOf(this.stepOf(name), Number(i)).map(([one, v]) => `${one} (${v.toFixed(2)})`).join(", ") || "no expert"}`;
    const received = this.live.block.steps.find((one) => one.op === "received" && one.name.startsWith(`${key}.`));
    const tokens = this.live.values[received.name].flatMap((row, at) => (row ? [at] : []));
    return `expert ${received.expert}: ${tokens.length ? `token${tokens.length > 1 ? "s" : ""} ${tokens.join(", ")}` : "no token"}`;
  }

  largestHidden() { // the cell of the largest number, by size, that a down projection reads
    let most = -1, found = "";
    for (const { inputs: [name] } of this.live.block.steps.filter((one) => one.op === "linear" && /(^|\.)down$/.test(one.name))) {
      this.live.values[name].forEach((row, i) => row?.forEach((v, j) => { if (Math.abs(v) > most) [most, found] = [Math.abs(v), `${name}[${i},${j}]`]; }));
    }
    return found;
  }

  atAGlance(hidden) {
    const lines = hidden ? [["largest", `The largest hidden value is ${this.nameOf(hidden)} = ${cellText(this.valueOf(this.place(hidden)))} (thick frame).`]] : [];
    for (const step of this.live.block.steps.filter((one) => one.op === "route" && one.names.length)) {
      this.live.values[step.name].slice(0, 8).forEach((_, i) => lines.push(["", `Token ${i} goes to ${joined(this.chosenOf(step, i).map(([name, v]) => `${name} (${v.toFixed(2)})`)) || "no expert"}.`]));
    }
    this.glance.replaceChildren(...lines.map(([kind, text]) => make("p", text, { class: kind })));
  }

  sumOf(part) { // how a number is made, in words
    const { name, i, j } = this.place(part), { values, weights, chosen } = this.live;
    return explained(this.stepOf(name), i, j, values, weights, chosen);
  }

  point(part) {
    this.pointed = part;
    const at = this.place(part), step = this.stepOf(at.name), value = this.valueOf(at), name = this.nameOf(part);
    const made = step && step.op !== "input" && value !== undefined ? this.madeOf(step, at.i, at.j) : [], lit = new Set([part, ...made]);
    for (const [one, rect] of this.rects) rect.classList.toggle("lit", lit.has(one));
    if (this.exercise?.hides(lit)) this.said.textContent = this.exercise.about(part, name, step, value);
    else if (this.gradients) this.said.textContent = `The loss changes by ${shownNumber(this.gradients.get(part))} per unit of ${name}.`;
    else if (made.length) this.said.textContent = this.sumOf(part);
    else this.said.textContent = `${name} ${value === undefined ? "is empty: the token does not go there." : `= ${shownNumber(value)}${at.rows && !this.exercise ? ": click it, or press Enter, to change it." : ""}`}`;
    if (this.exercise) return;
    this.showTerms(made.length && !this.gradients ? this.termsOf(step, at.i, at.j) : [], `${name} = ${cellText(value ?? 0)}`);
    this.entry.disabled = !at.rows;
    this.entryLabel.textContent = at.rows ? `${name} ` : "A number to change: none chosen ";
    if (at.rows && document.activeElement !== this.entry) this.entry.value = String(Number(value.toPrecision(6)));
  }

  termsOf(step, i, j) { // a sum as [in words, value]; that of experts and of a residual down to the weights
    const { values, weights } = this.live, rows = step.inputs.map((name) => values[name][i]), term = (text, value) => [text, value];
    if (step.op === "linear") {
      const { weight, bias } = step.weights, from = this.stepOf(step.inputs[0]).op === "received" ? this.stepOf(step.inputs[0]).inputs[0] : step.inputs[0];
      const terms = rows[0].map((v, k) => term(`${this.nameOf(`${weight}[${k},${j}]`)} ${cellText(weights[weight][k][j])} · ${from.split(".").pop()}[${i},${k}] ${cellText(v)}`, v * weights[weight][k][j]));
      return bias ? [...terms, term(this.nameOf(`${bias}[0,${j}]`), weights[bias][j])] : terms;
    }
    if (step.op === "experts") {
      return rows.slice(2).flatMap((row, e) => {
        const share = step.detail.weigh === "output" ? rows[1][step.first + e] : 1;
        return row ? this.termsOf(this.stepOf(step.inputs[2 + e]), i, j).map(([text, v]) => term(`${text} · ${cellText(share)}`, v * share)) : [];
      }).concat(step.identity ? [term("identities", rows[0][j] * sum(rows[1].slice(-step.identity)))] : []);
    }
    if (step.op === "add") return step.inputs.flatMap((name, k) => this.termsOf(this.stepOf(name), i, j).map(([text, v]) => term(text, v * (k === rows.length - 1 ? scaleOf(step) : 1))));
    return [term(`${this.nameOf(`${step.name}[${i},${j}]`)}`, values[step.name][i][Math.min(j, values[step.name][i].length - 1)])];
  }

  showTerms(terms, title) {
    const sorted = terms.length > 1 ? [...terms].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])) : [], shown = sorted.slice(0, 5), rest = sorted.slice(5);
    const lines = shown.map(([text, value], at) => {
      const line = make("li", null, at ? {} : { class: "strong" }), bar = make("span", null, { class: value < 0 ? "bar minus" : "bar plus", style: `width:${(6 * Math.abs(value) / Math.abs(shown[0][1] || 1)).toFixed(2)}rem` });
      line.append(bar, `${cellText(value)} = ${text}`);
      return line;
    });
    if (rest.length) lines.push(make("li", `${cellText(sum(rest.map(([, v]) => v)))} from ${rest.length} smaller terms`, { class: "muted" }));
    const list = make("ol");
    list.append(...lines);
    const most = shown.length ? /^(expert \d+: )?\S+/.exec(shown[0][0])[0] : "";
    this.terms.replaceChildren(...(most ? [make("p", `What makes ${title} (framed): ${most} has the largest part.`), list] : []));
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
    else if (this.exercise && event.key === "Enter") this.exercise.entryOf(part)?.focus();
    else if (this.exercise) return;
    else if (rows && event.key === "Enter") { this.entry.focus(); this.entry.select(); }
    else return;
    event.preventDefault();
  }

  drag(event, part) { // upwards is more
    const at = this.place(part), from = event.clientY, first = this.valueOf(at), rect = this.rects.get(part);
    rect.focus();
    if (this.exercise) { event.preventDefault(); return this.exercise.entryOf(part)?.focus(); }
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
      for (const [part, rect] of this.rects) rect.classList.toggle("walked", part.startsWith(`${step.name}[`) || part.startsWith(`${step.name}.`));
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
    const box = make("div", null, { class: "tools" }), rate = make("input", null, { class: "number", type: "number", step: "any", value: "0.1" });
    this.lossText = make("output");
    const few = this.rects.size <= 1200;
    const show = make("button", "Show the gradient", { type: "button", "aria-pressed": "false" }), train = make("button", "One training step", { type: "button" });
    const measure = () => new Map([...this.rects.keys()].map((part) => [part, this.place(part)]).filter(([, at]) => this.valueOf(at) !== undefined).map(([part, at]) => [part, this.gradientOf(at)]));
    show.addEventListener("click", () => {
      this.gradients = this.gradients ? null : measure();
      show.setAttribute("aria-pressed", String(this.gradients !== null));
      show.textContent = this.gradients ? "Show the values" : "Show the gradient";
      this.refresh();
    });
    train.addEventListener("click", () => {
      const before = [this.loss(), this.firstOutput()], places = this.places(), moves = [];
      for (const [part, gradient] of measure()) {
        const { name, i, j, rows } = this.place(part), by = Number(rate.value) * gradient;
        if (!this.live.weights[name] || !by) continue;
        moves.push([part, rows[i][j], by]);
        rows[i][j] -= by;
      }
      moves.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
      this.moved = new Set(moves.slice(0, 3).map(([part]) => part));
      this.gradients = null;
      this.live.update();
      this.tell(rate.value, before, places, moves);
    });
    const loss = make("span", "Loss (mean square of the output): ", { class: "loss" }), atRate = make("label", "at rate ");
    loss.append(this.lossText);
    atRate.append(rate);
    box.append(loss, ...(few ? [show, train, atRate] : []));
    return box;
  }

  firstOutput() { return this.live.values[this.live.block.steps[this.live.block.steps.length - 1].name][0][0]; }

  places() { // the experts of each token, by route
    return this.live.block.steps.filter((one) => one.op === "route" && one.names.length).map((step) => this.live.values[step.name].map((_, i) => joined(this.chosenOf(step, i).map(([name]) => name))));
  }

  tell(rate, before, places, moves) { // what a training step changed
    const [from, output] = before, loss = this.loss(), word = loss < from ? "fell" : loss > from ? "rose" : "stayed", most = moves.slice(0, 3);
    const weights = Object.values(this.live.weights).flat(2).length;
    const output_ = `${this.live.block.steps[this.live.block.steps.length - 1].name}[0,0] went from ${cellText(output)} to ${cellText(this.firstOutput())}`;
    const first = `One training step at rate ${rate}: the loss ${word} from ${shownNumber(from)} to ${shownNumber(loss)}, and ${output_}. It moved ${moves.length} weights of ${weights}${moves.length < weights ? ", as the others have gradient 0" : ""}; these the most (dashed frames):`;
    const list = make("ul");
    list.append(...most.map(([part, old, by]) => make("li", `${this.nameOf(part)} by ${by < 0 ? "+" : ""}${shownNumber(-by)}, from ${cellText(old)} to ${cellText(old - by)}`)));
    const now = this.places(), gone = places.flatMap((route, r) => route.flatMap((to, i) => (to === now[r][i] ? [] : [`Token ${i} went to ${to}, and now goes to ${now[r][i]}.`])));
    const end = gone.length ? gone.join(" ") : places.length ? "Every token keeps its experts." : "";
    this.trained.replaceChildren(make("p", first), list, ...(end ? [make("p", end)] : []));
  }

  forget() { // what was trained or rounded, when the numbers are again those of the file
    if (this.exercise) return;
    this.moved = new Set();
    this.exact = this.gradients = null;
    this.trained.replaceChildren();
    this.format.value = "";
  }

  formats() { // the weights rounded: to bf16, or to integers times one scale per matrix
    const select = this.format = make("select"), label = make("label", "Weights as "), names = { "": "they are", bf16: "bf16", int8: "8-bit integers", int4: "4-bit integers" };
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
    const { block, values, weights, chosen } = this.live, all = block.steps.filter((one) => one.op === "activation" && values[one.name].some(Boolean)), [step] = all;
    if (!step) return;
    const points = all.filter((one) => one.choice === step.choice).flatMap((one) => values[one.inputs[0]].filter(Boolean).flat()), f = activated(step, weightsOf(step, weights), chosen);
    const low = Math.min(-3, ...points), high = Math.max(3, ...points), xs = Array.from({ length: 121 }, (_, k) => low + (high - low) * k / 120), ys = xs.map(f);
    const [bottom, top] = [Math.min(...ys), Math.max(...ys)], x = (v) => 8 + 304 * (v - low) / (high - low), y = (v) => 128 - 116 * (v - bottom) / (top - bottom || 1);
    const svg = (tag, attributes) => { const node = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v); return node; };
    const root = svg("svg", { viewBox: "0 0 320 136", role: "img", "aria-label": `${chosen[step.choice || step.name] || step.detail.function} with the numbers of ${step.inputs[0]} on it` });
    root.append(svg("path", { d: `M8 ${y(0)}H312M${x(0)} 8V128`, class: "axis" }), svg("path", { d: "M" + xs.map((v, k) => `${x(v).toFixed(1)} ${y(ys[k]).toFixed(1)}`).join("L"), class: "function" }));
    for (const v of points) root.append(svg("circle", { cx: x(v).toFixed(1), cy: y(f(v)).toFixed(1), r: 3.5 }));
    this.curve.replaceChildren(make("p", `${step.choice || step.name} = ${chosen[step.choice || step.name] || step.detail.function}: a point for each number of ${step.inputs[0].split(".").pop()}`, { class: "muted" }), root);
  }
}

function toBf16(value) { // to the nearest, ties to even
  const bits = new Uint32Array(new Float32Array([value]).buffer)[0], rounded = (bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000;
  return new Float32Array(new Uint32Array([rounded]).buffer)[0];
}
