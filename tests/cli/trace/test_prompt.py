"""`ffn trace DIR --prompt`, `--layer all` and `--unembed` as a user asks them."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ffncli.cli.trace.layers_page import IN_CSV
from ffncli.models.source import load
from tests.oracles.checkpoints import expect_refusal
from tests.oracles.prompted import PROMPT, WORDS, built, give_tokenizer, made
from tests.test_docs import JSON_DOC, keys

pytestmark = pytest.mark.models

FAMILIES = {
    "llama": "1", "gpt2": "1", "bert": "1", "t5-gated-gelu": "decoder.1", "t5-relu": "encoder.0", "opt": "1",
    "mixtral": "1", "deepseek_v3": "1", "gpt_oss": "1", "gemma2": "1", "qwen3_moe": "2",
}  # fmt: skip


def source(name: str) -> str:
    return str(made(name).path)


def test_nothing_is_printed_that_other_packages_log(ffn):
    """torchao logs what it cannot load when transformers imports it."""
    done = ffn("trace", source("llama"), "--prompt", PROMPT, "--layer", "9")
    assert done.stderr.startswith("error: --layer 9 is out of range")
    done = ffn("experts", source("mixtral"), "--prompt", PROMPT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees_with_its_own_ffn(json_of, name):
    found = json_of("trace", source(name), "--prompt", PROMPT, "--layer", FAMILIES[name], notes=True)
    assert found["model_run"]["prompt"] == PROMPT
    assert found["model_run"]["agreement"]["relative_error"] <= 1e-6
    tokens = found["model_run"]["tokens"]
    assert found["steps"][0]["shape"] == [len(tokens), found["block"]["d_model"]]
    assert found["steps"][0]["op"] == "input"
    assert found["steps"][0]["name"] == found["ffn_input"]
    assert found["steps"][-1]["name"] == found["ffn_output"]


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
def test_every_format(stdout_of, style):
    out = stdout_of("trace", source("mixtral"), "--prompt", PROMPT, "--unembed", "--format", style)
    assert "\x1b" not in out


def test_rows_are_labelled_by_their_tokens(call):
    out = call("trace", source("llama"), "--prompt", PROMPT, "--position", "-1,0")[1]
    assert '2 tokens: 3 "sat", 0 "Hello"' in out
    assert '\n  3 "sat"    ' in out
    assert '\n  0 "Hello"  ' in out
    assert "against the model's own FFN: max error" in out or "matches the model's own FFN exactly" in out


def test_extremes_are_named_by_their_tokens(call, json_of):
    arguments = (source("mixtral"), "--prompt", PROMPT, "--position", "-1,0,1", "--expert", "all")
    out = call("trace", *arguments)[1]
    words = PROMPT.split()
    for step in json_of("trace", *arguments)["steps"]:
        rows = [(3, 0, 1)[row] for row in step["tokens"] or range(3)]
        row, unit = step["max_at"]
        place = f'at [{rows[row]} "{words[rows[row]]}", {unit}]'
        block = out[out.index(f"\n{step['name']} = " if step["inputs"] else f"\n{step['name']}  [") :]
        assert place in next(line for line in block.splitlines() if "  max " in line or line.startswith("  max "))
    assert all(len(line) <= 80 for line in out.splitlines() if line.startswith(("  min ", "  max ", "  mean ")))


def test_rows_inside_an_expert_keep_their_tokens(call, json_of):
    found = json_of("trace", source("mixtral"), "--prompt", PROMPT, "--expert", "all")
    inside = [step for step in found["steps"] if step["tokens"]]
    out = call("trace", source("mixtral"), "--prompt", PROMPT, "--expert", "all")[1]
    for step in inside:
        block = out[out.index(f"\n{step['name']} = ") :].splitlines()[2 : 2 + len(step["tokens"])]
        assert [int(line.split()[0]) for line in block] == step["tokens"]
        assert [line.split('"')[1] for line in block] == [PROMPT.split()[token] for token in step["tokens"]]


def test_the_token_of_a_unit_s_largest_value_has_its_text(call, json_of):
    arguments = (source("mixtral"), "--prompt", PROMPT, "--expert", "all", "--top-units", "2")
    out, words = call("trace", *arguments)[1], PROMPT.split()
    for step in json_of("trace", *arguments)["steps"]:
        for unit in (step["units"] or {"largest_norm": ()})["largest_norm"]:
            block = out[out.index(f"\n{step['name']}: the units") :]
            row = next(line for line in block.splitlines() if line.split()[:1] == [str(unit["unit"])])
            assert f'{unit["token"]} "{words[unit["token"]]}"' in row


def test_a_token_cannot_speak_to_the_terminal(call):
    out = call("trace", source("llama"), "--prompt", "Hello \x1b[31mred")[1]
    assert r'1 "\x1b[31mred"' in out
    assert "\x1b" not in out


def test_token_numbers_instead_of_a_prompt(call, json_of, tmp_path):
    bare = shutil.copytree(made("llama").path, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    found = json_of("trace", str(bare), "--input-ids", "3,5,6,7")
    with_texts = json_of("trace", source("llama"), "--prompt", PROMPT)
    assert found["steps"] == with_texts["steps"]
    assert [token["text"] for token in found["model_run"]["tokens"]] == [None] * 4
    assert (found["model_run"]["prompt"], found["model_run"]["tokens"][1]["id"]) == (None, 5)
    assert "4 tokens: 0 #3, 1 #5, 2 #6, 3 #7" in call("trace", str(bare), "--input-ids", "3 5,6, 7")[1]
    out = call("trace", str(bare), "--input-ids", ",".join("1" * 9))[1]
    assert "9 tokens: 0 #1, 1 #1, 2 #1, 3 #1 … 5 #1, 6 #1, 7 #1, 8 #1\n" in out  # the fifth is left out


def test_a_long_token_leaves_room_for_the_values(call, json_of, tmp_path):
    folder = shutil.copytree(made("llama").path, tmp_path / "model")
    give_tokenizer(folder, (*WORDS, "extraordinarily-long"))
    out = call("trace", str(folder), "--prompt", "Hello extraordinarily-long")[1]
    assert '\n  1 "extraordina…"  ' in out
    assert max(map(len, out.split("\nnorm")[1].splitlines())) <= 100
    found = json_of("trace", str(folder), "--prompt", "extraordinarily-long")
    assert found["model_run"]["tokens"][0]["text"] == "extraordinarily-long"


# --- routes -----------------------------------------------------------------------------------------------------------


def test_the_chosen_experts_are_named(call, json_of):
    found = json_of("trace", source("qwen3_moe"), "--prompt", PROMPT, "--show", "all", "--layer", "1")
    (route,) = [step for step in found["steps"] if step["op"] == "route"]
    for row in found["routes"]:
        weights = route["values"][row["token"]]
        assert row["weights"] == sorted((w for w in weights if w), reverse=True)
        assert [weights[e] for e in row["experts"]] == row["weights"]
        assert (len(row["experts"]), row["step"]) == (3, "route")
    assert [row["token"] for row in found["routes"]] == [0, 1, 2, 3]
    first = found["routes"][0]
    said = ", ".join(f"{e}: {w:.4f}" for e, w in zip(first["experts"], first["weights"], strict=True))
    assert f'0 "Hello"  {said}\n' in call("trace", source("qwen3_moe"), "--prompt", PROMPT, "--layer", "1")[1]


def test_a_softmax_over_a_vocabulary_is_no_route(json_of):
    assert "routes" not in json_of("trace", "8x16:relu", "--vocab", "9")


def test_what_was_captured_can_be_explained_and_saved(call, json_of, tmp_path):
    file = tmp_path / "trace.safetensors"
    arguments = ("--prompt", PROMPT, "--explain", "down[3,0]", "--save", str(file))
    found = json_of("trace", source("llama"), *arguments, "--show", "all", notes=True)
    assert found["explain"][0]["value"] == found["steps"][-1]["values"][3][0]
    assert call("compare", str(file), str(file))[0] == 0


def test_routes_without_a_prompt(json_of):
    found = json_of("trace", "8x16:swiglu", "--experts", "4", "--tokens", "100")
    assert [row["token"] for row in found["routes"]] == [0, 1, 2, 3, 96, 97, 98, 99]
    assert len(json_of("trace", "8x16:swiglu", "--experts", "4", "--tokens", "100", "--show", "all")["routes"]) == 100
    assert "routes" not in json_of("trace", "8x16:swiglu")


def test_experts_that_return_the_token_as_it_is(call, tmp_path):
    """LongCat-Flash's last experts are identities, which have no number of their own."""
    experts = built("longcat_flash", tmp_path, zero_expert_num=4).config.n_routed_experts
    (tmp_path / "model.safetensors").unlink()  # transformers gives the identities rows, published files do not
    moe = next(f"{group.stack}.{group.layers[0]}" for group in load(str(tmp_path)).model.groups if group.spec.moe)
    arguments = ("trace", str(tmp_path), "--tokens", "40", "--show", "all", "--layer", moe)
    chosen = {e for row in json.loads(call(*arguments, "--json")[1])["routes"] for e in row["experts"]}
    assert max(chosen) >= experts > min(chosen)
    out = call(*arguments)[1]
    assert f" identity {max(chosen)}: " in out
    assert f" {min(chosen)}: " in out


# --- all layers -------------------------------------------------------------------------------------------------------


def test_all_layers(call, json_of):
    found = json_of("trace", source("t5-gated-gelu"), "--prompt", PROMPT, "--layer", "all", notes=True)
    assert [(row["stack"], row["layer"]) for row in found["layers"]] == [
        ("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder", 1), ("decoder", 2),
    ]  # fmt: skip
    assert all(row["relative_error"] <= 1e-6 for row in found["layers"])
    assert [token["text"] for token in found["model"]["tokens"]["encoder"]] == PROMPT.split()
    code, out, err = call("trace", source("t5-gated-gelu"), "--prompt", PROMPT, "--layer", "all")
    assert (code, err) == (0, "note: the prompt goes to the encoder; the decoder gets only its start token\n")
    assert "\nencoder.1 " in out
    table = out[out.index("\nlayer ") : out.index("\n  zero %")]
    assert max(map(len, table.splitlines())) <= 80


def test_all_layers_as_csv(csv_of, json_of):
    asked = ("trace", source("deepseek_v3"), "--prompt", PROMPT, "--layer", "all")
    table, same = csv_of(*asked), json_of(*asked)["layers"]
    assert [float(row["input_norm"]) for row in table] == [row["input_norm"] for row in same]
    assert list(table[0]) == [*(name for name in same[0] if name != "routing"), *IN_CSV]
    places = [u for row in table for u in row["most_active"].split(";")]
    assert any(":" in place for place in places)
    assert len(table[0]["most_active"].split(";")) == 3


def test_all_layers_of_a_known_model(call, json_of):
    found = json_of("trace", "gpt2", "--d-model", "8", "--d-ff", "16", "--layer", "all", notes=True)
    assert len(found["layers"]) == 12
    assert found["layers"][0]["max_error"] is None
    assert found["model"]["tokens"] == {}
    out = call("trace", "gpt2", "--d-model", "8", "--d-ff", "16", "--layer", "all")[1]
    assert "error" not in out


def test_all_layers_without_a_model_say_on_what(call, json_of):
    """Random weights and a random input give figures that look like a model's."""
    assert "random weights" not in call("trace", source("llama"), "--layer", "all")[2]
    code, out, err = call("trace", "gpt2", "--d-model", "8", "--d-ff", "16", "--layer", "all", "--tokens", "3")
    assert code == 0
    assert "  input: randn, 3 tokens, the same for every layer\n" in out
    assert "random weights, seed 0, the same in all layers of one shape: no file contains" in err
    found = json_of("trace", source("llama"), "--layer", "all", "--input", "ones", "--tokens", "1")
    assert found["model"]["input"] == "ones, 1 token, the same for every layer"
    assert json_of("trace", source("llama"), "--layer", "all", "--prompt", PROMPT)["model"]["input"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--expert", "0"], "--expert contradicts --layer all; the option concerns one layer: give the layer's number"),
        (["--unembed"], "--unembed contradicts --layer all"),
        (["--train"], "--train contradicts --layer all"),
        (["--explain", "down[0,0]"], "--explain contradicts --layer all"),
        (["--save", "x.json"], "--save contradicts --layer all"),
        (["--vocab", "9"], "--vocab contradicts --layer all"),
    ],
)
def test_options_of_one_layer(call, arguments, said):
    expect_refusal(call("trace", source("mixtral"), "--layer", "all", *arguments), said)


@pytest.fixture
def broken(tmp_path):
    """One NaN and one Inf in a weight of layer 1."""
    folder = shutil.copytree(made("llama").path, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, :2] = torch.tensor([float("nan"), float("inf")])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("given", [[], ["--prompt", PROMPT]])
def test_what_is_not_finite_in_any_layer(call, csv_of, json_of, broken, given):
    first, second = json_of("trace", broken, "--layer", "all", *given, notes=True)["layers"]
    assert first["not_finite"] == []
    weight, step = second["not_finite"]
    assert weight == {"kind": "weight", "name": "up.weight", "nan": 1, "inf": 1}
    assert (step["kind"], step["name"]) == ("step", "up")
    assert step["nan"] + step["inf"] == 4  # one unit of four tokens
    code, out, err = call("trace", broken, "--layer", "all", *given)
    assert code == 0
    assert "note: decoder layer 1: weight up.weight has 1 NaN and 1 Inf\n" in err
    code, judged, err = call("trace", broken, "--layer", "all", "--fail-on-nonfinite", *given)
    assert (code, judged) == (1, out)
    assert "error: not finite: decoder layer 1: weight up.weight has 1 NaN and 1 Inf; decoder layer 1: 'up'" in err
    table = csv_of("trace", broken, "--layer", "all", *given, notes=True)
    assert [row["not_finite"] for row in table] == ["", "weight up.weight;step up"]


def test_all_layers_are_finite(call):
    assert call("trace", source("llama"), "--layer", "all", "--fail-on-nonfinite")[::2] == (0, "")


def test_as_many_active_units_as_asked_for(call, json_of):
    found = json_of("trace", source("llama"), "--layer", "all")["layers"]
    out = call("trace", source("llama"), "--layer", "all", "--top-units", "3")[1]
    for row in found:
        assert f"  {', '.join(str(unit['unit']) for unit in row['most_active'])}\n" in out
    assert "most active: the units with" in out


# --- unembedding ------------------------------------------------------------------------------------------------------


def test_the_output_at_the_last_position_is_unembedded(call, json_of):
    found = json_of("trace", source("llama"), "--prompt", PROMPT, "--unembed")["unembed"]
    assert [(row["row"], row["neuron"], row["sign"], len(row["promoted"])) for row in found] == [(3, None, None, 10)]
    last = json_of("trace", source("llama"), "--prompt", PROMPT, "--unembed", "--position", "-1", "--top-tokens", "3")
    ids = [t["id"] for t in last["unembed"][0]["promoted"]]
    assert ids == [t["id"] for t in found[0]["promoted"]][:3]
    some = json_of("trace", source("llama"), "--prompt", PROMPT, "--unembed", "--position", "0,3", "--top-tokens", "3")
    assert [row["row"] for row in some["unembed"]] == [0, 1]
    assert [t["id"] for t in some["unembed"][1]["promoted"]] == ids
    out = call("trace", source("llama"), "--prompt", PROMPT, "--unembed")[1]
    assert re.search(r'^after token 3 "sat": argmax \S+$', out, re.M)
    assert "normalised alone, then as a part of the residual stream" in out


@pytest.mark.parametrize("more", [(), ("--neuron", "7")])
def test_the_tokens_come_without_the_steps_unless_these_are_asked_for(call, json_of, more):
    asked = ("trace", source("gpt2"), "--layer", "0", "--unembed", *more)
    short = call(*asked)[1]
    names = [step["name"] for step in json_of("trace", *asked[1:])["steps"]]
    assert "argmax" in short
    assert short.endswith("\n  -v also shows the steps\n")
    assert not [name for name in names if re.search(rf"^{name}( = |  )", short, re.M)]
    for option in (("-v",), ("--show", "2"), ("--top-units", "1")):
        long = call(*asked, *option)[1]
        assert [name for name in names if re.search(rf"^{name}( = |  )", long, re.M)] == names
        assert long.index(f"\n{names[-1]} = ") < long.index("\nunembed  ")
        assert "-v shows" not in long


def test_unembedding_is_transformers_own(json_of):
    found = json_of("trace", source("gpt2"), "--prompt", PROMPT, "--layer", "0", "--unembed", "--show", "all")
    down = torch.tensor(found["steps"][-1]["values"][-1])
    model = made("gpt2").model
    with torch.no_grad():
        shares = model.lm_head(model.transformer.ln_f(down)).softmax(-1)
    best = found["unembed"][0]["promoted"]
    assert [t["id"] for t in best] == shares.argsort(descending=True)[:10].tolist()
    assert [t["probability"] for t in best] == pytest.approx(shares[[t["id"] for t in best]].tolist(), rel=1e-4)


def test_a_branch_norm_is_gone_through(json_of):
    found = json_of("trace", source("gemma2"), "--prompt", PROMPT, "--unembed", "--show", "all", "--top-tokens", "60")
    model = made("gemma2").model
    with torch.no_grad():
        down = torch.tensor(found["steps"][-1]["values"][-1])
        added = model.model.layers[0].post_feedforward_layernorm(down)
        logits = 30 * torch.tanh(model.lm_head(model.model.norm(added)) / 30)
    assert [t["id"] for t in found["unembed"][0]["promoted"]] == logits.argsort(descending=True).tolist()


def test_the_sets_of_what_is_promoted(call, json_of):
    arguments = (source("gpt2"), "--prompt", PROMPT, "--unembed", "--sample-top-k", "3", "--sample-top-p", "0.5")
    found = json_of("trace", *arguments, "--show", "all")
    model = made("gpt2").model
    with torch.no_grad():
        down = torch.tensor(found["steps"][-1]["values"][-1])
        shares = model.lm_head(model.transformer.ln_f(down)).double().softmax(-1)
    mass = shares.sort(descending=True).values.cumsum(0)
    needed = int((mass < 0.5).sum()) + 1
    (row,) = found["unembed"]
    assert (row["argmax"], row["top_k"], row["top_p"], row["top_p_count"]) == (int(shares.argmax()), 3, 0.5, needed)
    assert row["top_k_mass"] == pytest.approx(float(shares.topk(3).values.sum()), rel=1e-4)
    assert row["top_p_mass"] == pytest.approx(float(mass[needed - 1]), rel=1e-4)
    assert [t["cumulative"] for t in row["promoted"]] == pytest.approx(mass[:10].tolist(), rel=1e-4)
    assert [t["in_top_k"] for t in row["promoted"]] == [True] * 3 + [False] * 7
    assert [t["in_top_p"] for t in row["promoted"]] == [True] * needed + [False] * (10 - needed)

    table = call("trace", *arguments)[1].partition("after token")[2].splitlines()
    assert table[1].split(maxsplit=5)[-1] == "top 3  top-p 0.5"
    assert [line.split()[-2:] for line in table[2:12]] == [
        ["yes" if at < 3 else "no", "yes" if at < needed else "no"] for at in range(10)
    ]
    three, half = float(mass[2]), float(mass[needed - 1])
    assert table[12] == f"  top 3 with mass {three:.4f}, top-p 0.5 needs {needed} of 60 with mass {half:.4f}"
    words = (
        "suppressed: ",
        'after token 3 "sat", divided by the residual stream\'s RMS ',
        "promoted: ",
        "suppressed: ",
    )
    assert all(line.startswith(f"  {start}") for line, start in zip(table[13:], words, strict=False))
    assert table[17:] == ["  -v also shows the steps"]
    assert max(map(len, table)) <= 80


def test_what_is_left_of_a_set_is_said(call, json_of):
    """--top-tokens says how many exactly; without it the whole top-k set is listed."""
    asked = (source("gpt2"), "--layer", "1", "--unembed", "--neuron", "7")
    row = json_of("trace", *asked)["unembed"][0]
    assert (row["top_k"], row["top_p"], len(row["promoted"])) == (5, 0.9, 10)
    count = row["top_p_count"]
    out = call("trace", *asked)[1]
    assert f"\n  … {count - 10} more in the top-p set; --top-tokens {count} shows them\n" in out
    assert f"\n  … {count - 2} more in" in call("trace", *asked, "--top-tokens", "2")[1]
    assert f"; --top-tokens {count} " not in call("trace", *asked, "--top-tokens", str(count))[1]
    assert len(json_of("trace", *asked, "--sample-top-k", "13")["unembed"][0]["promoted"]) == 13
    assert len(json_of("trace", *asked, "--sample-top-k", "13", "--top-tokens", "4")["unembed"][0]["promoted"]) == 4


def test_nothing_is_promoted_by_what_is_no_number(call, json_of):
    asked = (source("gpt2"), "--input", "nan" + ",1" * 15, "--unembed")
    (row,) = json_of("trace", *asked, notes=True)["unembed"]
    assert (row["argmax"], row["top_k_mass"], row["top_p_count"], row["promoted"]) == (None, None, None, [])
    assert "\nafter token 0: some values are NaN, so there is nothing to pick\n" in call("trace", *asked)[1]


def test_a_hidden_unit(json_of):
    asked = (source("gpt2"), "--layer", "1", "--unembed", "--neuron", "7", "--top-tokens", "60")
    found = json_of("trace", *asked)["unembed"]
    assert [(row["neuron"], row["sign"], row["row"]) for row in found] == [(7, 1, None), (7, -1, None)]
    model = made("gpt2").model
    column = model.transformer.h[1].mlp.c_proj.weight[7]  # Conv1D: [in, out]
    with torch.no_grad():
        for row, sign in zip(found, (1, -1), strict=True):
            logits = model.lm_head(model.transformer.ln_f(sign * column))
            assert [t["id"] for t in row["promoted"]] == logits.argsort(descending=True).tolist()
    assert sum(t["probability"] for t in found[0]["promoted"]) == pytest.approx(1)


def test_a_hidden_unit_of_an_expert(call, json_of):
    asked = (source("mixtral"), "--layer", "1", "--unembed", "--neuron", "7", "--expert", "1,3")
    found = json_of("trace", *asked)["unembed"]
    assert [(row["expert"], row["sign"]) for row in found] == [(1, 1), (1, -1), (3, 1), (3, -1)]
    model = made("mixtral").model
    column = model.model.layers[1].mlp.experts.down_proj[3][:, 7]
    with torch.no_grad():
        best = model.lm_head(model.model.norm(column)).argsort(descending=True)[:10].tolist()
    assert [t["id"] for t in found[2]["promoted"]] == best
    assert (
        "unit 7 of expert 3, negative"
        in call("trace", source("mixtral"), "--layer", "1", "--unembed", "--neuron", "7", "--expert", "3")[1]
    )


def test_unembedding_without_a_prompt(json_of):
    asked = (source("llama"), "--input", "ones", "--batch", "2", "--seq-len", "3", "--unembed")
    found = json_of("trace", *asked)["unembed"]
    assert [row["row"] for row in found] == [5]
    found = json_of("trace", source("llama"), "--tokens", "3", "--unembed", "--position", "0:2")["unembed"]
    assert [row["row"] for row in found] == [0, 1]


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("llama", ["--prompt", ""], "--prompt is empty; give some text, or token ids as --input-ids"),
        ("llama", ["--prompt", "Hello", "--input-ids", "1"], "--prompt contradicts --input-ids; give one"),
        ("llama", ["--prompt", "Hello", "--position", "1"], "--position 1 is out of range; the one token has"),
        ("llama", ["--prompt", "Hello", "--position", "x"], "--position must be a number"),
        ("llama", ["--position", "1"], "--position needs --prompt, --input-ids or --unembed"),
        ("llama", ["--input-ids", "1,60"], "token 60 (position 1) is out of range; the model has 60 tokens"),
        ("llama", ["--input-ids", "1,x"], "--input-ids must be token ids such as 1,2,3, got '1,x'"),
        ("llama", ["--input-ids", ""], "--input-ids must be token ids such as 1,2,3, got ''"),
        ("gpt2", ["--input-ids", ",".join("1" * 33)], "33 tokens, but gpt2 has 32 positions; shorten it"),
        ("roberta", ["--input-ids", ",".join("4" * 31)], "the prompt has 31 tokens, but roberta has 30 positions"),
        ("llama", ["--prompt", "Hello", "--layer", "2"], "--layer 2 is out of range; "),
        ("t5-relu", ["--prompt", "Hello", "--layer", "1"], "--layer '1' is ambiguous; write encoder.1 or decoder.1"),
        ("llama", ["--prompt", "Hello", "--input", "ones"], "--input contradicts --prompt; the model computes"),
        ("llama", ["--input-ids", "1", "--tokens", "3"], "--tokens contradicts --input-ids"),
        ("llama", ["--prompt", "Hello", "--d-ff", "3"], "--d-ff contradicts --prompt; the model runs unchanged"),
        ("llama", ["--prompt", "Hello", "--train"], "--train contradicts --prompt"),
        ("llama", ["--prompt", "Hello", "--vocab", "9"], "--vocab contradicts --prompt; --unembed uses"),
        ("llama", ["--neuron", "1"], "--neuron needs --unembed"),
        ("llama", ["--top-tokens", "1"], "--top-tokens needs --unembed"),
        ("llama", ["--prompt", "Hello", "--sample-top-k", "3"], "--sample-top-k needs --vocab, --unembed or --example"),
        ("llama", ["--unembed", "--sample-top-k", "61"], "--sample-top-k 61 exceeds the vocabulary of 60"),
        ("llama", ["--unembed", "--neuron", "40"], "--neuron 40 is out of range; d_ff is 40: 0 to 39"),
        ("mixtral", ["--unembed", "--neuron", "1"], "--neuron 1: each of 4 experts has this unit; add --expert 0"),
        ("t5-relu", ["--unembed", "--layer", "encoder.0"], "'s encoder; a decoder layer's output can be unembedded"),
        ("vit", ["--input-ids", "1"], "vit takes pixel_values, not text"),
        ("vit", ["--unembed"], "transformers has no language-model head for vit"),
        ("whisper", ["--prompt", "Hello", "--layer", "encoder.0"], "not text; its decoder layers accept text"),
    ],
)  # fmt: skip
def test_what_is_refused(call, name, arguments, said):
    err = expect_refusal(call("trace", source(name), *arguments), said)
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("typed", ["gpt2", "8x16", "llama-2-7b"])
def test_dimensions_cannot_be_run(call, typed):
    for option in (["--prompt", "Hello"], ["--unembed"]):
        code, _, err = call("trace", typed, *option)
        assert (code, err.count("\n")) == (2, 1)
        assert f"error: {option[0]}: '{typed}' is not a directory with weights; give a directory with config" in err
    assert "error: --prompt: the block is not a directory with weights" in call("trace", "--prompt", "Hello")[2]


def test_a_directory_that_has_a_known_models_name(call, tmp_path, monkeypatch):
    shutil.copytree(made("gpt2").path, tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    err = expect_refusal(call("trace", "gpt2", "--prompt", "Hello"))
    assert err == "error: --prompt: 'gpt2' is the known model, which has no weights; the directory is ./gpt2\n"
    assert call("trace", "./gpt2", "--prompt", "Hello")[0] == 0


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(made("llama").path, tmp_path / "model")


def rewrite(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **values}), "utf-8")


def expect_refused(call, folder: Path, code: int, said: str) -> None:
    """One line without the notes, which speak of the checkpoint."""
    expect_refusal(call("trace", str(folder), "--prompt", "Hello", "-q"), said, code=code)


def test_no_tokenizer(call, copied):
    (copied / "tokenizer.json").unlink()
    expect_refused(call, copied, 2, "/model has no tokenizer (tokenizer.json); --input-ids accepts token ids")


def test_an_architecture_that_transformers_does_not_know(call, copied):
    rewrite(copied, model_type="from-tomorrow")
    expect_refused(call, copied, 3, "does not know the model_type 'from-tomorrow'; `ffn trace` without a prompt may")


def test_remote_code_alone(call, copied):
    rewrite(copied, model_type="from-tomorrow", auto_map={"AutoModel": "evil.Model"})
    (copied / "evil.py").write_text("raise SystemExit(9)")
    expect_refused(call, copied, 2, "'from-tomorrow' needs custom code, which is never run")


def test_an_architecture_that_transformers_cannot_run(call, monkeypatch):
    from transformers import LlamaModel

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("needs a picture\nand a second line")

    monkeypatch.setattr(LlamaModel, "forward", fail)
    code, _, err = call("trace", source("llama"), "--prompt", "Hello")
    said = "ValueError: needs a picture and a second line"
    assert (code, err) == (3, f"error: transformers cannot run llama on this prompt: {said}\n")


def test_the_reason_that_a_config_is_refused_is_in_the_second_line(call, copied):
    rewrite(copied, num_attention_heads=7, num_key_value_heads=7, head_dim=None)
    expect_refused(call, copied, 2, "is not a multiple of the number of attention heads (7)")


def test_a_config_of_another_model(call, copied):
    rewrite(copied, vocab_size=7)
    expect_refused(
        call,
        copied,
        2,
        "tensor 'model.embed_tokens.weight' has shape [60, 16], but the model needs [7, 16]; config.json",
    )


def test_pickled_weights(call, copied):
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    expect_refused(call, copied, 2, "/model has only pickled weights, which are never loaded; use safetensors")


def test_weights_that_are_not_read_are_named_before_the_model_runs(call, copied):
    stored = load_file(copied / "model.safetensors")
    for name in [n for n in stored if n.endswith("_proj.weight") and ".mlp." in n]:
        stored[name] = stored[name].to(torch.int8)
        stored[name.removesuffix("weight") + "SCB"] = torch.ones(len(stored[name]))
    save_file(stored, copied / "model.safetensors")
    rewrite(copied, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    for more in ([], ["--layer", "all"]):
        err = expect_refusal(
            call("trace", str(copied), "--prompt", "Hello", *more), "is packed as bnb-int8, which is not supported here"
        )
        assert "transformers" not in err


def test_eight_bit_weights_agree(json_of, copied):
    stored = load_file(copied / "model.safetensors")
    for name in [n for n in stored if n.endswith("_proj.weight")]:
        scale = stored[name].abs().max() / 448
        stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(stored, copied / "model.safetensors")
    rewrite(copied, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"})
    found = json_of("trace", str(copied), "--prompt", PROMPT, "--layer", "1")
    assert found["model_run"]["agreement"]["relative_error"] <= 1e-6
    assert "fp8" in found["block"]["weights"]


def test_without_transformers(call, monkeypatch):
    for name in [n for n in sys.modules if n == "transformers" or n.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = call("trace", source("llama"), "--prompt", "Hello")
    assert (code, err) == (
        3,
        "error: running a model needs the transformers library; in a clone of ffn: pip install -e '.[models]'\n",
    )


def test_a_truncated_file_is_one_line(call, copied):
    raw = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(raw[:-10])
    expect_refused(call, copied, 2, "is truncated")


def test_a_config_that_transformers_refuses(call, copied):
    rewrite(copied, rope_parameters="many")
    expect_refused(call, copied, 2, "transformers rejects it")


def test_every_key_is_described(json_of):
    documented = set(re.findall(r"`(\w+)`", JSON_DOC))
    for arguments in (
        ["--unembed"],
        ["--unembed", "--neuron", "1", "--expert", "0,1,2,3"],
        ["--promotes", "cat"],
        ["--layer", "all"],
    ):
        found = json_of("trace", source("mixtral"), "--prompt", PROMPT, *arguments)
        assert keys(found) <= documented
