"""Every column has a role, and by it reaches whoever reads results: an added one is a case of these tests at once."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from xml.etree.ElementTree import tostring

import pytest
import torch

from ffncli.bench.judge.compare import compare
from ffncli.bench.judge.comparison_records import CASE_COLUMNS, Rules
from ffncli.bench.judge.curves import speed_sweeps
from ffncli.bench.judge.environment_match import match
from ffncli.bench.judge.summary import case_columns, summarise
from ffncli.bench.judge.warnings import Code
from ffncli.bench.machine import machine
from ffncli.bench.public.admission import admit
from ffncli.bench.records import Case
from ffncli.bench.results.csv_file import ResultRows
from ffncli.bench.results.merge import merge
from ffncli.bench.results.row import ASKED, BLOCK_COLUMNS, COMPARED, MACHINE, ResultRow, columns, name_of
from ffncli.bench.timing.auto.kept import key_of
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.models.files.json_records import hints_of
from ffncli.pages.results import results_parts
from tests.bench.public.made import changed, result
from tests.bench.stored import row, write
from tests.bench.units import CASE, QUICK, RUN, units_of

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
