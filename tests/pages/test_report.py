"""`ffncli.report`: what goes on a page of each kind of file, and what is refused."""

import csv
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ffncli
from ffncli.bench.results.csv_file import read_rows
from ffncli.errors import ExitCode, FFNError
from ffncli.pages.live import live_block
from ffncli.pages.traces import heat_data
from ffncli.run.saved.saved import open_saved
from tests.oracles.prompted import PROMPT, made
from tests.show.page.test_page import Tags

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "ffn-1" / "xeon-avx512-2cpu.csv"


def data_of(page: Path) -> dict[str, Any]:
    """The data in a page."""
    found: dict[str, Any] = json.loads(Tags(page.read_text("utf-8")).data)
    return found


def test_a_result(tmp_path: Path) -> None:
    rows = read_rows(RESULTS)
    written = ffncli.report(RESULTS, tmp_path / "page.html", title="Mine")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert (written.bytes, written.path) == (len(text.encode()), str(tmp_path / "page.html"))
    assert written.bytes < 500_000
    assert written.sections[0] == "Ratios"
    assert {"Roofline", "Rounds", "All rows", "The machine", "How to read this"} <= {*written.sections}
    assert "<title>Mine</title>" in text
    data = data_of(tmp_path / "page.html")
    table = data["file1-table"]
    for row, ours in zip(rows, table["rows"], strict=True):
        assert dict(zip(table["columns"], ours, strict=True)) == {
            name: getattr(row, "passes" if name == "pass" else name) for name in table["columns"]
        }
    assert data["file1-csv"] == {"name": RESULTS.name, "text": RESULTS.read_text("utf-8")}
    timed = sum(row.ratio is not None and row.kernel != row.baseline for row in rows)
    assert text.count('class="interval') == timed
    assert f"{sum(row.status == 'skipped' for row in rows)} were skipped" in text


def test_a_result_is_titled_by_its_case_and_its_machine(tmp_path: Path) -> None:
    """And its warnings stand below the verdicts: a wrong kernel first, what leaves the ratios as they are last."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "bert-base" and row["status"] == "ok"]
    for row, words in zip(rows, ("", "drift: +3 % between halves", "unresolved: 5 %", "spikes: 9 %"), strict=False):
        row["warnings"] = words
    rows.append({**rows[1], "kernel": "bad", "status": "wrong", "note": "not the product", "ratio": "", "time_s": ""})
    with (tmp_path / "run.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    ffncli.report(tmp_path / "run.csv", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<title>bert-base, 512 tokens, fp32 on Intel(R) Xeon(R) Processor</title>" in text
    order = [
        "Verdicts on",
        "bad is wrong: not the product",
        "unresolved: 5 %",
        "spikes: 9 %",
        "drift: +3 %",
        "<figure>",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert f"{rows[2]['kernel']} (1 of {len(rows)} rows): unresolved" in text


def test_a_result_without_rounds_needs_no_library(tmp_path: Path) -> None:
    shutil.copy(RESULTS, tmp_path / "alone.csv")
    written = ffncli.report(tmp_path / "alone.csv", tmp_path / "page.html")
    assert "Rounds" not in written.sections
    assert "uPlot=" not in (tmp_path / "page.html").read_text("utf-8")


def test_several_results_are_compared_in_turn(tmp_path: Path) -> None:
    names = ["a.csv", "b.csv", "c.csv"]
    for name in names:
        shutil.copy(RESULTS, tmp_path / name)
    written = ffncli.report([tmp_path / name for name in names], tmp_path / "page.html")
    assert written.sections[:2] == ("a.csv and b.csv", "b.csv and c.csv")
    # what a comparison leaves to say of each result
    assert written.sections[2:] == tuple(f"{name}: {part}" for name in names for part in ("All rows", "The machine"))
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<title>b.csv compared with a.csv: 5 blocks, 1 to 512 tokens, fp32, bf16 on Intel" in text
    assert "llama-3.2-1b, 1 token, fp32, cold-weights" in text
    table = data_of(tmp_path / "page.html")["compared1"]
    at = table["columns"].index("ratio")
    assert {row[at] for row in table["rows"]} <= {1.0, None}


@pytest.mark.parametrize("column", ["tokens", "kernel", "dtype"])
def test_parts_of_one_grid_are_shown_without_a_comparison(column: str, tmp_path: Path) -> None:
    with RESULTS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["pass"] == "forward"]
    values = list(dict.fromkeys(row[column] for row in rows))[:2]
    if len(values) < 2:
        values.append("bf16")
        rows += [{**row, column: "bf16"} for row in rows]
    names = ["part-1.csv", "part-2.csv"]
    for name, value in zip(names, values, strict=True):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(row for row in rows if row[column] == value)
    written = ffncli.report([tmp_path / name for name in names], tmp_path / "page.html")
    assert written.sections[0] == "part-1.csv and part-2.csv"
    assert {"part-1.csv: All rows", "part-2.csv: All rows"} <= {*written.sections}
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "Not compared: the two results have no case and kernel in common" in text
    assert f"{column}: {values[0]} in part-1.csv, {values[1]} in part-2.csv" in text
    shown = [len(data_of(tmp_path / "page.html")[f"file{at}-table"]["rows"]) for at in (1, 2)]
    assert shown == [sum(row[column] == value for row in rows) for value in values]


def test_a_sweep_has_times_under_the_roof(tmp_path: Path) -> None:
    with RESULTS.open(newline="", encoding="utf-8") as file:
        first = next(row for row in csv.DictReader(file) if row["kernel"] == "packed")
    with (tmp_path / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, first)
        writer.writeheader()
        writer.writerows({**first, "tokens": tokens, "case": f"case {tokens}"} for tokens in (1, 32))
    written = ffncli.report(tmp_path / "sweep.csv", tmp_path / "page.html")
    assert "Time against tokens" in written.sections
    assert "measured roof" in (tmp_path / "page.html").read_text("utf-8")


def test_a_trace(tmp_path: Path) -> None:
    session = ffncli.trace("4x8:relu", tokens=3, save=tmp_path / "t.npz")
    written = ffncli.report(tmp_path / "t.npz", tmp_path / "page.html")
    assert written.sections == (
        "The block, number by number",
        "The block",
        "Token by token",
        "x",
        "up = x · W1 + b1",
        "act = relu(up)",
        "down = act · W2 + b2",
    )
    data, text = data_of(tmp_path / "page.html"), (tmp_path / "page.html").read_text("utf-8")
    for step in session.steps:
        assert f"{step.flops:,} FLOPs" in text
        digits = [[float(f"{value:.4g}") for value in row] for row in session[step.name].tolist()]
        assert data[f"file1-{step.name}"]["values"] == digits
    live = torch.tensor(data["file1-live"]["inputs"]["x"], dtype=torch.float64)
    assert torch.equal(live, session["x"].double())
    assert {*data["file1-live"]["weights"]} == {"up.weight", "up.bias", "down.weight", "down.bias"}


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "json"])
def test_a_trace_of_a_prompt_names_the_tokens(suffix: str, tmp_path: Path) -> None:
    """The words are those of the tokenizer's own file; ids are no prompt."""
    source, file, page = str(made("llama").path), tmp_path / f"t.{suffix}", tmp_path / "page.html"
    ffncli.trace(source, prompt=PROMPT, layer=1, save=file)
    ffncli.report(file, page)
    words = [f"{at} “{word}”" for at, word in enumerate(PROMPT.split())]
    data, text = data_of(page), page.read_text("utf-8")
    assert data["file1-tokens"]["labels"] == data["file1-act"]["rows"] == data["file1-live"]["labels"] == words
    assert [data[f"file1-{step}"]["across"] for step in ("norm", "act", "down")] == ["dimension", "unit", "dimension"]
    name = open_saved(file).block["name"]
    assert f"<title>{name}: “{PROMPT}”</title>" in text
    assert f"<dt>prompt</dt><dd>{PROMPT}</dd>" in text
    ffncli.trace(source, input_ids=[3, 5, 6], position="1,2", layer=1, save=file, force=True)
    ffncli.report(file, page, force=True)
    assert data_of(page)["file1-tokens"]["labels"] == ["1 “the”", "2 “cat”"]
    assert f"<title>{name}</title>" in page.read_text("utf-8")


def test_a_trace_of_many_tokens_or_of_none_that_fit(tmp_path: Path) -> None:
    file, page = tmp_path / "t.json", tmp_path / "page.html"
    ffncli.trace(str(made("llama").path), input_ids=[3, 5] * 24, layer=1, save=file)
    ffncli.report(file, page)
    assert data_of(page)["file1-tokens"]["labels"][:2] == ["0 “Hello” to 1 “the”", "2 “Hello” to 3 “the”"]
    record = json.loads(file.read_text("utf-8"))
    del record["ffn_trace"]["tokens"][5]
    file.write_text(json.dumps(record), "utf-8")
    with pytest.raises(FFNError, match="has 47 tokens for 48 rows of 'norm'"):
        open_saved(file)


def test_a_trace_that_a_page_does_not_compute(tmp_path: Path) -> None:
    ffncli.trace("64x256:swiglu", tokens=3, save=tmp_path / "t.safetensors")
    written = ffncli.report(tmp_path / "t.safetensors", tmp_path / "page.html")
    assert "The block, number by number" not in written.sections
    assert any(title.startswith("hidden") for title in written.sections)


@pytest.mark.parametrize(("block", "options", "why"), [
    ("32x64:swiglu", {}, "(-o page.html) is limited to 4,096 weights; this block has 6,144; ffn trace ... --save"),
    ("2x700:relu", {"tokens": 30}, "is limited to 32,768 values; this block has 42,120; use fewer tokens, or "),
    ("4x6:relu", {"save_weights": False}, "t.safetensors has none; add --save-weights"),
    ("4x6:relu", {"dropout": 0.5, "train": True}, "computes without dropout; add --eval"),
    ("4x6:swiglu", {"experts": 4, "dropout": 0.5, "train": True}, "computes without dropout; add --eval"),
    ("1x2:relu", {"input": [[math.inf]]}, "needs finite numbers, but x has NaN or infinity"),
])  # fmt: skip
def test_why_a_page_does_not_compute_a_block(block: str, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    ffncli.trace(block, save=tmp_path / "t.safetensors", **options)
    with pytest.raises(FFNError) as error:
        live_block(open_saved(tmp_path / "t.safetensors"))
    assert why in str(error.value)


def test_a_trace_of_an_older_version(tmp_path: Path) -> None:
    """Without what the experts compute, and without fields that its version did not have."""
    ffncli.trace("4x6:swiglu", experts=3, tokens=2, expert="all", save=tmp_path / "t.json")
    values = json.loads((tmp_path / "t.json").read_text("utf-8"))
    step = next(one for one in values["ffn_trace"]["steps"] if one["name"] == "experts")
    del step["program"], step["detail"]["always"], step["detail"]["common"]
    (tmp_path / "t.json").write_text(json.dumps(values), "utf-8")
    ffncli.report(tmp_path / "t.json", tmp_path / "page.html")
    assert "save the trace again with this version" in (tmp_path / "page.html").read_text("utf-8")


def test_steps_inside_experts_do_not_crowd_out_the_blocks(tmp_path: Path) -> None:
    options = {"experts": 16, "top_k": 4, "tokens": 6, "norm": "rmsnorm", "residual": True, "expert": "all"}
    session = ffncli.trace("8x8:swiglu", save=tmp_path / "t.safetensors", **options)
    written = ffncli.report(tmp_path / "t.safetensors", tmp_path / "page.html")
    steps = [title.partition(" = ")[0] for title in written.sections]
    assert {"x", "norm", "router", "route", "experts", "out"} <= {*steps}
    count = sum(step.shape[0] > 0 for step in session.steps)
    assert sum(step in {one.name for one in session.steps} for step in steps) == 40 < count
    assert f"The file has {count - 40} more steps." in (tmp_path / "page.html").read_text("utf-8")


def test_a_sum_that_overflows_has_a_rest_that_is_not_finite(tmp_path: Path) -> None:
    ffncli.trace("4x64:relu2", dtype="fp16", input=[[6e4, -6e4, 6e4, 6e4]], save=tmp_path / "t.safetensors")
    ffncli.report(tmp_path / "t.safetensors", tmp_path / "page.html")
    down = data_of(tmp_path / "page.html")["file1-down"]
    infinite = [at for at, value in enumerate(down["values"][0]) if isinstance(value, str)]
    assert infinite
    assert all(down["origins"][at][-1] is None for at in infinite)


@pytest.mark.parametrize("block", ["1x1365:gelu", "1x1365:swiglu", "44x45:relu", "8x16:swiglu"])
def test_any_block_of_4096_weights_is_computed_for_the_usual_tokens(block: str, tmp_path: Path) -> None:
    options = {"experts": 10} if block.startswith("8x") else {}
    session = ffncli.trace(block, save=tmp_path / "t.safetensors", **options)
    assert 3900 < sum(tensor.numel() for tensor in session.prepared.weights.values()) <= 4096
    written = ffncli.report(tmp_path / "t.safetensors", tmp_path / "page.html")
    assert "The block, number by number" in written.sections
    assert written.bytes <= 500_000


def test_a_cell_shows_its_most_extreme_value() -> None:
    x = torch.zeros(48, 300, dtype=torch.float64)
    x[5, 7], x[40, 299], x[0, 0], x[1, 100] = -9.0, torch.nan, 2.0, torch.inf
    data = heat_data("x", x)
    values = data["values"]
    assert (len(values), len(values[0])) == (24, 72)
    assert data["most"] == 9.0
    assert values[2][7 * 72 // 300] == -9.0
    assert values[20][71] == "nan"
    assert values[0][0] == 2.0
    assert values[0][100 * 72 // 300] == "inf"
    cells = [value for row in values for value in row]
    assert sum(value != 0 for value in cells) == 4
    assert data["means"][20][71] is None
    assert heat_data("x", torch.ones(2, 3))["each"] == 1


def test_answers_in_json(tmp_path: Path, call: Any) -> None:
    for arguments in (["verify", "4x8:relu", "--kernel", "eager", "--referee"], ["verify", "4x8:relu"]):
        path = tmp_path / f"{len(arguments)}.json"
        call(*arguments, "-o", str(path))
        written = ffncli.report(path, tmp_path / "page.html", force=True)
        assert written.sections == ("Verified",)
        rows = json.loads(path.read_text())["rows"]
        table = data_of(tmp_path / "page.html")["file1"]
        assert len(table["rows"]) == len(rows)
        at = table["columns"].index("relative_error")
        assert [row[at] for row in table["rows"]] == [row["relative_error"] for row in rows]


def test_layers_are_curves_over_their_numbers(tmp_path: Path, call: Any) -> None:
    """The points of a chart say their numbers, which are those of the rows; so does the table."""
    source = str(made("llama").path)
    texts = tmp_path / "texts.txt"
    texts.write_text("Hello cat\nsat Hello\n")
    for name, options in (("one", ["--prompt", PROMPT]), ("corpus", ["--prompts", str(texts)])):
        path, page = tmp_path / f"{name}.json", tmp_path / f"{name}.html"
        call("trace", source, "--layer", "all", *options, "-o", str(path))
        ffncli.report(path, page)
        answer = json.loads(path.read_text())
        rows = answer["layers"] if name == "one" else answer["corpus"]["layers"]
        key = "output_norm" if name == "one" else "max"
        titles = re.findall(rf"{key.replace('_', ' ')}, layer: (\S+), ([^<]+)<", page.read_text())
        assert titles == [(f"{row['layer']:g}", f"{row[key]:.4g}") for row in rows]
        table = data_of(page)["file1"]
        assert [line[table["columns"].index(key)] for line in table["rows"]] == [row[key] for row in rows]


def test_the_load_of_experts_is_a_map(tmp_path: Path, call: Any) -> None:
    source, path = str(made("mixtral").path), tmp_path / "e.json"
    for command, options in (("experts", []), ("trace", ["--layer", "all"])):
        call(command, source, "--prompt", PROMPT, *options, "-o", str(path), "--force")
        ffncli.report(path, tmp_path / "e.html", force=True)
        rows = json.loads(path.read_text())["layers"]
        load = data_of(tmp_path / "e.html")["file1-load"]
        expected = [
            row["routing"]["tokens_per_expert"] if command == "trace" else [e["tokens"] for e in row["experts"]]
            for row in rows
        ]
        assert (load["values"], load["rows"]) == (expected, [f"decoder {row['layer']}" for row in rows])


@pytest.mark.parametrize("line", ["plan mixtral-8x7b --tp 1,2", "params gpt2 llama-2-7b", "activations relu --at 1"])
def test_every_answer_with_rows_is_a_table(line: str, tmp_path: Path, call: Any) -> None:
    path, command = tmp_path / "a.json", line.partition(" ")[0]
    assert call(*line.split(), "-o", str(path))[0] == 0
    written = ffncli.report(path, tmp_path / "page.html")
    assert written.sections == (f"ffn {command}",)
    rows, shown = json.loads(path.read_text("utf-8"))["rows"], data_of(tmp_path / "page.html")["file1"]
    for key in ("device", "tokens", "needed_bytes", "name", "ffn_params_total", "lipschitz"):
        if key in rows[0]:
            at = shown["columns"].index(key)
            assert [row[at] for row in shown["rows"]] == [row[key] for row in rows]


def test_what_the_experts_of_a_model_are_worth(tmp_path: Path, call: Any) -> None:
    """A map of divergences, the pairs, and the hits of caches over the choices of all layers."""
    source, path, texts = str(made("mixtral").path), tmp_path / "e.json", tmp_path / "texts.txt"
    texts.write_text("Hello cat\nsat Hello\nthe cat sat\n")
    assert call("experts", source, "--prompts", str(texts), "--cache", "lru,best", "--ep", "2", "-o", str(path))[0] == 0
    ffncli.report(path, tmp_path / "e.html")
    answer, data, text = json.loads(path.read_text()), data_of(tmp_path / "e.html"), (tmp_path / "e.html").read_text()
    worth = [[float(f"{one['divergence'] or 0:.4g}") for one in row["experts"]] for row in answer["layers"]]
    assert data["file1-divergence"]["values"] == worth
    assert any(any(row) for row in worth)
    total = sum(row["choices"] for row in answer["layers"])
    for policy in ("lru", "best"):
        hits: dict[int, float] = {}
        for row in answer["layers"]:
            for one in row["caches"]:
                if one["policy"] == policy:
                    hits[one["slots"]] = hits.get(one["slots"], 0) + row["choices"] * one["hit_rate"] / total
        drawn = re.findall(rf"<title>{policy}: (\S+), ([^<]+)</title>", text)
        assert drawn == [(str(slots), f"{hits[slots]:.4g}") for slots in sorted(hits)]
    tables = [one for one in data.values() if "lift" in one.get("columns", ())]
    pairs = [pair for row in answer["layers"] for pair in row["pairs"]]
    (table,) = tables
    assert [row[table["columns"].index("lift")] for row in table["rows"]] == [pair["lift"] for pair in pairs]
    assert f"<dt>saved</dt><dd>{answer['worth']['saved']:.6g}</dd>" in text


def test_records_inside_rows_are_tables_that_name_their_rows(tmp_path: Path) -> None:
    rows = [
        {"layer": at, "at": {"text": "<b>" * 100, "token": at}, "tensor": [[1, 2]], "wide": [at, at + 0.5],
         "parts": [{"part": f"p{at}", "more": [{"x": at}]}]}
        for at in (0, 1)
    ]  # fmt: skip
    answer = {
        "command": "plan",
        "note": "two\nlines",
        "limit": 0,
        "none": None,
        "rows": rows,
        "odd": {"at": {"y": True}},
    }
    (tmp_path / "a.json").write_text(json.dumps(answer), "utf-8")
    ffncli.report(tmp_path / "a.json", tmp_path / "a.html")
    data, text = data_of(tmp_path / "a.html"), (tmp_path / "a.html").read_text("utf-8")
    columns, cells = data["file1"]["columns"], data["file1"]["rows"]
    assert columns == ["layer", "at.text", "at.token", "wide"]
    assert [(row[0], len(row[1]), *row[2:]) for row in cells] == [(0, 200, 0, "0, 0.5"), (1, 200, 1, "1, 1.5")]
    assert data["file1-2"] == {"columns": ["layer", "part"], "rows": [[0, "p0"], [1, "p1"]]}
    assert data["file1-3"] == {"columns": ["layer", "x"], "rows": [[0, 0], [1, 1]]}
    assert "<h3>Rows: parts: more</h3>" in text
    assert '<pre tabindex="0">two\nlines</pre>' in text
    assert "<dt>limit</dt><dd>0</dd>" in text
    assert "<dt>y</dt><dd>yes</dd>" in text
    assert "<b>" not in text


def test_a_history_is_a_chart_of_each_line(tmp_path: Path) -> None:
    """In the unit of its first time; a time that is no number is left out. A change stands between two runs."""
    runs = [{"run_id": str(at), "time_s": time, "time_low_s": time and time * 0.9, "time_high_s": time and time * 1.1}
            for at, time in enumerate((2e-3, None, 3e-3))]  # fmt: skip
    changes = [{"kind": "jump", "first": 1, "ratio": 1.5}, {"kind": "drift", "first": 0, "ratio": 0.9},
               {"kind": "jump", "first": 99, "ratio": 2.0}, {"first": "1", "ratio": 2.0}, 3]  # fmt: skip
    line = {"machine": "m", "case": "c", "kernel": "k", "runs": runs, "changes": changes}
    answer = {"command": "compare", "history": ["a.csv"], "lines": [{**line, "runs": runs[:1]}, line, {"runs": 3}]}
    (tmp_path / "h.json").write_text(json.dumps(answer), "utf-8")
    ffncli.report(tmp_path / "h.json", tmp_path / "h.html")
    text = (tmp_path / "h.html").read_text("utf-8")
    assert re.findall(r"<title>k: (\S+), ([^<]+)</title>", text) == [("1", "2"), ("3", "3")]
    first, last = (float(x) for x in re.findall(r'<circle cx="([\d.]+)"', text))  # of the runs 1 and 3
    marks = re.findall(r'<line x1="([\d.]+)"[^>]*class="mark" ?/?></?line?>?<text[^>]*>([^<]+)<', text)
    assert [word for _, word in marks] == ["+50.0 %", "drift -10.0 %"]
    assert float(marks[0][0]) == pytest.approx((3 * first + last) / 4, abs=0.02)  # at 1.5
    assert text.count("<h3>k: c, m</h3>") == 1
    assert "ms per call" in text


def test_what_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for name, text, words in (
        ("x.txt", "hello", "cannot be shown on a page"),
        ("p.json", '{"command": "params", "rows": []}', "the JSON of ffn params, without rows"),
        ("e.json", '{"command": "explain"}', "the JSON of ffn explain, without rows"),
        ("h.json", '{"command": "<b>", "rows": [{}]}', "not an answer of ffn"),
        ("l.json", '{"command": "trace", "layers": [1]}', "the JSON of ffn trace"),
        ("q.json", "[1]", "q.json"),
        ("r.json", '{"command": "verify", "rows": [1]}', "r.json"),
        ("s.csv", "a,b\n1,2\n", "s.csv"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(FFNError, match=words):
            ffncli.report(tmp_path / name, page)
        assert not page.exists()
    with pytest.raises(FFNError, match="does not exist"):
        ffncli.report(tmp_path / "none.csv", page)
    with pytest.raises(FFNError, match="is a rounds file"):
        ffncli.report(RESULTS.with_name("xeon-avx512-2cpu.rounds.csv"), page)
    with pytest.raises(FFNError, match=r"must end in \.html"):
        ffncli.report(RESULTS, tmp_path / "page.pdf")
    with pytest.raises(FFNError, match="1 to 20 files"):
        ffncli.report([], page)
    page.write_text("mine")
    with pytest.raises(FFNError, match="exists already"):
        ffncli.report(RESULTS, page)
    assert page.read_text() == "mine"
    with pytest.raises(FFNError) as caught:
        ffncli.report(RESULTS, tmp_path / "nowhere" / "page.html")
    assert caught.value.code is ExitCode.ENVIRONMENT


def test_steps_as_a_trace_of_events(tmp_path: Path) -> None:
    """Complete events of microseconds, the steps end to end."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    times = {"block": 3e-3, "step gate": 1e-3, "step up": 1.5e-3, "step experts[e].up": 2e-4, "step down": 5e-4}
    with (tmp_path / "steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, first)
        writer.writeheader()
        writer.writerows({**first, "kernel": name, "time_s": time, "status": "ok"} for name, time in times.items())
    written = ffncli.report(tmp_path / "steps.csv", tmp_path / "steps.json")
    assert written.sections == ()
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    assert events[0] == {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": first["case"]}}
    timed = {event["name"]: event for event in events[1:]}
    assert [*timed] == ["block", "gate", "up", "experts[e].up", "down"]
    assert all(event["ph"] == "X" and event["pid"] == 1 for event in timed.values())
    assert [event["dur"] for event in timed.values()] == pytest.approx([1e6 * time for time in times.values()])
    assert [event["tid"] for event in timed.values()] == [0, 1, 1, 2, 1]
    assert [timed[name]["ts"] for name in ("gate", "up", "down")] == pytest.approx([0, 1000, 2500])
    with pytest.raises(FFNError, match="this result has no steps"):
        ffncli.report(RESULTS, tmp_path / "none.json")
    with pytest.raises(FFNError, match="one result of ffn bench --by-step"):
        ffncli.report([RESULTS, RESULTS], tmp_path / "none.json")


@pytest.mark.parametrize("layer", [[0], "0", None, True, 10**400])
def test_a_layer_that_is_not_a_number_is_not_drawn(tmp_path: Path, layer: Any) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"command": "trace", "layers": [{"layer": layer, "input_norm": 1.0}]}))
    with pytest.raises(FFNError, match=r"layers\.json is the JSON of ffn trace"):
        ffncli.report(path, tmp_path / "page.html")


def test_a_figure_too_large_for_a_float_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"command": "trace", "layers": [{"layer": 0, "input_norm": 10**400}]}))
    assert len(ffncli.report(path, tmp_path / "page.html").sections) == 1


def cells_of(text: str) -> list[list[str]]:
    """The cells of the first table of layers and tensors, row by row."""
    table = re.search(r'aria-label="layers and tensors".*?</table>', text, re.S)
    assert table is not None
    rows = re.findall(r"<tr>(.*?)</tr>", table[0], re.S)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


@pytest.mark.parametrize("source", ["64x64:swiglu", "64x64:relu"])
def test_precision_is_a_map_and_bars(source: str, tmp_path: Path, call: Any) -> None:
    assert call("precision", source, "--dtype", "fp8", "-o", str(tmp_path / "p.json"))[0] == 0
    ffncli.report(tmp_path / "p.json", tmp_path / "p.html")
    text, (row,) = (tmp_path / "p.html").read_text("utf-8"), ffncli.precision(source, dtype="fp8").rows
    assert f"<h1>{source} in fp8</h1>" in text
    tensors = [name for name in row.by_tensor if row.by_tensor[name] is not None]
    head, *rows = cells_of(text)
    assert head == ["layer", *tensors]
    alone = [100 * (row.error_rel or 0) * math.sqrt(row.by_tensor[name] or 0) for name in tensors]
    assert rows == [["block 0", *(f"{error:.3g}" for error in alone)]]
    bars = dict(re.findall(r"<title>block 0, (\w+): (\S+) %</title>", text))
    assert [*bars] == [*tensors, "pairs", "rest"]
    assert sum(map(float, bars.values())) == pytest.approx(100, abs=0.5)
    assert float(bars["pairs"]) == pytest.approx(100 * sum(one or 0 for one in row.by_pair.values()), rel=5e-3)
    wide = re.findall(r'width="([\d.]+)" height="16" class="point', text)
    shares = [abs(float(share)) for share in bars.values()]
    assert [float(one) / float(wide[0]) for one in wide] == pytest.approx([s / shares[0] for s in shares], rel=0.02)


def test_a_budget_is_a_map_of_formats(tmp_path: Path, call: Any) -> None:
    words = ("precision", "64x64:swiglu", "--dtype", "fp8,nvfp4", "--budget", "6", "-o", str(tmp_path / "p.json"))
    assert call(*words)[0] == 0
    ffncli.report(tmp_path / "p.json", tmp_path / "p.html")
    chosen = json.loads((tmp_path / "p.json").read_text("utf-8"))["budget"]["choices"]
    assert cells_of((tmp_path / "p.html").read_text("utf-8")) == [
        ["layer", "W1", "W3", "W2"], ["block 0", *(one["format"] for one in chosen)],
    ]  # fmt: skip
    assert len(data_of(tmp_path / "p.html")["file1"]["rows"]) == 3


@pytest.mark.parametrize("value", ["<b>", [1], 1e300, -1, None, 10**400, True])
def test_a_precision_of_other_values_is_shown_without_them(value: Any, tmp_path: Path) -> None:
    row = {**dict.fromkeys(("layer", "format", "error_rel", "by_pair", "rest"), value), "by_tensor": {"W1": value}}
    choice = dict.fromkeys(("layer", "tensor", "format", "bits"), value)
    for more in ({"rows": [row]}, {"rows": [], "budget": {"choices": [choice]}}):
        (tmp_path / "p.json").write_text(json.dumps({"command": "precision", "model": {"name": "m"}, **more}), "utf-8")
        ffncli.report(tmp_path / "p.json", tmp_path / "p.html", force=True)
        assert "<b>" not in (tmp_path / "p.html").read_text("utf-8")


def test_a_comparison_of_checkpoints_has_a_map_and_spectra(call, tmp_path):
    from tests.oracles import edited

    base = edited.tensors("gated")
    paths = [edited.write(tmp_path / "a", "gated", base)]
    paths.append(edited.write(tmp_path / "b", "gated", edited.lora("gated", base, 4)))
    assert call("compare", *map(str, paths), "-o", str(tmp_path / "c.json"))[0] == 1
    assert call("report", str(tmp_path / "c.json"), "-o", str(tmp_path / "c.html"))[0] == 0
    page = (tmp_path / "c.html").read_text()
    for text in (
        "LoRA of rank 4 on gate, up and down of layers 0 to 3",
        "Relative change in %",
        "singular values",
        "unit",
    ):
        assert text in page
