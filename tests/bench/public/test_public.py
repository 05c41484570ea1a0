"""ffn-1 is what it was; what is admitted to its table, and which condition each fault fails; the table itself."""

import itertools
import json
import math
import random
import re
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml

import ffncli
from benchmarks import results_table
from benchmarks.results_table import Entry, newest, ranked, ranks, standings
from ffncli.bench.judge.memory_need import memory_need
from ffncli.bench.public.admission import admit
from ffncli.bench.records import TWIN, Method
from ffncli.bench.referee.prescribed_routing import _draw_of
from ffncli.bench.request.grid import from_json, load_block, to_json
from ffncli.bench.request.suite import public_suite, suite_request, track_of
from ffncli.block.steps import Axis, Route
from ffncli.errors import FFNError
from ffncli.models.dimensions import Dimensions
from ffncli.version import __version__
from tests.bench.public.made import RUN, SHA256, SUITE, TIMES, changed, result
from tests.bench.stored import row

CASES = {track: SUITE.cases(track) for track in SUITE.tracks}
# Of the file, and of the text that its routing `text` goes by. They are never edited: a change is another suite.
FFN_1 = "8178253b0d356f2ae602ee5059fe209fd5a16ed060147a4a493954b5597e3410"
TEXT = "aa3d1d9053edee97f04adb889b3c81fa0fe34868b6be59dce2753518e4319745"


def digest(package: str, name: str) -> str:
    return sha256(files(package).joinpath(name).read_bytes()).hexdigest()


def test_the_definition_is_never_edited():
    assert digest("ffncli.bench.public", "ffn-1.json") == FFN_1 == SUITE.digest
    assert digest("ffncli.bench.referee", "gettysburg.txt") == TEXT
    assert SUITE.tag == f"ffn-1@{FFN_1}"


@pytest.mark.parametrize("name", SUITE.blocks)
def test_every_block_is_the_catalogs(name):
    """Of a mixture that is too large for one device, one rank's share of the experts."""
    model, _, experts = name.partition("+experts=")
    spec = load_block(model, Dimensions()).model.main.spec
    if experts:
        assert spec.moe.experts == 8 * int(experts)
        spec = replace(spec, moe=replace(spec.moe, experts=int(experts)))
    assert SUITE.blocks[name] == spec


def test_the_tracks_are_small_enough_and_wide_enough():
    assert {track: len(cases) for track, cases in CASES.items()} == {"cpu": 6, "cuda": 12}
    assert {case.tokens for case in CASES["cpu"]} == {1, 32, 512}
    assert {case.tokens for case in CASES["cuda"]} == {1, 32, 512, 4096}
    for cases in CASES.values():
        assert len({case.key for case in cases}) == len(cases)
        assert all((case.spec.moe is not None) == bool(case.routing) for case in cases)
        assert {case.block for track in SUITE.tracks.values() for case in track.cases} == {*SUITE.blocks}
    assert {case.routing for case in CASES["cuda"]} == {"", "uniform", "zipf:1.2", "text"}
    # A user's kernel, what its prepare was given, the drawn weights and the referee's.
    assert max(memory_need(case, 4).total for case in CASES["cpu"]) < 4e9
    assert max(memory_need(case, 3).total for case in CASES["cuda"]) < 60e9


@pytest.mark.parametrize(
    ("experts", "top_k", "routes"),
    [(128, 4, "414b9ea3be0300d9"), (256, 6, "2c1bcc09bb3e7c58"), (112, 16, "ae61606bcb0d71b0")],
)
def test_the_routes_of_the_text_are_never_changed(experts, top_k, routes):
    case = next(case for case in CASES["cuda"] if case.routing == "text")
    draw = _draw_of(case, Route(Axis("experts", experts), top_k))
    rows = draw(272, torch.Generator()).to(torch.uint8).numpy().tobytes()
    assert sha256(rows).hexdigest()[:16] == routes


def test_a_request_has_the_suites_cases_and_its_mark_also_when_it_is_read_back():
    request, notes = suite_request(SUITE, "cpu", ["packed"], SUITE.method("cpu"))
    assert (request.cases, request.suite) == (CASES["cpu"], SUITE.tag)
    assert (request.baseline, request.names) == ("eager", ("eager", "packed"))
    assert (request.method.seed, request.method.processes, request.method.max_time) == (1, 5, 30.0)
    assert notes == ()
    assert from_json(json.loads(json.dumps(to_json(request)))) == request
    _, notes = suite_request(SUITE, "cpu", ["packed"], Method(processes=3))
    assert notes == ("only a trial: results of ffn-1 need 5 processes or more, and this run has 3",)


def test_what_is_no_suite_and_no_track_is_refused():
    with pytest.raises(FFNError) as caught:
        public_suite("ffn-2")
    assert (caught.value.message, caught.value.hint) == ("suite: there is no suite 'ffn-2'", "did you mean 'ffn-1'?")
    assert [track_of(()), track_of(("cpu",)), track_of(("cuda",))] == ["cpu", "cpu", "cuda"]
    for devices in (("cuda:1",), ("cpu", "cuda"), ("mps",)):
        with pytest.raises(FFNError, match="has the tracks cpu and cuda"):
            track_of(devices)


MIXTURE = 4  # the case of that number


def failing(path: Path) -> dict[str, tuple[str, ...]]:
    return {one.name: one.faults for one in admit(path).conditions if not one.passed}


def test_a_good_result_is_admitted(tmp_path):
    admission = ffncli.admit(result(tmp_path))
    assert admission.admitted
    assert failing(admission.path) == {}
    assert (admission.track, admission.suite.name, len(admission.rows)) == ("cpu", "ffn-1", 12)


@pytest.mark.parametrize(
    ("edit", "condition", "words"),
    [
        (changed("fast", suite=""), "suite", "has 'nothing', not ffn-1@"),
        (changed("fast", suite=f"ffn-1@{'0' * 64}"), "suite", "not ffn-1@"),
        (changed("fast", 2, tokens=256), "cases", "tokens is 256, not 512"),
        (changed("fast", 0, seed=7), "cases", "seed is 7, not 1"),
        (changed("eager", 0, cache="warm"), "cases", "cache is 'warm', not cold-weights"),
        (changed("fast", MIXTURE, routing="uniform"), "cases", "routing is 'uniform', not 'text'"),
        (changed("fast", baseline="packed"), "kernels", "compared with 'packed', not eager"),
        (changed("fast", note="mine.py"), "kernels", "has no sha256"),
        (changed("fast", 1, error_max=None), "verified", "has no error against float64"),
        (changed("fast", 1, error_max=1e-3), "verified", "error 0.001, more than"),
        (changed("fast", 1, computes="fp7"), "verified", "is not a known format"),
        (changed("fast", 1, referee="worker"), "referee", "has 'worker', not process"),
        (changed("fast", 3, ratio=0.5), "rounds", "ratio is 0.5, its blocks give 0.8"),
        (changed("fast", 3, time_s=1e-4), "rounds", "time_s is 0.0001"),
        (changed("fast", 3, process_ratios=(0.5,) * 5), "rounds", "process_ratios"),
        (changed("eager", 3, aa_high=1.0), "rounds", "aa_high is 1.0"),
        (changed("fast", 0, roof_fraction=0.001), "roof", "its roof differs from"),
        (changed("fast", 0, roof_fraction=None), "roof", "no roof was measured"),
        (changed("fast", 0, datasheet_fraction=1.03), "roof", "103"),
        (changed("fast", 5, torch="2.12.0"), "environment", "torch is '2.13.0' and '2.12.0'"),
    ],
)
def test_a_changed_row_fails_its_condition(edit, condition, words, tmp_path):
    faults = failing(result(tmp_path, edit))
    assert condition in faults
    assert words in faults[condition][0]
    assert set(faults) - {condition} <= {"rounds", "roof"}  # what the change drags along


def test_a_wrong_kernel_and_a_missing_case_fail(tmp_path):
    first = SUITE.cases("cpu")[0].key
    path = result(tmp_path, changed("fast", 1, status="wrong", note=f"mine.py, sha256 {SHA256}; replay-by-id"))
    assert "is wrong: mine.py" in failing(path)["verified"][0]
    path = result(tmp_path, lambda row: replace(row, case="another") if row.case == first else row)
    assert failing(path)["cases"][:2] == (
        f"the case {first} is missing", "another is not a case of the track cpu",
    )  # fmt: skip
    skipped = changed("fast", MIXTURE, status="skipped", note="no experts", **dict.fromkeys(
        ("time_s", "ratio", "ratio_low", "ratio_high", "error_max", "error_rel", "roof_fraction"))
    )  # fmt: skip
    assert "verified" not in failing(result(tmp_path, skipped))


def test_too_few_processes_and_a_machine_that_cannot_resolve_fail(tmp_path):
    assert set(failing(result(tmp_path, processes=4))) == {"processes"}
    faults = failing(result(tmp_path, times={**TIMES, TWIN: 1.05e-2}))
    assert set(faults) == {"a/a"}
    assert "identical code timed twice gave ratios of 1.0" in faults["a/a"][0]


def test_faster_than_the_roof_fails(tmp_path):
    """A kernel that answers in no time, with blocks that say so: nothing else is wrong with its files."""
    faults = failing(result(tmp_path, times={**TIMES, "fast": 1e-5}))
    assert set(faults) == {"roof"}
    assert "% of the measured roof" in faults["roof"][0]


def test_the_rounds_file_is_needed_and_must_be_that_of_the_rows(tmp_path):
    path = result(tmp_path)
    rounds = path.with_suffix(".rounds.csv")
    lines = rounds.read_text("utf-8").splitlines(keepends=True)
    rounds.write_text("".join(lines[:-1]), "utf-8")
    assert set(failing(path)) == {"rounds"}
    rounds.write_text("".join(lines).replace(RUN["run_id"], "other"), "utf-8")
    assert "processes is 5" in failing(path)["rounds"][0] or "has no blocks" in failing(path)["rounds"][0]
    rounds.write_text("damaged\n", "utf-8")
    assert "rounds" in failing(path)
    rounds.unlink()
    assert failing(path)["rounds"] == (f"cannot read {rounds}: No such file or directory",)


def test_the_page_the_json_and_the_exit_codes(call, stdout_of, tmp_path):
    words = ("bench", "--suite", "ffn-1", "--admit")
    good, bad = result(tmp_path, name="good"), result(tmp_path, processes=3, name="bad")
    out = stdout_of(*words, str(good))
    assert [line.split()[0] for line in out.splitlines()[1:-1] if line] == ["PASS"] * 10
    assert out.splitlines()[-1] == "admitted"
    code, out, err = call(*words, str(bad), "--json")
    body = json.loads(out)
    assert (code, body["admission"]["admitted"]) == (1, False)
    assert [row["condition"] for row in body["rows"] if not row["passed"]] == ["processes"]
    assert err == "error: not admitted: processes\n"


def test_a_file_that_is_no_result_is_bad_input(tmp_path):
    with pytest.raises(FFNError, match=r"must end in \.csv"):
        admit(tmp_path / "a.txt")
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(FFNError, match="no column schema_version"):
        admit(tmp_path / "a.csv")


ROOT = Path(__file__).parents[3]


def test_ranks_are_those_of_every_pair():
    drawn = random.Random(1)
    for _ in range(300):
        ends = [sorted((drawn.randrange(8), drawn.randrange(8))) for _ in range(drawn.randrange(1, 7))]
        intervals = [(float(low), math.inf if high == 7 else float(high)) for low, high in ends]
        places = ranks(intervals)
        below = [0] * len(intervals)
        for one, other in itertools.permutations(range(len(intervals)), 2):
            apart = all(a < b for a in intervals[other] for b in intervals[one])
            below[one] += apart
            overlap = max(intervals[one][0], intervals[other][0]) <= min(intervals[one][1], intervals[other][1])
            assert not (overlap and apart)
        assert places == [1 + n for n in below]
        assert min(places) == 1
    assert ranks([(1.0, 1.0), (0.9, 1.0), (0.8, 0.89)]) == [2, 2, 1]  # two overlap, one is wholly below both
    assert ranks([(1, 2), (2, 3), (2.5, 4)]) == [1, 1, 2]  # overlapping is not transitive


def test_kernels_are_ranked_with_those_that_compute_alike():
    entries = [
        Entry(row(kernel=name, ratio=low, ratio_low=low, ratio_high=low + 0.05, computes=computes), "")
        for name, low, computes in (("a", 1.0, ""), ("b", 0.8, ""), ("c", 0.4, "fp8"), ("d", 0.83, ""))
    ]
    places = [(rank, entry.row.kernel, entry.error_class) for rank, entry in ranked(entries)]
    assert places == [(1, "b", "fp32"), (1, "d", "fp32"), (3, "a", "fp32"), (1, "c", "fp8")]


def test_the_page_is_that_of_the_files():
    assert results_table.PAGE == ROOT / "docs" / "results.md"
    assert f"\n\n{standings()}\n\n" in results_table.PAGE.read_text("utf-8"), "make results"


def test_the_page_of_made_up_results(tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "ffn-1"
    folder.mkdir(parents=True)
    assert "No result has been admitted yet" in standings(folder.parent, tmp_path)
    result(folder, name="first")
    later = {**RUN, "run_id": "later", "started_utc": "2026-12-01T00:00:00Z"}
    result(folder, name="again", run=later, times={**TIMES, "fast": 9e-3})
    result(folder, processes=3, name="short")
    (folder / "broken.csv").write_text("x\n")
    text = standings(folder.parent, tmp_path)
    assert "short](../benchmarks/results/ffn-1/short.csv) | processes |" in text
    assert re.search(r"broken\]\(\S+\) \| \S*broken.csv, line 1: no column", text)
    assert text.count("**llama-3.2-1b, 1 tokens") == text.count("**privacy-filter, 32 tokens") == 1
    lines = [line for line in text.splitlines() if line.startswith("| 1 | `fast` | 0.9")]
    assert len(lines) == 6  # of the newer file
    assert all("[again](../benchmarks/results/ffn-1/again.csv)" in line for line in lines)
    assert sum(line.startswith("| 2 | `eager` | 1.000 | ") for line in text.splitlines()) == 6
    day = "2026-11-24, with a baseline that was up to 8 % slower on small blocks"
    assert f"| {day} | `ffn bench --suite ffn-1 --kernel eager,fast=mine.py` |" in text
    tables = newest([admit(folder / "first.csv"), admit(folder / "again.csv")], tmp_path)
    assert list(tables) == ["a cpu, cpu"]
    assert {len(entries) for entries in tables["a cpu, cpu"].values()} == {2}


def test_what_is_withdrawn_is_named_and_not_ranked(tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "ffn-1"
    folder.mkdir(parents=True)
    result(folder, name="first")
    assert "| `fast` |" in standings(folder.parent, tmp_path)
    reason = '[[rows]]\nresult = "first"\nkernel = "fast"\nreason = "it slept"\n'
    (folder / "withdrawn.toml").write_text(reason, "utf-8")
    text = standings(folder.parent, tmp_path)
    assert "| 1 | `fast` |" not in text
    assert "| 1 | `eager` |" in text
    link = "[first](../benchmarks/results/ffn-1/first.csv)"
    assert f"### Withdrawn\n\n| result | kernel | why |\n| --- | --- | --- |\n| {link} | `fast` | it slept |" in text
    (folder / "withdrawn.toml").write_text(reason.replace("fast", "fats"), "utf-8")
    with pytest.raises(SystemExit, match="no admitted result has"):
        standings(folder.parent, tmp_path)


def test_the_citation_names_this_version():
    """Checked with cffconvert when it was written; the keys that its schema requires, and what changes."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["cff-version"], cited["type"], cited["license"]) == ("1.2.0", "software", "MIT")
    assert cited["version"] == __version__
    assert all(set(author) == {"name"} for author in cited["authors"])
