"""A block as one drawing: its cells are the trace's numbers, equal blocks give equal bytes."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ffncli
from ffncli.pages.drawing import block_drawing, value_text
from ffncli.run.saved.saved import open_saved

SVG = "{http://www.w3.org/2000/svg}"


def drawn(path: Path, call, *words: str) -> ElementTree.Element:
    assert call("trace", *words, "-q", "-o", str(path))[0] == 0
    return ElementTree.fromstring(path.read_bytes())


def cells(tree: ElementTree.Element) -> dict[str, str]:
    return {one.attrib["data-text"]: one.text or "" for one in tree.iter(f"{SVG}text") if "data-text" in one.attrib}


def test_every_number_is_in_its_cell(tmp_path: Path, call):
    found = cells(drawn(tmp_path / "block.svg", call, "4x8:swiglu", "--bias", "--tokens", "3"))
    session = ffncli.trace("4x8:swiglu", bias=True, tokens=3)
    expected = {f"{step.name}[{i},{j}]": value for step in session.steps
                for i, row in enumerate(session[step.name].tolist()) for j, value in enumerate(row)}  # fmt: skip
    for name, tensor in session.prepared.weights.items():  # as x · W multiplies
        matrix = tensor.T if tensor.dim() == 2 else tensor[None]
        expected |= {f"{name}[{i},{j}]": v for i, row in enumerate(matrix.tolist()) for j, v in enumerate(row)}
    assert {name: float(text) for name, text in found.items()} == pytest.approx(expected, abs=6e-4)


def test_the_order_is_that_of_the_products_and_experts_are_lanes(tmp_path: Path, call):
    tree = drawn(tmp_path / "plain.svg", call, "4x8:relu", "--tokens", "2")
    labels = [one.text for one in tree.iter(f"{SVG}text") if "data-text" not in one.attrib]
    assert [str(text).split("   ")[0] for text in labels] == [
        "4x8:relu", "x", "· W1", "+ up.bias", "up = x · W1 + b1", "act = relu(up)", "· W2", "+ down.bias",
        "down = act · W2 + b2",
    ]  # fmt: skip
    tree = drawn(tmp_path / "mixture.svg", call, "8x16:swiglu", "--experts", "4", "--top-k", "2", "--tokens", "3")
    lanes = [one for one in tree.iter(f"{SVG}text") if str(one.text).startswith("expert ")]
    assert len({one.attrib["y"] for one in lanes}) == 1
    assert [float(one.attrib["x"]) for one in lanes] == sorted({float(one.attrib["x"]) for one in lanes})
    route = ffncli.trace("8x16:swiglu", experts=4, top_k=2, tokens=3)["route"]
    for e, lane in enumerate(lanes):
        assert [int(text) for text in re.findall(r"\d+", str(lane.text))][1:] == route[
            :, e
        ].nonzero().flatten().tolist()


@pytest.mark.parametrize(("words", "lines"), [("3x4:relu --tokens 2", 2), ("4x12:relu --tokens 2", 4)])
def test_a_result_stands_where_a_product_is_written(words: str, lines: int, tmp_path: Path, call):
    """Right of what it is computed from, row by row, and below its weights, column by column."""
    tree = drawn(tmp_path / "block.svg", call, *words.split())
    at = {one.attrib["data-part"]: (float(one.attrib["x"]), float(one.attrib["y"])) for one in tree.iter(f"{SVG}rect")
          if "data-part" in one.attrib}  # fmt: skip
    results = ("x", "up", "act", "down")
    assert len({at[f"{name}[0,0]"][1] for name in results}) == lines
    for name, reads in zip(results[1:], results, strict=False):
        (x, y), (before, level) = at[f"{name}[1,0]"], at[f"{reads}[1,0]"]
        assert x > before if y == level else (x == at["x[0,0]"][0] and y > level)  # or it begins the next line
        for part in ("weight", "bias") if name in ("up", "down") else ():
            assert at[f"{name}.{part}[0,2]"][0] == at[f"{name}[0,2]"][0]
            assert at[f"{name}.{part}[0,2]"][1] < at[f"{name}[0,2]"][1]
    width = float(tree.attrib["viewBox"].split()[2])
    assert max(x for x, _ in at.values()) < width <= 620


def test_a_page_gets_panels_and_lanes(tmp_path: Path):
    """Each panel is an SVG of its own, so that lines break where the window ends; an arrow leads to what reads it."""
    ffncli.trace("4x8:swiglu", experts=3, top_k=2, tokens=2, save=tmp_path / "t.npz", save_weights=True)
    page = block_drawing(open_saved(tmp_path / "t.npz")).element()
    assert [one.tag for one in page] == ["svg", "svg", "svg", "div", "svg"]  # x, router, route, the lanes, their sum
    assert [len(one) for one in page.iter("div") if one.get("class") == "lanes"] == [3]
    assert len([*page.iter("style")]) == 1
    assert [len([*one.iter("path")]) for one in page] == [1, 1, 0, 0, 0]  # x → router → route
    whole = ElementTree.fromstring(block_drawing(open_saved(tmp_path / "t.npz")).svg())
    assert {one.get("data-part") for one in page.iter("rect")} == {
        one.get("data-part") for one in whole.iter(f"{SVG}rect") if one.get("class") != "frame"
    }


@pytest.mark.parametrize(
    "words", ["4x8:gelu", "8x16:swiglu --experts 4 --top-k 2", "512x2048:swiglu", "--example notebook --eval"]
)
def test_the_same_block_twice_gives_the_same_bytes(words: str, tmp_path: Path, call):
    for name in ("a", "b"):
        drawn(tmp_path / f"{name}.svg", call, *words.split())
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_large_block_has_boxes_with_shapes(tmp_path: Path, call):
    tree = drawn(tmp_path / "large.svg", call, "512x2048:swiglu")
    assert "· W1   512 × 2,048" in {one.text for one in tree.iter(f"{SVG}text")}
    assert cells(tree) == {}


def test_a_png_and_its_refusals(tmp_path: Path, call):
    pytest.importorskip("matplotlib")
    assert call("trace", "4x8:relu", "-q", "-o", str(tmp_path / "block.png"))[0] == 0
    assert (tmp_path / "block.png").read_bytes()[:4] == b"\x89PNG"
    code, _, err = call("trace", "4x8:relu", "-o", str(tmp_path / "block.svg"), "--explain", "up[0,1]")
    assert (code, "--explain contradicts --output .svg" in err) == (2, True)


def test_shared_weights_of_experts_and_odd_values(tmp_path: Path):
    ffncli.trace("4x8:swiglu", experts=3, tokens=2, save=tmp_path / "t.npz")
    drawing = block_drawing(open_saved(tmp_path / "t.npz"))
    assert drawing.about.startswith("4x8:swiglu: x, · W_router")
    assert [value_text(v) for v in (1.5, -12.346, 1234.5, float("nan"), float("-inf"))] == [
        "1.500", "-12.35", "1.23e+03", "NaN", "-Inf"
    ]  # fmt: skip
