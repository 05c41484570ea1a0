// A small block that is computed in the page, in float64, by the same steps: every number follows what is changed.
function erf(x) { // Abramowitz & Stegun 7.1.5 near 0, the continued fraction 7.1.14 of erfc further out
  const a = Math.abs(x);
  let y;
  if (a < 2.5) {
    let term = a, sum = a;
    for (let n = 1; n < 80; n++) { term *= -a * a / n; sum += term / (2 * n + 1); }
    y = 2 / Math.sqrt(Math.PI) * sum;
  } else {
    let fraction = 0;
    for (let k = 120; k > 0; k--) fraction = k / 2 / (a + fraction);
    y = 1 - Math.exp(-a * a) / Math.sqrt(Math.PI) / (a + fraction);
  }
  return x < 0 ? -y : y;
}
const sigmoid = (x) => (x >= 0 ? 1 / (1 + Math.exp(-x)) : Math.exp(x) / (1 + Math.exp(x)));
const softplus = (x) => (x > 20 ? x : Math.log1p(Math.exp(x)));
const FUNCTIONS = {
  identity: (x) => x,
  relu: (x) => Math.max(x, 0),
  gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  silu: (x) => x * sigmoid(x),
  sigmoid,
  tanh: Math.tanh,
  relu2: (x) => Math.max(x, 0) ** 2,
  quick_gelu: (x) => x * sigmoid(1.702 * x),
  softplus,
  elu: (x) => (x > 0 ? x : Math.expm1(x)),
  leaky_relu: (x) => (x > 0 ? x : 0.01 * x),
  mish: (x) => x * Math.tanh(softplus(x)),
  selu: (x) => 1.0507009873554805 * (x > 0 ? x : 1.6732632423543772 * Math.expm1(x)),
};
const known = (text) => text !== undefined && text !== "None" && text !== "";

function norm(row, step, weight, bias) {
  const mean = step.detail.kind === "layernorm" ? row.reduce((a, b) => a + b, 0) / row.length : 0;
  const size = Math.sqrt(row.reduce((sum, v) => sum + (v - mean) ** 2, 0) / row.length + Number(step.detail.eps));
  return row.map((v, i) => (v - mean) / size * (weight ? weight[i] + (step.detail.weight === "one_plus" ? 1 : 0) : 1) + (bias ? bias[i] : 0));
}

function activated(step, chosen) {
  const d = step.detail, f = FUNCTIONS[chosen[step.name] || d.function];
  return (v) => {
    let x = v;
    if (known(d.low)) x = Math.max(x, Number(d.low));
    if (known(d.high)) x = Math.min(x, Number(d.high));
    let y = f(x);
    if (known(d.most)) y = Math.min(y, Number(d.most));
    return known(d.plus) ? y + Number(d.plus) : y;
  };
}

function compute(block, inputs, weights, chosen) { // name of a step → its rows
  const out = { ...inputs };
  for (const step of block.steps) {
    const [x, ...rest] = step.inputs.map((name) => out[name]);
    const weight = weights[step.name + ".weight"], bias = weights[step.name + ".bias"];
    if (step.op === "linear") {
      out[step.name] = x.map((row) => weight[0].map((_, o) => row.reduce((sum, v, i) => sum + v * weight[i][o], 0) + (bias ? bias[o] : 0)));
    } else if (step.op === "activation") {
      out[step.name] = x.map((row) => row.map(activated(step, chosen)));
    } else if (step.op === "multiply") {
      out[step.name] = x.map((row, i) => row.map((v, j) => rest.reduce((p, other) => p * other[i][other[i].length > 1 ? j : 0], v)));
    } else if (step.op === "add") {
      const scale = known(step.detail.scale) ? Number(step.detail.scale) : 1, all = [x, ...rest];
      out[step.name] = x.map((row, i) => row.map((_, j) => all.reduce((s, t, k) => s + t[i][j] * (k === all.length - 1 ? scale : 1), 0)));
    } else if (step.op === "norm") {
      out[step.name] = x.map((row) => norm(row, step, weight, bias));
    } else if (step.op === "dropout") {
      out[step.name] = x;
    }
  }
  return out;
}

function explained(block, step, i, j, values, weights, chosen) { // one number, in words
  const place = `${step.name}[${i}, ${j}]`, value = shownNumber(values[step.name][i][j]), x = values[step.inputs[0]];
  if (step.op === "linear") {
    const w = weights[step.name + ".weight"].map((row) => row[j]), bias = weights[step.name + ".bias"];
    const terms = x[i].slice(0, 12).map((v, k) => `${shownNumber(v)}·${shownNumber(w[k])}`);
    const more = x[i].length > 12 ? ` + … (${x[i].length} products)` : "";
    return `${place} = ${terms.join(" + ")}${more}${bias ? ` + ${shownNumber(bias[j])}` : ""} = ${value}`;
  }
  if (step.op === "activation") return `${place} = ${chosen[step.name] || step.detail.function}(${shownNumber(x[i][j])}) = ${value}`;
  const parts = step.inputs.map((name) => values[name][i][values[name][i].length > 1 ? j : 0]).map(shownNumber);
  if (step.op === "multiply") return `${place} = ${parts.join(" · ")} = ${value}`;
  if (step.op === "add") return `${place} = ${parts.join(" + ")} = ${value}` + (known(step.detail.scale) && Number(step.detail.scale) !== 1 ? `, the last times ${step.detail.scale}` : "");
  return `${place} = ${step.formula} = ${value}`;
}

function live(root) {
  const block = DATA[root.dataset.live], chosen = {};
  const copy = (value) => JSON.parse(JSON.stringify(value));
  const linear = new Set(block.steps.filter((step) => step.op === "linear").map((step) => step.name + ".weight"));
  const fresh = () => Object.fromEntries(Object.entries(copy(block.weights)).map(([name, tensor]) => [ // as x · W multiplies
    name, linear.has(name) ? tensor[0].map((_, i) => tensor.map((row) => row[i])) : tensor,
  ]));
  let inputs = copy(block.inputs), weights = fresh();
  const first = compute(block, inputs, weights, chosen);
  const place = make("div", null, { class: "live" });
  const reading = make("p", "Point at a number, or move to it with Tab, to see how it is computed.", { class: "reading values", role: "status" });
  const again = make("button", "Back to the saved numbers", { type: "button" });
  const cells = {};
  root.append(again, place, reading);

  function editable(title, rows, label) { // a matrix of number fields, rows and columns as given
    const grid = make("table");
    rows.forEach((row, i) => {
      const line = make("tr");
      row.forEach((_, j) => {
        const field = make("input", null, { class: "number", type: "number", step: "any", "aria-label": label(i, j) });
        field.value = String(Number(row[j].toPrecision(6)));
        field.addEventListener("input", () => {
          const value = Number(field.value);
          if (field.value !== "" && Number.isFinite(value)) { row[j] = value; update(); }
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

  function scrolled(grid, title) {
    const box = make("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
    box.append(grid);
    return box;
  }

  function computed(step) {
    const grid = make("table");
    cells[step.name] = first[step.name].map((row, i) => {
      const line = make("tr");
      grid.append(line);
      return row.map((_, j) => {
        const cell = make("td", "", { class: "value", tabindex: "0", "data-cell": `${step.name}[${i},${j}]` });
        const tell = () => { reading.textContent = explained(block, step, i, j, values, weights, chosen); };
        cell.addEventListener("pointerenter", tell);
        cell.addEventListener("focus", tell);
        line.append(cell);
        return cell;
      });
    });
    return scrolled(grid, step.name);
  }

  let values = first;
  function update() {
    values = compute(block, inputs, weights, chosen);
    for (const [name, rows] of Object.entries(cells)) {
      rows.forEach((row, i) => row.forEach((cell, j) => {
        cell.textContent = shownNumber(Number(values[name][i][j].toPrecision(6)));
        cell.dataset.value = String(values[name][i][j]);
        cell.classList.toggle("changed", values[name][i][j] !== first[name][i][j]);
      }));
    }
  }

  function build() {
    place.replaceChildren();
    for (const step of block.steps) {
      place.append(make("h3", step.op === "input" ? step.name : `${step.name} = ${step.formula}`));
      if (step.op === "input") {
        place.append(editable(`${step.name}, the input: a row per token`, inputs[step.name], (i, j) => `${step.name}[${i}, ${j}]`));
        continue;
      }
      if (step.op === "activation") {
        const choice = make("select", null, { "aria-label": `Activation of ${step.name}` });
        for (const name of block.functions) choice.append(make("option", name, { value: name }));
        choice.value = chosen[step.name] || step.detail.function;
        choice.addEventListener("change", () => { chosen[step.name] = choice.value; update(); });
        place.append(choice);
      }
      for (const part of ["weight", "bias"]) {
        const name = `${step.name}.${part}`, tensor = weights[name];
        if (!tensor) continue;
        const matrix = Array.isArray(tensor[0]), symbol = matrix ? (/ · (W\w*)/.exec(step.formula) || [0, name])[1] : name;
        const title = matrix ? `${symbol} [${tensor.length}, ${tensor[0].length}], ${name} transposed: a row per input` : `${name} [${tensor.length}]`;
        place.append(editable(title, matrix ? tensor : [tensor], (i, j) => (matrix ? `${symbol}[${i}, ${j}]` : `${symbol}[${j}]`)));
      }
      place.append(computed(step));
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
