"""The page to learn from, with every number of a small block; or as an exercise, with blanks that a seed draws among
the results of its steps, and a second page with the answers.

A blank can be computed from what the page shows: nothing that it reads is hidden. What can show its value, such as
relu(up) that of up, is hidden until it is filled in.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from ffncli.errors import FFNError, option
from ffncli.pages.drawing import Drawing, block_drawing, value_text
from ffncli.pages.live import live_block
from ffncli.pages.traces import facts_section, live_section
from ffncli.run.saved.saved import Saved
from ffncli.show.page.document import PageParts, Section, document, element
from ffncli.show.text import plural

_ASKED = ("linear", "activation", "multiply", "add", "norm", "route", "experts")
_WHOLE_ROW = ("linear", "norm", "route")  # each number reads a whole row
_MAY_EQUAL = ("activation", "multiply", "add", "dropout", "experts")  # a number can be that of an input in its column
_ATTEMPTS = 200
_MADE = "Made by ffn trace; the page loads nothing."


@dataclass(frozen=True)
class Blank:
    """A number to compute: its cell in the drawing (`up[0,3]`), its step's formula, its value, and the cells that are
    hidden with it."""

    cell: str
    formula: str
    value: float
    hides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The number's name as the page writes it: `up[0,3]`, `expert 1: gate[0,3]`."""
        return re.sub(r"^experts\.(\d+)\.", r"expert \1: ", self.cell)


def learner_page(saved: Saved, title: str) -> str:
    """Return the page on which every number of a small block can be changed. Raises FFNError for any other block."""
    data: dict[str, Any] = {}
    sections = live_section(saved, "block", data), facts_section(saved, "block")
    data["block-live"]["folded"] = True
    about = f"Every number of a feed-forward block, ready to change. {_MADE}"
    return document(title, about, [PageParts(sections, data)])


def exercise_pages(saved: Saved, title: str, count: int, seed: int) -> tuple[str, str]:
    """Return the page with `count` blanks, and the page with their answers. The blanks follow from the seed.

    Raises FFNError if the block is too large for a page that shows its numbers, or has no room for as many blanks.
    """
    drawing, data = block_drawing(saved), dict[str, Any]()
    blanks, title = blanks_of(saved, drawing, count, seed), f"{title}: exercise, seed {seed}"
    picture = drawing.element()
    picture.set("data-exercise", f"{count}")
    secret = {cell: "…" for one in blanks for cell in one.hides}
    secret |= {one.cell: f"{at}?" for at, one in enumerate(blanks, 1)}
    for one in picture.iter():
        if (cell := one.get("data-text")) in secret:
            one.text = secret[str(cell)]
        elif one.get("data-part") in secret:
            one.attrib.pop("class", None)
            one.attrib.pop("fill-opacity", None)
    live = live_section(
        saved, "block", data, picture, "Answers are checked here, with the numbers as the page shows them."
    )
    data["block-live"]["blanks"] = [{"cell": one.cell, "formula": one.formula, "hides": one.hides} for one in blanks]
    numbers = plural("number", count)
    about = f"{count} {numbers} {'is' if count == 1 else 'are'} missing: compute, type, and press Enter. {_MADE}"
    sheet = document(title, about, [PageParts((live, facts_section(saved, "block")), data)])
    return sheet, _answers(saved, title, blanks)


def _answers(saved: Saved, title: str, blanks: Iterable[Blank]) -> str:
    """Return the page of a block with nothing hidden, under a table of the answers; a script adds how they are made."""
    rows = [
        element("tr", element("th", f"{at}", scope="row"), element("td", one.name), element("td", one.formula),
                element("td", value_text(one.value), class_="number"), element("td", data_worked=one.cell))
        for at, one in enumerate(blanks, 1)
    ]  # fmt: skip
    head = element(
        "tr", [element("th", name, scope="col") for name in ("blank", "number", "formula", "answer", "in full")]
    )
    table = element("table", element("thead", head), element("tbody", rows))
    scroll = element("div", table, class_="scroll", tabindex="0", role="region", aria_label="Answers")
    data: dict[str, Any] = {}
    sections = Section("answers", "Answers", (scroll,)), live_section(saved, "block", data)
    data["block-live"]["folded"] = True
    return document(f"{title}, answers", _MADE, [PageParts(sections, data)])


def blanks_of(saved: Saved, drawing: Drawing, count: int, seed: int) -> tuple[Blank, ...]:
    """Return `count` blanks in the order of the drawing. Raises FFNError if there is no room for as many."""
    block = _Cells(saved, drawing)
    best: list[str] = []
    rng = Random(seed)
    for _ in range(_ATTEMPTS):
        chosen = block.drawn_blanks(count, rng)
        best = max(best, chosen, key=len)
        if len(best) == count:
            break
    if len(best) < count:
        what = f"{option('exercise', count)}: this block has room for {len(best)} {plural('blank', len(best))}"
        hint = "use more tokens" if best else "use a smaller block, so that the drawing shows its numbers"
        raise FFNError(what, hint)
    return tuple(block.blank(cell) for cell in block.asked if cell in best)


class _Cells:
    """The cells of a drawing that show a number, and which others each of them is computed from."""

    def __init__(self, saved: Saved, drawing: Drawing) -> None:
        self._saved = saved
        self._steps: dict[str, Mapping[str, Any]] = {step["name"]: step for step in live_block(saved)["steps"]}
        texts = {one.cell: one.text.strip() for one in drawing.shapes if one.cell and one.text}
        matrices = {_split(cell)[0] for cell in texts}
        results = [cell for cell, text in texts.items() if text and _split(cell)[0] in self._steps]
        self._reads = dict[str, set[str]]()
        self._equals: dict[str, list[str]] = {}  # a number → those that may be the same one
        for cell in results:
            self._read(cell)
        self.asked = [
            cell for cell in results
            if (step := self._steps[_split(cell)[0]])["op"] in _ASKED and self._reads[cell] <= texts.keys()
            and {*step["weights"].values()} <= matrices and (step["op"] != "route" or 0 < self._value(cell) < 1)
        ]  # fmt: skip

    def blank(self, cell: str) -> Blank:
        return Blank(cell, self._steps[_split(cell)[0]]["formula"], self._value(cell), tuple(self._hidden_with(cell)))

    def drawn_blanks(self, count: int, rng: Random) -> list[str]:
        """Return up to `count` cells, of different steps as far as possible, of which none is computed from another."""
        by_step: dict[str, list[str]] = {}
        for cell in self.asked:
            by_step.setdefault(_split(cell)[0], []).append(cell)
        groups = [rng.sample(cells, len(cells)) for cells in rng.sample([*by_step.values()], len(by_step))]
        chosen, secret, read = list[str](), set[str](), set[str]()
        while groups and len(chosen) < count:
            for cells in groups:
                cell = cells.pop()
                hidden = {cell, *self._hidden_with(cell)}
                if cell not in secret and not self._reads[cell] & secret and not hidden & read:
                    chosen.append(cell)
                    secret |= hidden
                    read |= self._reads[cell]
            groups = [cells for cells in groups if cells]
        return chosen[:count]

    def _hidden_with(self, cell: str) -> list[str]:
        hidden, queue = list[str](), [cell]
        while queue:
            new = [one for one in self._equals.get(queue.pop(), ()) if one not in hidden]
            hidden += new
            queue += new
        return hidden

    def _read(self, cell: str) -> None:
        """Note the cells that a number is computed from, all of its token's row; an expert reads the token itself."""
        name, i, j = _split(cell)
        step, reads = self._steps[name], self._reads.setdefault(cell, set())
        for at, source in enumerate(step["inputs"]):
            width, of_sum = self._steps[source]["width"], step["op"] != "experts" or at > 1
            if self._steps[source]["op"] == "received":
                source = self._steps[source]["inputs"][0]
            whole = step["op"] in _WHOLE_ROW or not of_sum
            reads |= (here := {f"{source}[{i},{k}]" for k in (range(width) if whole else [min(j, width - 1)])})
            for one in here if step["op"] in _MAY_EQUAL and of_sum else ():
                self._equals.setdefault(one, []).append(cell)

    def _value(self, cell: str) -> float:
        name, i, j = _split(cell)
        tensor, received = self._saved.tensor(name), self._saved.tokens(name)
        rows = tensor.reshape(-1, tensor.shape[-1])
        return float(rows[i if received is None else received.index(i), j])


def _split(cell: str) -> tuple[str, int, int]:
    """Return (matrix, row, column) of a cell such as `gate.weight[3][0,1]`."""
    name, _, place = cell.rpartition("[")
    i, j = place.rstrip("]").split(",")
    return name, int(i), int(j)
