"""Many results over time: planted changes are found, and a history without one shows one as rarely as it says."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import ffncli
from ffncli.bench.judge.history import ALPHA, FEWEST, History, find_changes, history_lines
from ffncli.bench.results.row import ResultRow
from ffncli.errors import FFNError
from tests.bench.stored import around, row, write

NOISE = 0.01  # between runs, of the log of a time


def series(runs: int, seed: int, factor: Callable[[int], float] = lambda at: 1.0) -> list[float]:
    """Logs of times around 1 ms; `factor` is what is planted."""
    drawn = random.Random(seed)
    return [math.log(1e-3 * factor(at)) + drawn.gauss(0, NOISE) for at in range(runs)]


def stored(times: Sequence[float], **changes: object) -> list[ResultRow]:
    """A row per run, one day after the other; its processes scatter around the time."""
    return [
        row(around(math.exp(time), 4, 0.002, at), around(0.5, 4, 0.002, at + 99), run_id=f"run-{at}",
            started_utc=f"2026-{1 + at // 28:02d}-{1 + at % 28:02d}T08:00:00Z", commit=f"{at:040x}", **changes)
        for at, time in enumerate(times)
    ]  # fmt: skip


# --- the test ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [8, 30])
def test_a_history_without_a_change_shows_one_at_most_as_often_as_stated(runs):
    """Of 1,000 histories; three standard deviations above 5 % would be 70."""
    assert sum(bool(find_changes([series(runs, seed)], ALPHA)) for seed in range(1000)) <= 1000 * ALPHA + 20


@pytest.mark.parametrize(("percent", "least"), [(3, 85), (5, 97), (10, 98), (-5, 97)])
def test_a_jump_is_found_where_it_is(percent, least):
    found = 0
    for seed in range(100):
        changes = find_changes([series(24, seed, lambda at: 1 + percent / 100 * (at >= 16))], ALPHA / 10)
        found += len(changes) == 1 and changes[0].kind == "jump" and abs(changes[0].first - 16) <= 1
    assert found >= least


def test_two_jumps_and_a_drift():
    twice = find_changes([series(40, 1, lambda at: 1.1 if 12 <= at < 28 else 1.0)], ALPHA)
    assert [(one.kind, one.first, one.ratio > 1) for one in twice] == [("jump", 12, True), ("jump", 28, False)]
    drifts = [find_changes([series(30, seed, lambda at: 1.1 ** (at / 29))], ALPHA) for seed in range(50)]
    assert sum([(one.kind, one.first, one.last) for one in some] == [("drift", 0, 29)] for some in drifts) >= 48
    assert sum(some[0].ratio_low < 1.1 < some[0].ratio_high for some in drifts) >= 42  # 95 % of 50, less 3 deviations


def test_the_interval_of_a_jump_covers_it():
    """In 94 % of these histories: the place of the jump is estimated, too."""
    some = [find_changes([series(24, seed, lambda at: 1 + 0.05 * (at >= 16))], ALPHA / 10) for seed in range(300)]
    found = [changes[0] for changes in some if len(changes) == 1]
    assert sum(one.ratio_low < 1.05 < one.ratio_high for one in found) >= 0.9 * len(found)


def test_t_is_that_of_a_regression_on_two_means():
    """The p-value by torch: least squares on an intercept and a step, the t density integrated numerically."""
    values, at = series(20, 5, lambda at: 1.05 if at >= 9 else 1.0), 9
    y = torch.tensor(values, dtype=torch.float64)
    design = torch.stack([torch.ones(20), (torch.arange(20) >= at).float()], 1).double()
    solved = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    error = (((y - design @ solved) ** 2).sum() / 18 * torch.linalg.inv(design.T @ design)[1, 1]).sqrt()
    t = torch.linspace(float(solved[1] / error), 4000, 4_000_001, dtype=torch.float64)
    density = torch.exp(torch.lgamma(torch.tensor(9.5)).double() - torch.lgamma(torch.tensor(9.0)).double())
    density = density / math.sqrt(18 * math.pi) * (1 + t * t / 18) ** -9.5
    (one,) = find_changes([values], ALPHA)
    assert one.first == at
    assert one.ratio == pytest.approx(math.exp(solved[1]), rel=1e-12)
    assert one.p == pytest.approx(float(2 * 17 * torch.trapezoid(density, t)), rel=1e-4)


def test_runs_without_any_spread():
    assert find_changes([[0.0] * 8], ALPHA) == []
    (one,) = find_changes([[0.0] * 4 + [0.1] * 4], ALPHA)
    assert (one.kind, one.first, one.p) == ("jump", 4, 0.0)


# --- lines of results -------------------------------------------------------------------------------------------------


def test_machines_are_apart_and_a_new_one_is_no_change():
    old, new = "AMD EPYC 7B13", "Intel Xeon"
    rows = stored(series(20, 1), cpu=old)[:10] + stored(series(20, 2, lambda at: 0.5), cpu=new)[10:]
    lines = history_lines(rows)
    assert [(line.machine.split(",")[0], len(line.runs), line.changes) for line in lines] == [
        (old, 10, ()),
        (new, 10, ()),
    ]


def test_a_slower_machine_is_no_slower_kernel():
    """The anchor of each process shows the same 10 %."""
    times = series(20, 1, lambda at: 1 + 0.1 * (at >= 10))
    plain = history_lines(stored(times))[0]
    assert [one.first for one in plain.changes] == [10]
    slower = [
        row(one.process_times_s, around(0.5 * (1 + 0.1 * (at >= 10)), 4, 0.002, at + 99), run_id=one.run_id,
            started_utc=one.started_utc)
        for at, one in enumerate(stored(times))
    ]  # fmt: skip
    assert history_lines(slower)[0].changes == ()


def test_what_a_line_says_about_its_change():
    rows = stored(series(24, 3, lambda at: 1 + 0.1 * (at >= 16)))
    rows = [*rows[:16], *(one_with(one, torch="2.14.0") for one in rows[16:])]
    (line,) = history_lines(rows[::-1])  # sorted by their dates
    (one,) = line.changes
    assert line.runs[one.first].commit == f"{16:040x}"
    assert one.also == ("torch: 2.13.0, then 2.14.0",)
    assert one.ratio_low < one.ratio < one.ratio_high
    assert line.runs[0].time_s == pytest.approx(math.prod(rows[0].process_times_s) ** 0.25)
    assert line.slower(0.03)
    assert not line.slower(0.2)
    few = history_lines(rows[: FEWEST - 1])[0]
    assert few.untested == "5 of the 6 runs that a test needs"


def one_with(one: ResultRow, **changes: object) -> ResultRow:
    from dataclasses import replace

    return replace(one, **changes)  # type: ignore[arg-type]


# --- the call ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 files: `packed` jumps by 10 % at the 17th, `eager` does not; and what is no result."""
    slow, same = stored(series(24, 3, lambda at: 1 + 0.1 * (at >= 16))), stored(series(24, 4), kernel="eager")
    for at, rows in enumerate(zip(slow, same, strict=True)):
        write(tmp_path / f"{at:02d}.csv", rows)
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    (tmp_path / "00.rounds.csv").write_text("run_id,process\n")
    return tmp_path


def test_the_command_and_the_library_agree(folder, call, json_of):
    pattern = f"{folder}/*.csv"
    code, out, err = call("compare", "--history", pattern)
    assert code == 0
    assert "since run 17, 2026-01-17 08:00:00 (commit 000000000000)" in out
    assert out.endswith("1 of 2 lines changed\n")
    code, _, err = call("compare", "--history", pattern, "--fail-if-slower", "3%", "-q", "-o", f"{folder}/page.html")
    assert code == 1
    assert err.startswith("error: 1 of 2 lines is slower by more than 3 % since the last change: packed (")
    page = (folder / "page.html").read_text("utf-8")
    assert "since run 17" in page
    assert page.count("<svg") == 2
    assert call("compare", "--history", pattern, "--fail-if-slower", "30%")[0] == 0
    ours = ffncli.compare(history=pattern)
    assert isinstance(ours, History)
    body = json_of("compare", "--history", pattern)
    assert [line["changes"][0]["first"] for line in body["lines"] if line["changes"]] == [16]
    assert (len(body["history"]), len(body["skipped"]), len(ours.frame())) == (24, 1, 48)
    assert list(ours.frame()["change"].dropna()) == ["jump"]


def test_what_it_refuses(folder, tmp_path):
    for pattern, says in (
        ("nothing/*.csv", "matches no file"),
        (f"{folder}/notes.csv", "is not a result of ffn bench"),
    ):
        with pytest.raises(FFNError, match=says):
            ffncli.compare(history=pattern)
    with pytest.raises(FFNError, match="base is missing"):
        ffncli.compare()
    with pytest.raises(FFNError, match=r"history.*contradicts"):
        ffncli.compare(f"{folder}/00.csv", history=f"{folder}/*.csv")
