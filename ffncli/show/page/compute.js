// A small block, computed in float64 by the same steps as `ffn trace`. A row is a token's; of an expert's steps there are
// only the rows of the tokens that go to it, the others are undefined.
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
const softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));
const gelu = (x) => 0.5 * x * (1 + erf(x / Math.SQRT2));
const FUNCTIONS = { // of a number, and of the learned parameters where there are some
  identity: (x) => x,
  relu: (x) => Math.max(x, 0),
  relu2: (x) => Math.max(x, 0) ** 2,
  relu6: (x) => Math.min(Math.max(x, 0), 6),
  leaky_relu: (x) => (x > 0 ? x : 0.01 * x),
  prelu: (x, { weight: [slope] }) => (x > 0 ? x : slope * x),
  gelu,
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  quick_gelu: (x) => x * sigmoid(1.702 * x),
  gelu_10: (x) => Math.min(gelu(x), 10),
  silu: (x) => x * sigmoid(x),
  sigmoid,
  tanh: Math.tanh,
  mish: (x) => x * Math.tanh(softplus(x)),
  hardswish: (x) => x * Math.min(Math.max(x + 3, 0), 6) / 6,
  softplus,
  sqrtsoftplus: (x) => Math.sqrt(softplus(x)),
  elu: (x) => (x > 0 ? x : Math.expm1(x)),
  selu: (x) => 1.0507009873554805 * (x > 0 ? x : 1.6732632423543772 * Math.expm1(x)),
  laplace: (x) => 0.5 * (1 + erf((x - 0.707107) / (0.282095 * Math.SQRT2))),
  xielu: (x, { alpha_p: [p], alpha_n: [n] }) => 0.5 * x
    + (x > 0 ? softplus(p) * x * x : (Math.expm1(Math.min(x, -1e-6)) - x) * (0.5 + softplus(n))),
};
const SOFT_CAPPED = { identity: () => 1, silu: sigmoid }; // what is left of the function where its linear factor is capped
const known = (text) => text !== undefined && text !== "None" && text !== "";
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function norm(row, { detail: d }, { weight, bias }) {
  const factor = (i) => (weight ? weight[i] + (d.weight === "one_plus" ? 1 : 0) : 1);
  const x = d.weigh === "input" ? row.map((v, i) => v * factor(i)) : row;
  const mean = d.kind === "layernorm" ? sum(x) / x.length : 0;
  const size = Math.sqrt(sum(x.map((v) => (v - mean) ** 2)) / x.length + Number(d.eps));
  return x.map((v, i) => (v - mean) / size * (d.weigh === "input" ? 1 : factor(i)) + (bias ? bias[i] : 0));
}

function activated(step, weights, chosen) {
  const d = step.detail, name = chosen[step.choice || step.name] || d.function, cap = Number(d.soft_cap);
  const f = known(d.soft_cap) && SOFT_CAPPED[name] ? (x) => cap * Math.tanh(x / cap) * SOFT_CAPPED[name](x) : FUNCTIONS[name];
  return (v) => {
    let x = v;
    if (known(d.low)) x = Math.max(x, Number(d.low));
    if (known(d.high)) x = Math.min(x, Number(d.high));
    const y = f(x, weights);
    return (known(d.most) ? Math.min(y, Number(d.most)) : y) + Number(d.plus || 0);
  };
}

function scored(name, logits) {
  if (name !== "softmax") return logits.map((x) => FUNCTIONS[name](x));
  const most = Math.max(...logits), powers = logits.map((x) => Math.exp(x - most)), total = sum(powers);
  return powers.map((p) => p / total);
}

const best = (values, count) => values.map((_, i) => i).sort((a, b) => values[b] - values[a] || a - b).slice(0, count);

function withinGroups(d, choice) { // only experts of the best groups may be chosen
  const groups = Number(d.groups), size = choice.length / groups;
  if (groups === 1 || groups === Number(d.top_groups)) return choice;
  const ranks = Array.from({ length: groups }, (_, g) => {
    const group = choice.slice(g * size, (g + 1) * size);
    return sum(best(group, Number(d.group_best)).map((i) => group[i]));
  });
  const kept = new Set(best(ranks, Number(d.top_groups)));
  return choice.map((v, i) => (kept.has(Math.floor(i / size)) ? v : d.zero_outside === "True" ? 0 : -Infinity));
}

function oneByOne(d, logits) { // each time the best of those left, scored among those close to it
  const left = [...logits], chosen = [], values = [];
  for (let k = 0; k < Number(d.top_k); k++) {
    const [at] = best(left, 1), top = left[at];
    const close = left.map((v, i) => (top - v <= Number(d.threshold) * Math.max(Math.abs(logits[i]), top) ? v : -Infinity));
    chosen.push(at);
    values.push(scored(d.score, close)[at]);
    left[at] = -Infinity;
  }
  return [chosen, values];
}

function chosenExperts(step, logits, id, { correction, lookup }) { // the experts of a token, and what each of them weighs
  const d = step.detail, count = logits.length, always = Number(d.always), top = Number(d.top_k), all = scored(d.score, logits);
  const corrected = (values) => (correction ? values.map((v, i) => v + correction[i]) : values);
  if (d.order === "one_by_one") return oneByOne(d, logits);
  if (d.order === "choose_first") {
    const chosen = best(corrected(logits), top);
    return [chosen, scored(d.score, chosen.map((e) => logits[e]))];
  }
  const nearest = (index, size) => Math.min(size - 1, Math.max(0, Math.round(index)));
  const row = lookup && lookup[nearest(id, lookup.length)].map((e) => nearest(e, count));
  const chosen = row || best(withinGroups(d, corrected(all.slice(0, count - always))), top);
  const taken = [...chosen, ...Array.from({ length: always }, (_, i) => count - always + i)];
  const values = taken.map((e) => all[e]), total = sum(values) + Number(d.eps);
  return [taken, d.renormalise === "True" ? values.map((v) => v / total) : values];
}

function routed(step, logits, id, weights) { // one number per expert, 0 for those that are not chosen
  const [chosen, values] = chosenExperts(step, logits, id, weights), factor = weights.factor ? weights.factor[0] : 1;
  const out = logits.map(() => 0);
  chosen.forEach((e, k) => { out[e] += values[k] * Number(step.detail.scale) * factor; });
  return out;
}

function mixed(step, x, share, outputs) { // a token's weighted sum over its experts
  const byOutput = step.detail.weigh === "output", identity = step.identity ? sum(share.slice(share.length - step.identity)) : 0;
  return Array.from({ length: step.width }, (_, j) => outputs.reduce(
    (total, row, e) => (row ? total + row[j] * (byOutput ? share[step.first + e] : 1) : total), identity ? identity * x[j] : 0));
}

const ROW = { // by op, a row of the step's output from the rows of its inputs; i is the token
  linear: (step, [x], { weight, bias }) => weight[0].map((_, o) => x.reduce((total, v, k) => total + v * weight[k][o], 0) + (bias ? bias[o] : 0)),
  activation: (step, [x], weights, i, chosen) => x.map(activated(step, weights, chosen)),
  multiply: (step, rows, { factor }) => Array.from({ length: step.width }, (_, j) => rows.reduce(
    (product, row) => product * row[row.length > 1 ? j : 0], factor ? factor[factor.length > 1 ? j : 0] : 1)),
  add: (step, rows, { bias }) => rows[0].map((_, j) => sum(rows.map((row, k) => row[j] * (k === rows.length - 1 ? scaleOf(step) : 1))) + (bias ? bias[j] : 0)),
  norm: (step, [x], weights) => norm(x, step, weights),
  dropout: (step, [x]) => x,
  route: (step, [logits, ids], weights) => routed(step, logits, ids && ids[0], weights),
  received: ({ detail: d }, [x, share]) => (share[d.entry] === 0 ? undefined : d.weighs_input ? x.map((v) => v * share[d.entry]) : x),
};
const scaleOf = (step) => (known(step.detail.scale) ? Number(step.detail.scale) : 1);
const weightsOf = (step, weights) => Object.fromEntries(Object.entries(step.weights).map(([part, name]) => [part, weights[name]]));

function rowOf(step, rows, params, i, chosen) { // of token i; undefined if the token does not go there
  if (step.op === "experts") return mixed(step, rows[0], rows[1], rows.slice(2));
  return rows.includes(undefined) ? undefined : ROW[step.op](step, rows, params, i, chosen);
}

function compute(block, inputs, weights, chosen, shift) { // name of a step → its rows; one number moved by `shift`
  const out = { ...inputs };
  for (const step of block.steps.filter((one) => one.op !== "input")) {
    const from = step.inputs.map((name) => out[name]), params = weightsOf(step, weights);
    out[step.name] = from[0].map((_, i) => rowOf(step, from.map((one) => one[i]), params, i, chosen));
    if (shift && shift.name === step.name) {
      const rows = out[step.name];
      rows[shift.i] = rows[shift.i].map((v, j) => (j === shift.j ? v + shift.by : v));
    }
  }
  return out;
}

const EXPLAINED = { // by op, how one number was computed, in words
  linear(step, j, [x], { weight, bias }) {
    const terms = x.slice(0, 12).map((v, k) => `${shownNumber(v)}·${shownNumber(weight[k][j])}`);
    return `${terms.join(" + ")}${x.length > 12 ? ` + … (${x.length} products)` : ""}${bias ? ` + ${shownNumber(bias[j])}` : ""}`;
  },
  activation: (step, j, [x], weights, chosen) => activationText(step.detail, chosen[step.choice || step.name] || step.detail.function, shownNumber(x[j])),
  multiply: (step, j, rows, { factor }) => [...(factor ? [factor] : []), ...rows].map((row) => shownNumber(row[row.length > 1 ? j : 0])).join(" · "),
  add(step, j, rows, { bias }) {
    const terms = rows.map((row, k) => (k === rows.length - 1 && scaleOf(step) !== 1 ? `${step.detail.scale}·` : "") + shownNumber(row[j]));
    return [...terms, ...(bias ? [shownNumber(bias[j])] : [])].join(" + ");
  },
  received: (step, j, [x, share]) => (step.detail.weighs_input ? `${shownNumber(share[step.detail.entry])}·` : "") + `${step.inputs[0]} ${shownNumber(x[j])}`,
  experts(step, j, [x, share, ...outputs]) {
    const terms = outputs.map((row, e) => row && `${step.detail.weigh === "output" ? `${shownNumber(share[step.first + e])}·` : ""}${shownNumber(row[j])} (expert ${e})`);
    const identity = step.identity ? sum(share.slice(share.length - step.identity)) : 0;
    return [...terms.filter(Boolean), ...(identity ? [`${shownNumber(identity)}·${shownNumber(x[j])} (identities)`] : [])].join(" + ") || "0: no expert";
  },
};

function activationText(d, name, x) { // as formulas print it, of a number
  const clipped = known(d.low) && known(d.high) ? `clip(${x}, ${d.low}, ${d.high})`
    : known(d.high) ? `min(${x}, ${d.high})` : known(d.low) ? `max(${x}, ${d.low})` : x;
  const capped = known(d.soft_cap) && SOFT_CAPPED[name];
  const value = capped ? `${d.soft_cap} · tanh(${clipped} / ${d.soft_cap})${name === "identity" ? "" : ` · sigmoid(${clipped})`}`
    : name === "identity" && clipped !== x ? clipped : `${name}(${clipped})`;
  const bounded = known(d.most) ? `min(${value}, ${d.most})` : value;
  return bounded + (Number(d.plus || 0) ? ` + ${d.plus}` : "");
}

function chosenBy(step, j, [logits, ids], weights) { // where the token goes, and what the router says of entry j
  const [chosen] = chosenExperts(step, logits, ids && ids[0], weights), names = [...new Set(chosen)].sort((a, b) => a - b);
  if (names.length === logits.length || !step.names.length) return "";
  const [kind, number] = step.detail.order === "score_first" ? [step.detail.score, scored(step.detail.score, logits)[j]] : ["logit", logits[j]];
  const list = names.map((e) => step.names[e]), last = list.pop();
  return `: this token goes to ${list.length ? `${list.join(", ")} and ` : ""}${last}; the ${kind} of ${step.names[j]} is ${shownNumber(number)}`;
}

function explained(step, i, j, values, weights, chosen) { // one number, in words
  const rows = step.inputs.map((name) => values[name][i]), how = EXPLAINED[step.op], params = weightsOf(step, weights);
  const text = how ? how(step, j, rows, params, chosen) : step.formula;
  return `${step.name}[${i}, ${j}] = ${text} = ${shownNumber(values[step.name][i][j])}${step.op === "route" ? chosenBy(step, j, rows, params) : ""}`;
}
