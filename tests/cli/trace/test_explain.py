"""`ffn trace --explain` as a user asks it."""

import json
from dataclasses import replace

import pytest

from ffncli.run.engine.prepare import Token
from ffncli.run.trace import session
from tests.oracles.checkpoints import GPT2, MIXTRAL, folder, tensors

OWN = """
from torch import nn
class Mine(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 8), nn.Linear(8, d_model)
    def forward(self, x):
        return self.down(self.up(x).relu())
"""


def number(found: dict, at: list[int]):
    values = found["values"]
    for i in at:
        values = values[i]
    return values


def test_it_ends_with_the_printed_value_exactly(stdout_of):
    out = stdout_of("trace", "--example", "notebook", "--explain", "up[0,0,5]")
    last = out.splitlines()[-1]
    assert "0,0  -2.2255  -0.1673   1.5966  -1.5649  -0.1716   0.4000" in out
    assert last == "  up[0,0,5] = 0.4000, in full 0.39999404549598694"
    assert "x[0,0,2]  2  up.weight[5,2]   W1[2,5]          0.23123    0.46246" in out
    assert "x[0,0,3]  3  up.weight[5,3]   W1[3,5]        -0.020821  -0.062462" in out
    assert "bias         up.bias[5]       b1[5]                      -0.23123" in out


def test_long_names_move_into_the_heading_of_the_table(call):
    out = call(
        "trace", "40x4000:swiglu", "--tokens", "1000", "--seed", "1", "--show", "1", "--explain", "down[999,39]"
    )[1]
    table = out[out.index("down[999,39] in down") :].splitlines()
    assert table[2].split() == ["hidden", "x", "down.weight", "W2", "w", "x", "·", "w"]
    assert all(len(line) <= 80 for line in table[2:-2])
    cells = table[3].split()
    feature = cells[0].removeprefix("[999,").removesuffix("]")
    assert cells[2:4] == [f"[39,{feature}]", f"[{feature},39]"]


def test_a_number_among_small_ones_is_printed_as_the_block_prints_it(call):
    out = call("trace", "--input", "0.00001,1,2,3", "--explain", "x[0,0]")[1]
    assert out.splitlines()[-1] == "  x[0,0] = 0.0000, in full 9.999999747378752e-06"


@pytest.mark.parametrize(
    "place", ["up[0,0,5]", "up:0,0,5", "up[ 0, 0, 5 ]", "up[-2,-3,-3]", " up[0,0,5] ", "up:-2,0,5", "up[0,0,-3]"]
)
def test_spellings_of_a_place(json_of, place):
    assert json_of("trace", "--example", "notebook", "--explain", place)["explain"][0]["place"] == "up[0,0,5]"


def test_several_places_and_several_options(json_of):
    asked = ("--example", "notebook", "--explain", "up[0,0,5],down[0,0,1]", "--explain", "x[1,2,3]")
    found = json_of("trace", *asked)["explain"]
    assert [one["place"] for one in found] == ["up[0,0,5]", "down[0,0,1]", "x[1,2,3]"]


def test_values_are_the_traces_own(call):
    code, out, _ = call(
        "trace", "8x16:swiglu", "--experts", "4", "--shared-experts", "1", "--norm", "rmsnorm", "--residual",
        "--show", "all", "--expert", "all", "--json", *(a for n in ("norm", "router", "route", "experts", "moe", "out",
        "shared.gate", "shared.act", "shared.hidden", "experts.1.gate", "experts.1.act", "experts.1.hidden", "x")
        for a in ("--explain", f"{n}[0,3]")),
    )  # fmt: skip
    found = json.loads(out)
    steps = {step["name"]: step for step in found["steps"]}
    assert (code, len(found["explain"])) == (0, 13)
    for one in found["explain"]:
        assert one["value"] == number(steps[one["name"]], one["index"])
        assert one["op"] == steps[one["name"]]["op"]
        inner = one["name"].startswith("experts.")
        assert one["token"] == (steps[one["name"]]["tokens"][0] if inner else None)


def test_terms_and_depth(json_of):
    two = json_of("trace", "--example", "notebook", "--explain", "down[0,0,1]", "--terms", "2")["explain"]
    assert [(len(one["terms"]), one["others"]) for one in two] == [(2, 6)]
    chain = json_of("trace", "--example", "notebook", "--explain", "down[0,0,1]", "--depth", "9")["explain"]
    assert [one["name"] for one in chain] == ["down", "dropout", "act", "up", "x"]
    assert [one["origin"] for one in chain[:-1]] == [one["place"] for one in chain[1:]]


def test_inside_an_expert_that_is_not_shown(stdout_of):
    out = stdout_of("trace", "8x16:swiglu", "--experts", "4", "--explain", "experts[1].gate[0,5]")
    assert "experts.1.gate[0,5] in experts.1.gate = x · W1  token " in out
    assert "  gate.weight[1,5," in out
    assert "experts.1.gate = x" not in out.split("experts.1.gate[0,5] in")[0]


def test_any_source(call, json_of, tmp_path):
    gpt2 = folder(tmp_path / "gpt2", GPT2, tensors("gpt2"))
    (one,) = json_of("trace", gpt2, "--layer", "1", "--explain", "up[0,5]")["explain"]
    stored = tensors("gpt2")["transformer.h.1.mlp.c_fc.weight"]
    for term in one["terms"]:
        x, w = term["factors"]
        out, into = (int(i) for i in w["place"][len("up.weight[") : -1].split(","))
        assert (w["value"], out, w["symbol"]) == (stored[into, 5].item(), 5, f"W1[{into},5]")
        assert x["place"] == f"norm[0,{into}]"
    mixtral = folder(tmp_path / "mixtral", MIXTRAL, tensors("mixtral"))
    assert json_of("trace", mixtral, "--explain", "experts[0,1]")["explain"][0]["terms"]
    (tmp_path / "own.py").write_text(OWN)
    code, out, err = call("trace", f"{tmp_path}/own.py:Mine", "--d-model", "4", "--explain", "up[0,1]", "-q", "--json")
    assert (code, json.loads(out)["explain"][0]["place"]) == (0, "up[0,1]"), err


def test_a_number_that_is_none(json_of, stdout_of):
    out = stdout_of("trace", "--input", "1,nan,inf,2", "--explain", "up[0,3],act[0,3]", notes=True)
    assert out.splitlines()[-1] == "  act[0,3] = NaN, in full nan"
    (one,) = json_of("trace", "--input", "1,nan,inf,2", "--explain", "up[0,3]", "-q")["explain"]
    assert (one["value"], one["computed"], one["terms"][0]["factors"][0]["place"]) == (None, None, "x[0,1]")


def test_a_token_with_a_text_is_named(call, monkeypatch):
    plain = session.prepare
    texts = (*"Hello, how are you ?".split(), "\x1b[2J")
    tokens = tuple(Token(position, 0, text) for position, text in enumerate(texts))
    monkeypatch.setattr(session, "prepare", lambda *asked, **named: replace(plain(*asked, **named), tokens=tokens))
    out = call("trace", "4x8", "--batch", "2", "--seq-len", "3", "--explain", "up[1,0,5]", "--explain", "up[1,2,0]")[1]
    assert "up[1,0,5] in up = x · W1 + b1  token 3 'you'\n" in out
    assert "up[1,2,0] in up = x · W1 + b1  token 5 '\\x1b[2J'\n" in out
    inner = call("trace", "8x16:swiglu", "--experts", "2", "--explain", "experts.1.up[2,5]")[1]
    assert "in experts.1.up = x · W3  token 2 'are'\n" in inner


def test_the_final_layers_choices_are_ids_and_no_experts(call):
    out = call("trace", "8x16:gelu", "--vocab", "12", "--explain", "probs[0,1]")[1]
    assert "\nid  logit" in out
    assert "expert" not in out
