"""`ffn trace --example` and `--vocab` as a user asks them."""

import json
import re

import pytest
import torch

from docs.schemas import keys_text
from tests.oracles import notebook as printed
from tests.oracles.checkpoints import LLAMA, folder, tensors
from tests.test_docs import keys


def test_the_notebook_on_its_page(call, stdout_of):
    out = stdout_of("trace", "--example", "notebook")
    assert "x 4 ──W1──▶ up 8 ──relu──▶ act 8 ──dropout 0.1──▶ dropout 8 ──W2──▶ down 4" in out
    for name, rows in printed.PRINTED.items():
        for at, row in enumerate(rows):
            assert re.search(rf"^  {at // 3},{at % 3} +{' +'.join(map(re.escape, row))}$", out, re.M), (name, at)
    assert "wrong    zeros that dropout makes: 6 of 33 live values (18 %); the text says ~10 %" in out
    assert "holds    negatives before ReLU: 15\n" in out
    assert "\x1b" not in out
    assert out.startswith("the notebook's block  fixed weights\n")
    assert "dropped 6 of 33 live values (18 %)" in out
    assert "verdict" not in call("trace")[1]


def test_the_wrong_values_stand_beside_the_right_ones(call):
    out = call("trace", "--example", "explained", "--show", "4")[1]
    for x, right, said in (("0.21", "0.1225", "0.115"), ("-0.15", "-0.0661", "-0.058"), ("0.28", "0.1709", "0.168")):
        assert f"wrong    gelu({x}): {right}; the text says {said}\n" in out
    assert "holds    gelu(0.25): 0.1497; the text says 0.150\n           f(x)/x = Φ(x) = 0.5987" in out
    assert "the published text gives 4 of the 512 values of 'Hello'" in out
    assert "0.1460  0.1080  …  " in out


def test_facts_as_json(json_of):
    found = json_of("trace", "--example", "bert", "--seed", "3", "--tokens", "2")
    assert found["steps"][0]["shape"] == [2, 768]
    assert found["block"]["weights"] == "random weights, seed 3"
    assert found["flow"][1] == "x, down ──+──▶ out 768 ──layernorm──▶ post_norm 768"
    share = next(f for f in found["facts"] if f["topic"] == "the FFN's share of a layer's parameters")
    assert (share["found"], share["said"], share["verdict"]) == ("66.6 %", "the majority", "depends")
    assert "facts" not in json_of("trace")


@pytest.mark.parametrize("style", ["csv", "md"])
def test_other_formats(stdout_of, style):
    out = stdout_of("trace", "--example", "notebook", "--format", style)
    assert ("| wrong | zeros that dropout makes: 6 of 33" in out) == (style == "md")


# --- the final layer --------------------------------------------------------------------------------------------------


def test_a_final_layer_from_dimensions(json_of):
    found = json_of("trace", "--d-model", "16", "--vocab", "50", "--tokens", "3", "--show", "all")
    steps = {s["name"]: s for s in found["steps"]}
    assert [(n, s["formula"], s["shape"]) for n, s in steps.items()] == [
        ("x", "x", [3, 16]), ("logits", "x · W + b", [3, 50]), ("probs", "softmax(logits)", [3, 50]),
    ]  # fmt: skip
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(16, 50), torch.randn(3, 16)
    probs = layer(x).softmax(-1).detach()
    assert torch.allclose(torch.tensor(steps["probs"]["values"]), probs, atol=1e-6)
    for row, one in zip(probs, found["sampling"], strict=True):
        assert one["argmax"] == int(row.argmax())
        assert [c["id"] for c in one["candidates"] if c["in_top_k"]] == row.topk(5).indices.tolist()
        assert one["top_p_count"] == int((row.sort(descending=True).values.double().cumsum(0) < 0.9).sum()) + 1
    block = found["block"]
    assert (block["d_ff"], block["activation"], block["vocab"], block["bias"]) == (None, None, 50, True)
    assert (found["ffn_input"], found["ffn_output"]) == ("x", "logits")
    assert not json_of("trace", "--d-model", "16", "--vocab", "50", "--no-bias")["block"]["bias"]


def test_double_precision_is_kept(json_of):
    probs = json_of("trace", "--d-model", "4", "--vocab", "6", "--tokens", "1", "--dtype", "fp64")["steps"][-1]
    assert probs["dtype"] == "float64"
    assert sum(probs["values"][0]) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize(
    ("arguments", "before", "bias"),
    [
        (["8x16:swiglu"], "down", False),
        (["8x16:gelu", "--residual"], "out", True),
        (["--d-model", "8", "--d-ff", "16", "-q"], "down", True),
        (["8x16:swiglu", "--experts", "4"], "experts", False),
        (["--tokens", "2"], "down", True),
    ],
)
def test_a_blocks_output_feeds_the_final_layer(json_of, arguments, before, bias):
    found = json_of("trace", *arguments, "--vocab", "9")
    logits, probs = found["steps"][-2:]
    assert logits["inputs"] == [before]
    assert logits["formula"] == f"{before} · W" + (" + b" if bias else "")
    assert probs["name"] == "probs"
    assert found["ffn_output"] != "logits"
    assert found["block"]["vocab"] == 9


def test_the_small_blocks_numbers_stay_before_a_final_layer(json_of):
    assert json_of("trace", "--vocab", "9")["steps"][:-2] == json_of("trace")["steps"]


def test_a_checkpoints_layer_feeds_a_drawn_final_layer(json_of, tmp_path):
    source = folder(tmp_path / "llama", LLAMA, tensors("llama"))
    alone, found = (json_of("trace", source, "--layer", "1", *more) for more in ((), ("--vocab", "9")))
    assert found["block"]["weights"] == "weights of decoder layer 1; the final layer's weights are random, seed 0"
    torch.manual_seed(0)
    weight = torch.nn.Linear(4, 9, bias=False).weight
    assert torch.allclose(
        torch.tensor(found["steps"][-2]["values"])[:, :4],
        (torch.tensor(found["steps"][-3]["values"]) @ weight.T)[:, :4].detach(),
        atol=1e-5,
    )
    names = [step["name"] for step in alone["steps"]]
    assert [step["name"] for step in found["steps"]] == [*names, "logits", "probs"]


def test_sets_are_marked(call):
    out = call("trace", "--d-model", "8", "--vocab", "20", "--tokens", "1", "--sample-top-k", "3", "--sample-top-p",
               "0.15", "--seed", "4")[1]  # fmt: skip
    assert re.search(r"probs of token 0: argmax (\d+), top 3 with mass 0\.\d{4}, top-p 0.15 needs 2 of 20", out)
    rows = out[out.index("probs of token 0") :].splitlines()[2:]
    assert [row.split()[-2:] for row in rows[:4]] == [["yes", "yes"], ["yes", "yes"], ["yes", "no"], ["no", "no"]]
    assert len(rows) == 8
    assert "more in the top-p set" not in out
    assert "enters the FFN" not in out


def test_what_is_left_of_a_set_is_said(call, json_of):
    asked_for = ("--d-model", "8", "--vocab", "20", "--tokens", "1")
    count = json_of("trace", *asked_for)["sampling"][0]["top_p_count"]
    assert count > 8
    assert call("trace", *asked_for)[1].endswith(
        f"\n  … {count - 8} more in the top-p set; --show {count} shows them\n"
    )
    assert "more in the top-p set" not in call("trace", *asked_for, "--show", str(count))[1]


def test_nothing_is_picked_from_what_is_no_number(call, json_of):
    arguments = ("4x8:gelu", "--vocab", "3", "--input", "nan,1,2,3,1,2,3,4")
    first, second = json_of("trace", *arguments, "-q")["sampling"]
    assert (first["argmax"], first["top_p_count"], first["candidates"]) == (None, None, [])
    assert second["argmax"] is not None
    out = call("trace", *arguments)[1]
    assert "probs of token 0: some values are NaN, so there is nothing to pick\n\nprobs of token 1: argmax" in out


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_a_drawn_mask_is_said_with_its_seed(call, json_of):
    out = call("trace", "4x8", "--dropout", "0.5", "--train", "--seed", "3")[1]
    assert "dropout is on, with a fixed mask (drawn, seed 3)\n" in out
    first, again, other = (
        json_of("trace", "4x8", "--dropout", "0.5", "--train", "--seed", seed)["steps"] for seed in ("3", "3", "4")
    )
    assert first == again != other
    assert json_of("trace", "--example", "notebook")["block"]["mask"] == "the notebook's"
    assert json_of("trace", "4x8", "--dropout", "0.5", "--eval")["block"]["mask"] is None
    assert json_of("trace", "4x8", "--dropout", "0.5", "--train")["block"]["mask"] == "drawn, seed 0"
    assert "dropout is on, with a fixed mask (the notebook's)" in call("trace", "--example", "notebook")[1]
    page = call("trace", "4x8", "--dropout", "0.5")[1]
    assert "fixed mask" not in page
    assert "eval mode: passes everything through" in page


@pytest.mark.parametrize("arguments", [["--example", "notebook"], ["4x8", "--vocab", "9"]])
def test_every_key_is_described(json_of, arguments):
    found = json_of("trace", *arguments)
    found.pop("aliases", None)
    assert keys(found) <= set(re.findall(r"`(\w+)`", keys_text("trace") + keys_text("")))


def test_a_texts_names_can_be_explained(json_of):
    (found,) = json_of("trace", "--example", "llama", "--explain", "H[0,1,3]", "-q")["explain"]
    assert (found["place"], found["op"]) == ("hidden[0,1,3]", "multiply")


def test_the_notebooks_block_without_its_dropout(call):
    """Its statements need the mask: with --eval they are not checked."""
    code, out, err = call("trace", "--example", "notebook", "--eval", "--json")
    answer = json.loads(out)
    assert (code, "facts" in answer) == (0, False)
    by_name = {step["name"]: step for step in answer["steps"]}
    assert by_name["dropout"]["values"] == by_name["act"]["values"]
    assert "are not checked" in err
