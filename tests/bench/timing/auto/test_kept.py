"""Choices of `auto` in the cache folder: what they depend on, who reads them, and files that hold something else."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from ffncli.bench.records import Case
from ffncli.bench.timing.modes import auto_choice
from ffncli.bench.timing.modes.auto import choose
from ffncli.bench.timing.modes.auto_choice import AutoChoice
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError

CASE = Case("8x16:swiglu", "8x16:swiglu", FFNSpec(8, 16, "swiglu"), 3)
MACHINE = {"cpu": "a processor", "torch": "2.13.0", "math_mode": "fp32=highest"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ffn" / "auto"


def key(case: Case = CASE, machine=MACHINE, candidates=("eager", "packed")) -> dict[str, str]:
    return auto_choice.key_of(case, machine, candidates)


def test_what_is_kept_is_read_again(cache):
    assert auto_choice.read(key()) is None
    assert (auto_choice.choices(), auto_choice.clear()) == ([], 0)
    auto_choice.keep(key(), AutoChoice("packed", "by 5 %"))
    auto_choice.keep(key(), AutoChoice("eager", "because"), "a case")
    assert auto_choice.read(key()) == AutoChoice("eager", "because")
    assert (auto_choice.choices(), auto_choice.folder()) == ([("a case", AutoChoice("eager", "because"))], cache)
    assert auto_choice.clear() == 1
    assert auto_choice.read(key()) is None


@pytest.mark.parametrize(
    "other",
    [
        key(replace(CASE, tokens=4)), key(replace(CASE, dtype="bf16")), key(replace(CASE, threads=2)),
        key(replace(CASE, cache="flush")), key(replace(CASE, passes="forward+backward")),
        key(replace(CASE, device="cuda:0")), key(replace(CASE, routing="uniform")),
        key(replace(CASE, spec=FFNSpec(8, 16, "geglu"))), key(machine={**MACHINE, "torch": "2.14.0"}),
        key(machine={**MACHINE, "cpu": "another"}), key(machine={**MACHINE, "math_mode": "fp32=high"}),
        key(candidates=("eager", "packed", "gemv")),
    ],
)  # fmt: skip
def test_another_machine_version_or_case_has_another_choice(other):
    auto_choice.keep(key(), AutoChoice("packed", ""))
    assert auto_choice.read(other) is None


def test_the_same_block_by_another_name_has_the_same(cache):
    assert key(replace(CASE, source="my-model", label="my-model")) == key()
    assert key(replace(CASE, device="cuda:0")) == key(replace(CASE, device="cuda:1"))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"key": {}, "choice": {"kernel": "packed", "note": ""}}', "\xff", "[" * 10**5]
)
def test_a_file_that_holds_something_else_is_no_choice(cache, text):
    auto_choice.keep(key(), AutoChoice("packed", ""))
    (path,) = cache.iterdir()
    path.write_text(text, "latin-1")
    assert auto_choice.read(key()) is None
    path.write_text(json.dumps({"key": key(), "choice": {"kernel": 3, "note": ""}}))
    assert auto_choice.read(key()) is None


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FFNError, match=r"the choice cannot be stored in .*: Not a directory") as caught:
        auto_choice.keep(key(), AutoChoice("packed", ""))
    assert "XDG_CACHE_HOME" in caught.value.hint
    assert caught.value.code == 3
    assert "the choice cannot be stored in" in choose(CASE).note  # and is made all the same


def test_a_choice_is_made_once(cache):
    first = choose(CASE)
    assert [case for case, _ in auto_choice.choices()] == [CASE.key]
    again = choose(CASE)
    assert again.kernel == first.kernel
    assert again.note == f"{first.note}, in an earlier run"
    (path,) = cache.iterdir()
    stored = json.loads(path.read_text())
    assert stored["key"]["candidates"].split()[0] == "eager"
    assert not {"gemv", "compiled", "module", "int8"} & {*stored["key"]["candidates"].split()}


def test_a_full_choice_is_taken_where_there_is_one(monkeypatch):
    heard: list[tuple[str, ...]] = []

    def race(case, steps, copies, x, kernels, clock, write, flush):
        heard.append(tuple(kernel.name for kernel in kernels))
        return AutoChoice(kernels[-1].name, "")

    monkeypatch.setattr("ffncli.bench.timing.modes.auto.calibrate", race)
    quick, full = choose(CASE), choose(CASE, how="full")
    assert quick.kernel not in ("gemv", "compiled")
    assert {*heard[1]} - {*heard[0]} == {"compiled", "frozen"}
    assert choose(CASE).kernel == full.kernel
    assert len(heard) == 2
    one = replace(CASE, tokens=1)
    choose(one, compiled=("gemv",))
    assert "gemv" in heard[2]
    assert "compiled" not in heard[2]


def test_choices_are_read_without_torch():
    code = "import sys, ffncli.bench.timing.modes.auto_choice; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_choice_depends_on_the_code_of_the_race(monkeypatch, tmp_path):
    digest = auto_choice._digest_of_code.__wrapped__  # without its cache
    before = digest()
    assert digest() == before
    monkeypatch.setattr(auto_choice, "__file__", str(tmp_path / "auto_choice.py"))
    (tmp_path / "auto.py").write_text("another race")
    assert digest() != before
