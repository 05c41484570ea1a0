"""`ffn bench --shard` and `ffn merge` as a user types them, by a worker that measures nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ffncli.bench import suite
from ffncli.bench.results.csv_file import COLUMNS, read_rows
from ffncli.cli.bench.progress import UnitProgress
from tests import ROOT
from tests.bench.test_suite import FAKE
from tests.oracles.checkpoints import expect_refusal

GRID = ("8x16:swiglu", "--tokens", "1,2,3,4,5", "--kernel", "eager,packed", "--threads", "1", "--device", "cpu")
GRID += ("--processes", "1")


@pytest.fixture
def ffn(call, monkeypatch, tmp_path):
    """Runs a command with the fake worker, in a directory of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite.run, "__defaults__", (suite.run.__defaults__[0], FAKE))
    return call


def part(ffn, index: int, count: int = 2, *more: str) -> tuple[int, str, str]:
    return ffn("bench", *GRID, "--shard", f"{index}/{count}", "--save", f"part-{index}.csv", *more)


def test_a_grid_in_two_parts(ffn, tmp_path):
    code, out, err = part(ffn, 1)
    assert (code, "note: part 1/2: 3 of 5 cases" in err, "3 cases" in out) == (0, True, True)
    code, out, err = ffn("merge", "part-1.csv", "-o", "all.csv")
    assert code == 1
    words = "ffn bench 8x16:swiglu --tokens 1,2,3,4,5 --device cpu --threads 1 --kernel eager,packed --processes 1"
    assert err == f"note: wrote all.csv\nerror: 2 of 5 cases are missing; measure them: {words} --shard 2/2\n"
    assert out.startswith("3 of 5 cases from 1 file  all.csv\n")
    assert f"  {words} --shard 2/2\n" in out
    assert out.count(" 2/2   -") == 2
    assert ffn(*err.split("measure them: ffn ")[1].split(), "--save", "part-2.csv")[0] == 0  # as it is printed
    names = sorted(path.name for path in tmp_path.glob("part*"))
    code, out, err = ffn("merge", *names, "-o", "all.csv", "--force")
    assert (code, err) == (0, "note: wrote all.csv\n")
    assert out.startswith("5 of 5 cases from 2 files  all.csv\n")
    assert "missing" not in out
    assert "machine  cases  run" in out
    assert "\ntokens  eager, time  packed\n" in out  # one machine: no column for it
    assert {row.tokens for row in read_rows("all.csv")} == {1, 2, 3, 4, 5}
    assert ffn("compare", "all.csv", "all.csv")[0] == 0
    assert "speed against eager" in ffn("compare", "all.csv", "--plot")[1]


def test_json_and_csv_have_the_rows_and_json_what_is_missing(ffn):
    part(ffn, 1)
    code, out, _ = ffn("merge", "part-1.csv", "-o", "all.csv", "--json")
    body = json.loads(out)
    assert (code, body["command"], body["complete"], body["file"]) == (1, "merge", False, "all.csv")
    assert [(one["part"], one["resume"], one["command"][-11:]) for one in body["missing"]] == [
        ("2/2", "", "--shard 2/2")
    ] * 2
    assert body["inputs"] == [{"file": "part-1.csv", "hosts": ["here"], "cases": 3, "unfinished": False}]
    assert list(body["rows"][0]) == list(COLUMNS)
    assert ffn("merge", "part-1.csv", "-o", "b.csv", "--csv")[1] == Path("all.csv").read_text()


def test_a_table_of_several_machines_names_the_machine_of_each_row(ffn):
    part(ffn, 1)
    part(ffn, 2)
    text = Path("part-2.csv").read_text()
    Path("part-2.csv").write_text(text.replace(",here,", ",there,").replace(",fake,", ",other CPU,"))
    out = ffn("merge", "part-1.csv", "part-2.csv", "-o", "all.csv")[1]
    assert "\ntokens  machine  eager, time  packed\n" in out
    assert (out.count("\n  here: fake, 3 cases\n"), out.count("\n  there: other CPU, 2 cases\n")) == (1, 1)
    tokens = {row.tokens for row in read_rows("part-2.csv")}
    shown = {line.split()[0]: line.split()[1] for line in out.splitlines() if " ms " in line}
    assert shown == {str(n): "there" if n in tokens else "here" for n in range(1, 6)}


def test_a_part_without_cases_says_so_and_succeeds(ffn):
    grid = [word.replace("1,2,3,4,5", "1") for word in GRID]
    code, out, err = ffn("bench", *grid, "--shard", "2/2", "--save", "empty.csv")
    assert (code, out) == (0, "  nothing to measure: this part of the grid has no cases\n")
    assert "note: part 2/2 has no cases: the 1 case of the grid went to other parts" in err
    assert json.loads(ffn("bench", *grid, "--shard", "2/2", "--save", "e.csv", "--json")[1])["rows"] == []
    ffn("bench", *grid, "--shard", "1/2", "--save", "full.csv")
    assert ffn("merge", "empty.csv", "full.csv", "-o", "all.csv")[0] == 0


def test_a_part_has_a_default_name_of_its_own(ffn, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ffn("bench", *GRID, "--shard", "2/8")
    (path,) = (tmp_path / "ffn" / "results").glob("*.rounds.csv")
    assert path.name.endswith("-2of8.rounds.csv")


def test_a_resumed_part_is_that_part(ffn, monkeypatch):
    def stopped(*arguments, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ffncli.bench.suite._Run.work", stopped)
        assert part(ffn, 1)[0] == 130
    assert not Path("part-1.csv").exists()  # nothing was finished, and nothing is left
    assert not Path("part-1.grid.json").exists()
    lost = _stopped_after_one(ffn, monkeypatch)
    assert "1 of 3 units kept in part-1.csv" in lost
    out, err = ffn("merge", "part-1.csv", "-o", "all.csv")[1:]
    assert "unfinished" in out
    assert "ffn bench --resume part-1.csv" in err + out
    expect_refusal(ffn("bench", "--resume", "part-1.csv", "--shard", "2/2"), "--shard 2/2 cannot be resumed: the run began with 1/2")  # fmt: skip  # noqa: E501
    assert ffn("bench", "--resume", "part-1.csv", "--shard", "1/2")[0] == 0
    assert len(read_rows("part-1.csv")) == 6


def _stopped_after_one(ffn, monkeypatch) -> str:
    """The words at the end of a part that was interrupted after its first unit."""

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UnitProgress, "finished", interrupt)
        code, _, err = part(ffn, 1)
    assert code == 130
    return err


def test_a_merge_imports_neither_torch_nor_numpy(ffn):
    part(ffn, 1)
    program = (
        "import sys; from ffncli.cli.main import main\n"
        "try: main(['merge', 'part-1.csv', '-o', 'all.csv', '-q'])\n"
        "finally: print(sorted({'torch', 'numpy', 'pandas'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "[]")
