"""Every text architecture of transformers: config, headers, module and trace agree, as the committed tables say."""

import csv
import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.architectures import report
from ffncli.models.config.families import BY_TYPE, OF_REPOSITORIES
from ffncli.models.config.read import FFNS
from ffncli.models.counting.count import count
from ffncli.models.source import load
from ffncli.models.tensors.matching import block_tensors
from ffncli.run.engine.execute import function
from tests import ROOT
from tests.oracles.architectures import Architecture, cases, matching, numbers, outside, text_architectures, towers
from tests.oracles.architectures.nested import composites, uncounted
from tests.oracles.architectures.tiny import COLUMNS, counts, statement, tiny
from tests.oracles.architectures.traced import APART, FP32, compare, row
from tests.oracles.architectures.traced import COLUMNS as TRACE_COLUMNS
from tests.oracles.architectures.walk import walk

FILE = ROOT / "benchmarks" / "results" / "architectures.csv"
LEAST = 459  # how many architectures agreed when the table was last made (`make architectures`)


def table(path: Path) -> Mapping[str, Mapping[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return {line["model_type"]: line for line in csv.DictReader(file)}


TABLE = table(FILE)


def test_it_names_everything_that_takes_token_ids_once_in_order() -> None:
    with open(FILE, encoding="utf-8", newline="") as file:
        first, *lines = csv.reader(file)
    assert tuple(first) == COLUMNS
    assert [line[0] for line in lines] == sorted({*walk(), *text_architectures()})


def test_as_many_agree_as_before() -> None:
    assert sum(line["result"] == "same" for line in TABLE.values()) >= LEAST


def test_what_agrees_has_one_number_in_all_columns() -> None:
    for name, line in TABLE.items():
        numbers = {line[column] for column in ("config_count", "header_count", "module_count")}
        if line["result"] == "same":
            assert (len(numbers), "" in numbers, line["reason"]) == (1, False, ""), name


def test_what_does_not_agree_has_a_reason() -> None:
    for name, line in TABLE.items():
        if line["result"] != "same":
            assert line["result"] in ("differs", "not counted"), name
            assert line["reason"], name


def test_what_is_not_counted_is_what_the_cases_cannot_build() -> None:
    told = {name: case.reason for name, case in {**towers(), **cases()}.items() if case.reason}
    told |= {name: why for name in composites() if (why := uncounted(name))}
    assert {name: line["reason"] for name, line in TABLE.items() if line["result"] == "not counted"} == told


def test_a_row_that_fails_says_so_and_the_others_follow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(name: str, case: object) -> tuple[object, ...]:
        if name == "bert":
            raise RuntimeError("no such\nmodule")
        return (name, "A", 1, 1, 1, "same", "")

    monkeypatch.setattr("benchmarks.architectures.architectures", lambda: dict.fromkeys(("albert", "bert", "zaya")))
    monkeypatch.setattr(sys, "argv", ["architectures", "--save", str(tmp_path / "rows.csv")])
    assert report("about", COLUMNS, row, "agree") == 1
    with open(tmp_path / "rows.csv", encoding="utf-8", newline="") as file:
        made = list(csv.DictReader(file))
    assert [line["result"] for line in made] == ["same", "error", "same"]
    assert made[1]["reason"] == "error: RuntimeError: no such module"
    assert "2 of 3 agree" in capsys.readouterr().out


CASES = cases()
BUILT = [name for name, case in CASES.items() if not case.reason]
_FUNCTIONS = tuple("act_fn activation_fn act intermediate_act_fn activation hidden_act gelu gelu_impl nonlin".split())


@statement
@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("factor", [1, 2])
def test_config_count_is_the_modules(name: str, factor: int) -> None:
    one = tiny(name)
    model, module = (one.model, one.module) if factor == 1 else (one.wide_model, one.wide)
    assert count(model).ffn_params_total == numbers(module, one.case.ffn)


@statement
@pytest.mark.parametrize("name", BUILT)
def test_norms_are_the_modules(name: str) -> None:
    counted = sum(group.norm_params_per_layer * len(group.layers) for group in count(tiny(name).model).groups)
    assert counted == numbers(tiny(name).module, CASES[name].norm)


@statement
@pytest.mark.parametrize("name", BUILT)
def test_no_matrix_outside_the_ffn_depends_on_d_ff(name: str) -> None:
    assert outside(tiny(name).module, tiny(name).wide, CASES[name]) == []


@statement
@pytest.mark.parametrize("name", BUILT)
def test_activation_is_the_modules(name: str) -> None:
    ours = {group.spec.activation for group in tiny(name).model.model.groups}
    assert len(ours) == 1
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for where, theirs in _functions(tiny(name).module, CASES[name]):
        expected = _plainly(theirs, x)  # first: it skips what has learned parameters
        assert torch.allclose(function(next(iter(ours)))(x), expected, atol=2e-4), where  # erf to tanh: 5e-4


def _functions(model: nn.Module, case: Architecture) -> Iterator[tuple[str, Any]]:
    """The activation functions that modules with FFN parameters hold, under the usual names."""
    owners = {name.rsplit(".", depth)[0] for name, _ in matching(model, case.ffn) for depth in (1, 2, 3)}
    for name, module in model.named_modules():
        for attribute in _FUNCTIONS:
            held = getattr(module, attribute, None)
            if name.endswith("router_mlp"):  # its function is not the experts': see test_router_mlp.py
                continue
            if name in owners and callable(held) and case.activation:
                yield f"{name}.{attribute}", held


def _plainly(held: Any, x: torch.Tensor) -> torch.Tensor:
    """The function on real numbers; one with parameters is compared by tests/block."""
    if isinstance(held, nn.Module) and any(True for _ in held.parameters()):
        pytest.skip("a learned activation")
    y = held(x)
    return y[0] if isinstance(y, tuple) else y  # I-BERT's also gives a scaling factor


@statement
@pytest.mark.parametrize("name", [name for name, line in TABLE.items() if line["result"] == "same"])
def test_config_headers_and_module_agree(name: str) -> None:
    line, found = TABLE[name], counts(tiny(name))
    assert found.reason == ""
    assert [found.config, found.header, found.module] == [
        int(line[column]) for column in ("config_count", "header_count", "module_count")
    ]


def test_a_latent_width_that_the_tensors_contradict(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("nemotron_h").folder, tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "moe_latent_size": 11}))
    (found,) = load(str(folder)).differences
    assert (found.name, found.config, found.tensors, found.layers) == ("latent", "11", "10", 2)


TRACES = ROOT / "benchmarks" / "results" / "trace_architectures.csv"
WHOLE = 373  # of how many the whole block, norms and residual included, gives what leaves the model's layer
TRACED = table(TRACES)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Tiny models warn of their sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
@statement
@pytest.mark.parametrize("name", [name for name, line in TABLE.items() if line["result"] == "same"])
def test_the_trace_is_the_models_own(name: str) -> None:
    found = compare(tiny(name))
    assert [one.reason for one in found if one.reason] == []
    line = dict(zip(TRACE_COLUMNS, row(name, tiny(name).case, found), strict=True))
    kept = ("layers", "norms", "block", "result")  # the error's last digits depend on the machine
    assert [line[column] for column in kept] == [TRACED[name][column] for column in kept]


def test_the_table_names_what_the_other_names_in_its_order() -> None:
    with open(TRACES, encoding="utf-8", newline="") as file:
        first, *lines = csv.reader(file)
    assert tuple(first) == TRACE_COLUMNS
    assert [line[0] for line in lines] == list(TABLE)


def test_whatever_is_counted_is_traced() -> None:
    assert {name: line["result"] for name, line in TRACED.items()} == {n: line["result"] for n, line in TABLE.items()}
    assert all(float(line["relative_error"]) <= FP32 for line in TRACED.values() if line["result"] == "same")


def test_the_blocks_are_the_layers_but_for_those_with_a_reason() -> None:
    assert sum(line["block"] == "same" for line in TRACED.values()) >= WHOLE
    assert {name for name, why in APART.items() if name in TRACED and TRACED[name]["block"] != why} == set()


TOWERS = [name for name, case in towers().items() if case.second != Architecture().second]
COMPOSITES = ["ernie4_5_vl_moe"]  # whose files have them in one list with the text's


@statement
@pytest.mark.parametrize("name", [*TOWERS, *COMPOSITES])
def test_their_parameters_are_the_modules(name: str) -> None:
    one = tiny(name)
    (second,) = (part for part in one.saved_model.not_counted if part.what.startswith("FFNs of "))
    assert second.parameters == numbers(one.module, one.case.second) > 0
    assert second in one.model.not_counted


@statement
@pytest.mark.parametrize("name", COMPOSITES)
def test_a_layer_read_by_itself_has_the_texts_experts_alone(name: str) -> None:
    model = tiny(name).saved_model
    assert model.checkpoint is not None
    layer = block_tensors(model, model.checkpoint, "decoder", 1)
    assert layer is not None
    experts = {name: item.count for name, item in layer.items.items() if name.startswith("mlp.experts.")}
    assert experts == {f"mlp.experts.#.{which}_proj.weight": 8 for which in ("gate", "up", "down")}


def test_every_family_that_has_them_is_here() -> None:
    assert FFNS.keys() - OF_REPOSITORIES == {BY_TYPE[name] for name in TOWERS}
