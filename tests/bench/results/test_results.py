"""The CSV of a benchmark: what is written is read, and what cannot be right is refused with its line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ffncli.bench.records import TimedBlock
from ffncli.bench.results.csv_file import (
    COLUMNS,
    HEADER,
    ROUNDS_HEADER,
    block_lines,
    cells,
    read_results,
    read_rows,
    row_lines,
)
from ffncli.bench.results.row import BenchWarning, ResultRow
from ffncli.errors import FFNError
from tests.bench.stored import blocks_in

ROW = ResultRow(
    run_id="r", host="=none", kernel="none", baseline="eager", status="ok", verdict="same", gated=True, threads=2,
    time_s=0.1 + 0.2, warnings=(BenchWarning("drift", "3 %"), BenchWarning("x", "9")), note='a "b", c',
    process_times_s=(1e-9, 2.0), passes="forward",
)  # fmt: skip


def test_rows_come_back_as_they_were_and_files_can_be_put_together(tmp_path):
    path, other = tmp_path / "a.csv", replace(ROW, kernel="-x", gated=None, time_s=None, warnings=())
    text = HEADER + row_lines([ROW, other])
    path.write_text(text)
    assert read_rows(path) == (ROW, other)
    path.write_text(text + text)
    assert read_rows(path) == (ROW, other, ROW, other)
    path.write_text("\ufeff" + text.replace("\n", "\r\n"))
    assert read_rows(path) == (ROW, other)
    fewer = ",".join(HEADER.rstrip().split(",")[: HEADER.split(",").index("note") + 1])
    path.write_text(text + fewer + "\n")  # of a version that had fewer columns
    assert len(read_rows(path)) == 2


def test_a_frame_has_the_right_types(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEADER + row_lines([ROW, replace(ROW, threads=None, time_s=None, gated=None)]))
    frame = read_results([path, path])
    assert list(frame.columns) == HEADER.rstrip().split(",")
    assert [str(frame[name].dtype) for name in ("threads", "time_s", "gated")] == ["Int64", "float64", "boolean"]
    assert list(frame["kernel"]) == ["none"] * 4
    assert frame["threads"].isna().tolist() == [False, True, False, True]
    assert frame["time_s"][0] == 0.1 + 0.2
    assert math.isnan(frame["time_s"][1])
    assert frame["process_times_s"][0] == (1e-9, 2.0)
    assert frame["pass"][0] == "forward"
    assert frame["warnings"][0] == ("drift: 3 %", "x: 9")


@pytest.mark.parametrize(
    ("warning", "text"),
    [
        (BenchWarning("load", "5.5"), "load: 5.5"),
        (BenchWarning("precision", "±2 % reached, ±1 % wanted: some 9 rounds needed"),
         "precision: ±2 % reached, ±1 % wanted: some 9 rounds needed"),
        (BenchWarning("from the future"), "from the future"),
    ],
)  # fmt: skip
def test_a_warning_is_text_in_files_alone(tmp_path, warning, text):
    path = tmp_path / "a.csv"
    path.write_text(HEADER + row_lines([replace(ROW, warnings=(warning, BenchWarning("load", "1; 2")))]))
    assert f"{text};load: 1, 2" in path.read_text()
    (row,) = read_rows(path)
    assert row.warnings == (warning, BenchWarning("load", "1, 2"))
    assert cells(row)[COLUMNS.index("warnings")] == (text, "load: 1, 2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[:-1], "line 2 is cut off"),
        (lambda raw: raw.replace(b",same,", b","), "line 2 has .* cells, the header"),
        (lambda raw: raw.replace(b",same,", b",sa\0me,"), "line 2 holds a NUL byte"),
        (lambda raw: raw.replace(b",same,", b",\xff,"), "line 2 is not UTF-8"),
        (lambda raw: raw.replace(b",same,", b",better,"), "line 2: verdict must be one of .*, got .better."),
        (lambda raw: raw.replace(b"host,", b"torch,"), "line 1: the column 'torch' is duplicated"),
        (lambda raw: raw.replace(b"host,", b"hoast,"), "line 1: no column host"),
        (lambda raw: raw.replace(b"\n1,", b"\n2,"), "line 2: unknown schema_version '2'"),
        (lambda raw: raw.replace(b"0.30000000000000004", b"nan"), "line 2: time_s is not a number: 'nan'"),
        (lambda raw: raw.replace(b",true,", b",yes,"), "line 2: gated must be true or false"),
        (lambda raw: b"", "is empty"),
    ],
)
def test_what_is_damaged_is_refused_with_its_line(tmp_path, change, words):
    path = tmp_path / "a.csv"
    raw = (HEADER + row_lines([ROW])).encode()
    assert change(raw) != raw
    path.write_bytes(change(raw))
    with pytest.raises(FFNError, match=words) as error:
        read_rows(path)
    assert "\n" not in str(error.value)


def test_blocks_come_back_as_they_were(tmp_path):
    path, block = tmp_path / "a.rounds.csv", TimedBlock(1, "a, b", 2, 3, 4, "(aa)", 5, 1 / 3, ("faults=3", "stolen"))
    path.write_text(ROUNDS_HEADER + block_lines("r", [block, replace(block, flags=())]))
    assert blocks_in(path) == [("r", block), ("r", replace(block, flags=()))]


def test_a_header_of_many_columns_is_refused_at_once(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("schema_version," + ",".join(f"c{n}" for n in range(120_000)) + "\n")
    with pytest.raises(FFNError, match="120,001 columns are too many"):
        read_rows(path)


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("threads", "-2", "threads must be at least 0, got -2"),
        ("time_s", "-1e-9", "time_s must be at least 0, got -1e-09"),
        ("process_times_s", "1;-2", r"process_times_s\[1\] must be at least 0"),
        ("precision", "0", "precision must be above 0"),
    ],
)
def test_a_figure_that_cannot_be_is_refused_with_its_line(tmp_path, column, cell, words):
    path = tmp_path / "a.csv"
    raw = [text.split(",") for text in (HEADER + row_lines([replace(ROW, note="", warnings=())])).splitlines()]
    raw[1][raw[0].index(column)] = cell
    path.write_text("\n".join(map(",".join, raw)) + "\n")
    with pytest.raises(FFNError, match=f"line 2: {words}"):
        read_rows(path)
