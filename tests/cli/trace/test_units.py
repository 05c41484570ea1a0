"""`ffn trace` on hidden units, near zeros, histograms, and NaN and Inf, as a user asks for them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.run.engine.trace import find_not_finite, trace
from ffncli.run.engine.weights import random_weights

ARGUMENTS = ("64x256:swiglu", "--tokens", "50")


def test_dead_units_are_said_where_there_are_any(call, json_of):
    assert "5 of 8 units are zero for every token" in call("trace")[1]
    assert "units are" not in call("trace", "4x8:relu", "--tokens", "1")[1]  # one token: every zero would be dead
    assert "units are" not in call("trace", *ARGUMENTS)[1]
    small = ("4x8:relu", "--input", "1e-5,2e-5,3e-5,4e-5,0,1e-5,2e-5,1e-5", "--no-bias")
    units = next(s["units"] for s in json_of("trace", *small)["steps"] if s["name"] == "act")
    assert (units["units"], units["tokens"], units["near_dead"]) == (8, 2, 8)
    assert f"{units['dead']} of 8 units are zero for every token, 8 within 0.001 of zero" in call("trace", *small)[1]


def test_top_units(call, json_of):
    steps = {s["name"]: s for s in json_of("trace", *ARGUMENTS, "--top-units", "3", "--show", "all")["steps"]}
    values = torch.tensor(steps["hidden"]["values"], dtype=torch.float64)
    best = steps["hidden"]["units"]["largest_norm"]
    assert [u["unit"] for u in best] == values.norm(dim=0).topk(3).indices.tolist()
    assert best[0]["norm"] == pytest.approx(values[:, best[0]["unit"]].norm().item(), rel=1e-12)
    active = steps["act"]["units"]["most_active"]
    acts = torch.tensor(steps["act"]["values"], dtype=torch.float64)
    assert [u["unit"] for u in active] == acts.abs().mean(0).topk(3).indices.tolist()
    text = call("trace", *ARGUMENTS, "--top-units", "3")[1]
    assert "act: the units with the largest norm or mean |x| over 50 tokens" in text
    assert text.count("writes: the norm of what the unit adds to the output") == 1
    for one, row in zip(steps["hidden"]["units"]["per_token"], values, strict=True):
        assert one["units"] == row.abs().topk(3).indices.tolist()
        assert one["values"] == row[one["units"]].tolist()
    table = text[text.index("hidden: each token's units") :].splitlines()
    last = steps["hidden"]["units"]["per_token"][49]
    assert " ".join(table[10].split()) == "49 " + " ".join(map("{}: {:.4g}".format, last["units"], last["values"]))
    row = next(line for line in text[text.index("hidden: the units") :].splitlines() if line[:1].isdigit())
    assert row.split()[:2] == [str(best[0]["unit"]), f"{best[0]['norm']:.4g}"]
    assert json_of("trace", *ARGUMENTS)["steps"][3]["units"]["largest_norm"] == []
    assert "--top-units must be a whole number" in call("trace", "--top-units", "x")[2]


def test_near_zeros_are_counted_and_shown_where_they_are_many(call, json_of):
    many = ("4x8:relu", "--input", "5e-4,-1e-3,2e-3,0")
    x = json_of("trace", *many)["steps"][0]
    assert (x["near_zeros"], x["near_zero_share"], x["zeros"]) == (3, 0.75, 1)
    assert "1 zero (25 %), 3 within 0.001 of zero (75 %)" in call("trace", *many)[1]
    assert "within 0.001" not in call("trace", "512x512:relu", "--tokens", "64", "--show", "1")[1].split("up =")[0]


def test_the_histogram_ends_the_statistics(call, csv_of, json_of):
    lines = call("trace", *ARGUMENTS)[1].splitlines()
    line = next(line for line in lines if line.startswith("  mean"))
    bar = line.partition("std ")[2].split(maxsplit=1)[1]
    counts = json_of("trace", *ARGUMENTS)["steps"][0]["histogram"]
    assert len(bar) == len(counts) == 24
    assert bar[counts.index(max(counts))] == "█"
    assert (sum(counts), len(line) <= 78) == (50 * 64, True)
    one = call("trace", "4x8:relu", "--input", "1,2,3,4")[1]
    assert "min 1.0000 at [0, 0]  max 4.0000 at [0, 3]  mean 2.5000  std 1.1180\n" in one  # four values have no form
    lines = call("trace", *ARGUMENTS, "--digits", "17")[1].splitlines()
    assert any(line.startswith("  mean ") and line.endswith(f"  {bar}") for line in lines)  # extremes stand above
    assert all(len(line) <= 78 for line in lines if line.startswith(("  min ", "  mean ")))
    rows = csv_of("trace", *ARGUMENTS)
    assert [int(n) for n in rows[0]["histogram"].split(";")] == counts


def test_extremes_have_their_places(call, csv_of, json_of):
    steps = json_of("trace", *ARGUMENTS, "--show", "all")["steps"]
    text, rows = call("trace", *ARGUMENTS)[1], csv_of("trace", *ARGUMENTS)
    for step, row in zip(steps, rows, strict=True):
        values = torch.tensor(step["values"])
        for name, at in (("min", values.argmin()), ("max", values.argmax())):
            place = [int(i) for i in torch.unravel_index(at, values.shape)]
            assert step[f"{name}_at"] == place
            assert row[f"{name}_at"] == ";".join(map(str, place))
            assert f"{name} {step[name]:.4f} at {place}" in text


def test_a_pipe_that_knows_no_blocks_gets_ascii(ffn):
    done = ffn("trace", "--example", "notebook", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout.isascii(), "?" in done.stdout) == (0, True, False)
    assert "std 6.9222  @@@@@@" in done.stdout


def test_fail_on_nonfinite_answers_first(call):
    code, out, err = call("trace", "4x8:relu", "--input", "nan,inf,1,2", "--fail-on-nonfinite")
    assert (code, out) == (1, call("trace", "4x8:relu", "--input", "nan,inf,1,2")[1])
    assert err == (
        "error: not finite: input x has 1 NaN and 1 Inf; 'up' is the first step that is not finite, with 8 NaN\n"
    )
    assert call("trace", "--fail-on-nonfinite")[0] == 0


def test_weights_that_are_not_finite_are_named(call, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1})
    )
    draw = torch.Generator().manual_seed(0)
    stem = "model.layers.0.mlp"
    weights = {
        f"{stem}.gate_proj.weight": torch.randn(16, 8, generator=draw),
        f"{stem}.up_proj.weight": torch.randn(16, 8, generator=draw),
        f"{stem}.down_proj.weight": torch.randn(8, 16, generator=draw),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(8),
    }
    weights[f"{stem}.up_proj.weight"][3, 5] = torch.nan
    weights[f"{stem}.down_proj.weight"][0, :2] = -torch.inf
    save_file(weights, tmp_path / "model.safetensors")
    code, out, err = call("trace", str(tmp_path), "--json")
    assert code == 0
    assert "note: weight up.weight has 1 NaN\nnote: weight down.weight has 2 Inf\n" in err
    assert json.loads(out)["not_finite"] == [
        {"kind": "weight", "name": "up.weight", "nan": 1, "inf": 0},
        {"kind": "weight", "name": "down.weight", "nan": 0, "inf": 2},
        {"kind": "step", "name": "up", "nan": 4, "inf": 0},
    ]
    code, out, err = call("trace", str(tmp_path), "--fail-on-nonfinite")
    assert (code, len(err.strip().splitlines()[-1:])) == (1, 1)
    assert err.splitlines()[-1].startswith(
        "error: not finite: weight up.weight has 1 NaN; weight down.weight has 2 Inf"
    )


def test_weights_of_experts_that_no_token_chose_count_too(call):
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(8, 1)))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.randn(1, 8)
    chosen = trace(block, weights, {"x": x}, inside=None)
    idle = next(e for e in range(8) if not any(r.name.startswith(f"experts.{e}.") for r in chosen.steps))
    weights["gate.weight"][idle, 0, 0] = torch.inf
    found = find_not_finite(trace(block, weights, {"x": x}), weights)
    assert [(f.kind, f.name, f.nan, f.inf) for f in found] == [("weight", "gate.weight", 0, 1)]
    assert str(found[0]) == "weight gate.weight has 1 Inf"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_low_precision_counts_and_sums_are_exact(json_of, dtype):
    """64,000 ones: bfloat16 alone stops counting at 256, float16 at 2048."""
    asked = ("trace", "16x32:relu", "--tokens", "4000", "--dtype", dtype, "--show", "1")
    x = json_of(*asked, "--input", "ones")["steps"][0]
    assert (x["mean"], x["std"], x["dtype"]) == (1.0, 0.0, "float16" if dtype == "fp16" else "bfloat16")
    x = json_of(*asked, "--input", "zeros")["steps"][0]
    assert (x["zeros"], x["near_zeros"]) == (64_000, 64_000)


def test_insight_options_are_described(call):
    text = " ".join(call("trace", "--help")[1].split())
    assert "--top-units" in text
    assert "--fail-on-nonfinite" in text
