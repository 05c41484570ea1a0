"""Turn a saved trace into sections of a page: the steps with their costs, a heat map of each step and, for a small
block, all values, which can be edited."""

import math
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from torch import Tensor

from ffncli.errors import FFNError
from ffncli.pages.drawing import Drawing, block_drawing
from ffncli.pages.live import MOST_WEIGHTS, live_block
from ffncli.pages.origins import origins
from ffncli.pages.records import titled
from ffncli.run.measure.statistics import cells_of, largest, percentile, span, values_of_a_cell
from ffncli.run.saved.saved import Saved, SavedStep, open_saved
from ffncli.show.page.charts import CostBar, cost_bars, histogram
from ffncli.show.page.document import Child, PageParts, Section, definitions, element
from ffncli.show.tensors import number_text

_OF_EXPERTS = ("experts", "top_k", "shared_experts")  # these are 0 in a dense block
_ABOUT = (
    "name", "layer", "d_model", "d_ff", "activation", "gated", "bias", "norm", *_OF_EXPERTS, "weights", "mode", "dtype",
    "device",
)  # fmt: skip
_ROWS, _COLUMNS = 24, 72  # maximum number of cells in a heat map
_MOST_STEPS = 40
_MOST_NAMED = 240  # rows of a map that are named by their tokens
_MOST_COLOURED = 512  # weights of a drawing in which each has a cell
_LIVE = (
    "Change an input, a weight or the activation: every number in this part that depends on it is computed again, in"
    " float64, and marked if it changes."
)


def trace_parts(path: Path, name: str) -> PageParts:
    """Return the sections of one saved trace. Raises FFNError for a file that `ffn trace --save` did not write."""
    saved = open_saved(path)
    shown = _shown(saved)
    tensors = {step.name: _rows(saved.tensor(step.name)) for step in shown}
    whole = [step for step in shown if not step.inner]
    data: dict[str, Any] = {}
    sections = []
    try:
        sections.append(live_section(saved, name, data, about=f"{_LIVE} The parts below keep the saved numbers."))
    except FFNError as error:
        # No note for a large block or a block without weights: nobody expects to edit those.
        if 0 < saved.weight_count <= MOST_WEIGHTS:
            sections.append(Section(f"{name}-live", "The block, number by number", (element("p", f"{error}"),)))
        picture = _framed(_drawing(saved).element())
        sections.append(Section(f"{name}-picture", "The block as a picture", (picture,)))
    sections.append(facts_section(saved, name))
    rows = tensors[shown[0].name].shape[0]
    labels, alike = _labels(saved, rows), [step for step in whole if tensors[step.name].shape[0] == rows]
    if rows > 1:
        spans = [span(i, rows, min(rows, _ROWS)) for i in range(min(rows, _ROWS))]
        named = [" to ".join(dict.fromkeys((labels[one.start], labels[one.stop - 1]))) for one in spans]
        data[f"{name}-tokens"] = {"steps": [f"{name}-{step.name}" for step in alike], "labels": named}
        sections.append(Section(f"{name}-tokens", "Token by token", (element("div", data_tokens=f"{name}-tokens"),)))
    for step in shown:
        key = f"{name}-{step.name}"
        data[key] = {**heat_data(step.name, tensors[step.name]), "inputs": step.inputs, "op": step.op}
        data[key] |= {"formula": step.formula} if step.inputs else {}
        data[key] |= {"rows": labels} if saved.prompt_tokens and step in alike and rows <= _MOST_NAMED else {}
        data[key]["across"] = _columns_of(saved, step)
        if (tokens := saved.tokens(step.name)) is not None:
            data[key]["tokens"] = tokens
        cells = data[key]["values"]
        data[key] |= origins(saved, step, tensors, (len(cells), len(cells[0])))
        figures = element("p", _figures(tensors[step.name]), class_="values")
        bars = histogram(tensors[step.name].flatten().tolist())
        sections.append(Section(f"{key}-step", _assignment(step), (figures, element("div", data_heat=key), bars)))
    if left := len([step for step in saved.steps if 0 not in step.shape]) - len(shown):
        more = element("p", f"The file has {left:,} more step{'s' if left > 1 else ''}.")
        sections.append(Section(f"{name}-more", "More steps", (more,)))
    title = titled(str(saved.block.get("name") or ""), saved.prompt or "") or path.name
    return PageParts(tuple(sections), data, title=title)


def live_section(
    saved: Saved, name: str, data: dict[str, Any], picture: Element | None = None, about: str = _LIVE
) -> Section:
    """Return the block's drawing, or `picture`, in which every number can be changed, and put what its script needs
    into `data`; `about` is the text below it. Raises FFNError if the block is too large, or the script cannot compute
    it."""
    data[f"{name}-live"] = live_block(saved)
    if saved.prompt_tokens:
        data[f"{name}-live"]["labels"] = _labels(saved, len(saved.prompt_tokens))
    drawn = _drawing(saved).element() if picture is None else picture
    live = element("div", _framed(drawn), data_live=f"{name}-live")
    return Section(f"{name}-live", "The block, number by number", (live, element("p", about)))


def facts_section(saved: Saved, name: str) -> Section:
    """Return the block's properties, and what each step costs."""
    whole = [step for step in saved.steps if not step.inner and 0 not in step.shape]
    costs = [CostBar(_assignment(step), step.flops or 0, f"[{', '.join(map(str, step.shape))}]") for step in whole]
    return Section(f"{name}-block", "The block", (_about(saved), cost_bars(costs)))


def _framed(drawn: Element) -> Element:
    return element("div", element("div", drawn, class_="drawing"), class_="picture")


def _drawing(saved: Saved) -> Drawing:
    return block_drawing(saved, colours=saved.weight_count <= _MOST_COLOURED)


def _shown(saved: Saved) -> list[SavedStep]:
    """Return the steps to show, in the file's order: the block's steps, and as many steps inside experts as still fit.
    Steps of an expert without tokens are left out, since they have no values."""
    steps = sorted((step for step in saved.steps if 0 not in step.shape), key=lambda step: step.inner)
    names = {step.name for step in steps[:_MOST_STEPS]}
    return [step for step in saved.steps if step.name in names]


def _columns_of(saved: Saved, step: SavedStep) -> str:
    """Return what the columns of a step's map are."""
    if step.op == "route" or any(one.op == "route" and step.name in one.inputs for one in saved.steps):
        return "expert"
    return "dimension" if step.shape[-1] == saved.block.get("d_model") else "unit"


def _rows(tensor: Tensor) -> Tensor:
    """Reshape [..., features] to a matrix in float64."""
    return tensor.reshape(-1, tensor.shape[-1]).double()


def _assignment(step: SavedStep) -> str:
    return f"{step.name} = {step.formula}" if step.inputs else step.name


def _about(saved: Saved) -> Child:
    values = {**{key: saved.block.get(key) for key in _ABOUT}, "prompt": saved.prompt}
    return definitions(
        (key, "yes" if value is True else "no" if value is False else str(value))
        for key, value in values.items()
        if value not in (None, "") and (key not in _OF_EXPERTS or value)
    )


def _figures(x: Tensor) -> str:
    """Return the shape; minimum, maximum, mean and spread of the finite values; and counts of NaN, Inf and zeros."""
    finite = x[x.isfinite()]
    text = f"{x.shape[0]} × {x.shape[1]}"
    if finite.numel():
        ends = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "std": finite.std(correction=0)}
        text += "".join(f", {name} {number_text(float(value), 4)}" for name, value in ends.items())
    odd = {"NaN": int(x.isnan().sum()), "infinite": int(x.isinf().sum()), "zero": int((x == 0).sum())}
    return text + "".join(f", {count:,} {name}" for name, count in odd.items() if count)


# --- heat maps --------------------------------------------------------------------------------------------------------


def heat_data(name: str, x: Tensor) -> dict[str, Any]:
    """Return the cells of a matrix's heat map. Each cell has the mean and the value of largest magnitude of the
    values that it covers. NaN takes precedence, then infinity, so that a cell that covers a NaN or an infinity shows
    it."""
    cells, finite = cells_of(x, _ROWS, _COLUMNS), x[x.isfinite()]
    out: dict[str, Any] = {
        "name": name, "shape": list(x.shape), "values": [[_word_of(largest(cell)) for cell in line] for line in cells],
        "most": _digits(float(finite.abs().max())) if finite.numel() else 0, "each": values_of_a_cell(x, cells),
    }  # fmt: skip
    if finite.numel() and 0 < (clip := percentile(finite.abs())) < float(finite.abs().max()) / 2:
        out["clip"] = _digits(clip)
    if out["each"] > 1:
        means = [[float(cell.mean()) for cell in line] for line in cells]
        out["means"] = [[_digits(mean) if math.isfinite(mean) else None for mean in line] for line in means]
    return out


def _word_of(value: float) -> float | str:
    """Return a value for JSON, with NaN and infinity as strings, since JSON cannot represent them."""
    return _digits(value) if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _labels(saved: Saved, rows: int) -> list[str]:
    """Return a label for each row of the input: its number or, if a model ran, the token's position and text."""
    if len(saved.prompt_tokens) != rows:
        return [str(row) for row in range(rows)]
    texts = ["#" + str(token.id) if token.text is None else f"“{token.text}”" for token in saved.prompt_tokens]
    return [f"{token.position} {text}" for token, text in zip(saved.prompt_tokens, texts, strict=True)]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
