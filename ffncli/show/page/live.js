// A small block whose inputs, weights and activations can be changed: every number that follows is computed again.
function scrolled(grid, title) {
  const box = make("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
  box.append(grid);
  return box;
}

function editable(title, rows, label, changed) { // a matrix of number fields, rows and columns as given
  const grid = make("table");
  rows.forEach((row, i) => {
    const line = make("tr");
    row.forEach((_, j) => {
      const field = make("input", null, { class: "number", type: "number", step: "any", "aria-label": label(i, j) });
      field.value = String(Number(row[j].toPrecision(6)));
      const before = row[j];
      field.addEventListener("input", () => {
        const value = Number(field.value), valid = field.value !== "" && Number.isFinite(value);
        field.setAttribute("aria-invalid", String(!valid)); // the number before it still counts
        field.classList.toggle("changed", valid && value !== before);
        if (valid) { row[j] = value; changed(); }
      });
      const cell = make("td");
      cell.append(field);
      line.append(cell);
    });
    grid.append(line);
  });
  const fold = make("details");
  if (rows.length * rows[0].length <= 64) fold.open = true;
  fold.append(make("summary", title), scrolled(grid, title));
  return fold;
}

const copied = (value) => JSON.parse(JSON.stringify(value));
const ownerOf = (step) => step.name.split(".")[0]; // of a step inside an expert: its step of experts
const prefixOf = (step) => (step.expert === undefined || ownerOf(step) === "experts" ? "" : `${ownerOf(step)}.`);

class LiveBlock {
  constructor(root) {
    this.block = DATA[root.dataset.live];
    this.tokens = Object.values(this.block.inputs)[0].length;
    this.place = make("div", null, { class: "live" });
    this.reading = make("p", "", { class: "reading values", role: "status" });
    const reset = make("button", "Back to the saved numbers", { type: "button" });
    reset.addEventListener("click", () => this.reset());
    const fold = make("details"); // on a page whose drawing shows every number, the fields are a second way
    fold.open = !this.block.folded;
    fold.append(make("summary", "All numbers as fields"), this.place);
    if (!this.block.blanks) root.append(reset, fold, this.reading);
    this.load();
    this.picture = root.querySelector(".picture") && new Picture(root, this);
    this.update();
  }

  reset() {
    this.load();
    if (this.picture) this.picture.forget();
    this.update();
  }

  load() {
    const linear = new Set(this.block.steps.filter((step) => step.op === "linear").map((step) => step.weights.weight));
    this.inputs = copied(this.block.inputs);
    this.weights = Object.fromEntries(Object.entries(copied(this.block.weights)).map(([name, tensor]) => [ // as x · W multiplies
      name, linear.has(name) ? tensor[0].map((_, i) => tensor.map((row) => row[i])) : tensor,
    ]));
    this.chosen = {};
    this.first = this.first || compute(this.block, copied(this.inputs), this.weights, this.chosen);
    this.build();
  }

  build() {
    this.opened = this.folds && new Set(this.folds.filter((one) => one.fold.open).map((one) => one.step.name));
    Object.assign(this, { grids: [], folds: [], headings: [], shown: new Set(), pointed: null });
    this.place.replaceChildren();
    let into = this.place;
    for (const step of this.block.steps) {
      if (step.op === "input") {
        const title = `${step.name}, the input: a row per token`, label = (i, j) => `${step.name}[${i}, ${j}]`;
        this.place.append(make("h3", step.name), editable(title, this.inputs[step.name], label, () => this.update()));
        continue;
      }
      if (step.op === "received") into = this.foldOf(step);
      else if (step.expert === undefined) into = this.place;
      into.append(this.headingOf(step, step.name));
      if (step.op === "activation" && !step.choice) into.append(this.selectOf(step));
      into.append(...this.fieldsOf(step), this.gridOf(step));
    }
  }

  update() {
    this.values = compute(this.block, this.inputs, this.weights, this.chosen);
    for (const { step: { name }, lines } of this.grids) {
      lines.forEach(({ line, cells }, i) => {
        const row = this.values[name][i], before = this.first[name][i];
        line.hidden = row === undefined;
        if (row) cells.forEach((cell, j) => {
          cell.textContent = shownNumber(Number(row[j].toPrecision(6)));
          cell.dataset.value = String(row[j]);
          cell.classList.toggle("changed", !before || row[j] !== before[j]);
        });
      });
    }
    for (const { summary, step } of this.folds) {
      const here = this.values[step.name].flatMap((row, i) => (row ? [i] : []));
      const name = ownerOf(step) === "experts" ? "Expert" : `${ownerOf(step)}, expert`;
      summary.textContent = `${name} ${step.expert}: ${here.length ? `token${here.length > 1 ? "s" : ""} ${here.join(", ")}` : "no token"}`;
    }
    for (const { node, name, step, rest } of this.headings) {
      const function_ = this.chosen[step.choice || step.name];
      node.textContent = `${name} = ${function_ ? step.formula.replace(step.detail.function, function_) : step.formula}${rest}`;
    }
    this.read();
    if (this.picture) this.picture.refresh();
  }

  headingOf(step, name, rest = "") { // its formula has the activation that is chosen
    const node = make("h3");
    this.headings.push({ node, name, step, rest });
    return node;
  }

  read() { // how the number under the pointer is computed, while it is there
    if (!this.pointed) return;
    const { step, i, j } = this.pointed;
    if (this.values[step.name][i]) this.reading.textContent = explained(step, i, j, this.values, this.weights, this.chosen);
  }

  foldOf(step) { // the part of an expert; before the first one what all of them share
    const summary = make("summary"), fold = make("details", null, { class: "expert" });
    const busy = this.first[step.name].some(Boolean) && !this.folds.some((one) => one.fold.open);
    fold.open = this.opened ? this.opened.has(step.name) : busy;
    this.folds.push({ summary, step, fold });
    fold.append(summary);
    for (const one of step.expert === 0 ? this.block.steps : []) {
      if (one.expert === 0 && one.choice && ownerOf(one) === ownerOf(step)) {
        this.place.append(this.headingOf(one, one.choice, ", of each expert"), this.selectOf(one));
      }
    }
    this.place.append(fold);
    return fold;
  }

  gridOf(step) { // a line per token; without those that do not go to its expert
    const grid = make("table");
    const lines = Array.from({ length: this.tokens }, (_, i) => {
      const line = make("tr"), cells = Array.from({ length: step.width }, (__, j) => {
        const cell = make("td", "", { class: "value", tabindex: "0", "data-cell": `${step.name}[${i},${j}]` });
        const point = () => { this.pointed = { step, i, j }; this.read(); };
        cell.addEventListener("pointerenter", point);
        cell.addEventListener("focus", point);
        return cell;
      });
      line.append(make("th", this.block.labels ? this.block.labels[i] : `token ${i}`, { scope: "row" }), ...cells);
      grid.append(line);
      return { line, cells };
    });
    this.grids.push({ step, lines });
    return scrolled(grid, step.name);
  }

  selectOf(step) {
    const name = step.choice || step.name, initial = step.detail.function, { functions } = this.block;
    const select = make("select", null, { "aria-label": `Activation of ${name}` });
    for (const one of functions.includes(initial) ? functions : [initial, ...functions]) select.append(make("option", one, { value: one }));
    select.value = this.chosen[name] || initial;
    select.addEventListener("change", () => { this.chosen[name] = select.value; this.update(); });
    return select;
  }

  fieldsOf(step) { // of the weights that no step before has shown
    return Object.entries(step.weights).filter(([, name]) => !this.shown.has(name)).map(([part, name]) => {
      this.shown.add(name);
      const tensor = this.weights[name], matrix = Array.isArray(tensor[0]), ofOne = name.endsWith("]"); // one expert's
      const formula = step.op === "linear" && matrix && / · ((?:\w+\.)*W\w*)/.exec(step.formula);
      const symbol = formula ? prefixOf(step) + formula[1] : name.replace(/\[\d+\]$/, "");
      const shape = matrix ? `[${tensor.length}, ${tensor[0].length}]` : `[${tensor.length}]`;
      const title = `${symbol} ${shape}${part === "weight" && matrix ? `, ${name} transposed: a row per input` : ""}`;
      const label = (i, j) => `${symbol}[${[...(ofOne ? [step.expert] : []), ...(matrix ? [i] : []), j].join(", ")}]`;
      return editable(title, matrix ? tensor : [tensor], label, () => this.update());
    });
  }
}
document.querySelectorAll("[data-live]").forEach((root) => {
  root.picture = new LiveBlock(root).picture;
  for (const cell of document.querySelectorAll("[data-worked]")) cell.textContent = root.picture.sumOf(cell.dataset.worked).replace(/^[^=]*= /, "");
});
