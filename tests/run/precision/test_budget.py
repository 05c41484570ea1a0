"""Formats within a budget of bits: scores, bits and measured errors by hand, the choice against all choices."""

from itertools import product
from math import sqrt
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ffncli
from ffncli.errors import FFNError
from ffncli.models.model import Layer
from ffncli.run.precision.budget import PricedMatrix, random_mix
from tests.oracles.checkpoints import sensitive
from tests.run.precision.test_precision import drawn, near

SOURCE, D_MODEL, D_FF = "64x96:swiglu", 64, 96
FORMATS = ("nvfp4", "fp8", "bf16")
NAMES = ("W1", "W3", "W2")
NUMBER = D_MODEL * D_FF
ROWS = {"W1": D_FF, "W3": D_FF, "W2": D_MODEL}


def bits(name: str, form: str) -> int:
    """Return the bits of a matrix, counted by hand."""
    scales = {"nvfp4": NUMBER // 16 * 8 + 32, "fp8": 32 * ROWS[name], "bf16": 0}
    return {"nvfp4": 4, "fp8": 8, "bf16": 16}[form] * NUMBER + scales[form]


def error(formats: dict[str, str], inputs: bool = False) -> float:
    """Return the relative error of the block with a format for each matrix, and with `inputs` for what it reads."""
    weights, x = drawn(SOURCE, 6)
    named = {"W1": weights["gate.weight"], "W3": weights["up.weight"], "W2": weights["down.weight"]}

    def product_of(name: str, x: Tensor, chosen: dict[str, str]) -> Tensor:
        form = chosen.get(name)
        return (near(x, form) if form and inputs else x) @ (near(named[name], form) if form else named[name]).T

    def out(chosen: dict[str, str]) -> Tensor:
        hidden = functional.silu(product_of("W1", x, chosen)) * product_of("W3", x, chosen)
        return product_of("W2", hidden, chosen)

    exact = out({})
    return float((out(formats) - exact).norm() / exact.norm())


@pytest.mark.parametrize("what", [None, "both"])
@pytest.mark.parametrize("limit", [4.51, 6, 7.3, 9, 20])
def test_the_choice_is_the_best_of_all(limit, what):
    found = ffncli.precision(SOURCE, dtype=FORMATS, tokens=6, budget=limit, what=what).budget
    inputs = what == "both"
    scores = {(name, form): error({name: form}, inputs) for name in NAMES for form in FORMATS}
    sums = {
        choice: sum(scores[one] ** 2 for one in zip(NAMES, choice, strict=True))
        for choice in product(FORMATS, repeat=3)
        if sum(bits(*one) for one in zip(NAMES, choice, strict=True)) <= limit * 3 * NUMBER
    }
    chosen = {one.tensor: one.format for one in found.choices}
    assert tuple(chosen[name] for name in NAMES) == min(sums, key=lambda choice: sums[choice])
    assert (found.limit, found.score, found.slack, found.what) == (limit, "error_rel", 0, what or "weights")
    assert found.predicted == pytest.approx(sqrt(min(sums.values())))
    assert found.measured == pytest.approx(error(chosen, inputs))
    assert found.bits == sum(bits(*one) for one in chosen.items()) / (3 * NUMBER)
    for one in found.choices:
        assert one.bits == bits(one.tensor, one.format) / NUMBER
        assert one.error == pytest.approx(scores[one.tensor, one.format])


def test_uniform_choices_fit_but_the_last_and_random_ones_do():
    found = ffncli.precision(SOURCE, dtype=FORMATS, tokens=6, budget=7).budget
    assert [one.format for one in found.uniform] == ["nvfp4", "fp8"]
    for one in found.uniform:
        assert one.bits == sum(bits(name, one.format) for name in NAMES) / (3 * NUMBER)
        assert one.measured == pytest.approx(error(dict.fromkeys(NAMES, one.format)))
    assert [one.bits <= 7 for one in found.uniform] == [True, False]
    assert len(found.random) == 5
    assert all(found.predicted <= one.predicted and one.bits <= 7 for one in found.random)
    again = ffncli.precision(SOURCE, dtype=FORMATS, tokens=6, budget=7, seed=0).budget
    assert again.random == found.random


def test_random_mixes_use_up_the_limit_and_differ():
    layer = Layer("block", 0, ffncli.FFNSpec(8, 8, "relu"))
    every = [PricedMatrix((layer, f"W{at}"), 100, {"a": 400, "b": 800, "c": 1600}, {}) for at in range(30)]
    mixes = [random_mix(every, 20_000, Random(seed)) for seed in range(20)]
    for mix in mixes:
        size = sum(matrix.bits[mix[matrix.place]] for matrix in every)
        assert 20_000 - 400 < size <= 20_000  # no matrix can have a larger format
    assert len({tuple(mix.values()) for mix in mixes}) == 20


def test_a_format_that_does_not_fit_is_left_out_and_said():
    found = ffncli.precision("64x24:swiglu", dtype=FORMATS, tokens=4, budget=6.2)
    assert {one.tensor: one.format for one in found.budget.choices} == {"W1": "nvfp4", "W3": "nvfp4", "W2": "fp8"}
    assert [one.format for one in found.budget.uniform] == ["fp8"]
    (note,) = [note for note in found.notes if "left out" in note]
    assert note.startswith("nvfp4 is left out for 1 matrix: nvfp4:torchao needs rows of whole blocks of 16 values")
    with pytest.raises(FFNError, match=r"no format fits W2: nvfp4:torchao needs rows"):
        ffncli.precision("64x24:swiglu", dtype="nvfp4", budget=6)
    both = ffncli.precision("64x96:swiglu", dtype=["fp8:block128", "int8"], budget=9, what="both", tokens=4)
    assert {one.format for one in both.budget.choices} == {"int8"}  # 64 inputs are no whole group of 128


def test_a_budget_below_the_smallest_formats_says_what_they_need():
    with pytest.raises(FFNError, match=r"^budget is 4, but these formats need at least 4\.5053 bits a weight$"):
        ffncli.precision(SOURCE, dtype=FORMATS, budget=4)
    assert ffncli.precision(SOURCE, dtype=FORMATS, budget=4.5053, tokens=2).budget.bits <= 4.5053


def test_the_experts_of_a_mixture_have_one_format():
    mixture = {"experts": 4, "shared_experts": 1, "tokens": 6}
    found = ffncli.precision("32x64:swiglu", dtype=("mxfp4", "bf16"), budget=9, **mixture).budget
    assert [one.tensor for one in found.choices] == ["W1", "W3", "W2"]
    assert {one.weights for one in found.choices} == {5 * 32 * 64}
    assert {one.bits for one in found.choices} == {4.25, 16}


def test_the_frame_has_a_row_for_each_matrix():
    found = ffncli.precision(SOURCE, dtype=FORMATS, tokens=2, budget=6)
    assert found.frame()["tensor"].tolist() == [*NAMES]
    assert found.rows == ()
    assert "bits per weight" in repr(found)


def test_layers_without_a_text_have_the_root_of_the_mean_square(tmp_path):
    source = sensitive(tmp_path / "m", 300, 5, 0)
    found = ffncli.precision(source, layer="all", dtype=("nvfp4", "fp8"), tokens=8, budget=5).budget
    assert found.score == "error_rel"
    assert {one.format for one in found.choices if one.layer == 5 and one.tensor != "W2"} == {"fp8"}
    rows = ffncli.precision(source, layer="all", dtype="nvfp4", what="weights", tokens=8).rows
    mean = sum(row.error_rel**2 for row in rows) / len(rows)
    assert found.uniform[0].measured == pytest.approx(sqrt(mean))


# --- in a model -------------------------------------------------------------------------------------------------------


@pytest.mark.models
@pytest.mark.parametrize("texts", [["Hello the cat sat"], ["Hello the cat", "the cat sat on the mat"]])
def test_divergences_are_those_of_transformers(texts):
    import copy

    from tests.oracles.prompted import WORDS, made

    path, model = made("llama").path, copy.deepcopy(made("llama").model).float()
    given = {"prompt": texts[0]} if len(texts) == 1 else {"prompts": texts}
    found = ffncli.precision(path, layer="all", dtype=("fp8", "int8:g32"), budget=10, **given).budget
    parameters = {"W1": "gate_proj", "W3": "up_proj", "W2": "down_proj"}

    def next_tokens(formats: dict[tuple[int, str], str]) -> Tensor:
        other = copy.deepcopy(model)
        ids = [[WORDS.index(word) for word in text.split()] for text in texts]
        with torch.no_grad():
            for (layer, name), form in formats.items():
                weight = other.get_parameter(f"model.layers.{layer}.mlp.{parameters[name]}.weight")
                weight.copy_(ffncli.quantize(weight, form).dequantize())
            return torch.cat([other(input_ids=torch.tensor([one])).logits[0].double() for one in ids]).log_softmax(-1)

    exact = next_tokens({})

    def divergence(formats: dict[tuple[int, str], str]) -> float:
        return float((exact.exp() * (exact - next_tokens(formats))).sum(-1).mean())

    chosen = {(one.layer, one.tensor): one.format for one in found.choices}
    assert found.score == "kl"
    assert found.measured == pytest.approx(divergence(chosen), rel=1e-2, abs=1e-9)
    assert found.predicted == pytest.approx(sum(one.error for one in found.choices))
    for one in found.choices:
        assert one.error == pytest.approx(divergence({(one.layer, one.tensor): one.format}), rel=1e-2, abs=1e-9)
    for one in found.uniform:
        assert one.measured == pytest.approx(divergence(dict.fromkeys(chosen, one.format)), rel=1e-2, abs=1e-9)


@pytest.mark.models
@pytest.mark.parametrize(("name", "score"), [("llama", "kl"), ("mixtral", "kl"), ("bert", "output_error")])
def test_one_format_for_all_is_the_whole_model_in_that_format(name, score, tmp_path):
    """`--in-model` rounds layer by layer with the code of rows; without a head, both measure the model's output."""
    from tests.oracles.prompted import PROMPT, give_tokenizer, made

    source = made(name).path
    if name == "bert":  # without its head
        made(name).model.bert.save_pretrained(tmp_path)
        source = give_tokenizer(tmp_path)
    asked = {"layer": "all", "prompt": PROMPT, "dtype": ("fp8", "int8")}
    for what in ("weights", "both"):
        budget = ffncli.precision(source, budget=20, what=what, **asked).budget
        whole = ffncli.precision(source, in_model=True, what=what, **asked).whole
        measures = {one.format: one.kl if score == "kl" else one.output_error for one in whole}
        assert budget.score == score
        for one in budget.uniform:
            assert one.measured == pytest.approx(measures[one.format], rel=1e-4, abs=1e-12)
        add = (lambda x: x) if score == "kl" else (lambda x: x * x)
        assert add(budget.predicted) == pytest.approx(sum(add(one.error) for one in budget.choices))
