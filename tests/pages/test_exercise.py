"""Exercises: every answer follows from what the page shows, and the page does not show it."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import ffncli
from ffncli.pages.exercise import exercise_pages
from ffncli.run.saved.saved import open_saved
from ffncli.run.trace.call import session_for
from ffncli.run.trace.question import Question


def parsed(page: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """(the text of each cell of the drawing, the blanks that its script knows)."""
    parts = "".join(re.sub(r"xmlns=\S+ ", "", one) for one in re.findall(r"<svg .*?</svg>", page, re.S))
    svg = ElementTree.fromstring(f"<all>{parts}</all>")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    cells = {one.attrib["data-text"]: (one.text or "").strip() for one in svg.iter("text") if "data-text" in one.attrib}
    return cells, data["block-live"].get("blanks", [])


def answers(page: str) -> list[float]:
    return [float(text) for text in re.findall(r'<td class="number">(\S+)</td>', page)]


def row(cells: dict[str, str], name: str, i: int) -> list[float]:
    """The numbers of a token's row that the page shows; raises ValueError for a blank among them."""
    width = sum(cell.startswith(f"{name}[{i},") for cell in cells)
    return [float(cells[f"{name}[{i},{k}]"]) for k in range(width)]


def by_hand(cells: dict[str, str], cell: str) -> float:
    """What a reader computes from the numbers that the page shows."""
    name, i, j = re.fullmatch(r"(?:experts\.\d+\.)?(\w+)\[(\d+),(\d+)\]", cell).groups()  # type: ignore[union-attr]
    e = re.match(r"experts\.(\d+)\.", cell)
    own, token, at, gated = (e[0] if e else ""), int(i), int(j), any("hidden" in one for one in cells)
    if name in ("up", "gate", "router", "down"):
        x = row(cells, own + ("hidden" if gated else "act") if name == "down" else "x", token)
        weight = f"{name}.weight[{e[1]}]" if e else f"{name}.weight"
        bias = cells.get(f"{name}.bias[0,{at}]", "0")
        return sum(v * float(cells[f"{weight}[{k},{at}]"]) for k, v in enumerate(x)) + float(bias)
    if name == "act":
        value = float(cells[f"{own}{'gate' if gated else 'up'}[{token},{at}]"])
        return float(torch.nn.functional.silu(torch.tensor(value))) if gated else max(value, 0.0)
    if name == "hidden":
        return float(cells[f"{own}act[{token},{at}]"]) * float(cells[f"{own}up[{token},{at}]"])
    if name == "route":
        best = torch.tensor(row(cells, "router", token)).topk(2)
        return float(best.values.softmax(0)[best.indices.tolist().index(at)])
    shares = row(cells, "route", token)
    return sum(s * float(cells[f"experts.{k}.down[{token},{at}]"]) for k, s in enumerate(shares) if s)


BLOCKS = {
    "plain": {"source": "3x4:relu", "tokens": 5},
    "mixture": {"source": "4x4:swiglu", "experts": 3, "top_k": 2, "tokens": 3},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_blank_follows_from_what_is_shown(name: str, tmp_path: Path) -> None:
    """With small integers, sums are exact; shown digits limit the rest. The answers are the trace's values."""
    path, asked = tmp_path / "t.safetensors", set()
    question = Question(**BLOCKS[name], integers=True, save=path, save_weights=True)  # type: ignore[arg-type]
    session, saved = session_for(question, inside=True), open_saved(path)
    for seed in range(10):
        sheet, solved = exercise_pages(saved, "title", 6, seed)
        (cells, blanks), values = parsed(sheet), answers(solved)
        assert len(blanks) == len({one["cell"] for one in blanks}) == len(values) == 6
        for at, (one, value) in enumerate(zip(blanks, values, strict=True), 1):
            assert cells[one["cell"]] == f"{at}?"
            assert {cells[cell] for cell in one["hides"]} <= {"…"}
            expected = by_hand(cells, one["cell"])
            assert value == pytest.approx(expected, rel=2e-2, abs=6e-3), one  # 3 decimals times 9
            step, i, j = re.fullmatch(r"(.*)\[(\d+),(\d+)\]", one["cell"]).groups()  # type: ignore[union-attr]
            if "." not in step:
                assert value == pytest.approx(float(session[step][int(i), int(j)]), rel=5e-3, abs=6e-4)
            asked.add(step.rpartition(".")[2])
            if step.endswith("up") and name == "plain":
                assert one["hides"] == [f"act[{i},{j}]"]  # relu of a number above 0 would tell it
    more = {"router", "route", "gate", "hidden", "experts"} if name == "mixture" else set()
    assert asked == {"up", "act", "down"} | more


def test_a_seed_is_a_sheet(tmp_path: Path, call: Any) -> None:
    def made(name: str, *more: str) -> tuple[bytes, bytes]:
        page = tmp_path / f"{name}.html"
        assert call("trace", "2x3:relu", "--integers", "--exercise", "3", "-q", "-o", str(page), *more)[0] == 0
        return page.read_bytes(), page.with_suffix(".answers.html").read_bytes()

    first, again, other = made("a", "--seed", "4"), made("b", "--seed", "4"), made("c", "--seed", "5")
    assert first == again
    assert answers(first[1].decode()) != answers(other[1].decode())
    (tmp_path / "a.html").unlink()
    code, _, err = call("trace", "2x3:relu", "--exercise", "3", "-o", str(tmp_path / "a.html"))
    assert (code, "a.answers.html exists already" in err, (tmp_path / "a.html").exists()) == (2, True, False)


def test_small_integers_choose_experts_clearly() -> None:
    for seed in range(8):
        session = ffncli.trace("4x6:swiglu", experts=6, top_k=2, tokens=4, integers=True, seed=seed)
        weights = session.prepared.weights
        x, router = session["x"], session["router"].sort(-1, descending=True).values
        for tensor in (x, *weights.values()):
            assert torch.equal(tensor, tensor.round())
            assert float(tensor.abs().max()) <= 3
        assert len({*map(tuple, x.tolist())}) == 4
        assert bool((router[:, 1] > router[:, 2]).all())
        assert torch.equal(session["router"], x @ weights["router.weight"].T)
