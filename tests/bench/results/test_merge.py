"""Parts of a grid become one result: everything once, nothing lost, what does not belong together refused by name."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ffncli import merge, read_results
from ffncli.bench.records import BLOCK, STEP
from ffncli.bench.request.machines import GridPart
from ffncli.bench.results.csv_file import HEADER, ROUNDS_HEADER, read_rows, row_lines
from ffncli.bench.results.grid_file import WholeGrid, grid_bytes, parse_grid
from ffncli.bench.results.journal import ResultFiles
from ffncli.bench.results.row import case_columns
from ffncli.bench.suite import new_run, resumed, run
from ffncli.block.recipe import FFNSpec
from ffncli.errors import ExitCode, FFNError
from tests.bench.stored import blocks_in
from tests.bench.test_suite import FAKE, in_process, request

WHOLE = replace(request(tokens=tuple(range(1, 11))), asked={"--source": "8x16:swiglu", "--tokens": "1,2"})
KEYS = [case.key for case in WHOLE.cases]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda handle: None)


def part(index: int, count: int = 3, whole: Any = WHOLE, name: str = "", units: int | None = None) -> Path:
    """The files of a part by a worker that measures nothing; with `units`, of one that was killed after so many."""
    path = Path(name or f"p{index}.csv")
    with new_run(path, whole, part=GridPart(index, count)) as journal:
        in_process(journal, units)
        if units is None:
            journal.finish()
    return path


def grid_of(name: str) -> WholeGrid:
    return parse_grid(Path(name).read_bytes(), name)


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path.cwd().iterdir()}


def rows_of(path: str | Path) -> set[Any]:
    """The rows, but for what tells runs apart."""
    return {replace(row, run_id="", started_utc="") for row in read_rows(path)}


def refused(*arguments: Any, **more: Any) -> str:
    """The error of a merge that writes nothing and leaves everything as it is."""
    before = contents()
    with pytest.raises(FFNError) as error:
        merge(*arguments, **more)
    assert contents() == before
    return str(error.value)


# --- a whole grid -----------------------------------------------------------------------------------------------------


def test_the_parts_together_are_what_one_machine_measures():
    with new_run(Path("one.csv"), WHOLE) as journal:
        in_process(journal)
        journal.finish()
    parts = [part(index) for index in (1, 2, 3)]
    before = contents()
    merged = merge([*parts[::-1], *Path.cwd().glob("p*.rounds.csv"), *Path.cwd().glob("p*.grid.json")], "all.csv")
    assert {name: raw for name, raw in contents().items() if not name.startswith("all.")} == before
    assert (merged.complete, merged.missing, merged.notes, len(merged.inputs)) == (True, (), (), 3)
    assert rows_of("all.csv") == rows_of("one.csv")
    assert [row.case for row in read_rows("all.csv")] == [row.case for row in read_rows("one.csv")]
    blocks = [Counter(block for _, block in blocks_in(Path(name))) for name in ("all.rounds.csv", "one.rounds.csv")]
    assert blocks[0] == blocks[1]
    assert len(read_results("all.csv")) == 20
    grid = grid_of("all.grid.json")
    assert Path("all.grid.json").read_bytes() == Path("p1.grid.json").read_bytes()
    assert [case.key for case in grid.request.cases] == KEYS


def test_a_merge_can_be_merged_again():
    parts = [part(index) for index in (1, 2, 3)]
    merge(parts, "all.csv")
    first = merge(parts[:2], "two.csv")
    assert len(first.missing) == 3
    again = merge(["two.csv", parts[2], parts[0]], "again.csv")
    assert again.complete
    for end in (".csv", ".rounds.csv", ".grid.json"):
        assert Counter(Path(f"again{end}").read_bytes().split(b"\n")) == Counter(
            Path(f"all{end}").read_bytes().split(b"\n")
        )
    merge([*parts, "two.csv"], "again.csv", force=True)
    assert Path("again.csv").read_bytes() == Path("all.csv").read_bytes()


def test_parts_of_parts_belong_to_the_same_grid():
    merged = merge([part(1, 2), part(2, 4, name="a.csv"), part(4, 4, name="b.csv")], "all.csv")
    assert merged.complete
    assert [row.case for row in merged.rows][::2] == KEYS


def test_a_part_without_cases_has_headers_and_belongs_to_the_grid():
    path = Path("p.csv")
    with new_run(path, WHOLE, part=GridPart(11, 11)) as journal:
        result = run(journal, command=("no worker is started",))
    assert (result.rows, sorted(contents())) == ((), ["p.csv", "p.grid.json", "p.rounds.csv"])
    assert (path.read_text(), Path("p.rounds.csv").read_text()) == (HEADER, ROUNDS_HEADER)
    assert [one.part for one in merge([path, part(1, 11)], "all.csv").missing] == [f"{n}/11" for n in _places()[1:]]


def _places() -> list[int]:
    """The parts of 11 that have a case, in the order of the grid, the first in front."""
    grid = grid_of("p.grid.json")
    places = [grid.part_of_case[key].index for key in KEYS]
    return sorted(places, key=lambda index: index != 1)


# --- an incomplete one ------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_with_its_part_and_its_unfinished_run():
    part(1)
    part(2, units=5)  # its first process, and one case of the second
    grid = grid_of("p1.grid.json")
    merged = merge(["p1.csv", "p2.csv"], "all.csv")
    mine = {index: [key for key in KEYS if grid.part_of_case[key].index == index] for index in (1, 2, 3)}
    assert len(mine[2]) == 3
    assert {row.case for row in read_rows("all.csv")} == {*mine[1], *mine[2][:2]}
    assert not merged.complete
    expected = {**dict.fromkeys(mine[3], ("3/3", "")), mine[2][2]: ("2/3", "p2.csv")}
    assert [(one.case, one.part, one.resume) for one in merged.missing] == [
        (key, *expected[key]) for key in KEYS if key in expected
    ]
    assert [(one.file, one.cases, one.unfinished) for one in merged.inputs] == [
        ("p1.csv", 4, False),
        ("p2.csv", 2, True),
    ]
    assert {block.case for _, block in blocks_in(Path("all.rounds.csv"))} == {row.case for row in merged.rows}


def test_a_killed_part_is_resumed_and_merged_into_what_is_there():
    part(1)
    part(2, units=4)
    part(3)
    assert len(merge(["p1.csv", "p2.csv", "p3.csv"], "all.csv").missing) == 2
    with resumed(Path("p2.csv")) as journal:
        assert journal.request.asked["--shard"] == "2/3"
        in_process(journal)
        journal.finish()
    merged = merge(["all.csv", "p2.csv"], "both.csv", force=True)
    assert merged.complete
    assert Counter(row.case for row in merged.rows) == dict.fromkeys(KEYS, 2)
    merge(["p1.csv", "p2.csv", "p3.csv"], "anew.csv")
    assert Path("both.csv").read_bytes() == Path("anew.csv").read_bytes()


@pytest.mark.parametrize("name", ["p2.csv", "p2.rounds.csv"])
@pytest.mark.parametrize("lines", [-1, -2])
def test_an_unfinished_part_may_end_within_a_line(name, lines):
    """Its last case may have lost a line, or a part of one: it is measured again when the run is resumed."""
    part(2, units=5)
    lost = sorted(row.case for row in read_rows("p2.csv"))
    raw = Path(name).read_bytes()
    Path(name).write_bytes(b"\n".join(raw.split(b"\n")[:lines])[:-3])
    merged = merge(["p2.csv"], "all.csv")
    there = sorted({row.case for row in merged.rows})
    assert len(there) == (2 if name == "p2.rounds.csv" else 1)
    assert set(there) <= set(lost)
    assert len(merged.rows) == 2 * len(there)


def test_a_part_that_was_killed_before_its_first_unit_is_known_by_its_journal():
    path = part(2)
    kept = {end: Path(f"p2{end}").read_bytes() for end in (".csv", ".rounds.csv")}
    with new_run(path, WHOLE, force=True, part=GridPart(2, 3)):
        state = contents()
    for name, raw in state.items():
        Path(name).write_bytes(raw)
    assert Path("p2.csv").read_bytes() == kept[".csv"]  # of the run before, which --force has not yet replaced
    merged = merge(["p2.csv"], "all.csv")
    assert (merged.rows, len(merged.missing)) == ((), 10)
    Path("p2.csv").unlink()
    assert {one.resume for one in merge(["p2.partial.jsonl"], "b.csv").missing} == {"", "p2.csv"}


def test_without_grids_results_that_do_not_collide_are_merged_with_a_note():
    for name, tokens in (("a", (1, 2)), ("b", (3,))):
        with new_run(Path(f"{name}.csv"), request(tokens=tokens)) as journal:
            in_process(journal)
            journal.finish()
    merged = merge(["a.csv", "b.csv"], "all.csv")
    assert (merged.complete, merged.grid, len(merged.rows)) == (None, None, 6)
    assert merged.notes == ("no file is a part of a grid, so it is unknown whether cases are missing",)
    with new_run(Path("killed.csv"), request(tokens=(4,))):
        state = contents()
    Path("killed.partial.jsonl").write_bytes(state["killed.partial.jsonl"])
    some = merge(["a.csv", "killed.partial.jsonl"], "some.csv")
    assert [one.resume for one in some.missing] == ["killed.csv"]
    assert some.notes == ("no file is a part of a grid, so it is unknown whether other cases are missing",)
    assert not Path("all.grid.json").exists()
    assert merge(["all.csv", "a.csv"], "again.csv").rows == merged.rows
    Path("x.grid.json").write_text("of what is replaced")
    merge(["a.csv", "b.csv"], "x.csv", force=True)
    assert not Path("x.grid.json").exists()


def test_a_missing_rounds_file_is_a_note_until_it_is_there():
    part(1)
    part(2)
    Path("p2.rounds.csv").rename("elsewhere")
    merged = merge(["p1.csv", "p2.csv"], "all.csv")
    assert merged.notes == ("the merged rounds file lacks 3 cases: there is no p2.rounds.csv",)
    assert {run_id for run_id, _ in blocks_in(Path("all.rounds.csv"))} == {read_rows("p1.csv")[0].run_id}
    assert merge(["all.csv", "p2.csv"], "again.csv").notes == merged.notes
    Path("elsewhere").rename("p2.rounds.csv")
    assert merge(["all.csv", "p2.csv"], "again.csv", force=True).notes == ()
    merge(["p1.csv", "p2.csv"], "whole.csv")
    assert Path("again.rounds.csv").read_bytes() == Path("whole.rounds.csv").read_bytes()


# --- what does not belong together ------------------------------------------------------------------------------------


def test_two_results_of_one_case_are_refused_by_name_and_equal_ones_count_once():
    part(1)
    for end in (".csv", ".rounds.csv", ".grid.json"):
        Path(f"copy{end}").write_bytes(Path(f"p1{end}").read_bytes())
    assert len(merge(["p1.csv", "copy.csv"], "all.csv").rows) == 8
    assert len(blocks_in(Path("all.rounds.csv"))) == len(blocks_in(Path("p1.rounds.csv")))
    part(1, name="again.csv")  # another run
    case = read_rows("p1.csv")[0].case
    text = refused(["p1.csv", "again.csv"], "x.csv")
    assert text == f"two different results of the case '{case}' are in p1.csv and again.csv; leave one of them out"
    lines = Path("copy.csv").read_text().splitlines(True)
    Path("copy.csv").write_text(lines[0] + "".join(line.replace(",ok,", ",failed,") for line in lines[1:]))
    assert "two different results" in refused(["p1.csv", "copy.csv"], "x.csv")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (request(tokens=(1, 2, 3)), "only one of them has the case '8x16:swiglu, 4 tokens,"),
        (request(tokens=tuple(range(1, 12))), "only one of them has the case '8x16:swiglu, 11 tokens,"),
        (replace(WHOLE, method=replace(WHOLE.method, precision=0.5)), "the method: precision is 0.01 and 0.5"),
        (
            request(tokens=tuple(range(1, 11)), kernels=("eager", "numpy")),
            "the kernels, eager, packed and eager, numpy",
        ),
        (replace(WHOLE, baseline="packed"), "the baseline, 'eager' and 'packed'"),
        (replace(WHOLE, files={"/there/mine.py": "00"}), "the contents of 'mine.py'"),
        (replace(WHOLE, cases=tuple(replace(one, input_sha256="7") for one in WHOLE.cases)), "the data of the case"),
    ],
)
def test_parts_of_different_grids_are_refused_with_what_differs(other, words):
    part(1)
    part(2, whole=other)
    text = refused(["p1.csv", "p2.csv"], "all.csv")
    assert "p1.csv and p2.csv are parts of different grids: " in text
    assert words in text


def test_machines_may_have_their_files_in_different_folders():
    part(1, whole=replace(WHOLE, files={"/here/mine.py": "00"}, directory="/here", asked={"--shard": "1/3"}))
    whole = replace(WHOLE, files={"/there/a/mine.py": "00"}, directory="/there")
    part(2, whole=replace(whole, cases=tuple(replace(one, source="elsewhere") for one in whole.cases)))
    assert len(merge(["p1.csv", "p2.csv"], "all.csv").rows) == 14


def test_a_part_without_its_grid_is_refused():
    part(1)
    part(2)
    Path("p2.grid.json").unlink()
    text = refused(["p1.csv", "p2.csv"], "all.csv")
    assert text == "p1.csv is a part of a grid, but p2.csv has no p2.grid.json; copy that file too, or merge only parts"


def changed(path: Path, **changes: Any) -> None:
    path.write_text(HEADER + row_lines([replace(row, **changes) for row in read_rows(path)]))


def test_versions_must_be_the_same_unless_that_is_allowed():
    part(1)
    changed(part(2), torch="1.0")
    text = refused(["p1.csv", "p2.csv"], "all.csv")
    assert text.startswith("torch is '2.x' in p1.csv, '1.0' in p2.csv; ")
    merged = merge(["p1.csv", "p2.csv"], "all.csv", allow_mismatch=True)
    assert merged.notes == ("torch is '2.x' in p1.csv, '1.0' in p2.csv",)


def test_machines_may_differ_and_each_row_says_which():
    part(1)
    changed(part(2), host="there", cpu="other", python="3.99")
    rows = merge(["p1.csv", "p2.csv"], "all.csv").rows
    assert Counter((row.host, row.cpu) for row in rows) == {("here", "fake"): 8, ("there", "other"): 6}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("\n1,", "\n2,"), "p1.csv, line 2: unknown schema_version '2'"),
        (lambda text: text[:-40], "p1.csv, line 9 is cut off"),
        (
            lambda text: "".join(text.splitlines(True)[:-1]),
            "p1.csv: the kernels are eager, not eager, packed in the case",
        ),
        (lambda text: text.replace(",eager,", ",naive,"), "p1.csv: the baseline is 'naive', not 'eager' in the case"),
        (lambda text: text.replace(" tokens", " words"), "p1.csv: its grid has no case '8x16:swiglu, "),
        (lambda text: text.replace("\n", ",\n").replace(",\n", ",new\n", 1), "p1.csv has the column 'new', which"),
        (lambda text: "", "p1.csv is empty"),
        (lambda text: "a,b\n", "p1.csv, line 1: no column schema_version"),
    ],
)
def test_a_damaged_part_is_refused(change, words):
    path = part(1)
    path.write_text(change(path.read_text()))
    assert words in refused(["p1.csv"], "all.csv")


def test_an_input_is_never_overwritten():
    """Not even with force: the parts would be lost."""
    part(1)
    before = Path("p1.csv").read_bytes()
    assert "p1.csv is one of the files to merge" in refused(["p1.csv"], "p1.csv", force=True)
    Path("link.csv").symlink_to("p1.csv")
    assert "link.csv is one of the files to merge" in refused(["p1.csv"], "link.csv", force=True)
    assert Path("p1.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("tokens", 99, "p1.csv: tokens is 99, not"), ("dtype", "bf16", "p1.csv: dtype is 'bf16', not 'fp32'"),
        ("d_ff", 17, "p1.csv: d_ff is 17, not 16"),
        ("passes", "forward+backward", "p1.csv: pass is 'forward+backward'"),
        ("threads", 64, "p1.csv: threads is 64, not"), ("time_s", None, "p1.csv: a row is ok without a time"),
    ],
)  # fmt: skip
def test_a_row_that_contradicts_its_case_is_refused(column, value, words):
    """An edited column, under a case and a grid that are as before."""
    path = part(1)
    first, *others = read_rows(path)
    edited = replace(first, status="ok", **{"time_s": 1e-3, column: value})
    path.write_text(HEADER + row_lines([edited, *others]))
    assert words in refused(["p1.csv"], "all.csv")


def test_the_rows_of_a_case_by_step_are_its_block_and_all_its_steps():
    case = replace(WHOLE.cases[0], spec=FFNSpec(64, 256, "silu", gated=True))
    grid = replace(WHOLE, cases=(case,), kernels=(), baseline=BLOCK, method=replace(WHOLE.method, by_step=True))
    Path("a.grid.json").write_bytes(grid_bytes(WholeGrid(grid, 1)))
    defined = {name: value for name, value in case_columns(case).items() if name != "cache"}
    blank = replace(read_rows(part(1))[0], **defined, baseline=BLOCK, status="ok", time_s=1e-3)
    names = [BLOCK, *(f"{STEP}{name}" for name in ("gate", "up", "act", "hidden", "down"))]

    def written(*kernels: str) -> Path:
        rows = [replace(blank, kernel=kernel) for kernel in kernels]
        Path("a.csv").write_text(HEADER + row_lines(rows), "utf-8")
        return Path("a.csv")

    assert merge([written(*names)], "all.csv").complete
    assert "'step down' is missing" in refused([written(*names[:-1])], "all.csv", force=True)
    assert "'eager' is not a step" in refused([written(*names, "eager")], "all.csv", force=True)


def test_a_cut_rounds_file_is_refused_and_nothing_is_written():
    part(1)
    rounds = Path("p1.rounds.csv")
    rounds.write_bytes(rounds.read_bytes()[:-5])
    assert "p1.rounds.csv, line 129 is cut off" in refused(["p1.csv"], "all.csv")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda grid: grid.update(grid=2), "p1.grid.json: not a grid written by this version of ffn"),
        (lambda grid: grid.update(parts=0), "p1.grid.json: parts must be at least 1 and at most 10000, got 0"),
        (lambda grid: grid.update(parts=10**9), "p1.grid.json: parts must be at least 1 and at most 10000"),
        (lambda grid: grid.update(parts="3"), "p1.grid.json: parts must be a whole number, got '3'"),
        (lambda grid: grid.pop("parts"), "p1.grid.json: it has no field parts"),
        (lambda grid: grid.update(extra=1), "p1.grid.json: it has the unknown field 'extra'"),
        (lambda grid: grid.update(request=[]), "p1.grid.json: request: it must be an object"),
        (lambda grid: grid["request"].update(cases=[]), "p1.grid.json: request: its 0 cases must be 1 to"),
        (lambda grid: grid["request"]["cases"][0].update(tokens=-1), "cases[0].tokens must be at least 1"),
        (lambda grid: grid["request"].update(baseline="other"), "include the baseline"),
    ],
)
def test_a_hostile_grid_is_refused(change, words):
    part(1)
    grid = json.loads(Path("p1.grid.json").read_text())
    change(grid)
    Path("p1.grid.json").write_text(json.dumps(grid))
    assert words in refused(["p1.csv"], "all.csv")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"null", b'{"grid": 1, "grid": 1}'])
def test_what_is_not_json_is_not_a_grid(raw):
    part(1)
    Path("p1.grid.json").write_bytes(raw)
    assert "p1.grid.json" in refused(["p1.csv"], "all.csv")


def test_a_grid_that_is_a_pipe_is_not_opened():
    part(1)
    Path("p1.grid.json").unlink()
    os.mkfifo("p1.grid.json")
    with pytest.raises(FFNError, match=r"cannot read p1\.grid\.json: it is a pipe"):
        merge(["p1.csv"], "all.csv")


# --- where it is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [".csv", ".rounds.csv", ".grid.json"])
def test_existing_files_are_not_replaced_without_force(end):
    part(1)
    Path(f"all{end}").write_text("mine")
    assert refused(["p1.csv"], "all.csv").startswith(f"all{end} exists already; ")
    merge(["p1.csv"], "all.csv", force=True)
    assert b"mine" not in contents()[f"all{end}"]


def test_an_unfinished_run_is_not_replaced():
    part(1)
    part(2, units=1)
    assert refused(["p1.csv"], "p2.csv", force=True).startswith("p2.csv is unfinished; ")


def test_a_full_disk_leaves_what_was_there(monkeypatch):
    part(1)
    merge(["p1.csv"], "all.csv")
    before = contents()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FFNError, match="No space left on device") as error:
        merge(["p1.csv"], "all.csv", force=True)
    assert error.value.code == ExitCode.ENVIRONMENT
    assert contents() == before


def test_no_result_and_a_missing_one_are_refused():
    assert refused([], "all.csv").startswith("none of these files is a result; ")
    assert refused(["a.rounds.csv"], "all.csv").startswith("none of these files is a result; ")
    assert refused(["a.csv"], "all.csv") == "cannot read a.csv: No such file or directory"
    assert refused(["a.txt"], "all.csv").startswith("a.txt must end in .csv")
    part(1)
    assert refused(["p1.csv"], "all.txt").startswith("all.txt must end in .csv")
    assert refused(["p1.csv"], "nowhere/all.csv").startswith("cannot write nowhere/all.csv: there is no directory ")


# --- the grid's file of a run -----------------------------------------------------------------------------------------


def test_a_part_stores_the_grid_before_anything_is_measured_and_the_same_in_every_part():
    with new_run(Path("a.csv"), WHOLE, part=GridPart(2, 3)) as journal:
        assert sorted(contents()) == ["a.csv.lock", "a.grid.json", "a.partial.jsonl"]
        in_process(journal)
        journal.finish()
    part(1, whole=replace(WHOLE, asked={**WHOLE.asked, "--shard": "1/3"}))
    assert Path("a.grid.json").read_bytes() == Path("p1.grid.json").read_bytes()


def test_a_run_that_measured_nothing_leaves_the_grid_that_was_there():
    part(1)
    before = contents()
    with new_run(Path("p1.csv"), request(), force=True, part=GridPart(1, 2)):
        assert Path("p1.grid.json").read_bytes() != before["p1.grid.json"]
    assert contents() == before
    with new_run(Path("p1.csv"), request(), force=True) as journal:  # no part: the grid would be another's
        assert not ResultFiles(Path("p1.csv")).grid.exists()
    assert contents() == before
    with new_run(Path("p1.csv"), request(), force=True) as journal:
        in_process(journal)
        journal.finish()
    assert sorted(contents()) == ["p1.csv", "p1.rounds.csv"]


def test_a_part_by_real_processes(monkeypatch):
    from tests import ROOT

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with new_run(Path("a.csv"), request(tokens=(1, 2, 3), processes=1), part=GridPart(1, 2)) as journal:
        found = run(journal, command=FAKE)
    assert len(found.rows) == 4
    assert len(merge(["a.csv"], "all.csv").missing) == 1
