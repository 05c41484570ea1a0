"""A journal that somebody changed is refused with the line and the field; one that is no file is not opened."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import Job
from ffncli.bench.results.journal import ResultFiles, begin, locked, resume
from ffncli.errors import FFNError
from tests.bench import fake_worker
from tests.bench.test_suite import RUN, request


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
        (2, unit(outcomes=[]), "is damaged: its kernels are not the run's"),
        (2, unit(spent=[1]), "unit.spent must be an object"),
        (2, unit(spent={"blocks": "long"}), "unit.spent['blocks'] must be a number, got 'long'"),
        (2, unit(cache=7), "unit.cache must be one of warm, shared, cold-weights, flush, got 7"),
        (2, unit(process="0"), "unit.process must be a whole number, got '0'"),
        (2, unit(process=9), "is damaged: its process is none of the run's"),
        (2, unit(tokens_per_expert=[1.0]), "is damaged: its tokens per expert are not those of its experts"),
        (2, unit(tokens_per_expert=[-1.0]), "tokens_per_expert[0] must be at least 0"),
        (2, unit(experts_touched="all"), "experts_touched must be a number"),
        (1, first_case(routing="uniform"), "has a routing, and no experts"),
        (1, first_case(routing="some"), "unknown value 'some'"),
        (2, unit(case="another"), "is damaged: its case is none of the run's"),
        (2, unit(baseline="packed"), "is damaged: its baseline is not the run's"),
        (2, unit(roof={"flops_per_s": -1}), "unit.roof.flops_per_s must be at least 1"),
        (2, unit(environment={"host": ["a"]}), "unit.environment['host'] must be a text, got ['a']"),
        (2, unit(notes="note"), "unit.notes must be a list"),
        (2, unit(more=1), "unit has the unknown field 'more'"),
        (2, lambda entry: entry.update(rounds_end=-1), "rounds_end must be at least 0, got -1"),
        (3, lambda entry: entry.update(rounds_end=100), "is damaged: its blocks end before they begin"),
        (2, lambda entry: entry.update(died=0), "died must be true or false, got 0"),
        (2, lambda entry: entry.pop("rounds_end"), "it has no field rounds_end"),
        (1, lambda entry: entry["run"].pop("run_id"), "run has no field run_id"),
        (1, lambda entry: entry.update(software=3), "software must be an object"),
        (1, part_of_request(cases=[]), "request: its 0 cases are not from 1 to 10,000 different ones"),
        (1, part_of_request(baseline="numpy"), "request: its kernels are not different ones, with the baseline"),
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
    with pytest.raises(FFNError, match="line 4 is damaged: it is there twice"):
        resume(unfinished, summarise)


def test_blocks_of_another_unit(tmp_path: Path):
    asked, path = request(processes=1), tmp_path / "a.csv"
    journal = begin(path, asked, RUN, {}, summarise, False)
    journal.add(fake_worker.unit(asked.cases[0], Job(0, (), asked.kernels, "eager", asked.method)))
    rounds = ResultFiles(path).rounds
    rounds.write_text(rounds.read_text().replace(" 1 tokens", " 2 tokens"))
    with pytest.raises(FFNError, match="blocks of one unit are where another's should be"):
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
