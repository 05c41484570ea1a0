// Heat maps. A cell stands for one value or for several, of which it shows the largest by size; NaN and Inf have colours of
// their own. The pointer or the arrow keys move through the cells, and the line below says what is there.
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;

function heatColour(share, night) { // -1 to 1: orange through the background to blue
  const [zero, one] = night ? [[30, 35, 40], share < 0 ? [245, 166, 109] : [138, 180, 248]]
    : [[255, 255, 255], share < 0 ? [168, 72, 15] : [11, 87, 208]];
  const t = Math.sqrt(Math.min(1, Math.abs(share)));
  return zero.map((z, i) => Math.round(z + (one[i] - z) * t));
}

function paintCells(canvas, values, most) {
  const rows = values.length, columns = rows ? values[0].length : 0;
  canvas.width = columns;
  canvas.height = rows;
  const least = canvas.parentElement && canvas.parentElement.className === "map" ? 15 : 6; // a row's name needs more
  canvas.style.height = Math.max(24, Math.min(rows * least > 320 ? rows * least : 320, rows * Math.max(least, Math.round(700 / Math.max(columns, 40))))) + "px";
  const context = canvas.getContext("2d"), night = dark(), picture = context.createImageData(columns, rows);
  values.forEach((row, i) => row.forEach((value, j) => {
    const odd = typeof value !== "number";
    const [r, g, b] = odd ? (value === "nan" ? [200, 0, 160] : [230, 180, 0]) : heatColour(value / (most || 1), night);
    picture.data.set([r, g, b, 255], 4 * (i * columns + j));
  }));
  context.putImageData(picture, 0, 0);
}

function heatMap(canvas, map, read) {
  const rows = map.values.length, columns = rows ? map.values[0].length : 0;
  let at = [0, 0];
  const draw = () => paintCells(canvas, map.values, map.shown || map.most);

  function move(i, j) {
    at = [Math.max(0, Math.min(rows - 1, i)), Math.max(0, Math.min(columns - 1, j))];
    read(...at);
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    move(Math.floor((event.clientY - box.top) / box.height * rows), Math.floor((event.clientX - box.left) / box.width * columns));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    move(at[0] + step[0], at[1] + step[1]);
  });
  canvas.addEventListener("focus", () => move(...at));
  canvas.addEventListener("repaint", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

function span(part, size, count) { // the values that a cell stands for: [first, last]
  return [Math.floor(part * size / count), Math.max(Math.floor(part * size / count), Math.floor((part + 1) * size / count) - 1)];
}

function framed(canvas, map) { // the names of the rows at the left, the ends of the columns below
  const frame = make("div", null, { class: "map" }), names = make("div", null, { class: "names", "aria-hidden": "true" });
  const rows = map.values.length, name = (i) => (map.rows ? map.rows[i] : map.tokens ? map.tokens[i] : i);
  map.values.forEach((_, i) => {
    const [first, last] = span(i, map.shape[0], rows);
    names.append(make("span", rows === 1 ? "" : first === last ? name(first) : `${name(first)} to ${name(last)}`));
  });
  const ends = make("div", null, { class: "ends muted", "aria-hidden": "true" });
  ends.append(make("span", "0"), make("span", map.across || ""), make("span", map.shape[1] - 1));
  frame.append(names, canvas, make("div"), ends);
  return frame;
}

function heat(root) {
  const map = DATA[root.dataset.heat], canvas = make("canvas", null, {
    tabindex: "0", role: "img", "aria-label": `Heat map of ${map.name}; the arrow keys move through it`,
  });
  const out = make("p", "", { class: "reading values", role: "status" });
  const ramp = make("canvas", null, { class: "ramp", "aria-hidden": "true" });
  const scale = make("div", null, { class: "scale" });
  const least = map.values.flat().some((v) => v < 0 || v === "-inf") ? -1 : 0; // of the ramp, as a share of the most
  const low = make("span", shownNumber(least * map.most)), high = make("span", shownNumber(map.most));
  scale.append(low, ramp, high, make("span", map.each > 1 ? `a cell: the largest of up to ${map.each} values` : "a cell: one value", { class: "muted" }));
  root.append(framed(canvas, map), scale, out);
  if (map.clip) { // a few large values would bleach all others
    const box = make("input", null, { type: "checkbox" }), label = make("label", null, { class: "muted" });
    box.checked = true;
    const clip = () => {
      map.shown = box.checked ? map.clip : map.most;
      low.textContent = shownNumber(least * map.shown);
      high.textContent = shownNumber(map.shown) + (box.checked ? " and more" : "");
      canvas.dispatchEvent(new Event("repaint"));
    };
    label.append(box, ` colours end at the 99th percentile (the largest value is ${shownNumber(map.most)})`);
    box.addEventListener("change", clip);
    scale.append(label);
    map.shown = map.clip;
    high.textContent = `${shownNumber(map.clip)} and more`;
    low.textContent = shownNumber(least * map.clip);
  }
  heatMap(ramp, { values: [Array.from({ length: 101 }, (_, i) => least + (i / 100) * (1 - least))], most: 1 }, () => {});
  ramp.style.height = "0.8rem";
  heatMap(canvas, map, (i, j) => {
    const row = span(i, map.shape[0], map.values.length), column = span(j, map.shape[1], map.values[0].length);
    const place = [row, column].map(([a, b], axis) => (axis === 0 && map.rows && a === b ? map.rows[a] : a === b ? a : `${a}–${b}`));
    const value = map.values[i][j], single = row[0] === row[1] && column[0] === column[1];
    const mean = map.means ? `, mean ${shownNumber(map.means[i][j])}` : "";
    const origins = map.origins && map.origins[i * map.values[0].length + j];
    if (origins) { // the value's place, counted from the cell's first
      const [down, across, ...numbers] = origins, known = [row[0] + down, column[0] + across, ...numbers];
      const at = `${map.rows ? map.rows[known[0]] : known[0]}, ${known[1]}`;
      const largest = single ? "" : ` (the largest of [${place.join(", ")}]${mean})`;
      const token = map.tokens ? ` (token ${map.tokens[known[0]]})` : "";
      out.textContent = `${map.name}[${at}]${token} = ${shownNumber(value)}${computedFrom(map, known)}${largest}`;
      return;
    }
    out.textContent = `${map.name}[${place.join(", ")}] ${single ? "=" : "largest by size:"} ${shownNumber(value)}${single && !map.tokens ? origin(map, root.dataset.heat, i, j) : mean}`;
  });
}

function origin(map, key, i, j) { // the formula of a value, with the values of its inputs where they stand at the same place
  if (!map.formula) return "";
  if (!["activation", "multiply", "add", "dropout"].includes(map.op)) return ` = ${map.formula}`; // more than what is at that place
  const inputs = map.inputs.map((name) => [name, DATA[key.slice(0, key.length - map.name.length) + name]]);
  const alike = inputs.filter(([, other]) => other && other.each === 1 && other.shape[0] === map.shape[0] && other.shape[1] === map.shape[1]);
  const values = alike.map(([name, other]) => `${name} ${shownNumber(other.values[i][j])}`);
  return ` = ${map.formula}` + (values.length === inputs.length && values.length ? `, with ${values.join(", ")}` : "");
}

function computedFrom(map, [row, column, ...numbers]) { // what a value was computed from
  if (!map.weight && !map.expert) {
    const values = map.inputs.map((name, at) => `${name} ${shownNumber(numbers[at])}`);
    return ` = ${map.formula}, ${map.of_row ? "of the whole row, with" : "with"} ${values.join(", ")}${map.of_row ? " there" : ""}`;
  }
  const inside = map.tokens && map.inputs[0].startsWith(map.name.slice(0, map.name.lastIndexOf(".") + 1));
  const from = map.tokens && !inside ? map.tokens[row] : row; // an expert's first steps read rows of all tokens
  const terms = [], number = (v) => (v === null ? "(not finite)" : shownNumber(v));
  for (let at = 0; at + 1 < numbers.length; at += 2) {
    const k = numbers[at], value = numbers[at + 1];
    if (map.weight) terms.push(`${map.inputs[0]}[${from}, ${k}]·${map.weight}[${k}, ${column}] ${number(value)}`);
    else if (value !== 0) terms.push(`${expertTerm(map, row, k)} ${number(value)}`);
  }
  const rest = numbers[numbers.length - 1];
  if (rest !== 0 || !terms.length) terms.push(`all else ${number(rest)}`);
  return ` = ${map.formula}: ${terms.join(" + ")}`;
}

function expertTerm(map, row, k) { // one expert's share of a token's sum
  if (k === map.experts) return "the identities";
  return `${map.weighs_input ? "" : `${map.inputs[1]}[${row}, ${map.first + k}]·`}${map.name}.${k}.${map.expert}`;
}

function tokens(root) { // a slider through the tokens: the row of each step
  const { steps, labels } = DATA[root.dataset.tokens];
  const slider = make("input", null, { type: "range", min: "0", max: String(labels.length - 1), value: "0", "aria-label": "Token" });
  const name = make("output");
  const tools = make("div", null, { class: "tools" });
  tools.append(make("label", "Token "), slider, name);
  root.append(tools);
  const strips = steps.map((key) => {
    const map = DATA[key], canvas = make("canvas", null, { role: "img" }), out = make("p", "", { class: "reading values" });
    root.append(make("h3", map.formula ? `${map.name} = ${map.formula}` : map.name), canvas, out);
    return { map, canvas, out };
  });

  function draw() {
    const at = Number(slider.value);
    name.textContent = labels[at];
    for (const { map, canvas, out } of strips) {
      const row = map.values[Math.min(at, map.values.length - 1)], plain = row.filter((v) => typeof v === "number");
      const ends = plain.length ? `from ${shownNumber(Math.min(...plain))} to ${shownNumber(Math.max(...plain))}` : "nothing finite";
      paintCells(canvas, [row], map.shown || map.most);
      canvas.setAttribute("aria-label", `${map.name}: ${ends}`);
      out.textContent = ends + (map.each > 1 ? ", a cell the largest of several values" : "");
    }
  }

  slider.addEventListener("input", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
document.querySelectorAll("[data-heat]").forEach(heat);
document.querySelectorAll("[data-tokens]").forEach(tokens);
