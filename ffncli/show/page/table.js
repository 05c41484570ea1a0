"use strict";
// Tables that sort and filter; every value goes in as text, never as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const MOST = 100; // rows that are drawn at first
const WHOLE = new Intl.NumberFormat("en"); // toLocaleString makes one for each number

function make(tag, text, attributes) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  return node;
}

function shownNumber(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return WHOLE.format(value);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(3);
}

function compared(a, b) {
  const missing = (v) => v === null || v === undefined || v === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0;
}

function table(root) {
  const { columns, rows } = DATA[root.dataset.table];
  const text = rows.map((row) => row.map((v) => (v === null ? "" : String(v))).join(" ").toLowerCase());
  const filter = make("input", null, { type: "search", placeholder: "words to filter by", "aria-label": "Filter the rows" });
  const count = make("span", "", { class: "muted", role: "status" });
  const more = make("button", "", { type: "button" });
  const tools = make("div", null, { class: "tools" });
  tools.append(filter, count, more);
  tools.hidden = rows.length < 12;
  const head = make("tr");
  const body = make("tbody");
  const grid = make("table");
  const top = make("thead");
  top.append(head);
  grid.append(top, body);
  const scroll = make("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" });
  scroll.append(grid);
  root.append(tools, scroll);
  let order = rows.map((_, i) => i), sorted = -1, down = false, most = MOST;

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = words.length ? order.filter((i) => words.every((w) => text[i].includes(w))) : order;
    const part = document.createDocumentFragment();
    for (const i of kept.slice(0, most)) {
      const line = make("tr", null, { "data-row": i });
      rows[i].forEach((value, at) => {
        const style = typeof value === "number" ? "number" : String(value).length > 44 ? "long" : null;
        const cell = make("td", shownNumber(value), style ? { class: style } : {});
        if (columns[at] === "verdict") cell.className = "word-" + value;
        line.append(cell);
      });
      part.append(line);
    }
    body.replaceChildren(part);
    count.textContent = `${kept.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
    more.hidden = kept.length <= most;
    more.textContent = `Show all ${kept.length.toLocaleString("en")}`;
  }

  columns.forEach((name, at) => {
    const cell = make("th", null, { scope: "col", ...(rows.some((row) => typeof row[at] === "number") && { class: "number" }) });
    const button = make("button", name, { type: "button" });
    button.addEventListener("click", () => {
      down = sorted === at ? !down : false;
      sorted = at;
      order = rows.map((_, i) => i).sort((a, b) => compared(rows[a][at], rows[b][at]) || a - b);
      if (down) order.reverse();
      for (const other of head.children) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      draw();
    });
    cell.append(button);
    head.append(cell);
  });
  filter.addEventListener("input", draw);
  more.addEventListener("click", () => { most = rows.length; draw(); });
  draw();
}

document.querySelectorAll("[data-table]").forEach(table);
document.querySelectorAll("button[data-download]").forEach((button) => {
  button.addEventListener("click", () => {
    const file = DATA[button.dataset.download];
    const link = make("a", null, { download: file.name });
    link.href = URL.createObjectURL(new Blob([file.text], { type: "text/csv" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
});
