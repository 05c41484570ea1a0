"""`ffn bench` by a worker that measures nothing: options, pages, exit codes."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from docs.schemas import keys_text
from ffncli.bench import suite
from ffncli.bench.judge import gate
from ffncli.bench.records import BLOCK, Case, Method, Stage
from ffncli.bench.request.grid import BenchRequest, Grid, build_request
from ffncli.bench.request.options import MethodOptions
from ffncli.bench.results.csv_file import COLUMNS, read_rows
from ffncli.bench.results.row import BenchWarning, ResultRow
from ffncli.block.recipe import FFNSpec
from ffncli.cli.bench import page as bench_page
from ffncli.cli.bench.command import FIRST_LOOK, asked
from ffncli.cli.bench.page import closing, longer_command
from ffncli.cli.bench.progress import UnitProgress
from ffncli.cli.common.result_lines import balance, rates, remarks, verdict
from ffncli.cli.common.sweep_page import sweep
from ffncli.options.accept import byte_count
from ffncli.show.color import Advance
from ffncli.show.text import time_text
from ffncli.system.files import results_folder
from tests import ROOT
from tests.bench.request.test_data import rows_file
from tests.bench.test_suite import FAKE, in_process, request, worker_with
from tests.oracles.checkpoints import expect_refusal

pytestmark = pytest.mark.runs


@pytest.fixture
def bench(call, monkeypatch, tmp_path):
    """Runs `ffn bench` with the fake worker and these faults, in a directory of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, faults: tuple[str, ...] = ()):
        command = worker_with(tmp_path, *faults)[0] if faults else FAKE
        monkeypatch.setattr(suite.run, "__defaults__", (suite.run.__defaults__[0], command))
        processes = () if "--processes" in arguments else ("--processes", "2")
        return call("bench", "--threads", "1", "--device", "cpu", *processes, *arguments)

    run.bare = lambda *arguments: call("bench", *arguments)
    return run


def test_the_page_the_json_and_the_file_agree(bench, tmp_path):
    code, out, err = bench("8x16:swiglu", "--kernel", "eager,packed", "--save", "a.csv")
    assert (code, "5 % faster" in out, "0.950 [0.950, 0.950]" in out) == (0, True, True)
    assert "results go to a.csv" in err
    assert all(len(line) <= 80 for line in out.splitlines() if "packed  " in line)
    body = json.loads(bench("8x16:swiglu", "--kernel", "eager,packed", "--save", "a.csv", "--force", "--json")[1])
    assert [row["kernel"] for row in body["rows"]] == ["eager", "packed"]
    assert (body["rows"][1]["pass"], body["file"], body["gate"]) == ("forward", "a.csv", None)
    lines = bench("8x16:swiglu", "--kernel", "eager", "--save", "b.csv", "--csv", "-q")
    assert lines[1] == (tmp_path / "b.csv").read_text()
    assert lines[2] == ""


def test_a_sweep_can_be_drawn_and_the_intervals_of_a_single_case(bench, tmp_path):
    words = ("8x16:swiglu", "--kernel", "eager,packed", "--save", "a.csv")
    code, out, err = bench(*words, "--tokens", "1,4", "--plot", "--plot-file", "a.svg")
    page, _, plot = out.partition("speed against eager, 8x16:silu, gated\n")
    assert (code, "how to read this" in page, "wrote a.svg" in err) == (0, True, True)
    *_, labels, name, legend = plot.rstrip().splitlines()
    assert (labels.split(), name.strip(), legend) == (["1", "4"], "tokens", "  a eager (baseline)   b packed")
    assert (tmp_path / "a.svg").exists()
    bars = [line.split() for line in page.splitlines() if "●" in line]
    assert [bar[0] for bar in bars] == ["packed", "packed"]
    assert bench(*words, "--force", "--plot")[1].count("●") == 1
    assert "wrote b.svg" in bench(*words, "--force", "--plot-file", "b.svg")[2]
    assert "with its 95 % interval" in (tmp_path / "b.svg").read_text()
    expect_refusal(bench(*words, "--force", "--tokens", "1,2", "--plot-file", "a.txt"), ".svg, .png, .pdf")
    expect_refusal(bench("8x16", "--by-step", "--tokens", "1,2", "--plot"), "--by-step contradicts --plot")
    expect_refusal(bench("8x16", "--selftest", "--plot"), "--selftest contradicts --plot")
    lost = (" 1 tokens 0 kill", " 4 tokens 0 kill")
    code, out, err = bench(*words, "--tokens", "1,4", "--plot", "--force", faults=lost)
    assert (code, "times as fast" in out, "nothing to plot: no ratio was measured" in err) == (3, False, True)


def test_a_first_look_is_short_and_any_option_makes_it_a_whole_run(call, monkeypatch):
    requests = []
    monkeypatch.setattr("ffncli.cli.bench.command._measure", lambda *arguments: requests.append(arguments[1].method))
    monkeypatch.setattr("ffncli.cli.bench.command.FIRST_LOOK", replace(FIRST_LOOK, seed=7))
    for words in ((), ("--json",), ("8x16",), ("--tokens", "1"), ("--fail-if-slower", "3%"), ("--seed", "1")):
        code, _, err = call("bench", *words)
        assert (code, "a first look" in err) == (0, words in ((), ("--json",)))
    assert [method.processes for method in requests] == [3, 3, 5, 5, 5, 5]
    assert requests[0].seed == 7
    assert FIRST_LOOK.max_time + 3 * 6 <= 40  # seconds; a process takes some six to start and to check six kernels


def test_a_verdict_is_one_word_on_the_screen_as_in_the_csv():
    _, rows = case_rows({1: "inconclusive", 2: "faster"})
    assert verdict(rows[1]) == rows[1].verdict == "inconclusive"


def test_the_longer_command_has_the_options_as_they_are_typed(call, monkeypatch):
    requests = []
    monkeypatch.setattr("ffncli.cli.bench.command._measure", lambda *arguments: requests.append(arguments[1]))
    typed = ["8x16", "--tokens", "1,32", "--tokens", "64", "--kernel", "eager,packed", "--dtype", "fp32"]
    call("bench", *typed)
    words = shlex.split(longer_command(requests[0]))[2:]
    call("bench", *words)
    assert (requests[1].cases, requests[1].kernels) == (requests[0].cases, requests[0].kernels)
    assert words[:3] == ["8x16", "--tokens", "1,32,64"]


def test_the_end_says_what_could_be_resolved_and_how_to_go_on():
    asked = {
        "--source": "512x2048:swiglu", "--tokens": "1,32", "--quick": "true", "--gated": "false", "--bias": "false",
        "--kernel": "eager,a b=my file.py:f", "--max-time": "5",
    }  # fmt: skip
    request = BenchRequest((), (), "eager", Method(max_time=5.0), asked=asked)
    _, rows = case_rows({1: "inconclusive", 2: "faster"})
    lines = closing(rows, request)
    width = (math.log(1.0) - math.log(0.8)) / 2
    assert lines[0] == f"this run could resolve differences of {100 * (1.02 * math.exp(width) - 1):.2g} % or more"
    words = shlex.split(lines[1].removeprefix("run longer: "))
    assert words == ["ffn", "bench", "512x2048:swiglu", "--tokens", "1,32", "--plain", "--no-bias", "--kernel",
                     "eager,a b=my file.py:f", "--max-time", "20s"]  # fmt: skip
    rows[3] = replace(rows[3], ratio_low=0.899, ratio_high=0.901)
    text = closing(rows, request)[0]
    assert text.endswith("2.1 % or more (packed); of 14 % or more where it was least certain (packed)")
    sure = BenchWarning("precision", "±4 % reached, ±1 % wanted: some 80 rounds needed, 20 done (--processes 20)")
    rows[1] = replace(rows[1], warnings=(sure,))
    assert closing(rows, request)[1].endswith("--max-time 5 --processes 20")
    busy = [replace(row, warnings=(BenchWarning("preempted", "20 %"),)) for row in rows]
    assert closing(busy, request)[0] == text  # other work widens an interval, and the interval says what it resolves
    unbounded = [replace(row, ratio_high=None) for row in rows]
    left, longer = closing(unbounded, request)
    assert left == "2 of 2 rows have no interval"
    assert longer.startswith("run longer: ffn bench ")
    alone = replace(request, method=Method(max_time=5.0, processes=1), asked={**asked, "--processes": "1"})
    for lines in (closing(rows, alone), closing(busy, alone)):  # one process cannot decide, however long it takes
        assert lines[-1].endswith(" --max-time 20s")
        assert "--processes" not in lines[-1]
    _, rows = case_rows({1: "same", 2: "faster"})
    assert closing(rows, request) == []


def test_every_key_is_documented(bench):
    section = keys_text("bench")
    named = set(re.findall(r"`([a-z_0-9]+)`", section))
    options = (
        "8x16:swiglu",
        "--tokens",
        "1",
        "--kernel",
        "eager,packed,numpy",
        "--fail-if-slower",
        "3%",
        "--json",
        "-q",
    )
    found = json.loads(bench(*options, "--save", "a.csv")[1])
    broken = json.loads(bench(*options, "--save", "b.csv", faults=(" 1 tokens 0 kill",))[1])
    gates = [row for body in (found, broken) for row in body["gate"]["rows"]]
    assert {row["result"] for row in gates} >= {"slower", "not gated"}
    assert {frozenset(row) for row in gates} == {frozenset({"case", "kernel", "result", "low", "p_holm", "reason"})}
    keys = set(found) | set(found["rows"][0]) | set(found["gate"]) | set(gates[0])
    assert keys - {"command", "conventions"} <= named
    assert list(found["rows"][0]) == list(COLUMNS)
    assert {"start", "verify", "warm_up", "blocks", "lead_in", "placing", "rest"} <= named  # of `spent`


def test_results_go_to_a_default_place(bench, tmp_path, monkeypatch):
    """Into a checkout that has the folder, else into the user's: a working directory gets no files unasked."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    theirs = tmp_path / "state" / "ffn" / "results"
    code, out, err = bench("8x16:relu", "--kernel", "eager")
    assert (code, len(list(theirs.glob("*Z-*.csv")))) == (0, 2)  # with its rounds
    assert f"results go to {theirs}/" in err
    assert f"results: {theirs}/" in out
    assert not (tmp_path / "benchmarks").exists()
    ours = tmp_path / "benchmarks" / "results"
    ours.mkdir(parents=True)
    err = bench("8x16:relu", "--kernel", "eager")[2]
    assert (len(list(ours.glob("*Z-*.csv"))), "results go to benchmarks/results/" in err) == (2, True)
    assert len(list(theirs.glob("*"))) == 2


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_without_a_state_folder_it_is_the_homes(tmp_path, monkeypatch, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", value)
    assert results_folder(tmp_path) == tmp_path / ".local/state/ffn/results"


@pytest.mark.parametrize(
    ("options", "processes", "precision"),
    [((), 3, 0.03), (("--processes", "7"), 7, 0.03), (("--precision", "0.5%"), 3, 0.005),
     (("--processes", "2", "--precision", "2%"), 2, 0.02)],
)  # fmt: skip
def test_quick_gives_way_to_what_is_given_beside_it(call, bench, tmp_path, options, processes, precision):
    asked = ("8x16:relu", "--threads", "1", "--device", "cpu", "--kernel", "eager", "--quick", "--save", "a.csv")
    bench("8x16:relu", "--kernel", "eager", "--save", "b.csv")  # sets the worker that measures nothing
    code, out, _ = call("bench", *asked, *options, "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["processes"], row["precision"]) == (0, processes, precision)


@pytest.mark.parametrize(
    ("options", "faults", "code", "words"),
    [
        (("--fail-if-slower", "3%"), (), 1, "slower than eager by more than 3 %: numpy"),
        (("--fail-if-slower", "20%"), (), 0, ""),
        ((), (" 1 tokens 1 wrong",), 1, "wrong results: eager"),
        (("--fail-if-slower", "3%"), (" 1 tokens 0 kill",), 1, "slower than eager"),
        ((), (" 1 tokens 0 kill",), 3, "not measured: eager"),
        ((), (" 1 tokens 0 fails",), 3, "not measured: eager"),
        (("--strict",), (), 0, ""),
    ],
)
def test_exit_codes(bench, options, faults, code, words):
    arguments = ("8x16:swiglu", "--tokens", "1,2", "--kernel", "eager,numpy", "--save", "a.csv", *options)
    found, out, err = bench(*arguments, faults=faults)
    assert found == code, err
    assert words in err
    assert "eager" in out


def test_a_kernel_file_is_looked_at_before_anything_runs(bench, tmp_path):
    (tmp_path / "k.py").write_text("def mlp(x, gate, up, down): return x\n")
    assert "has no 'mpl'; did you mean 'mlp'?" in bench("8x16:swiglu", "--kernel", "k.py:mpl")[2]
    (tmp_path / "k.py").write_text("def mlp(:\n")
    assert "k.py, line 1:" in bench("8x16:swiglu", "--kernel", "k.py:mlp")[2]


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("def mlp(x, wrong): return x", "k.py: mlp(x, wrong) needs wrong, which this block does not have"),
        ("def mlp(x, gate, up, *, last): return x", "k.py: mlp(x, gate, up, *, last) needs last, which"),
        ("def mlp(x, /, gate, up, down, more=1, *, other=2, **rest): return x", ""),
        ("def mlp(x, wrong): return x\nmlp = mlp", ""),
        ("def mlp(x, wrong): return x\ndef mlp(x): return x", ""),
        ("import functools\n@functools.cache\ndef mlp(x, wrong): return x", ""),
        ("class mlp: pass", ""),
    ],
)
def test_a_function_that_needs_what_the_block_lacks_is_refused_before_anything_runs(bench, tmp_path, code, refused):
    """What only running the file can show is left to the worker."""
    (tmp_path / "k.py").write_text(code)
    result = bench("8x16:swiglu", "--kernel", "k.py:mlp", "--save", "a.csv")
    if refused:
        expect_refusal(result, refused, "this block has gate, up, down")
        expect_refusal(bench("8x16:relu", "--experts", "2", "--kernel", "k.py:mlp"), "has router, up, up_bias, down, ")
    else:
        assert result[0] == 0, result[2]


def test_several_cases_are_one_grid(bench):
    """A line per case, a column per kernel: the ratio that the CSV has, `?` where that is inconclusive."""
    tokens = [*range(1, 9), 15, 16, 17]
    code, out, err = bench(
        "8x16:swiglu", "--tokens", ",".join(map(str, tokens)), "--kernel", "numpy,eager,packed", "--save", "a.csv",
        faults=(" 3 tokens 0 fails",),
    )  # fmt: skip
    assert code == 3
    assert out.startswith("11 cases  8x16:swiglu, fp32, forward, cpu, 1 thread\n")
    lines = out.split("\n\n")[1].splitlines()
    assert re.split(r"\s{2,}", lines[0]) == ["tokens, cache", "eager, time", "numpy", "packed"]
    assert len(lines[1:12]) == len(tokens)
    of = {(row.tokens, row.kernel): row for row in read_rows(Path("a.csv"))}
    for count, line in zip(tokens, lines[1:], strict=False):
        where, *shown = re.split(r"\s{2,}", line.strip())
        assert where.startswith(f"{count}, ")
        if count == 3:
            assert shown == ["failed"] * 3
            continue
        assert shown[0] == time_text(of[count, "eager"].time_s)
        for kernel, text in zip(("numpy", "packed"), shown[1:], strict=True):
            row = of[count, kernel]
            mark = " ?" if row.verdict == "inconclusive" else ""
            assert text == f"{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]{mark}"
    assert len(err.splitlines()) <= 15


def case_rows(verdicts: dict[int, str], **more) -> tuple[dict[str, Case], list[ResultRow]]:
    """A case for every number of tokens, in it eager and packed, whose verdict is that."""
    spec = FFNSpec(8, 16, "silu", gated=True)
    cases = {case.key: case for case in (Case("8x16", "8x16", spec, tokens) for tokens in verdicts)}
    found = []
    for key, word in zip(cases, verdicts.values(), strict=True):
        of_case = {"baseline": "eager", "status": "ok", "case": key, "threads": 1, "time_s": 2e-3, **more}
        found.append(ResultRow(kernel="eager", ratio=1.0, verdict="same", **of_case))
        found.append(ResultRow(kernel="packed", ratio=0.9, ratio_low=0.8, ratio_high=1.0, verdict=word, **of_case))
    return cases, found


def test_what_a_grid_cannot_decide_is_marked_and_the_mark_is_explained():
    cases, found = case_rows({1: "inconclusive", 2: "faster"})
    head, grid, legend = sweep(cases, found, "eager")
    assert (head.text, head.remark) == ("2 cases", "8x16, fp32, forward, warm, cpu, 1 thread")
    assert grid.columns == ("tokens", "eager, time", "packed")
    assert grid.rows == [("1", "2.00 ms", "0.900 [0.800, 1.000] ?"), ("2", "2.00 ms", "0.900 [0.800, 1.000]")]
    assert legend.text == "?: inconclusive"
    cases, found = case_rows({1: "slower", 2: "faster"})
    assert len(sweep(cases, found, "eager")) == 2


def test_a_kernel_of_fewer_bits_stands_apart_with_its_error():
    cases, found = case_rows({1: "faster"}, error_rel=0.026, baseline_error_rel=1.5e-7, cache="warm")
    eager, packed = found
    few = replace(packed, kernel="mine.py:mlp", computes="fp8-rowwise")
    _, table, group, others, *_ = bench_page.case_parts(next(iter(cases.values())), [eager, few, packed])
    assert [line[0] for line in table.rows] == ["eager", "packed"]
    assert group.text == "computes in fp8-rowwise"
    assert "fewer bits than fp32" in group.remark
    assert [(line[0], line[-1]) for line in others.rows] == [("mine.py:mlp", "0.026 (baseline 1.5e-07)")]
    assert others.columns[-1] == "rms error"
    _, grid, *_ = sweep(case_rows({1: "faster", 2: "faster"})[0], [eager, few], "eager")
    assert grid.rows[0][2] == "0.900 [0.800, 1.000] in fp8-rowwise, rms error 0.026"


def test_a_grid_names_the_caches_that_were_measured():
    """Cold weights that would need too many copies are measured warm: no case is called cold."""
    spec = FFNSpec(8, 16, "silu", gated=True)
    cases = {c.key: c for c in (Case("8x16", "8x16", spec, n, cache=c) for n, c in ((1, "cold-weights"), (64, "warm")))}
    measured = [
        ResultRow(
            kernel=kernel, baseline="eager", status="ok", case=key, threads=1, time_s=2e-3, ratio=1.0, cache="warm"
        )
        for key in cases
        for kernel in ("eager", "packed")
    ]
    head, grid, *_ = sweep(cases, measured, "eager")
    assert head.remark == "8x16, fp32, forward, warm, cpu, 1 thread"
    assert [row[0] for row in grid.rows] == ["1", "64"]


def of_balance(found: list[ResultRow], cases: dict[str, Case]) -> list[str]:
    return [part.text for part in sweep(cases, found, "eager") if "ridge" in getattr(part, "text", "")]


def test_what_bounds_a_case_stands_below_the_grid_with_the_ridge():
    cases, found = case_rows(dict.fromkeys((1, 2, 64), "same"), roof_fraction=0.5)
    ridges, bounds = (13.16, 13.16, 13.24), ("memory", "memory", "compute")
    found = [replace(row, bound=bounds[at // 2], ridge_flops_per_byte=ridges[at // 2]) for at, row in enumerate(found)]
    assert of_balance(found, cases) == [
        "memory bound: 1, 2; compute bound: 64; ridge 13.2 FLOP/byte, measured in this run"
    ]
    found = [replace(row, bound="memory", ridge_flops_per_byte=12.0, roof_fraction=None) for row in found]
    found[0] = replace(found[0], ridge_flops_per_byte=10.0)
    assert of_balance(found, cases) == ["all memory bound; ridge 10 to 12 FLOP/byte, by the data sheet"]
    assert of_balance([replace(row, bound="") for row in found], cases) == []


@pytest.mark.parametrize(
    ("intensity", "said"),
    [(3.21, "3.21 FLOP/byte from memory"), (None, "the working set fits in cache")],
)
def test_a_single_case_says_its_own_intensity(intensity, said):
    row = ResultRow(case="c", bound="compute", flops_per_byte=intensity, ridge_flops_per_byte=9.5, roof_fraction=0.3)
    (line,) = balance([row], {"c": "c"})
    assert line.text == f"compute bound: {said}; ridge 9.5 FLOP/byte, measured in this run"


def test_a_warning_of_many_cases_is_one_line_with_its_count():
    busy = BenchWarning("preempted", "20 % of the blocks")
    cases, found = case_rows({1: "inconclusive", 2: "inconclusive", 3: "faster"})
    found[1], found[3] = (replace(row, warnings=(busy,)) for row in (found[1], found[3]))
    (line,) = [part.text for part in sweep(cases, found, "eager") if getattr(part, "text", "").startswith("warning")]
    assert line == (
        "warning: 2 of 6 rows: preempted: 20 % of the blocks - other work ran on this core: stop it (ffn explain noise)"
    )


def test_what_more_threads_bring_stands_below_the_grid():
    """Twice the threads in 0.625 of the time: 1.6 times as fast, 80 % of what they could bring."""
    spec = FFNSpec(8, 16, "silu", gated=True)
    cases = {case.key: case for case in (Case("8x16", "8x16", spec, 32, threads=n) for n in (2, 1))}
    found = [
        ResultRow(kernel="eager", baseline="eager", status="ok", case=key, threads=case.threads, time_s=1e-3,
                  process_times_s=(2e-3, 2e-3, 2e-3) if case.threads == 1 else (1.25e-3, 1.25e-3))
        for key, case in cases.items()
    ]  # fmt: skip
    *_, head, table = sweep(cases, found, "eager")
    assert head.text == "speed-up and efficiency"
    assert (table.columns, table.rows) == (("threads", "eager"), [("1 → 2", "1.60 [1.600, 1.600], 80 %")])


@pytest.mark.parametrize(("tflops", "unit", "shown"), [
    ((0.0071, 0.0123), "GFLOP/s", ["7.1", "12.3"]), ((0.5, 1.25), "TFLOP/s", ["0.5", "1.25"]),
    ((None, None), "TFLOP/s", [None, None]),
])  # fmt: skip
def test_rates_are_in_a_unit_that_one_can_read(tflops, unit, shown):
    assert rates([ResultRow(tflops=value) for value in tflops]) == (unit, shown)


@pytest.mark.parametrize(("saving", "said"), [(0.086, "7.9 %"), (1.0, "50 %"), (5.5, "85 %")])
def test_what_fusing_saves_is_a_share_of_the_time_with_that_traffic_in_it(saving, said):
    row = ResultRow(kernel="eager", baseline="eager", status="ok", gemm_ratio=1.5, fusion_saving_max=saving)
    assert [part.text for part in remarks([row])] == [
        f"eager takes 1.5 × the time of its bare matrix products; fusing the activation can save about {said} at most"
    ]


@pytest.mark.parametrize("source", ["8x16:swiglu", "gpt2"])
def test_the_parent_of_a_run_imports_no_torch(source, tmp_path):
    """From the options to the table, with workers that measure nothing."""
    code = (
        f"import sys\nfrom ffncli.bench import suite\nfrom ffncli.cli.main import main\n"
        f"suite.run.__defaults__ = (suite.run.__defaults__[0], {FAKE!r})\n"
        f"words = ['{source}', '--kernel', 'eager', '--device', 'cpu', '--threads', '1', '--save', 'a.csv']\n"
        "try: main(['bench', *words])\n"
        "except SystemExit as end: print('exit', end.code)\n"
        "print(sorted({'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.stdout.endswith("exit 0\n[]\n"), done.stderr


def test_the_selftest_flags_what_is_slower_and_that_alone(bench):
    code, out, _ = bench("--selftest", "--threads", "1")
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    again = next(line for line in lines if line.startswith("identical code: ratio "))
    slowed = next(line for line in lines if line.startswith("code slowed by 5 %: ratio "))
    assert again.endswith("not flagged, as it should be")
    assert slowed.endswith("], flagged, as it should be")
    assert lines[-1] == "passed"


def test_a_selftest_that_cannot_tell_fails(bench):
    code, out, err = bench("--selftest", "--threads", "1", faults=(" tokens 0 even", " tokens 1 even"))
    assert code == 1
    assert "not flagged, which is wrong" in out
    assert "selftest failed: code slowed by 5 %" in err


def test_limits_are_part_of_the_method_and_of_a_longer_command():
    options = MethodOptions(call_time=90.0, memory_limit=2 << 30)
    assert (options.method_over().call_time, options.method_over().memory_limit) == (90.0, 2 << 30)
    assert (MethodOptions().method_over().call_time, MethodOptions().method_over().memory_limit) == (None, None)
    given = asked(options)
    assert given == {"--call-time": "90", "--memory-limit": "2147483648"}
    assert asked(MethodOptions(call_time=2.5, precision=0.01, max_time=3.0)) == {
        "--precision": "0.01", "--max-time": "3", "--call-time": "2.5",
    }  # fmt: skip
    assert byte_count(given["--memory-limit"]) == 2 << 30


def test_a_resumed_run_is_gated_under_the_same_conditions(bench, tmp_path):
    one = replace(request(), method=Method(processes=1))
    steps = replace(request(), kernels=(), baseline=BLOCK, method=Method(processes=2, by_step=True))
    for name, wanted in (("one", one), ("steps", steps)):
        with suite.new_run(tmp_path / f"{name}.csv", wanted) as journal:
            assert in_process(journal, 1) == 1
    for name, words in (
        ("one", "--fail-if-slower contradicts --processes 1"),
        ("steps", "--by-step contradicts --fail-if-slower"),
    ):
        code, _, err = bench.bare("--resume", f"{name}.csv", "--fail-if-slower", "3%")
        assert (code, words in err) == (2, True), err


# --- progress ---------------------------------------------------------------------------------------------------------


def progress_of(request, done: int = 0):
    """The progress of a run, the lines that it prints, and the clock that it reads."""
    lines, clock = [], [0.0]
    return UnitProgress(request, done, Advance(), lines.append, lambda: clock[0]), lines, clock


def test_what_takes_long_is_said_at_ten_seconds_and_then_ever_less_often():
    asked = request(tokens=(1, 2))
    shown, lines, _ = progress_of(asked)
    stage = Stage(0, asked.cases[1], "compiling", "mine.py:mlp")
    for seconds in range(100):
        shown.at(stage, float(seconds))
    shown.at(replace(stage, doing="checking"), 0.0)
    shown.at(stage, 95.0)
    assert lines == [
        f"case 2/2, 2 tokens: compiling mine.py:mlp ({seconds} s)" for seconds in (10, 20, 40, 80, 95)
    ]  # fmt: skip


def test_the_time_that_is_left_is_that_of_the_units_measured_now():
    asked = request(tokens=(1, 2))  # in two processes
    shown, lines, clock = progress_of(asked, done=1)
    clock[0] = 30.0
    shown.finished(0, asked.cases[1])
    shown.finished(1, asked.cases[0])
    shown.finished(1, asked.cases[1])
    assert lines == [
        "process 1 of 2, 2 of 4 units done, about 60 s left",
        "process 2 of 2, 3 of 4 units done, about 15 s left",
        "process 2 of 2, 4 of 4 units done",
    ]


def test_the_time_that_a_run_is_to_take_is_said_first(bench):
    asked = ("8x16:swiglu", "--tokens", "1,2,3", "--kernel", "eager", "--max-time", "4s")
    err = bench(*asked, "--save", "a.csv")[2]  # 3 × 4 s, and 2 × 5 s to start
    assert "note: 3 cases in 2 processes: about 22 s; less if --precision is reached, more if kernels compile\n" in err
    assert "processes: about" not in bench(*asked, "--save", "b.csv", "-q")[2]


def rows(base: str, *others: ResultRow) -> list[ResultRow]:
    """A baseline of that status and others beside it."""
    return [ResultRow(kernel="eager", baseline="eager", status=base, case="c", note="no such arithmetic"), *others]


def request_of(**fields):
    return BenchRequest((), (), "eager", Method(), **fields)


def test_a_gate_without_a_baseline_is_no_success():
    asked = request_of(fail_if_slower=0.03)
    found = rows("skipped", ResultRow(kernel="packed", baseline="eager", status="ok", case="c", time_s=1.0))
    error = gate.failure(found, asked, gate.gated(found, asked))
    assert (error.code, "nothing could be gated" in error.message, "no such arithmetic" in error.hint) == (
        3,
        True,
        True,
    )


def test_strict_leaves_nothing_open():
    found = rows("skipped", ResultRow(kernel="packed", baseline="eager", status="ok", case="c", time_s=1.0))
    assert gate.failure(found, request_of(), None) is None
    assert gate.failure(found, request_of(strict=True), None).code == 4
    same = {"baseline": "eager", "status": "ok", "case": "c", "ratio": 1.0, "verdict": "same"}
    fine = ResultRow(kernel="packed", process_ratios=(1.0, 1.0, 1.0), ratio_low=1.0, ratio_high=1.0, **same)
    alone = ResultRow(kernel="module", process_ratios=(1.0,), **same)
    asked = request_of(fail_if_slower=0.03, strict=True)
    found = [ResultRow(kernel="eager", baseline="eager", status="ok", case="c", ratio=1.0), fine, alone]
    judged = gate.gated(found, asked)
    assert gate.failure(found, asked, judged).code == 4
    summary = bench_page._gate(judged, found, asked)[-1].text
    assert summary == "gate: no kernel is more than 3 % slower; 1 of 2 could not be gated"


def test_routings_are_cases_of_their_own_on_the_page_in_the_file_and_when_drawn(bench):
    words = ("8x16:swiglu", "--experts", "4", "--tokens", "4", "--kernel", "eager,packed")
    code, out, err = bench(*words, "--routing", "uniform,zipf:1.2", "--save", "a.csv")
    assert (code, err.count("error")) == (0, 0)
    assert re.split(r"\s{2,}", out.split("\n\n")[1].splitlines()[0])[0] == "routing"
    assert re.search(r"^ *zipf:1.2 .*0\.950 \[", out, re.MULTILINE)
    assert [row.routing for row in read_rows(Path("a.csv"))] == ["uniform", "uniform", "zipf:1.2", "zipf:1.2"]
    code, out, _ = bench(*words, "--routing", "uniform", "--save", "b.csv")
    assert (code, out.splitlines()[0].endswith("1 thread, routing uniform")) == (0, True)
    code, out, err = bench.bare("--resume", "b.csv")
    assert (code, "is complete" in err) == (2, True)


@pytest.mark.parametrize(("loads", "words"), [((8.0, 2.71828, 22.4), "from 2.72 to 22.4"), ((8.0, 8.0), "8")])
def test_a_single_case_says_how_many_tokens_the_experts_received(loads, words):
    _, found = case_rows({4: "faster"}, tokens_per_expert=loads)
    assert remarks(found)[0].text == f"tokens per expert: {words}, as counted"
    _, plain = case_rows({4: "faster"})
    assert not any(line.text.startswith("tokens per expert") for line in remarks(plain))


def test_a_file_that_changed_is_not_resumed(bench, tmp_path):
    rows_file(tmp_path / "x.safetensors", torch.ones(3, 8))
    grid = Grid("8x16:swiglu", tokens=(1, 2), device="cpu", threads=1, input="x.safetensors")
    wanted = build_request(grid, ["eager"], None, Method(processes=2))[0]
    assert wanted.files == {str(tmp_path / "x.safetensors"): wanted.cases[0].input_sha256}
    with suite.new_run(tmp_path / "a.csv", wanted) as journal:
        assert in_process(journal, 1) == 1
    rows_file(tmp_path / "x.safetensors", torch.zeros(3, 8))
    expect_refusal(bench.bare("--resume", "a.csv"), "x.safetensors has changed since its run began", code=3)


def test_what_a_model_has_to_say_is_said(bench):
    _, _, err = bench("--d-model", "8", "--kernel", "eager", "--save", "a.csv")
    assert "assuming d_ff = 4x" in err


def test_reasons_that_are_visible():
    row = ResultRow(
        cache="shared", note="mine.py, sha256 abc; 9 page faults a call, the baseline 0: part of the ratio is memory"
    )
    said = bench_page._reason(row)
    assert "9 page faults" in said
    assert "cache: the kernels' weights do not all fit" in said
    assert "sha256" not in said
    assert bench_page._reason(ResultRow(cache="warm")) == ""
