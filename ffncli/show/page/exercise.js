// An exercise: numbers that are left out of the drawing, filled in at its side and checked.
const roundedAsShown = (v) => (Array.isArray(v) ? v.map(roundedAsShown) : typeof v === "number" ? Number(cellText(v)) : v);

class Exercise {
  constructor(picture, blanks) {
    Object.assign(this, { picture, blanks, solved: new Set(), entries: [] });
    this.hide();
    this.score = make("p", `0 of ${blanks.length} right`, { class: "strong", role: "status" });
    const list = make("ol"), box = make("div", null, { class: "exercise" });
    blanks.forEach((one, at) => {
      const item = make("li"), label = make("label", `${picture.nameOf(one.cell)} = ${one.formula} =`), says = make("span", "", { role: "status" });
      const entry = make("input", null, { class: "number", type: "number", step: "any" });
      entry.addEventListener("focus", () => picture.point(one.cell));
      entry.addEventListener("change", () => {
        const verdict = entry.value === "" ? "" : this.verdict(one.cell, Number(entry.value));
        if (verdict === "right") this.solved.add(at);
        else this.solved.delete(at);
        says.textContent = verdict;
        says.className = verdict === "right" ? "right" : "wrong";
        this.score.textContent = `${this.solved.size} of ${blanks.length} right`;
        this.hide();
        picture.refresh();
      });
      this.entries.push(entry);
      label.append(" ", entry);
      item.append(label, " ", says);
      list.append(item);
    });
    box.append(make("p", "Compute with the numbers as they are shown, and give as many digits. Press Enter to check.", { class: "muted" }), list, this.score);
    this.box = box;
  }

  hide() { // what is not to be seen yet
    this.secret = new Set(this.blanks.flatMap((one, at) => (this.solved.has(at) ? [] : [one.cell, ...one.hides])));
  }

  hides(parts) { return [...parts].some((part) => this.secret.has(part)); }

  textOf(part) {
    const at = this.blanks.findIndex((one) => one.cell === part);
    return at < 0 ? "…" : `${at + 1}?`;
  }

  about(part, name, step, value) {
    if (this.entryOf(part)) return `${name} = ${step.formula} is to be filled in. The framed cells make it.`;
    if (this.secret.has(part)) return `${name} = ${step.formula} is hidden until the blank that it reads is right.`;
    return `${name} = ${shownNumber(value)}. One of the numbers that make it is blank.`;
  }

  entryOf(part) { return this.entries[this.blanks.findIndex((one) => one.cell === part)]; }

  verdict(part, typed) { // right within one unit of the last digit shown, of the exact number or of that of the numbers shown
    const { live } = this.picture, { name, i, j } = this.picture.place(part), step = this.picture.stepOf(name), exact = live.values[name][i][j];
    const rows = step.inputs.map((one) => live.values[one][i]), params = roundedAsShown(Object.values(weightsOf(step, live.weights)));
    const named = Object.fromEntries(Object.keys(step.weights).map((kind, at) => [kind, params[at]]));
    const byHand = rowOf(step, roundedAsShown(rows), named, i, live.chosen)[j], size = Math.abs(exact);
    const unit = size < 10 ? 0.001 : size < 100 ? 0.01 : 10 ** (Math.floor(Math.log10(size)) - 2);
    const off = Math.max(Math.min(exact, byHand) - typed, typed - Math.max(exact, byHand));
    return off <= unit * 1.0001 ? "right" : `not yet: off by at most ${10 ** Math.ceil(Math.log10(Math.abs(typed - exact)))}`;
  }
}
