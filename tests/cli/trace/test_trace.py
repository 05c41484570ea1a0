"""`ffn trace` as a user asks it."""

import json
import re
from dataclasses import asdict

import pytest
import torch

import ffncli
from ffncli.run.engine import prepare as prepare_module
from ffncli.show.text import width
from tests.oracles.checkpoints import LLAMA, folder, tensors


def steps(call, *arguments: str) -> dict[str, dict]:
    code, out, err = call("trace", *arguments, "--format", "json")
    assert (code, err) == (0, "")
    return {step["name"]: step for step in json.loads(out)["steps"]}


def test_without_arguments_it_runs_a_small_block_and_shows_its_dimensions_first(call, stdout_of):
    """The same sums by torch's own layers, drawn in the same order from the same seed."""
    out = stdout_of("trace")
    assert out.startswith(
        "4x8:relu  random weights, seed 0\n"
        "  d_model 4, d_ff 8, relu, plain, bias\n"
        "  x 4 ──W1──▶ up 8 ──relu──▶ act 8 ──W2──▶ down 4\n"
        "  a small demo block; `ffn trace SOURCE` runs yours\n"
        "\nx  [2, 4] float32, enters the FFN\n"
        "  0  0.0000  1.0000  2.0000  3.0000\n"
        "  1  4.0000  5.0000  6.0000  7.0000\n"
    )
    assert "notebook" not in out
    assert "dropout" not in out
    torch.manual_seed(0)
    up, down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    with torch.no_grad():
        hidden = up(torch.arange(8.0).reshape(2, 4))
        expected = {"up": hidden, "act": hidden.relu(), "down": down(hidden.relu())}
    found = steps(call)
    assert list(found) == ["x", *expected]
    for name, tensor in expected.items():
        assert torch.allclose(torch.tensor(found[name]["values"]), tensor, atol=1e-6), name


def test_the_small_block_may_be_changed(call):
    assert steps(call, "--activation", "gelu")["act"]["formula"] == "gelu(up)"
    assert steps(call, "--input", "ones", "--tokens", "1")["x"]["shape"] == [1, 4]
    code, out, err = call("trace", "--d-ff", "16", "--json")
    assert (code, err, json.loads(out)["block"]["name"]) == (0, "", "4x16:relu")
    gated = steps(call, "--activation", "swiglu", "--norm", "rmsnorm", "--residual")
    assert {"norm", "gate", "out"} <= set(gated)
    assert gated["gate"]["params"] == 4 * 8  # a gated block has no biases unless they are chosen
    dropped = steps(call, "--dropout", "0.5", "--train")["dropout"]
    assert 0 < dropped["dropped"] <= dropped["live"] == 6
    assert steps(call, "--dropout", "0.5")["dropout"]["dropped"] is None  # eval mode


def test_the_head_says_moe_and_norm(call):
    """A mixture of experts is no plain block: its head says how many there are and how many a token uses."""
    small = ("--d-model", "4", "--d-ff", "8")
    out = call("trace", "mixtral-8x7b", *small)[1]
    assert "  d_model 4, d_ff 8, silu, gated, no bias, rmsnorm, MoE of 8 experts, top 2\n" in out
    found = block(call, "mixtral-8x7b", *small)
    assert (found["experts"], found["top_k"], found["shared_experts"], found["norm"]) == (8, 2, 0, "rmsnorm")
    out = call("trace", "4x8", "--experts", "4", "--shared-experts", "1")[1]
    assert "  d_model 4, d_ff 8, relu, plain, bias, MoE of 4 experts + 1 shared, top 2\n" in out
    found = block(call, "4x8")
    assert (found["experts"], found["top_k"], found["shared_experts"], found["norm"]) == (0, 0, 0, None)


def test_random_weights_are_not_taken_for_a_models(call, tmp_path):
    out = call("trace", "gpt2", "--d-model", "4", "--d-ff", "8")[1]
    assert "  random weights, not gpt2's: a model directory or a GGUF file has the real ones\n" in out
    assert block(call, "gpt2", "--d-model", "4", "--d-ff", "8")["random_weights"] is True
    source = folder(tmp_path / "llama", LLAMA, tensors("llama"))
    assert "random weights, not" not in call("trace", source)[1]
    assert block(call, source)["random_weights"] is False
    assert "random weights, not" not in call("trace", "4x8")[1]  # nobody's


def test_the_evidence_cites_the_layer(call, tmp_path):
    source = folder(tmp_path / "llama", LLAMA, tensors("llama"))
    for layer in ("0", "1"):
        cited = next(text for text in block(call, source, "--layer", layer)["evidence"] if "tensor" in text)
        assert cited == f"gated: tensor 'model.layers.{layer}.mlp.gate_proj.weight'"


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        (["512x64:gelu"], [4, 512]),
        (["512x64:gelu", "--tokens", "2"], [2, 512]),
        (["512x64:gelu", "--batch", "2", "--seq-len", "3"], [2, 3, 512]),
        (["512x64:gelu", "--seq-len", "3"], [1, 3, 512]),
        (["--d-model", "8", "--d-ff", "4x", "--activation", "relu", "--bias", "--batch", "3"], [3, 1, 8]),
    ],
)
def test_shapes(call, arguments, shape):
    assert steps(call, *arguments)["x"]["shape"] == shape


def test_show_and_digits(call):
    assert steps(call, "64x64:relu", "--show", "2")["up"]["values_index"] == [[0, 3], [0, 63]]
    everything = steps(call, "64x64:relu", "--show", "all")["up"]
    assert [len(row) for row in everything["values"]] == [64] * 4
    assert "-1.98   1.07" in call("trace", "--digits", "2")[1]


def test_threads_do_not_change_the_answer(call):
    assert call("trace", "64x64:relu", "--threads", "1", "--json") == call("trace", "64x64:relu", "--json")


def test_parallel_blocks_say_that_attention_is_drawn(call):
    code, out, err = call("trace", "palm-540b", "--d-model", "8", "--d-ff", "16")
    assert code == 0
    assert "attention" in out
    assert err == "note: 'attention', the output of the layer's other branch, is random\n"


def test_csv_has_a_row_per_step(csv_of):
    rows = csv_of("trace")
    assert [row["name"] for row in rows] == ["x", "up", "act", "down"]
    assert (rows[1]["negatives"], rows[2]["zeros"], rows[1]["shape"]) == ("10", "10", "2;8")


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
def test_every_format_of_a_moe(stdout_of, style):
    out = stdout_of("trace", "8x16:swiglu", "--experts", "4", "--expert", "all", "--format", style)
    assert "experts" in out
    assert "\x1b" not in out


def test_not_a_number_is_null(call):
    code, out, err = call("trace", "4x8:relu", "--input", "nan,inf,1,2", "--json")
    found = {step["name"]: step for step in json.loads(out)["steps"]}
    assert code == 0
    assert err.splitlines() == [
        "note: input x has 1 NaN and 1 Inf",
        "note: 'up' is the first step that is not finite, with 8 NaN",
    ]
    assert found["x"]["values"] == [[None, None, 1.0, 2.0]]
    assert (found["x"]["nan"], found["x"]["inf"], found["up"]["nan"]) == (1, 1, 8)
    assert found["up"]["mean"] is None
    assert "NaN" in call("trace", "4x8:relu", "--input", "nan,inf,1,2")[1]


def test_a_step_inside_an_expert_names_what_it_reads(call):
    found = steps(call, "8x16:swiglu", "--experts", "2", "--top-k", "2", "--norm", "rmsnorm", "--expert", "1")
    gate = found["experts.1.gate"]
    assert (gate["inputs"], gate["formula"], gate["tokens"]) == (["norm"], "norm · W1", [0, 1, 2, 3])
    assert found["experts.1.act"]["inputs"] == ["experts.1.gate"]


def test_an_expert_without_tokens_is_said(call):
    code, _, err = call("trace", "4x8:swiglu", "--experts", "64", "--tokens", "1", "--top-k", "1", "--expert", "0,1,2")
    assert code == 0
    assert err.startswith("note: no token is routed to expert ")
    assert call("trace", "4x8:relu", "--expert", "0")[0] == 2
    assert "experts 0 to 3" in call("trace", "4x8:relu", "--experts", "4", "--expert", "4")[2]


def test_rows_of_an_expert_are_labelled_by_token(call):
    out = call("trace", "4x8:swiglu", "--experts", "4", "--top-k", "1", "--tokens", "6", "--expert", "all", "--json")[1]
    (one, *_) = [s for s in json.loads(out)["steps"] if s["tokens"] and s["tokens"][0] > 0]
    text = call("trace", "4x8:swiglu", "--experts", "4", "--top-k", "1", "--tokens", "6", "--expert", "all")[1]
    block = text[text.index(f"\n{one['name']} = ") + 1 :].splitlines()
    assert [int(line.split()[0]) for line in block[1 : 1 + len(one["tokens"])]] == one["tokens"]


def test_statistics_say_something_of_small_numbers(call):
    text = call("trace", "4x8:relu", "--input", "1e-9,2e-9,3e-9,4e-9")[1]
    assert "min 1.000e-09 at [0, 0]  max 4.000e-09 at [0, 3]" in text
    assert "-0.0000" not in text


def test_options_without_effect(call):
    assert "--norm-position post needs --norm" in call("trace", "4x8:relu", "--norm-position", "post")[2]
    assert call("trace", "4x8:relu", "--train")[2] == "note: --train has no effect: the block has no dropout\n"


def test_a_directory_named_like_a_known_model(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert call("params", "gpt2")[2] == "note: gpt2 is the known model; the directory is ./gpt2\n"


def test_what_options_change_is_evidence(call):
    assert "changed by options: activation" in call("params", "gpt2", "--activation", "relu")[1]


def test_a_model_where_a_command_belongs(call):
    code, _, err = call("llama-2-7b")
    assert (code, err) == (2, "error: No such command 'llama-2-7b'; to count that model: ffn params llama-2-7b\n")
    assert call("help", "params") == call("params", "--help")
    assert call("help") == call("--help")


def test_run_options_reach_the_run(call, monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert steps(call, "4x8", "--threads", "3") == steps(call, "4x8", "--seed", "0")
    assert threads == [3]
    assert steps(call, "4x8", "--seed", "1")["x"]["values"] != steps(call, "4x8")["x"]["values"]
    everything = steps(call, "20x20")["x"]
    assert everything["values_index"][-1] == [0, 1, 2, 3, 16, 17, 18, 19]


def block(call, *arguments: str) -> dict:
    return json.loads(call("trace", *arguments, "--json")[1])["block"]


def test_what_was_run_is_said(call):
    found = block(call, "llama-2-7b", "--d-model", "8", "--d-ff", "16", "--layer", "3", "--seed", "5")
    assert (found["layer"], found["stack"], found["name"]) == (3, "decoder", "llama-2-7b, decoder layer 3")
    assert (found["weights"], found["mode"], found["device"]) == ("random weights, seed 5", "eval", "cpu")
    found = block(call, "4x8", "--dropout", "0.5", "--train")
    assert (found["layer"], found["stack"], found["name"], found["mode"]) == (None, None, "4x8", "train")
    assert block(call, "--d-model", "8")["weights"] == "random weights, seed 0"
    text = call("trace", "llama-2-7b", "--d-model", "8", "--d-ff", "16")[1]
    assert "changed by options: d_model, d_ff" in text
    assert "norm = rmsnorm(x)  [4, 8] float32, enters the FFN" in text
    assert "down = hidden · W2  [4, 8] float32, leaves the FFN" in text
    assert "W1 = gate.weightᵀ [8, 16]" in text


def test_notes_of_the_model_are_said_too(call):
    assert call("trace", "--d-model", "4")[2] == "note: assuming d_ff = 4x, activation relu, biases\n"


def test_few_tokens_are_listed(call):
    text = call("trace", "4x8", "--experts", "1", "--tokens", "9", "--expert", "0")[1]
    assert "float32, tokens 0, 1, 2, 3, 4, 5, 6, 7, …\n" in text
    assert "float32, token 0\n" in call("trace", "4x8", "--experts", "1", "--tokens", "1", "--expert", "0")[1]
    assert "norm.weight [4]" in call("trace", "4x8", "--norm", "rmsnorm")[1]
    assert "= norm.weight" not in call("trace", "4x8", "--norm", "rmsnorm")[1]


def test_tokens_that_are_left_out_of_the_routes_are_marked(call):
    """Eight of twelve tokens, the first four and the last four; with all of them, no mark."""
    block = ("trace", "4x8", "--experts", "3", "--top-k", "1", "--tokens", "12")
    for more, expected in (
        ((), ["0", "1", "2", "3", "…", "8", "9", "10", "11"]),
        (("--show", "all"), [*"0123456789", "10", "11"]),
    ):
        lines = call(*block, *more)[1].partition("The chosen experts")[2].splitlines()[2:]
        assert [line.split()[0] for line in lines[: len(expected)]] == expected


def test_what_is_not_finite_is_counted(call):
    text = call("trace", "4x8", "--input", "nan,inf,inf,-inf")[1]
    assert "1 negative, 0 zero, 1 NaN, 3 Inf" in text


def test_csv_has_one_value_per_cell(call):
    header = call("trace", "4x8", "--experts", "2", "--expert", "all", "--csv")[1].splitlines()[0].split(",")
    assert {"name", "shape", "flops", "live", "dropped"} <= set(header)
    assert not {"parameters", "values", "values_index", "tokens"} & set(header)


def test_the_device_reaches_the_run(call, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(prepare_module, "device_of", lambda text: asked.append(text) or "cpu")
    assert block(call, "4x8", "--device", "cuda:1")["device"] == "cuda:1"
    assert asked == ["cuda:1"]


def test_keep_holds_every_intermediate(call):
    code, _, err = call("trace", "8x16:swiglu", "--tokens", "4", "--keep")
    sizes = {"x": 8, "gate": 16, "up": 16, "act": 16, "hidden": 16, "down": 8}
    assert (code, err) == (0, f"note: kept {len(sizes)} tensors, {4 * 4 * sum(sizes.values()) / 1e3:.3f} KB\n")
    assert "kept" not in call("trace", "8x16:swiglu", "--tokens", "4")[2]


def test_a_heat_map_shows_each_step_as_a_picture(call):
    code, out, _ = call("trace", "16x200:relu", "--tokens", "30", "--heatmap", "--seed", "3")
    lines = out.splitlines()
    pictures = [line for line in lines if re.fullmatch(r"  [1-9a-i.]{16,76}", line)]
    assert code == 0
    assert len(pictures) == 4 * 24  # x, up, act, down
    assert {len(line) for line in pictures} == {2 + 16, 2 + 76}
    assert "a cell: the largest of up to 6 values; 9 is" in out
    assert max(map(len, lines)) <= 80
    act = pictures[2 * 24 : 3 * 24]
    assert not {*"abcdefghi"} & {*"".join(act)}  # of a relu nothing is below zero


# --- --tp and --ep ----------------------------------------------------------------------------------------------------


def test_the_page_shows_slices_that_multiply_partial_sums_and_bytes(call, stdout_of):
    out = stdout_of("trace", "16x64:swiglu", "--tp", "4", "-n", "1")
    lines = [line.strip() for line in out.splitlines()]
    for text in (
        "over 4 ranks  tp 4", "gate = x · W1                   W1 [16, 16] → [1, 16]",
        "down = hidden · W2              W2 [16, 16] → [1, 16], partial",
        "W1, W3: column-parallel (outputs split; distributed-llama: Row Matmul)",
        "W2: row-parallel (inputs split; distributed-llama: Col Matmul)", "collectives: 1 all-reduce",
        "No all-gather is needed before W2: each rank already has its inputs;",
        "it would cost 192 bytes from each rank",
        "4                96                                 192",
    ):  # fmt: skip
        assert text in lines
    assert [line.partition("  ")[0] for line in lines if line.startswith(("rank 0:", "rank 3:", "down.sum:"))] == [
        "rank 0: down, partial sum", "rank 3: down, partial sum", "down.sum: sum over 4 ranks",
    ]  # fmt: skip
    assert "histogram" not in out
    assert "act = silu(gate)  [1, 64]" in call("trace", "16x64:swiglu", "--tp", "4", "-n", "1", "-v")[1]


@pytest.mark.parametrize(
    "words",
    [
        ["1024x11008:swiglu", "-n", "1", "--tp", "16"],
        ["deepseek-v3", "--layer", "5", "--d-model", "32", "--d-ff", "16", "--tp", "2", "--ep", "8"],
        ["gpt-oss-20b", "--d-model", "32", "--d-ff", "16", "--ep", "4"],
    ],
)
def test_the_part_about_ranks_fits_80_columns(words, call):
    part = call("trace", *words)[1].partition("\nover ")[2]
    assert part
    assert max(map(width, part.splitlines())) <= 80


def test_json_is_the_librarys_record_and_csv_a_row_for_each_rank(call, csv_of):
    words = ["trace", "8x16:swiglu", "--experts", "4", "--tp", "2", "--ep", "2"]
    found = json.loads(call(*words, "--json")[1])["over_ranks"]
    expected = asdict(ffncli.trace("8x16:swiglu", experts=4, tp=2, ep=2).over_ranks)
    assert found == json.loads(json.dumps(expected))
    rows = csv_of(*words)
    assert [row["rank"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["experts"] for row in rows] == ["0;1", "0;1", "2;3", "2;3"]
    assert [float(row["dispatch_bytes"]) for row in rows] == [share["dispatch_bytes"] for share in expected["shares"]]
