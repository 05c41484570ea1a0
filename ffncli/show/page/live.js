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
      field.addEventListener("input", () => {
        const value = Number(field.value);
        if (field.value !== "" && Number.isFinite(value)) { row[j] = value; changed(); }
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

function live(root) {
  const block = DATA[root.dataset.live], chosen = {};
  const tokens = Object.values(block.inputs)[0].length;
  const copy = (value) => JSON.parse(JSON.stringify(value));
  const linear = new Set(block.steps.filter((step) => step.op === "linear").map((step) => step.weights.weight));
  const fresh = () => Object.fromEntries(Object.entries(copy(block.weights)).map(([name, tensor]) => [ // as x · W multiplies
    name, linear.has(name) ? tensor[0].map((_, i) => tensor.map((row) => row[i])) : tensor,
  ]));
  let inputs = copy(block.inputs), weights = fresh(), values, grids, folds;
  const first = compute(block, inputs, weights, chosen);
  const place = make("div", null, { class: "live" });
  const reading = make("p", "Point at a number, or move to it with Tab, to see how it is computed.", { class: "reading values", role: "status" });
  const again = make("button", "Back to the saved numbers", { type: "button" });
  root.append(again, place, reading);

  function computed(step) { // a line per token; without those that do not go to its expert
    const grid = make("table");
    grids.push({ step, lines: Array.from({ length: tokens }, (_, i) => {
      const line = make("tr"), cells = Array.from({ length: step.width }, (__, j) => {
        const cell = make("td", "", { class: "value", tabindex: "0", "data-cell": `${step.name}[${i},${j}]` });
        const tell = () => { reading.textContent = explained(step, i, j, values, weights, chosen); };
        cell.addEventListener("pointerenter", tell);
        cell.addEventListener("focus", tell);
        return cell;
      });
      if (step.expert !== undefined) line.append(make("th", `token ${i}`, { scope: "row" }));
      line.append(...cells);
      grid.append(line);
      return { line, cells };
    }) });
    return scrolled(grid, step.name);
  }

  function update() {
    values = compute(block, inputs, weights, chosen);
    for (const { step: { name }, lines } of grids) {
      lines.forEach(({ line, cells }, i) => {
        const row = values[name][i], before = first[name][i];
        line.hidden = row === undefined;
        if (row) cells.forEach((cell, j) => {
          cell.textContent = shownNumber(Number(row[j].toPrecision(6)));
          cell.dataset.value = String(row[j]);
          cell.classList.toggle("changed", !before || row[j] !== before[j]);
        });
      });
    }
    for (const { summary, step } of folds) {
      const here = values[step.name].flatMap((row, i) => (row ? [i] : []));
      summary.textContent = `Expert ${step.expert}: ${here.length ? `token${here.length > 1 ? "s" : ""} ${here.join(", ")}` : "no token"}`;
    }
  }

  function choiceOf(step) {
    const name = step.choice || step.name, initial = step.detail.function;
    const select = make("select", null, { "aria-label": `Activation of ${name}` });
    const functions = block.functions.includes(initial) ? block.functions : [initial, ...block.functions];
    for (const one of functions) select.append(make("option", one, { value: one }));
    select.value = chosen[name] || initial;
    select.addEventListener("change", () => { chosen[name] = select.value; update(); });
    return select;
  }

  function fieldsOf(step, shown) { // of the weights that no step before has shown
    const fields = [];
    for (const [part, name] of Object.entries(step.weights)) {
      if (shown.has(name)) continue;
      shown.add(name);
      const tensor = weights[name], matrix = Array.isArray(tensor[0]);
      const symbol = step.op === "linear" && matrix ? (/ · ((?:\w+\.)*W\w*)/.exec(step.formula) || [0, name])[1] : name;
      const expert = matrix && name.endsWith("]") ? `${step.expert}, ` : "", transposed = part === "weight" && matrix;
      const shape = matrix ? `[${tensor.length}, ${tensor[0].length}]` : `[${tensor.length}]`;
      const title = `${symbol} ${shape}${transposed ? `, ${name} transposed: a row per input` : ""}`;
      fields.push(editable(title, matrix ? tensor : [tensor], (i, j) => `${symbol}[${expert}${matrix ? `${i}, ` : ""}${j}]`, update));
    }
    return fields;
  }

  function build() {
    grids = [];
    folds = [];
    const shown = new Set();
    let into = place;
    place.replaceChildren();
    for (const step of block.steps) {
      if (step.op === "input") {
        const title = `${step.name}, the input: a row per token`;
        place.append(make("h3", step.name), editable(title, inputs[step.name], (i, j) => `${step.name}[${i}, ${j}]`, update));
        continue;
      }
      if (step.op === "received") {
        const summary = make("summary");
        into = make("details", null, { class: "expert" });
        into.open = first[step.name].some(Boolean) && !folds.some((fold) => fold.open);
        folds.push({ summary, step, open: into.open });
        into.append(summary);
        if (step.expert === 0) { // one choice for all experts, before the first
          for (const one of block.steps.filter((other) => other.expert === 0 && other.choice && other.name.startsWith(step.name.slice(0, step.name.lastIndexOf("."))))) {
            place.append(make("h3", `${one.choice} = ${one.formula}, of each expert`), choiceOf(one));
          }
        }
        place.append(into);
      } else if (step.expert === undefined) into = place;
      into.append(make("h3", `${step.name} = ${step.formula}`));
      if (step.op === "activation" && !step.choice) into.append(choiceOf(step));
      into.append(...fieldsOf(step, shown), computed(step));
    }
    update();
  }

  again.addEventListener("click", () => {
    inputs = copy(block.inputs);
    weights = fresh();
    for (const name of Object.keys(chosen)) delete chosen[name];
    build();
  });
  build();
}
document.querySelectorAll("[data-live]").forEach(live);
