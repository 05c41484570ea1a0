"""Pages of `ffn report` in a real browser: nothing is loaded or logged, numbers are the files', controls work."""

import csv
import math
import re
from pathlib import Path

import pytest

import ffncli
from tests.browser.conftest import CHANGE, RESULTS, Open, texts
from tests.oracles.prompted import PROMPT

PAGES = (
    "bench",
    "two",
    "small",
    "traces",
    "layers",
    "precision",
    "prompt",
    "experts",
    "history",
    "checkpoints",
    "steps",
    "learner",
    "exercise",
    "exercise.answers",
)
LOOKS = [(name, *look) for name in PAGES for look in ((1280, False), (400, True))]


@pytest.mark.parametrize(("name", "width", "dark"), [*LOOKS, ("bench", 1280, True), ("small", 400, False)])
def test_it_opens_and_is_accessible(pages: dict[str, Path], opened: Open, name: str, width: int, dark: bool) -> None:
    """By axe-core: no serious finding, contrast in both themes among them. The page is as wide as the window."""
    browser = opened(pages[name], dark, width)
    browser.execute_script(axe_source())
    found = browser.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    serious = [
        (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"][:200])
        for one in found["violations"] if one["impact"] in ("serious", "critical")
    ]  # fmt: skip
    assert serious == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert pages[name].stat().st_size <= 500_000


def axe_source() -> str:
    """axe-core as the package ships it."""
    import axe_core_python

    return (Path(axe_core_python.__file__).parent / "axe.min.js").read_text("utf-8")


# --- a bench ----------------------------------------------------------------------------------------------------------


def rows_of_file() -> list[dict[str, str]]:
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_numbers_are_those_of_the_file(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["bench"])
    table = browser.execute_script("return DATA['file1-table']")
    expected = rows_of_file()
    assert len(table["rows"]) == len(expected)
    for ours, theirs in zip(table["rows"], expected, strict=True):
        for name, value in zip(table["columns"], ours, strict=True):
            if isinstance(value, (int, float)):
                assert value == float(theirs[name])
            else:
                assert (value or "") == theirs[name]
    assert browser.execute_script("return DATA['file1-csv'].text") == RESULTS.read_text("utf-8")
    cells = texts(browser, "#file1-table tbody tr:first-child td")
    for name, cell in zip(table["columns"], cells, strict=True):
        theirs = expected[0][name]
        assert cell == theirs or float(cell.replace(",", "")) == pytest.approx(float(theirs), rel=1e-3)


@pytest.mark.parametrize("width", [1280, 400])
def test_interval_ends_lie_where_the_axis_says(pages: dict[str, Path], opened: Open, width: int) -> None:
    """Within a pixel, on the screen: the axis by its tick labels."""
    browser = opened(pages["bench"], width=width)
    script = """
    const svg = document.querySelector('#file1-ratios svg'), box = (e) => e.getBoundingClientRect();
    const numbers = [...svg.querySelectorAll('text.middle')].filter((t) => /^[0-9.]+$/.test(t.textContent));
    const ticks = numbers.map((t) => [Number(t.textContent), box(t).left + box(t).width / 2]);
    const lines = [...svg.querySelectorAll('line.bar')];
    const bars = lines.map((b) => [b.dataset.low, b.dataset.high, box(b).left, box(b).right]);
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return [ticks, bars, scale];
    """
    ticks, bars, scale = browser.execute_script(script)
    (v0, x0), (v1, x1) = ticks[0], ticks[-1]
    slope = (x1 - x0) / math.log(v1 / v0)
    expected = [row for row in rows_of_file() if row["ratio"] and row["ratio_low"] and row["kernel"] != row["baseline"]]
    assert len(bars) == len(expected) > 20
    for (low, high, left, right), row in zip(bars, expected, strict=True):
        assert (float(low), float(high)) == (float(row["ratio_low"]), float(row["ratio_high"]))
        for value, x in ((low, left), (high, right)):
            assert abs(x0 + slope * math.log(float(value) / v0) - x) <= 1 + 1.5 * scale  # half a stroke of 3


def test_a_table_sorts_and_filters(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["bench"])
    columns = texts(browser, "#file1-table thead button")
    button = browser.find_elements("css selector", "#file1-table thead button")[columns.index("ratio")]
    expected = sorted(float(row["ratio"]) for row in rows_of_file() if row["ratio"])
    at = columns.index("ratio") + 1
    for order in (expected, expected[::-1]):
        button.click()
        shown = [text for text in texts(browser, f"#file1-table tbody td:nth-child({at})") if text]
        assert [float(text.replace(",", "")) for text in shown] == pytest.approx(order, rel=1e-3)
    assert (
        browser.execute_script("return document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"
    )
    field = browser.find_element("css selector", "#file1-table input[type=search]")
    field.send_keys("mkl BERT")
    kept = [row for row in rows_of_file() if row["kernel"] == "mkl" and "bert" in row["source"]]
    assert len(texts(browser, "#file1-table tbody tr")) == len(kept) > 0
    assert texts(browser, "#file1-table [role=status]") == [f"{len(kept)} of {len(rows_of_file())} rows"]


def test_rounds_are_drawn_and_a_case_is_chosen(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["bench"])
    data = browser.execute_script("return DATA['file1-rounds']")
    lines = RESULTS.with_name("xeon-avx512-2cpu.rounds.csv").read_text("utf-8").splitlines()[1:]
    assert sum(len(case["seconds"]) for case in data["cases"]) == len(lines)
    first = next(csv.reader(lines[:1]))
    seconds = float(first[8]) / int(first[7])
    assert data["cases"][0]["seconds"][0] == pytest.approx(seconds, rel=1e-3)
    assert len(texts(browser, "#file1-rounds option")) == len(data["cases"])
    browser.execute_script(
        "const s = document.querySelector('#file1-rounds select'); s.value = 1; s.dispatchEvent(new Event('change'))"
    )
    assert browser.execute_script("return document.querySelectorAll('#file1-rounds canvas').length") == 1
    assert browser.get_log("browser") == []


def test_two_results_are_compared(pages: dict[str, Path], opened: Open) -> None:
    """The same numbers twice: every ratio is 1."""
    browser = opened(pages["two"])
    table = browser.execute_script("return DATA.compared1")
    ratios = [row[table["columns"].index("ratio")] for row in table["rows"]]
    assert {ratio for ratio in ratios if ratio is not None} == {1.0}


def test_hostile_names_do_nothing(tmp_path: Path, opened: Open) -> None:
    hostile = [
        "<script>document.title='pwned'</script>",
        '"><img src=x onerror="document.title=1">',
        "</script><b>",
        "\u202eevil&amp;",
    ]
    with RESULTS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[: len(hostile)]
    for row, text in zip(rows, hostile, strict=True):
        row.update(kernel=text, note=text, source=text, cpu=text, case=text)
    with (tmp_path / "hostile.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    ffncli.report(tmp_path / "hostile.csv", tmp_path / "page.html", title=hostile[0])
    browser = opened(tmp_path / "page.html")
    assert browser.title == hostile[0]
    kernel = texts(browser, "#file1-table thead button").index("kernel") + 1
    assert texts(browser, f"#file1-table tbody td:nth-child({kernel})") == hostile
    assert browser.execute_script("return document.querySelectorAll('main img, main b, main script').length") == 0


def test_ten_thousand_rows_respond(tmp_path: Path, opened: Open) -> None:
    """First paint and a filter, by the page's own clock."""
    lines = RESULTS.read_text("utf-8").splitlines(keepends=True)
    body = [line for line in lines[1:] for _ in range(-(-10_000 // (len(lines) - 1)))][:10_000]
    (tmp_path / "many.csv").write_text("".join([lines[0], *body]), "utf-8")
    ffncli.report(tmp_path / "many.csv", tmp_path / "page.html")
    browser = opened(tmp_path / "page.html")
    paint = browser.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
    script = """
    const field = document.querySelector('#file1-table input'), before = performance.now();
    field.value = 'mkl';
    field.dispatchEvent(new Event('input'));
    document.body.getBoundingClientRect();
    return performance.now() - before;
    """
    took = browser.execute_script(script)
    print(f"first paint {paint:.0f} ms, filter {took:.0f} ms")
    assert paint <= 2000
    assert took <= 200


def test_a_map_names_its_rows_and_columns(pages: dict[str, Path], opened: Open) -> None:
    """By the prompt's words; nothing of a name is cut on a phone."""
    browser = opened(pages["prompt"], width=400)
    words = [f"{at} “{word}”" for at, word in enumerate(PROMPT.split())]
    assert texts(browser, "#file1-act-step .names span") == words
    assert texts(browser, "#file1-act-step .ends span") == ["0", "unit", "39"]
    script = "return [...document.querySelectorAll('.names span')].map((e) => [e.scrollWidth, e.clientWidth])"
    names = browser.execute_script(script)
    assert all(whole <= seen for whole, seen in names)
    browser.execute_script("document.querySelector('#file1-act-step canvas').focus()")
    assert texts(browser, "#file1-act-step .reading")[0].startswith(f"act[{words[0]}, 0] = ")


# --- traces -----------------------------------------------------------------------------------------------------------


def test_the_pointer_and_the_keys_read_a_heat_map(pages: dict[str, Path], opened: Open) -> None:
    from selenium.webdriver import ActionChains, Keys

    browser = opened(pages["small"])
    session = ffncli.trace("4x8:gelu", tokens=3)
    canvas = browser.find_element("css selector", "#file1-act-step canvas:not(.ramp)")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(browser).move_to_element_with_offset(canvas, 0, 0).perform()
    read = texts(browser, "#file1-act-step .reading")[0]
    match = re.fullmatch(r"act\[(\d+), (\d+)\] = (\S+) = gelu\(up\), with up (\S+)", read)
    assert match is not None, read
    row, column = int(match[1]), int(match[2])
    assert float(match[3]) == pytest.approx(float(session["act"][row, column]), rel=1e-3)
    assert float(match[4]) == pytest.approx(float(session["up"][row, column]), rel=1e-3)
    browser.execute_script("arguments[0].focus()", canvas)
    canvas.send_keys(Keys.ARROW_RIGHT if column < 7 else Keys.ARROW_LEFT)
    after = texts(browser, "#file1-act-step .reading")[0]
    assert after.startswith(f"act[{row}, {column + (1 if column < 7 else -1)}] = ")


def test_a_number_of_a_large_block_is_explained_by_its_terms(pages: dict[str, Path], opened: Open) -> None:
    """A cell: the place of its value, whose largest terms, by torch, and all else add up to it."""
    from selenium.webdriver import Keys

    browser = opened(pages["traces"])
    session = ffncli.trace("64x256:swiglu", tokens=40)
    weight = session.prepared.weights["down.weight"].double()
    canvas = browser.find_element("css selector", "#file1-down-step canvas:not(.ramp)")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", canvas)
    canvas.send_keys(Keys.ARROW_DOWN)
    read = texts(browser, "#file1-down-step .reading")[0]
    match = re.fullmatch(
        r"down\[(\d+), (\d+)\] = (\S+) = hidden · W2: (.*) \+ all else (\S+) \(the largest of .*\)", read
    )
    assert match is not None, read
    row, column = int(match[1]), int(match[2])
    terms = session["hidden"][row].double() * weight[column]
    found = re.findall(r"hidden\[(\d+), (\d+)\]·W2\[(\d+), (\d+)\] (\S+)", match[4])
    assert [int(k) for _, k, _, _, _ in found] == terms.abs().topk(len(found)).indices.tolist()
    assert {(i, k, j) for i, k, _, j, _ in found} == {(match[1], k, match[2]) for _, k, _, _, _ in found}
    values = [float(value) for *_, value in found]
    assert values == pytest.approx(terms[[int(k) for _, k, _, _, _ in found]].tolist(), rel=1e-3)
    assert float(match[3]) == pytest.approx(float(session["down"][row, column]), rel=1e-3)
    assert sum(values) + float(match[5]) == pytest.approx(float(match[3]), abs=2e-3)


def test_a_mixtures_numbers_are_explained_by_its_experts(tmp_path: Path, opened: Open) -> None:
    """With the steps inside experts in the file: a sum over them, and a step of one, whose rows are its tokens."""
    session = ffncli.trace("16x32:swiglu", experts=4, tokens=6, expert="all", save=tmp_path / "t.safetensors")
    ffncli.report(tmp_path / "t.safetensors", tmp_path / "page.html")
    browser = opened(tmp_path / "page.html")
    read = {}
    for step in ("experts", "experts.3.gate", "experts.3.down", "route"):
        browser.execute_script(f"document.querySelector('[data-heat=\"file1-{step}\"] canvas').focus()")
        (read[step],) = texts(browser, f"[data-heat='file1-{step}'] .reading")
    least = {step: texts(browser, f"[data-heat='file1-{step}'] .scale span")[0] for step in ("route", "experts")}
    assert (least["route"], least["experts"][0]) == ("0", "-")  # the ends of the colours' scale
    match = re.fullmatch(r"experts\[0, 0\] = (\S+) = Σ route\[e\] · expert_e\(x\): (.*)", read["experts"])
    assert match is not None, read
    shares = {int(e): float(v) for e, v in re.findall(r"route\[0, (\d)\]·experts\.\1\.down (\S+)", match[2])}
    assert {*shares} == {*session["route"][0].nonzero().flatten().tolist()}
    assert sum(shares.values()) == pytest.approx(float(session["experts"][0, 0]), rel=2e-3)
    token = int(session["route"][:, 3].nonzero()[0])  # the first that goes to expert 3
    match = re.fullmatch(
        r"experts\.3\.gate\[0, 0\] \(token (\d)\) = \S+ = x · W1: x\[(\d), (\d+)\]·W1\[\3, 0\] (\S+) \+ .*",
        read["experts.3.gate"],
    )
    assert match is not None, read
    assert (int(match[1]), int(match[2])) == (token, token)
    weight = session.prepared.weights["gate.weight"][3, 0]
    assert float(match[4]) == pytest.approx(float(session["x"][token, int(match[3])] * weight[int(match[3])]), rel=1e-3)
    assert read["experts.3.down"].startswith(f"experts.3.down[0, 0] (token {token}) = ")
    assert "hidden · W2: experts.3.hidden[0, " in read["experts.3.down"]
    assert re.fullmatch(
        r"route\[0, 0\] = \S+ = normalise\(top2\(softmax\(router\)\)\), of the whole row, with router \S+ there",
        read["route"],
    )


def test_a_slider_goes_through_the_tokens(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["small"])
    act = ffncli.trace("4x8:gelu", tokens=3)["act"]
    for token in (0, 2):
        browser.execute_script(CHANGE, "#file1-tokens input", token, "input")
        assert texts(browser, "#file1-tokens output") == [str(token)]
        ends = re.fullmatch(r"from (\S+) to (\S+)", texts(browser, "#file1-tokens .reading")[2])
        assert ends is not None
        row = act[token]
        assert [float(end) for end in ends.groups()] == pytest.approx([float(row.min()), float(row.max())], rel=1e-3)


def test_a_cell_of_many_values_shows_the_largest(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["traces"])
    data = browser.execute_script("return DATA['file1-act']")
    act = ffncli.trace("64x256:swiglu", tokens=40)["act"].double()
    rows, columns = len(data["values"]), len(data["values"][0])
    assert (rows, columns) == (24, 72)
    for i, j in ((0, 0), (5, 50), (23, 71)):
        part = act[i * 40 // 24 : (i + 1) * 40 // 24, j * 256 // 72 : (j + 1) * 256 // 72]
        assert data["values"][i][j] == float(f"{float(part.flatten()[part.abs().argmax()]):.4g}")  # the digits shown
        assert data["means"][i][j] == float(f"{float(part.mean()):.4g}")
    assert data["most"] == float(f"{float(act.abs().max()):.4g}")
