"""Results on disk: columns by their roles, the CSV, the journal; and what cannot be right, refused with its line."""

import json
import math
import os
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from xml.etree.ElementTree import tostring

import pytest
import torch

from ffncli.bench.judge.compare import CASE_COLUMNS, Rules, compare
from ffncli.bench.judge.curves import speed_sweeps
from ffncli.bench.judge.environment_match import match
from ffncli.bench.judge.summary import summarise
from ffncli.bench.judge.warnings import Code
from ffncli.bench.machine import machine
from ffncli.bench.public.admission import admit
from ffncli.bench.records import Case, Job, TimedBlock
from ffncli.bench.results.csv_file import (
    COLUMNS,
    HEADER,
    ROUNDS_HEADER,
    ResultRows,
    block_lines,
    cells,
    read_results,
    read_rows,
    row_lines,
)
from ffncli.bench.results.journal import ResultFiles, begin, locked, resume
from ffncli.bench.results.merge import merge
from ffncli.bench.results.row import (
    ASKED,
    BLOCK_COLUMNS,
    COMPARED,
    MACHINE,
    BenchWarning,
    ResultRow,
    case_columns,
    columns,
    name_of,
)
from ffncli.bench.timing.modes.auto_choice import key_of
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.models.files.json_records import hints_of
from ffncli.pages.results import results_parts
from tests.bench import fake_worker
from tests.bench.public.made import changed, result
from tests.bench.stored import blocks_in, row, write
from tests.bench.test_suite import request
from tests.bench.units import CASE, QUICK, RUN, units_of

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


ENVIRONMENT = columns("environment")
SHOWN = (*columns("figure", shown="always"), *columns("figure", shown="page"))
RECOMPUTED = columns("figure", recomputed=True)


def another(name: str, than: ResultRow) -> Any:
    """A value of that column which this row does not have."""
    hint = hints_of(ResultRow)[name]
    if bool in get_args(hint):
        return not getattr(than, name)
    return "another" if hint is str else 7


def page_of(rows: list[ResultRow], folder: Path) -> tuple[str, dict[str, Any]]:
    """The section on the machine as text, and the table of rows, of a page about a result."""
    parts = results_parts(Path(write(folder / "made.csv", rows)), "made")
    (machine_of,) = next(one for one in parts.sections if one.title == "The machine").children
    return tostring(machine_of, "unicode"), parts.data["made-table"]


def test_every_column_has_one_role():
    of_role = {role: columns(role) for role in ("run", "case", "environment", "figure")}
    assert sorted(name for names in of_role.values() for name in names) == sorted(f.name for f in fields(ResultRow))
    parts = {part: columns("case", part=part) for part in ("block", "work", "place", "name", "kernel")}
    assert sum(map(len, parts.values())) == len(of_role["case"])


@pytest.mark.parametrize("name", MACHINE)
def test_a_column_of_the_machine_is_filled_by_its_processes(name):
    units = [replace(unit, environment={**unit.environment, name: "7"}) for unit in units_of()]
    assert str(getattr(summarise(CASE, units, QUICK, RUN)[0], name)) in ("7", "7.0")
    units[0] = replace(units[0], environment={**units[0].environment, name: "8"})
    (warning,) = (w for w in summarise(CASE, units, QUICK, RUN)[0].warnings if w.code == Code.ENVIRONMENT)
    assert warning.figures == name


def test_a_worker_says_all_columns_of_its_machine(monkeypatch):
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", L2_cache_size=50 << 20, uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card.name)
    assert {*machine.environment("cuda")} == {*MACHINE, "device"}
    assert {*machine.environment("cpu")} < {*MACHINE, "device"}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_column_of_the_environment_reaches_its_readers(name, tmp_path):
    base, other = row(run_id="base"), another(name, row())
    new = replace(base, run_id="new", **{name: other})
    differing = [mismatch.field for mismatch in compare([base], [new], Rules(allow_mismatch=True)).mismatches]
    assert differing == ([name] if name in COMPARED else [])
    faults = {one.name: one.faults for one in admit(result(tmp_path, changed("fast", **{name: other}))).conditions}
    assert [name in text for text in faults["environment"]] == ([True] if name in MACHINE else [])
    assert f">{name.replace('_', ' ')}<" in page_of([new], tmp_path)[0]
    choice = key_of(CASE, {name: "another"}, ()) != key_of(CASE, {}, ())
    assert choice == (name == "ffncli" or name in {*COMPARED} - {"gpu_uuid", "launch"})


@pytest.mark.parametrize("name", columns("environment", one_per_grid=True))
def test_a_grid_is_of_one_version(name, tmp_path):
    inputs = [row(tokens=1), row(tokens=2, **{name: "another"})]
    with pytest.raises(FFNError, match=f"{name} is .*another"):
        merge([write(tmp_path / f"{at}.csv", [one]) for at, one in enumerate(inputs)], tmp_path / "all.csv")
    parts = [row(tokens=tokens, run_id=run, **more) for tokens in (1, 2) for run, more in (("a", {}), ("b", {}))]
    assert len(speed_sweeps([replace(one, case=f"{one.case} {one.run_id}") for one in parts])) == 1
    parts = [replace(one, **{name: f"{one.run_id}"}) for one in parts]
    assert len(speed_sweeps([replace(one, case=f"{one.case} {one.run_id}") for one in parts])) == 2


@pytest.mark.parametrize("name", [*BLOCK_COLUMNS, *ASKED])
def test_a_column_of_the_case_reaches_its_readers(name, tmp_path):
    base, new = row(run_id="base"), row(run_id="new", **{name: another(name, row())})
    with pytest.raises(FFNError, match=rf"no case and kernel in common; .*{name_of(name)}: "):
        match([base], [new])
    swept = "d_ff" if name == "tokens" else "tokens"
    sizes = [replace(one, **{swept: size}) for one in (base, new) for size in (1, 2)]
    if name != swept and name not in ("d_ff", "d_model", "threads"):  # these could be what is swept
        assert len(speed_sweeps([replace(one, run_id="base", case=str(at)) for at, one in enumerate(sizes)])) == 2
    assert name in case_columns(Case("a", "a", FFNSpec(4, 8, "relu"), 1))
    path = result(tmp_path, lambda one: replace(one, **{name: another(name, one)}))
    faults = {condition.name: condition.faults for condition in admit(path).conditions}
    assert any(f": {name_of(name)} is " in text for text in faults["cases"])
    if name in ASKED:
        assert name_of(name) in page_of([base, new], tmp_path)[1]["columns"]
        assert f">{name_of(name)}<" in ResultRows([base, new])._repr_html_()
        assert name in CASE_COLUMNS or name == "layout"  # the comparison's own columns have no layout


@pytest.mark.parametrize("name", SHOWN)
def test_a_figure_that_is_shown_is_in_the_tables(name, tmp_path):
    value = {"status": "wrong", "verdict": "same", "bound": "memory"}.get(name, 7)
    one = row(**{name: value})
    assert name in page_of([one], tmp_path)[1]["columns"]
    assert (f">{name}<" in ResultRows([one])._repr_html_()) == (name in columns("figure", shown="always"))


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_figure_that_follows_from_the_blocks_is_computed_again(name, tmp_path):
    value = {"verdict": "slower"}.get(name, (7.0,) if name.startswith("process_") else 7)
    faults = {one.name: one.faults for one in admit(result(tmp_path, changed("fast", 1, **{name: value}))).conditions}
    assert any(f": {name} is " in text for text in faults["rounds"])


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A run of two cases in two processes; its first process is finished."""
    asked, path = request(), tmp_path / "a.csv"
    journal = begin(path, asked, RUN, {"torch": "2.x"}, summarise, False)
    for case in asked.cases:
        journal.add(fake_worker.unit(case, Job(0, (), asked.kernels, "eager", asked.method)))
    return path


def edited(path: Path, line: int, change: Any) -> None:
    """The journal with the JSON of one line changed."""
    journal = ResultFiles(path).journal
    lines = journal.read_text().splitlines()
    entry = json.loads(lines[line - 1])
    change(entry)
    lines[line - 1] = json.dumps(entry)
    journal.write_text("\n".join(lines) + "\n")


def unit(**changes: Any) -> Any:
    return lambda entry: entry["unit"].update(changes)


def first_case(**changes: Any) -> Any:
    return lambda entry: entry["request"]["cases"][0].update(changes)


def part_of_request(**changes: Any) -> Any:
    return lambda entry: entry["request"].update(changes)


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        (2, unit(outcomes=5), "unit.outcomes must be a list, got 5"),
        (2, unit(outcomes=[]), "is damaged: its kernels differ from the run's kernels"),
        (2, unit(spent=[1]), "unit.spent must be an object"),
        (2, unit(spent={"blocks": "long"}), "unit.spent['blocks'] must be a number, got 'long'"),
        (2, unit(cache=7), "unit.cache must be one of warm, shared, cold-weights, flush, got 7"),
        (2, unit(process="0"), "unit.process must be a whole number, got '0'"),
        (2, unit(process=9), "is damaged: its process does not belong to the run"),
        (2, unit(tokens_per_expert=[1.0]), "is damaged: its tokens per expert do not match its number of experts"),
        (2, unit(tokens_per_expert=[-1.0]), "tokens_per_expert[0] must be at least 0"),
        (2, unit(experts_touched="all"), "experts_touched must be a number"),
        (1, first_case(routing="uniform"), "has a routing but no experts"),
        (1, first_case(routing="some"), "unknown value 'some'"),
        (2, unit(case="another"), "is damaged: its case does not belong to the run"),
        (2, unit(baseline="packed"), "is damaged: its baseline differs from the run's baseline"),
        (2, unit(roof={"flops_per_s": -1}), "unit.roof.flops_per_s must be at least 1"),
        (2, unit(environment={"host": ["a"]}), "unit.environment['host'] must be a string, got ['a']"),
        (2, unit(notes="note"), "unit.notes must be a list"),
        (2, unit(more=1), "unit has the unknown field 'more'"),
        (2, lambda entry: entry.update(rounds_end=-1), "rounds_end must be at least 0, got -1"),
        (3, lambda entry: entry.update(rounds_end=100), "is damaged: its blocks end before they begin"),
        (2, lambda entry: entry.update(died=0), "died must be true or false, got 0"),
        (2, lambda entry: entry.pop("rounds_end"), "it has no field rounds_end"),
        (1, lambda entry: entry["run"].pop("run_id"), "run has no field run_id"),
        (1, lambda entry: entry.update(software=3), "software must be an object"),
        (1, part_of_request(cases=[]), "request: its 0 cases must be 1 to 10,000 different cases"),
        (1, part_of_request(baseline="numpy"), "request: its kernels must be different and include the baseline"),
        (1, part_of_request(kernels=["eager"]), "request: 1 kernels have 2 names"),
        (1, part_of_request(kernels=["eager", "x"]), "request: --kernel: unknown kernel"),
        (1, part_of_request(method={"processes": 0}), "request: method.processes must be at least 1"),
        (1, first_case(spec=4), "request: cases[0].spec must be an object, got 4"),
        (1, first_case(spec={"d_model": 4, "d_ff": 0}), "request: cases[0].spec is impossible: d_ff must be a whole"),
        (1, first_case(device="tpu"), "request: device: unknown device 'tpu'"),
        (1, lambda entry: entry.update(journal=1), "resume with the version that began the run"),
    ],
)  # fmt: skip
def test_a_journal_that_was_edited(unfinished: Path, line: int, change: Any, words: str):
    edited(unfinished, line, change)
    with pytest.raises(FFNError) as error:
        resume(unfinished, summarise)
    assert str(error.value).startswith(f"{unfinished.with_suffix('.partial.jsonl')}, line {line}")
    assert words in str(error.value)


def test_a_unit_that_is_there_twice(unfinished: Path):
    journal = ResultFiles(unfinished).journal
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines, lines[-1]]) + "\n")
    with pytest.raises(FFNError, match="line 4 is damaged: it is duplicated"):
        resume(unfinished, summarise)


def test_blocks_of_another_unit(tmp_path: Path):
    asked, path = request(processes=1), tmp_path / "a.csv"
    journal = begin(path, asked, RUN, {}, summarise, False)
    journal.add(fake_worker.unit(asked.cases[0], Job(0, (), asked.kernels, "eager", asked.method)))
    rounds = ResultFiles(path).rounds
    rounds.write_text(rounds.read_text().replace(" 1 tokens", " 2 tokens"))
    with pytest.raises(FFNError, match="it has one unit's blocks in another unit's place"):
        resume(path, summarise)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("suffix", [".partial.jsonl", ".rounds.csv", ".csv", ".csv.lock"])
@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "loop"])
def test_files_of_a_run_that_are_no_files(unfinished: Path, suffix: str, what: str):
    path = unfinished.with_suffix(suffix)
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if what == "loop" else what)
    words = "leads back to itself" if what == "loop" else "it is not a file"
    with pytest.raises(FFNError, match=words), locked(unfinished):
        pass
    if suffix == ".partial.jsonl" and what != "loop":
        with pytest.raises(FFNError, match="not a file"):
            resume(unfinished, summarise)


@pytest.mark.parametrize("resumed", [False, True])
def test_blocks_that_a_later_process_rewrites(tmp_path: Path, resumed: bool):
    """A kernel's file, loaded again by the next process, changes a time of the first one."""
    asked, path = request(), tmp_path / "a.csv"
    journal = begin(path, asked, RUN, {}, summarise, False)
    journal.add(fake_worker.unit(asked.cases[0], Job(0, (), asked.kernels, "eager", asked.method)))
    journal = resume(path, summarise) if resumed else journal
    rounds = ResultFiles(path).rounds
    header, _, lines = rounds.read_text().partition("\n")
    line, *rest = lines.split("\n")
    before, seconds, flags = line.rsplit(",", 2)
    less = f"{float(seconds) / 2!r}"[: len(seconds)].ljust(len(seconds), "0")
    padded = [f"{before},{less},{flags}", *rest]
    rounds.write_text("\n".join([header, *padded]))
    second = fake_worker.unit(asked.cases[0], Job(1, (), asked.kernels, "eager", asked.method))
    with pytest.raises(FFNError, match="was changed during the run, by a kernel or another program"):
        journal.add(second)


def test_a_torn_line_is_gone_before_the_next_is_written(unfinished: Path):
    """Of a run that is killed twice."""
    with ResultFiles(unfinished).journal.open("ab") as file:
        file.write(b'{"unit": {"proc')
    journal = resume(unfinished, summarise)
    asked = journal.request
    journal.add(fake_worker.unit(asked.cases[0], Job(1, (), asked.kernels, "eager", asked.method)))
    assert resume(unfinished, summarise).count == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_never_two_writers_of_one_file(tmp_path: Path):
    """Four processes want the lock again and again; whoever has it makes a file that must not be there."""
    children = []
    for number in range(4):
        children.append(os.fork())
        if children[-1] == 0:
            os._exit(_writes(tmp_path, number))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * 4
    assert (tmp_path / "count").stat().st_size > 10
    assert not ResultFiles(tmp_path / "a.csv").lock.exists()


def _writes(folder: Path, number: int) -> int:
    """0, or 1 where somebody else was writing too."""
    try:
        for _ in range(60):
            with suppress(FFNError), locked(folder / "a.csv"):
                os.close(os.open(folder / "writer", os.O_CREAT | os.O_EXCL))
                with (folder / "count").open("a") as file:
                    file.write("x")
                os.unlink(folder / "writer")
    except BaseException:
        return 1
    return 0
