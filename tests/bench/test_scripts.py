"""The figures of the scripts in benchmarks/, from rows small enough to count by hand."""

import math
import os
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

import ffncli
from benchmarks import (
    baseline,
    budget,
    certificates,
    conv1x1,
    demo,
    formats,
    grid_over_machines,
    grouped,
    in_model,
    known,
    method,
    plugin_import,
    script,
    sweep,
    timers,
)
from benchmarks.claims import MEASURED, why
from benchmarks.script import Answer, Kept, marks, read
from ffncli.run.texts import TextClaim

MACHINE = {"cpu": "a cpu, 2 cores", "python": "3.12", "torch": "2.13", "numpy": "2.4", "pytest-benchmark": "5.3"}


# --- rows that grow ---------------------------------------------------------------------------------------------------


def test_rows_are_there_at_once_and_found_again(tmp_path):
    path = tmp_path / "kept.csv"
    kept = Kept(str(path), ("what", "n", "ok"), {"cpu": "c"})
    kept.add({"what": "a, b", "n": 1.5, "ok": True})
    assert path.read_text("utf-8") == 'what,n,ok,cpu\n"a, b",1.5,true,c\n'
    again = Kept(str(path), ("what", "n", "ok"), {"cpu": "c"})
    assert again.has(what="a, b", n=1.5)
    assert not again.has(what="a, b", n=2)
    again.add({"what": "x"})
    assert [row["what"] for row in read(path)] == ["a, b", "x"]
    assert read(path)[1]["n"] == ""


def test_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "kept.csv"
    path.write_text("what,cpu\na,c\nb", "utf-8")
    kept = Kept(str(path), ("what",), {"cpu": "c"})
    kept.add({"what": "d"})
    assert path.read_text("utf-8") == "what,cpu\na,c\nd,c\n"


def test_a_file_of_another_script_is_refused(tmp_path):
    path = tmp_path / "kept.csv"
    path.write_text("other\na\n", "utf-8")
    with pytest.raises(SystemExit, match="other columns"):
        Kept(str(path), ("what",), {})
    assert path.read_text("utf-8") == "other\na\n"


# --- a script ---------------------------------------------------------------------------------------------------------


def test_a_default_says_what_an_option_takes(capsys):
    words = ["--max-time", "2", "--threads", "1,4", "--quick", "--source", "a", "--save", "x.csv"]
    options = script.options_of("What.", words, max_time=0.5, threads=(1, 2), quick=False, source=None, precision="1%")
    assert vars(options) == {
        "max_time": 2.0, "threads": (1, 4), "quick": True, "source": "a", "precision": "1%", "save": "x.csv",
        "summary": None,
    }  # fmt: skip
    assert script.how(script.options_of("", [], processes=3, max_time=0.5), seed=7) == [
        "--processes", "3", "--max-time", "0.5s", "--precision", "1%", "--seed", "7",
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        script.options_of("What.", ["--help"], precision="1%")
    assert "[1%]" in capsys.readouterr().out


def test_a_script_measures_what_is_missing_and_fails_where_a_mark_is_missed(tmp_path, monkeypatch, capsys):
    def measure(kept, options):
        for n in range(options.most):
            if not kept.has(n=n):
                kept.add({"n": n})

    def summary(rows):
        return f"{len(rows)} rows", len(rows) < 3

    for most, code in (("2", 0), ("3", 1)):
        monkeypatch.setattr("sys.argv", ["made-up", "--save", str(tmp_path / "a.csv"), "--most", most])
        with pytest.raises(SystemExit) as stop:
            script.main("", (), ("n",), measure, summary, most=1)
        assert (capsys.readouterr().out, stop.value.code) == (f"{most} rows\n", code)
    assert [row["n"] for row in read(tmp_path / "a.csv")] == ["0", "1", "2"]


def test_rows_of_one_go_are_printed_as_they_come_and_replace_the_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.csv"
    path.write_text("old\n1\n")
    monkeypatch.setattr("sys.argv", ["made-up", "--save", str(path)])
    first = {"name": "a", "bytes": 12345, "share": 0.123456, "passed": None}
    with pytest.raises(SystemExit) as stop:
        script.main_once("", ("numpy",), lambda _: iter([first, first | {"passed": False}]))
    assert stop.value.code == 1
    assert "| name | bytes | share | passed |\n| --- | --- | --- | --- |\n| a | 12,345 | 0.1235 |  |" in (
        capsys.readouterr().out
    )
    assert path.read_text("utf-8").startswith("name,bytes,share,passed,python,numpy,cpu\na,12345,0.123456,,")


@pytest.mark.parametrize(
    ("seconds", "torch", "passed"), [(0.02, False, True), (0.021, False, False), (0.01, True, False)]
)
def test_the_plugin_is_late_above_20_ms_in_the_median_and_must_not_load_torch(monkeypatch, seconds, torch, passed):
    late = iter([9.0, seconds, 0.0] * 4)  # three warm-ups, then a slow, a usual and a quick process
    figures = {
        "import pytest": lambda: {"seconds": 0.5, "torch": False},
        "import ffncli.pytest_plugin": lambda: {"seconds": next(late), "torch": torch},
    }
    monkeypatch.setattr(plugin_import, "PROGRAMS", {name: name for name in figures})
    monkeypatch.setattr(script, "child", lambda name: figures[name]())
    bare, plugin = plugin_import.measured(Namespace(processes=3))
    assert (bare["median_s"], bare["limit_s"], bare["passed"]) == (0.5, None, None)
    assert (plugin["median_s"], plugin["most_s"], plugin["limit_s"], plugin["passed"]) == (seconds, 9.0, 0.02, passed)


def test_a_child_reports_its_figures_and_its_peak():
    figures = script.child("finish(x=int(sys.argv[1]) + 1)", "4")
    assert figures["x"] == 5
    assert figures["peak"] > 1e6
    with pytest.raises(SystemExit, match="exit 3"):
        script.child("sys.exit(3)")


# --- timers -----------------------------------------------------------------------------------------------------------


def timed(
    tool: str, ratio: float, truth: float = 1.0, low: float | None = None, high: float | None = None, **more: str
):
    row = {"date": "2026-11-22T00:00:00Z", "load": "quiet", "threads": "1", "shape": "1x2x3:swiglu", "tool": tool}
    row |= {"truth": f"{truth:g}", "ratio": str(ratio), "low": "" if low is None else str(low)}
    return row | {"high": "" if high is None else str(high), "injected": "", **MACHINE, **more}


def cell_rows(ours: float, torch: float, other: float, truth: float = 1.0, **more: str):
    """Two repeats of each tool: truth times e^+x and e^-x, so that the rms error of the log is x."""
    rows = []
    for tool, x in (("ffn bench", ours), ("torch Timer", torch), ("do_bench", other), ("pytest-benchmark", other)):
        for sign in (1, -1):
            ratio = truth * math.exp(sign * x)
            held = (truth - 0.001, truth + 0.001) if sign > 0 else (truth + 0.1, truth + 0.2)
            rows.append(timed(tool, ratio, truth, *(held if tool == "ffn bench" else ()), **more))
    return rows


def test_errors_of_timers_are_judged_against_the_best_peer():
    (cell,) = timers.cells(cell_rows(0.01, 0.05, 0.04))
    assert cell.rms["ffn bench"] == pytest.approx(0.01)
    assert cell.rms["torch Timer"] == pytest.approx(0.05)
    assert cell.over_best == pytest.approx(0.25)
    # The standard deviation of x and -x, n - 1 = 1, is x·√2.
    assert cell.spread["torch Timer"] == pytest.approx(0.05 * math.sqrt(2))
    assert cell.torch_over_ours == pytest.approx(5)
    assert (cell.covered, cell.intervals) == (1, 2)


def test_an_error_is_that_of_the_log_ratio_to_the_truth():
    rows = [timed(tool, 1.05 * 1.02, 1.05, 1.0, 1.2) for tool in ("ffn bench", *timers.PEERS) for _ in range(2)]
    rows += [timed("ffn bench", 1.05 / 1.02, 1.05, 1.0, 1.2)]
    (cell,) = timers.cells(rows)
    assert cell.rms["ffn bench"] == pytest.approx(math.log(1.02))
    assert cell.rms["do_bench"] == pytest.approx(math.log(1.02))
    assert (cell.covered, cell.intervals) == (3, 3)


def test_both_truths_are_in_a_cell():
    (cell,) = timers.cells([*cell_rows(0.01, 0.05, 0.04), *cell_rows(0.03, 0.05, 0.04, truth=1.05)])
    assert cell.rms["ffn bench"] == pytest.approx(math.sqrt((0.01**2 + 0.03**2) / 2))
    assert cell.intervals == 4


def test_marks_of_timers():
    rows = [
        *cell_rows(0.01, 0.05, 0.04),
        *cell_rows(0.01, 0.09, 0.1, threads="2"),
        *cell_rows(0.06, 0.05, 0.1, load="busy"),
    ]
    figures = {what: (figure, reached) for what, figure, _, reached in timers.judged(timers.cells(rows))}
    assert figures == {
        "rms error ÷ the best other timer's, median": ("0.25", True),  # 0.25, 0.11, 1.2
        "rms error ÷ the best other timer's, largest": ("1.20", False),
        "95 % intervals that contain the true ratio": ("3 of 6 (50%)", False),
        "spread of torch's Timer ÷ spread of ffn bench, median": ("5.0", True),  # 5, 9, 0.83
    }
    text, reached = timers.summary(rows)
    assert not reached
    assert "| quiet | 1 | 1x2x3:swiglu | 1.00% (1.41%) | 5.00% (7.07%) | 4.00% (5.66%)" in text
    assert "Measured 2026-11-22; a cpu, 2 cores; python 3.12; torch 2.13; numpy 2.4; pytest-benchmark 5.3." in text


def test_a_cell_without_a_peer_is_not_judged():
    rows = [row for row in cell_rows(0.01, 0.05, 0.04) if row["tool"] != "do_bench"]
    assert timers.cells(rows) == []
    assert timers.summary(rows)[1] is False


def test_time_of_measuring_is_shared_by_what_blocks_and_lead_in_took():
    def block(case: str, seconds: float, inner: int) -> dict[str, str]:
        return {"case": case, "seconds": str(seconds), "inner": str(inner)}

    # a: 10 ms of 10 calls + 4 calls of 1 ms = 14 ms, twice; b: one call of 30 ms + 1 such = 60 ms.
    blocks = (block("a", 0.010, 10), block("a", 0.010, 10), block("b", 0.030, 1))
    answer = Answer(0, (), blocks, {}, 1.0, "")
    assert timers.shares(answer) == pytest.approx({"a": 0.028, "b": 0.060})
    spent = {"blocks": 0.1, "lead_in": 0.05, "placing": 0.026, "start": 5.0, "rest": 9.0}
    answer = Answer(0, (), blocks, {"spent": spent}, 1.0, "")
    assert timers.shares(answer) == pytest.approx({"a": 0.056, "b": 0.120})


def test_shapes_are_read_as_they_are_typed():
    shape = timers.Shape.of("32x512x2048:swiglu")
    assert (shape.tokens, shape.source, shape.gated) == (32, "512x2048:swiglu", True)
    assert timers.Shape.of(shape.text) == shape
    assert not timers.Shape.of("1x768x3072:gelu").gated


# --- kernels of a known ratio -----------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when it is looked at, and when `work` says so."""

    def __init__(self) -> None:
        self.now, self.work = 0.0, 0.0

    def perf_counter(self) -> float:
        self.now += self.work if self.work else 0.001
        self.work = 0.0
        return self.now


def test_the_wait_is_a_twentieth_of_the_own_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(known, "time", clock)
    monkeypatch.setattr(known, "_OWN", {1.0: 0.0, 1.05: 0.0})
    monkeypatch.setattr(known, "_ALL", {1.0: 0.0, 1.05: 0.0})
    for _ in range(3):
        start = clock.perf_counter()
        clock.work = 1.0
        known._until(None, start, 1.05)
        assert clock.now - start == pytest.approx(1.05, abs=0.002)
        start = clock.perf_counter()
        clock.work = 1.0
        known._until(None, start, 1.0)
        assert clock.now - start == pytest.approx(1.0)
    assert known.injected() == pytest.approx(1.05, abs=0.002)
    assert known.injected(1.0) == 1.0


def test_kernels_of_a_known_ratio_compute_the_block():
    import torch
    from torch import nn

    x = torch.randn(3, 8)
    gate, up, down = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
    wanted = down(nn.functional.silu(gate(x)) * up(x))
    for kernel in (known.base, known.same, known.slow, known.threaded):
        torch.testing.assert_close(kernel(x, gate.weight, up.weight, down.weight), wanted)
    up, down = nn.Linear(8, 16), nn.Linear(16, 8)
    wanted = down(nn.functional.gelu(up(x)))
    for kernel in (known.base_plain, known.same_plain, known.slow_plain):
        torch.testing.assert_close(kernel(x, up.weight, up.bias, down.weight, down.bias), wanted)


# --- the method -------------------------------------------------------------------------------------------------------


def row(kernel: str, ratio: float, low: float, high: float, verdict: str = "same", **more: str) -> dict[str, str]:
    base = {"date": "2026-11-22T00:00:00Z", "invocation": "plain", "repeat": "0", "case": "c", "kernel": kernel}
    base |= {"ratio": str(ratio), "low": str(low), "high": str(high), "verdict": verdict, "exit": "0", "cache": "warm"}
    return base | {"fired": "false", "time_s": "", "time_low_s": "", "time_high_s": "", **MACHINE, **more}


def figures(found) -> dict[str, tuple[str, bool | None]]:
    return {what: (figure, reached) for what, figure, _, reached in found}


def test_false_verdicts_and_gates_are_counted():
    rows = [row("same", 1.0, 0.99, 1.01) for _ in range(19)] + [row("same", 1.1, 1.05, 1.2, "slower")]
    assert figures(method.aa(rows)) == {
        "A/A: false faster or slower": ("1 of 20", True),
        "A/A: the gate fires": ("0 of 20", True),
        "A/A: reported as the same": ("19 of 20", True),
        "A/A: 95 % intervals that contain 1": ("19 of 20", True),
    }
    rows.append(row("same", 0.9, 0.85, 0.95, "faster", fired="true"))
    assert figures(method.aa(rows))["A/A: false faster or slower"] == ("2 of 21", False)
    assert figures(method.aa(rows))["A/A: the gate fires"] == ("1 of 21", False)
    assert method.aa([])[0][-1] is None


def test_an_injected_slowdown_must_be_said_and_must_fail():
    caught = {"exit": "1", "fired": "true", "invocation": "slower"}
    rows = [row("slow", 1.05, 1.04, 1.06, "slower", **caught) for _ in range(19)]
    rows.append(row("slow", 1.04, 1.01, 1.07, "inconclusive", **caught))
    assert figures(method.slower(rows))["x1.05: reported as slower, with exit code 1"] == ("19 of 20", True)
    rows.append(row("slow", 1.05, 1.04, 1.06, "slower", **caught | {"exit": "0"}))
    rows.append(row("slow", 1.06, 1.055, 1.07, "slower", **caught | {"fired": "false"}))
    rows.append(row("slow", 1.06, 1.04, 1.07, "slower"))
    assert figures(method.slower(rows)) == {
        "x1.05: reported as slower, with exit code 1": ("19 of 22", False),
        "x1.05: reported as slower in plain runs of half the length": ("1 of 1", True),
        "x1.05: 95 % intervals that contain 1.05": ("22 of 23", True),
    }


def test_ratios_beside_a_disturbing_arm_are_held_to_what_they_are_without_it():
    rows = [row("packed", ratio, 0, 2) for ratio in (0.9, 0.95, 0.99)] + [row("slow", 1.05, 1.04, 1.06)]
    rows += [row("slow", 1.09, 1.06, 1.1, invocation="sweep"), row("other", 1.0, 0.99, 1.01, invocation="sweep")]
    rows += [row("packed", 0.96, 0.94, 0.97, invocation="sweep"), row("sweep", 9.0, 8, 10, invocation="sweep")]
    swept, threaded = method.undisturbed(rows)
    assert (swept[1], swept[3]) == ("1 of 2", False)
    assert threaded[3] is None


def test_cold_weights_may_not_be_faster():
    warm = row("base", 1, 1, 1, invocation="cache", case="c, 1 tokens, fp32, forward, warm, cpu, 1 thread")
    cold = {**warm, "case": warm["case"].replace("warm", "cold-weights"), "cache": "cold-weights"}
    warm |= {"time_s": "2.0", "time_low_s": "1.9", "time_high_s": "2.1"}
    near = {**cold, "time_s": "1.8", "time_low_s": "1.7", "time_high_s": "1.95"}
    assert method.cold([warm, near])[0][1::2] == ("0 of 1; cold over warm 0.90 in the median", True)
    under = {**near, "time_high_s": "1.85"}
    assert method.cold([warm, under])[0][1::2] == ("1 of 1; cold over warm 0.90 in the median", False)
    assert method.cold([warm, {**cold, "cache": "warm"}])[0][-1] is None  # renamed: nothing to compare


def test_agreement_is_with_the_median_of_the_others():
    rows = [row("packed", ratio, ratio - 0.02, ratio + 0.02) for ratio in (0.90, 0.91, 0.92, 1.00)]
    # The medians of the others: 0.92, 0.92, 0.91, 0.91: the first three hold them, 0.98 to 1.02 does not.
    found = figures(method.agreement(rows))
    assert found["packed: intervals that contain the median of the other runs"] == ("3 of 4", False)
    assert found["packed: shapes reported both as faster and as slower"] == ("0 of 1", True)
    rows[0]["verdict"], rows[3]["verdict"] = "faster", "slower"
    assert figures(method.agreement(rows))["packed: shapes reported both as faster and as slower"] == ("1 of 1", False)


def test_every_kind_of_invocation_is_there_early():
    import argparse

    plan = method.plan(argparse.Namespace(repeats=6, disturbed=3, cache_repeats=1, slower_repeats=2))
    assert sorted(plan) == sorted(
        [("plain", at) for at in range(6)]
        + [("sweep", 0), ("sweep", 1), ("threads", 0), ("cache", 0), ("slower", 0), ("slower", 1)]
    )
    assert {kind for kind, _ in plan[:8]} == {"plain", "sweep", "threads", "cache", "slower"}


# --- sweeps -----------------------------------------------------------------------------------------------------------


def swept(cases: int, wall: float, **more: str) -> dict[str, str]:
    row = {"date": "2026-11-22T00:00:00Z", "what": "cost", "cases": str(cases), "processes": "1", "wall_s": str(wall)}
    return row | dict.fromkeys(sweep.SPENT, "") | MACHINE | more


def test_cost_of_a_case_is_what_it_adds_to_one_alone():
    rows = [swept(1, 5.0), swept(20, 14.5), swept(200, 109.475)]
    assert sweep.each_case(rows) == pytest.approx({20: 0.5, 200: 0.525})
    text, _ = sweep.summary(rows)
    assert "| seconds for each case | 0.500 s of 20, 0.525 s of 200: +5.0% | within 10% | reached |" in text
    assert "+20.9% | within 10% | **missed**" in sweep.summary([swept(1, 5), swept(20, 14.5), swept(200, 125.3)])[0]


def test_share_leaves_out_what_prepares():
    spent = {
        "start": "50",
        "verify": "30",
        "warm_up": "20",
        "blocks": "6",
        "lead_in": "2.5",
        "placing": "1",
        "rest": "0.5",
    }
    assert sweep.share(swept(20, 1, **spent)) == pytest.approx(0.85)
    assert sweep.share(swept(20, 1)) is None


def test_a_grid_has_as_many_cases_as_asked():
    def cases(words: list[str]) -> int:
        lists = {words[at]: words[at + 1].count(",") + 1 for at in range(1, len(words), 2)}
        return math.prod(lists.values())

    assert [cases(sweep.grid(n)) for n in (1, 6, 20, 200)] == [1, 6, 20, 200]


def test_what_a_kill_leaves_is_inspected(tmp_path):
    path, rounds = tmp_path / "s.csv", tmp_path / "s.rounds.csv"
    lines = [f"{case},{kernel},ok,1,0.1,1.0" for case in "ab" for kernel in ("eager", "packed")]
    blocks = [f"0,{case},0,0,{position},eager,1,0.1" for case in "ab" for position in (0, 1)]
    head, rounds_head = (
        "case,kernel,status,processes,time_s,ratio",
        "process,case,placement,round,position,kernel,inner,seconds",
    )

    def write(rows: list[str], of_rounds: list[str], end: str = "\n") -> dict[str, object]:
        path.write_text("\n".join([head, *rows]) + "\n")
        rounds.write_text("\n".join([rounds_head, *of_rounds]) + end)
        return sweep.inspected(path, 2, 1)

    assert write(lines, blocks) == {"complete": True, "doubled": 0, "damaged": 0}
    assert write(lines[:3], blocks)["complete"] is False
    assert write(lines, blocks[:2])["complete"] is False
    assert write([*lines, lines[0]], blocks)["doubled"] == 1
    assert write(lines, [*blocks, blocks[0]])["doubled"] == 1
    assert write([*lines[:3], "b,packed,ok,1,,"], blocks)["damaged"] == 1
    assert write([*lines[:3], "b,packed,ok,1"], blocks)["damaged"] == 1
    assert write(lines, blocks, end="\n0,a,1")["damaged"] == 1


def test_killed_sweeps_are_summed_up():
    good = {"what": "kill", "complete": "true", "exit": "0", "doubled": "0", "damaged": "0", "survivors": "0"}
    rows = [swept(6, 1, **good, blocks_before=str(n)) for n in (0, 7)]
    found = sweep.summary(rows)[0]
    assert "| killed and resumed: every case is there | 2 of 2 | all | reached |" in found
    assert "| killed with blocks already written | 1 of 2 |  |  |" in found
    rows[0] |= {"complete": "false", "survivors": "2"}
    found = sweep.summary(rows)[0]
    assert "every case is there | 1 of 2 | all | **missed** |" in found
    assert "workers alive 5 s later | 2 | none | **missed** |" in found


def test_processes_below_another_are_found_and_seen_to_end():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = sweep.descendants(os.getpid())
        assert child.pid in found
        assert sweep._alive(child.pid, found[child.pid])
        assert not sweep._alive(child.pid, "1")  # another process of that number
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert sweep.survivors({child.pid: found[child.pid]}) == 0


# --- convolutions -----------------------------------------------------------------------------------------------------


def conv(tokens: int, threads: int, ratio: float, verdict: str, dtype: str = "fp32") -> dict[str, str]:
    return {
        "date": "2026-11-22T00:00:00Z", "source": "512x2048:relu", "tokens": str(tokens), "threads": str(threads),
        "dtype": dtype, "status": "ok", "verdict": verdict, "ratio": str(ratio), "low": str(ratio - 0.01),
        "high": str(ratio + 0.01), **MACHINE,
    }  # fmt: skip


def test_the_claim_is_answered_by_the_ends():
    rows = [
        conv(1, 1, 1.0, "same"),
        conv(32, 1, 0.9, "faster"),
        conv(512, 1, 1.1, "slower"),
        conv(1, 2, 1.25, "slower"),
    ]
    assert conv1x1.sentence(rows) == (
        "time of the convolutions divided by the time of the matrix products, 2026-11-22; a cpu, 2 cores; torch 2.13: "
        "fp32, 1 thread: 0.900 (0.890 to 0.910) at 32 tokens … 1.100 (1.090 to 1.110) at 512 tokens; fp32, 2 threads: "
        "1.250 (1.240 to 1.260) at 1 token; faster in 1, slower in 2, same in 1"
    )
    assert "| 512x2048:relu | 32 | fp32 | 1 | 0.900 (0.890 to 0.910) | faster |" in conv1x1.summary(rows)
    assert conv1x1.sentence([]) == ""


# --- the baseline and a function written by hand ----------------------------------------------------------------------


def by_hand(case: str, compared: str, low: float, high: float, time_s: float = 2e-4, verdict: str = "same"):
    return {
        "date": "2026-11-26T00:00:00Z", "case": case, "compared": compared, "status": "ok", "time_s": str(time_s),
        "verdict": verdict if compared == "bench" else "", "ratio": str((low + high) / 2), "low": str(low),
        "high": str(high), **MACHINE,
    }  # fmt: skip


def test_the_baseline_is_judged_where_a_call_is_long():
    case, short = "gated-256x688-16-fp32-1", "gated-64x256-1-fp32-1"
    good = [by_hand(case, "bench", 0.995, 1.005), by_hand(case, "kernel", 0.99, 1.04)]
    brief = [by_hand(short, "bench", 0.96, 1.1, 9e-6), by_hand(short, "kernel", 1.04, 1.08, 9e-6)]
    text, reached = baseline.summary([*good, *brief])
    assert reached
    assert "| gated | 256x688:swiglu | 16 | fp32 | 1 | 200 µs | 1.000 (0.995 to 1.005) | same | 1.015 (" in text
    assert figures(baseline.judged([*good, *brief])) == {
        "verdict `same`": ("2 of 2", True),
        "function ÷ eager: an end of an interval, farthest from 1": ("0.5% (1 of 1 within)", True),
        'ffncli.kernel("eager") ÷ function, largest': ("1.015", True),
    }
    far = [by_hand(case, "bench", 0.98, 1.005, verdict="faster"), by_hand(case, "kernel", 1.02, 1.04)]
    assert [reached for *_, reached in baseline.judged(far)] == [False, False, False]
    assert [reached for *_, reached in baseline.judged([])] == [None, None, None]


def test_every_case_of_the_baseline_has_a_function():
    cases = [baseline.Case.of(text) for text in baseline.CASES]
    assert len(cases) == len(set(cases)) == 12
    assert all(callable(getattr(baseline, case.function)) for case in cases)
    assert "--experts 8 --top-k 2" in " ".join(baseline.Case.of("mixture-64x256-1-fp32-1").words)


def test_calls_in_turn_have_the_ratio_of_their_times(monkeypatch):
    now = 0.0

    def lasting(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(baseline.time, "perf_counter", lambda: now)
    found = baseline.in_turn(lambda: lasting(3e-4), lambda: lasting(2e-4), seconds=0.2)
    assert found == pytest.approx({"ratio": 1.5, "low": 1.5, "high": 1.5, "time_s": 2e-4})


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_with_kernels_name_the_best_of_each():
    shared = {"threads": "2", "dtype": "fp32", "verdict": "faster", "tokens_per_s": "1234.5", "model_tokens_per_s": ""}
    rows = [
        conv(tokens, 2, ratio, "faster") | shared | {"model": model, "kernel": kernel}
        for model, kernel, tokens, ratio in (
            ("llama", "packed", 32, 0.9), ("llama", "eager", 1, 1.1), ("gpt2", "eager", 1, 1.0),
        )
    ]  # fmt: skip
    assert in_model.sentence(rows) == (
        "time of a forward pass divided by the unchanged model's, 2026-11-22; a cpu, 2 cores; torch 2.13: "
        "llama with packed 0.900 (0.890 to 0.910) at 32 tokens, fp32, 2 threads; gpt2 with eager "
        "1.000 (0.990 to 1.010) at 1 tokens, fp32, 2 threads"
    )
    assert "| llama | packed | 32 | fp32 | 2 | 1,234 |  | 0.900 (0.890 to 0.910) | faster |" in in_model.summary(rows)
    assert in_model.sentence([]) == ""


def test_mixtures_by_case():
    """A line for each case in order; kernels that copy matrices only on few rows."""
    case = dict.fromkeys(grouped.CASE, "1") | {"source": "256x512:swiglu", "routing": "uniform", "dtype": "fp32"}
    row = case | MACHINE | {"transformers": "5.23", "date": "2026-11-22T10:00:00Z", "status": "ok", "time_s": "2e-5"}
    eager = row | {"kernel": "eager", "ratio": "1", "low": "1", "high": "1"}
    mine = row | {"kernel": "grouped", "ratio": "0.5", "low": "0.4", "high": "0.6"}
    skipped = row | {"kernel": "batched", "ratio": "", "status": "skipped"}
    more = [{**r, "tokens": "32"} for r in (eager, mine)]
    lines = grouped.summary([*more, eager, mine, skipped]).splitlines()
    assert lines[2] == "| 1 | 1 | uniform | 1 | fp32 | 20 µs | 0.500 (0.400 to 0.600) | skipped |  |  |  |"
    assert lines[3].startswith("| 1 | 1 | uniform | 32 | fp32 | 20 µs | 0.500 (0.400 to 0.600) |  |")
    assert grouped.summary([]) == ""
    assert [len(grouped.kernels(tokens, top_k)) for tokens, top_k in ((1, 8), (32, 2), (32, 8), (512, 1))] == [
        6,
        6,
        4,
        4,
    ]


def test_the_page_of_claims_quotes_what_was_measured(monkeypatch):
    (name,) = MEASURED
    claim = TextClaim("notes", name, "depends", "f", "why so", "ffn trace")
    monkeypatch.setitem(MEASURED, name, lambda: "0.9 on a machine")
    assert why(claim) == "why so; 0.9 on a machine"
    monkeypatch.setitem(MEASURED, name, lambda: "")
    assert why(claim) == "why so"


# --- the demonstration ------------------------------------------------------------------------------------------------


def test_the_demonstration_says_what_was_measured():
    shells = [demo.Shell(1.0, 0.98, 0.97, 0.99, "same"), demo.Shell(1.25, 0.99, 0.98, 1.0, "same")]
    text = demo.text(shells, demo.Caught("ffn bench x", "slower", 1), "a question", "today")
    assert "in two fresh shells, a question" in text
    assert "| 2 | 1.250 | 0.990 | 0.980 to 1.000 | same |" in text
    assert "25.0 % with Timers, and by 1.0 % with `ffn bench`" in text
    assert "$ ffn bench x\nslower\n$ echo $?\n1\n```" in text


def test_the_demonstration_goes_between_its_markers():
    page = f"before\n{demo.START}\nold\n<!-- end of demo -->\nafter\n"
    new = script.put(page, demo.START, "new")
    assert new == f"before\n{demo.START}\n\nnew\n\n<!-- end of demo -->\nafter\n"
    assert script.put(new, demo.START, "newer") == script.put(page, demo.START, "newer")
    with pytest.raises(ValueError, match="no <!-- demo"):
        script.put("a page", demo.START, "new")


def test_the_kernels_of_the_demonstration_compute_the_same():
    import torch

    found = []
    for source in (demo.OLD, demo.NEW):
        space: dict[str, object] = {}
        exec(source, space)  # ours, above
        torch.manual_seed(0)
        weights = torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16)
        found.append(space["mlp"](torch.randn(3, 8), *weights))
    torch.testing.assert_close(*found)


def test_marks_say_what_is_missed():
    text = marks(
        [("a", "1", "at most 2", True), ("b", "3", "at most 2", False), ("c", "", "", None), ("d", "4", "", True)]
    )
    assert text.splitlines()[2:] == [
        "| a | 1 | at most 2 | reached |", "| b | 3 | at most 2 | **missed** |", "| c |  |  | no data |",
        "| d | 4 |  |  |",
    ]  # fmt: skip


def test_the_table_of_certificates():
    """Numbers of threads in one line; where they differ, each; a refusal with its reason."""

    def row(kernel: str, threads: str, invariant: str, apart: str, verdict: str = "certified", reason: str = ""):
        return {
            "kernel": kernel, "dtype": "fp32", "threads": threads, "verdict": verdict, "error_class": "fp32-true",
            "batch_invariant": invariant, "other_bits": apart, "reason": reason,
        }  # fmt: skip

    rows = [
        row("a", "1", "false", "1.1e-3"), row("a", "2", "false", "9.7e-4"), row("b", "1", "true", "0"),
        row("b", "2", "false", "2e-7"), row("c", "1", "", "", "refused", "shapes, 1 token: error 1"),
    ]  # fmt: skip
    assert certificates.summary(rows).splitlines()[2:] == [
        "| `a` | fp32 | certified | fp32-true | no (1.1e-03) |",
        "| `b` | fp32 | certified | fp32-true | 1 thread: yes, 2 threads: no (2.0e-07) |",
        "| `c` | fp32 | refused: shapes, 1 token: error 1 | fp32-true |  |",
    ]


# --- grids over machines ----------------------------------------------------------------------------------------------


def test_what_a_grid_in_pieces_lacks_or_has_too_often_is_counted():
    def row(case: str, kernel: str, run: str = "r1", host: str = "h1") -> dict[str, str]:
        return {"case": case, "kernel": kernel, "run_id": run, "host": host}

    good = [row(case, kernel) for case in "abc" for kernel in ("eager", "numpy")]
    whole = {"a", "b", "c"}
    assert grid_over_machines.compared("w", good, whole, 0).holds
    bad = [
        *good[:3],  # numpy of b, and all of c, are missing
        row("a", "eager"),  # twice
        row("d", "eager"),
        row("d", "numpy", host="h2"),  # on another machine
        row("d", "numpy", run="r2", host="h2"),
    ]
    way = grid_over_machines.compared("w", bad, whole, 0)
    assert (way.cases, way.rows, way.missing, way.doubled, way.other, way.mixed) == (3, 7, 2, 2, 1, 1)
    for change in ({"missing": 1}, {"doubled": 1}, {"other": 1}, {"mixed": 1}, {"exit": 3}):
        assert not replace(grid_over_machines.compared("w", good, whole, 0), **change).holds
    assert "| w | 3 | 7 | 2 | 2 | 1 | 1 | 0 |  | 0 | 0 | **no** |" in grid_over_machines.page([way])


# --- budget -----------------------------------------------------------------------------------------------------------


def test_a_budget_is_won_against_every_other_choice():
    row = {"model": "m", "budget": "6", "bits": "5.9", "predicted": "0.1", "measured": "0.1"}
    rows = [
        {**row, "uniform": "0.2", "random_least": "0.11"},
        {**row, "uniform": "", "random_least": "0.11"},
        {**row, "uniform": "0.2", "random_least": "0.1"},
        {**row, "uniform": "0.05", "random_least": "0.2"},
    ]
    assert [budget.won(one) for one in rows] == [True, True, False, False]
    assert budget.verdicts(rows) == [("m: budgets won", "2 of 10", "at least 8", False)]
    text, reached = budget.summary([rows[0]] * 8)
    assert reached
    assert "| m | 6 | 5.9 | 0.1 | 0.1 | 0.2 | 0.11 | yes |" in text


# --- formats ----------------------------------------------------------------------------------------------------------


def test_the_error_of_a_format_is_what_it_loses():
    """In fp16, 2049 is a tie of 2048 and 2050, and goes to the even 2048: the error is 1 of all values."""
    assert formats.error("fp16", [torch.tensor([[2049.0]]), torch.tensor([[2048.0]])]) == pytest.approx(
        1 / math.hypot(2049, 2048)
    )


def test_codes_and_scales_that_differ_are_counted():
    """The scale of 7.5 is 1 by floor and 2 by ceil: the codes of 1 (2 and 1) and of 7.5 (7 and 6) differ."""
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 1] = 7.5, 1
    floor, ceil = (ffncli.quantize(x, f"mxfp4:{rule}") for rule in ("floor", "ceil"))
    assert formats.differ(floor, ceil) == (2 / 64, 1 / 2)


def test_the_tables_of_formats():
    errors = {"error_normal": "0.1", "error_heavy": "0.2", "error_trained": "0.12345"}
    same = {"bits_per_weight": "4.25", **errors, **dict.fromkeys(DIFFER, "")}
    other = {**same, **dict(zip(DIFFER, ("0.5", "0.0001", "0", "1"), strict=True))}
    rows = [{"format": "mxfp4", **same}, {"format": "mxfp4:gguf", **other}, {"format": "q8_0", **same}]
    _, _, first, second = formats.summary(rows).splitlines()
    assert first == "| `mxfp4` | e2m1 | e8m0 for 32 | 4.25 | ±6 | 2^-1 | 10 % | 20 % | 12.3 % |"
    assert second.startswith("| `q8_0` | int | fp16 for 32 | 4.25 | -127 to 127 | 1 |")
    assert formats.rules(rows).splitlines()[2:] == ["| `mxfp4:gguf` | 50 % | <0.1 % | 0 % | 100 % |"]


DIFFER = ("codes_differ_normal", "scales_differ_normal", "codes_differ_ties", "scales_differ_ties")


def test_the_script_trains_a_model_if_it_gets_none():
    (down,) = formats.trained(None)
    # torch draws its weights between ±1/√256
    assert (down.shape, bool(down.abs().max() > 1 / 16)) == ((64, 256), True)
