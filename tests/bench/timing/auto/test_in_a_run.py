"""`auto` among the kernels of a run: chosen once, verified and timed under its name, the same in later processes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ffncli.bench import suite
from ffncli.bench.records import Case, Job, Method, Outcome, TimedUnit
from ffncli.bench.timing.modes import auto as choosing
from ffncli.bench.timing.modes.auto import fastest
from ffncli.bench.timing.modes.auto_choice import AutoChoice
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels import built_in
from ffncli.kernels.choice import choices
from ffncli.kernels.kernel import REGISTERED
from ffncli.models.files.json_records import record_of
from tests.bench.timing.test_measure_case import Clock, Counters, measure_case

SPEC = FFNSpec(8, 16, "swiglu")
CASE = Case("s", "s", SPEC, 4, cache="warm")
METHOD = Method(processes=2, block=1e-3, max_time=1.0, placements=2, rounds=2)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def races(monkeypatch):
    """The races that are run; packed wins each."""
    heard: list[tuple[str, ...]] = []

    def race(case, steps, copies, x, kernels, clock, write, flush):
        heard.append(tuple(kernel.name for kernel in kernels))
        return AutoChoice("packed", "packed, in 0.5 of eager's time")

    monkeypatch.setattr(choosing, "calibrate", race)
    return heard


def measured(*kernels: str, chosen=(), case: Case = CASE) -> TimedUnit:
    return measure_case(case, Job(0, (case,), choices(kernels), None, METHOD, chosen=chosen), Clock(), Counters())


def test_it_is_a_kernel_under_its_name(races):
    unit = measured("auto", "eager")
    auto, eager = unit.outcomes
    assert (auto.kernel, auto.status, auto.chosen) == ("auto", "ok", "packed")
    assert auto.note == "packed, in 0.5 of eager's time"
    assert 0 < auto.error_rel < 1e-6
    assert (eager.kernel, eager.chosen) == ("eager", "")
    assert {"auto", "eager"} <= {block.kernel for block in unit.blocks}
    assert len(races) == 1
    again = measured("auto", "eager").outcomes[0]
    assert (again.chosen, again.note) == ("packed", "packed, in 0.5 of eager's time, in an earlier run")
    assert len(races) == 1


def test_all_processes_of_a_run_have_the_first_ones_choice(races):
    unit = measured("eager", "auto", chosen=((CASE.key, "auto", "conv1x1"), ("another case", "auto", "eager")))
    auto = unit.outcomes[1]
    assert (auto.chosen, auto.note, races) == ("conv1x1", "", [])

    journal = SimpleNamespace(finished_units=[unit])
    assert suite._chosen(journal) == {(CASE.key, "auto"): "conv1x1"}


def test_a_kernel_that_the_run_compiles_takes_part(races, monkeypatch):
    """It does not where nobody named it."""
    kernel = built_in("conv1x1")
    monkeypatch.setitem(REGISTERED, "conv1x1", replace(kernel, compiles=True))
    measured("eager", "auto")
    assert "conv1x1" not in races[0]
    measured("auto", "eager", "conv1x1")
    assert "conv1x1" in races[1]


def test_a_block_that_no_kernel_computes(monkeypatch):
    def race(*arguments, **more):
        raise FFNError("no kernel of the package computes this block here")

    monkeypatch.setattr(choosing, "calibrate", race)
    (auto,) = measured("auto").outcomes
    assert (auto.status, auto.chosen) == ("failed", "")
    assert "no kernel of the package computes" in auto.note


def test_a_users_kernel_never_competes(races, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mlp(x, gate, up, down):\n    return x\n")
    measured("eager", "auto", f"mine={file}:mlp")
    assert "mine" not in races[0]


def test_the_fastest_for_a_program(races):
    choice, note = fastest(SPEC, 4, torch.float32, "cpu")
    assert (choice.kernel, note) == ("packed", "auto: packed, in 0.5 of eager's time")
    with pytest.raises(FFNError, match="auto knows no kernel for"):
        fastest(SPEC, 4, torch.int32, "cpu")


def test_an_outcome_keeps_its_choice_in_the_journal():
    stored = {"kernel": "auto", "status": "ok", "chosen": "packed"}
    assert record_of(Outcome, stored, "outcome").chosen == "packed"
    assert record_of(Outcome, {"kernel": "auto"}, "outcome").chosen == ""
