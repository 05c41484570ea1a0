"""What `ffn params` can be asked beside counts: --all, --sweep, --iso-params, --tp, --ridge, --tokens, --dtype."""

import csv
import io
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.oracles.checkpoints import expect_refusal
from tests.oracles.counts import DENSE, MOE, RECENT

LLAMA = 4096, 11008, 32  # d_model, d_ff, layers of Llama-2-7B


def rows(call, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = call("params", *arguments, "--json")
    assert (code, _but_notes(err)) == (0, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["rows"]


def _but_notes(err: str) -> str:
    """What stderr has beside notes: of all known models some have them."""
    return "".join(line for line in err.splitlines() if not line.startswith("note: "))


def table(text: str) -> list[list[str]]:
    """The cells of a printed table: at least two spaces apart."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]


# --- --all ------------------------------------------------------------------------------------------------------------


def test_all_is_every_known_model(call):
    found = {row["name"]: row for row in rows(call, "--all")}
    assert set(found) == {*DENSE, *MOE, *RECENT}
    assert {name: found[name]["ffn_params_total"] for name in DENSE} == {
        name: total for name, (_, total) in DENSE.items()
    }
    code, out, _ = call("params", "--all", "--csv")
    listed = list(csv.DictReader(io.StringIO(out)))
    assert (code, [row["name"] for row in listed]) == (0, list(found))
    assert [row["name"] for row in json.loads(call("models", "--json")[1])["rows"]] == list(found)


def test_options_change_all_of_them(call):
    assert {row["dtype"] for row in rows(call, "--all", "--dtype", "bf16")} == {"bf16"}
    assert {row["tokens"] for row in rows(call, "--all", "--tokens", "7")} == {7}


# --- --sweep ----------------------------------------------------------------------------------------------------------


def test_a_sweep_is_a_row_for_each_combination(call):
    words = ["params", "64x256:gelu", "--no-bias", "--sweep", "d_ff=1x,2x,3x", "--sweep", "gated=yes,no"]
    code, out, err = call(*words, "--json")
    found = json.loads(out)["rows"]
    assert (code, err, len(found)) == (0, "", 6)
    for row, (times, gated) in zip(found, [(t, g) for t in (1, 2, 3) for g in (True, False)], strict=True):
        assert row["sweep"] == {"d_ff": f"{times}x", "gated": "yes" if gated else "no"}
        assert (row["d_ff"], row["gated"]) == (64 * times, gated)
        assert row["ffn_params_total"] == (3 if gated else 2) * 64 * 64 * times
    listed = list(csv.DictReader(io.StringIO(call(*words, "--csv")[1])))
    assert [(row["sweep_d_ff"], row["sweep_gated"]) for row in listed] == [
        (f"{t}x", g) for t in (1, 2, 3) for g in ("yes", "no")
    ]
    assert [int(row["ffn_params_total"]) for row in listed] == [row["ffn_params_total"] for row in found]
    head, *lines = table(call(*words)[1])
    assert head[:2] == ["d_ff", "gated"]
    assert [line[:2] for line in lines] == [[f"{t}x", g] for t in (1, 2, 3) for g in ("yes", "no")]


def test_a_sweep_over_tokens_shows_what_they_change(call):
    head, *lines = table(call("params", "64x256", "--sweep", "tokens=1,8")[1])
    flops = head.index("matmul FLOPs")
    assert [line[flops] for line in lines] == [f"{2 * 2 * 64 * 256 * tokens:,}" for tokens in (1, 8)]


def test_a_sweep_of_a_known_model(call):
    found = rows(call, "llama-2-7b", "--sweep", "d_ff=11008,2x")
    assert [row["ffn_params_total"] for row in found] == [32 * 3 * 4096 * d_ff for d_ff in (11008, 8192)]


# --- --iso-params -----------------------------------------------------------------------------------------------------


def test_iso_params_puts_its_twin_beside_it(call):
    plain, gated = rows(call, "64x256:gelu", "--no-bias", "--iso-params")
    assert (plain["gated"], gated["gated"], gated["d_ff"]) == (False, True, round(256 * 2 / 3))
    assert gated["name"] == "64x256:gelu (gated)"
    (_, rounded) = rows(call, "64x256:gelu", "--iso-params", "--multiple-of", "16")
    assert rounded["d_ff"] == 176
    gated, plain = rows(call, "llama-2-7b", "--iso-params")
    assert plain["ffn_params_per_layer"] == gated["ffn_params_per_layer"] == 3 * 4096 * 11008
    assert [row["gated"] for row in rows(call, "llama-2-7b", "gpt2", "--iso-params")] == [True, False, False, True]


# --- --tp -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_over_ranks(ranks: int, call):
    (row,) = rows(call, "llama-2-7b", "--tp", str(ranks), "--dtype", "bf16")
    found, (d, f, layers) = row["tensor_parallel"], LLAMA
    assert found["ranks"] == ranks
    assert found["rank_0_params_total"] == found["other_rank_params_total"] == layers * 3 * d * f // ranks
    (group,) = found["groups"]
    slices = {part["name"]: (part["rank_shape"], part["place"]) for part in group["slices"]}
    assert slices["up.weight"] == ([f // ranks, d], "column")
    assert slices["down.weight"] == ([d, f // ranks], "row")
    assert found["ring_all_reduce_bytes_per_token"] == 2 * (ranks - 1) / ranks * d * 2
    (cost,) = row["costs"]
    assert (cost["ranks"], cost["matmul_flops"]) == (ranks, layers * 3 * 2 * d * f // ranks)
    text = call("params", "llama-2-7b", "--tp", str(ranks))[1]
    assert [f"11008 × 4096  {f // ranks} × 4096" in text, f"over {ranks} ranks" in text] == [True, True]


# --- --ep ---------------------------------------------------------------------------------------------------------


def test_experts_over_ranks(call):
    (row,) = rows(call, "mixtral-8x7b", "--ep", "4", "--tokens", "32")
    stored, sent = row["tensor_parallel"], row["expert_parallel"]
    assert (stored["ranks"], stored["expert_ranks"]) == (1, 4)
    assert stored["rank_0_params_total"] == 32 * (2 * 3 * 4096 * 14336 + 8 * 4096)
    assert (sent["ranks"], sent["experts"], sent["layers"], sent["tokens_per_expert"]) == (4, 2, 32, 32 * 4 * 2 / 8)
    assert sent["dispatch_bytes_per_token"] == sent["combine_bytes_per_token"] == 2 * 4096 * 2 * 3 / 4
    (cost,) = row["costs"]
    assert (cost["ranks"], round(cost["experts_touched"], 9)) == (4, 2)
    text = call("params", "mixtral-8x7b", "--ep", "4")[1]
    assert "8 × 14336 × 4096  2 × 14336 × 4096  experts" in text
    assert "two all-to-alls between 4 ranks of 2 experts" in text
    (line,) = csv.DictReader(io.StringIO(call("params", "mixtral-8x7b", "--ep", "4", "--csv")[1]))
    assert (line["expert_ranks"], line["experts_per_rank"], line["dispatch_bytes_per_token"]) == ("4", "2", "12288")


def test_experts_and_their_width_over_ranks(call):
    (row,) = rows(call, "deepseek-v3", "--ep", "8", "--tp", "2")
    assert (row["costs"][0]["ranks"], row["tensor_parallel"]["groups"][1]["d_ff"]) == (16, 1024)
    assert row["expert_parallel"]["layers"] == 58
    assert "over 16 ranks (tp 2, ep 8), decoder layers 3-60" in call("params", "deepseek-v3", "--ep=8", "--tp=2")[1]


# --- --tokens and --ridge ---------------------------------------------------------------------------------------------


def test_tokens_as_a_list_are_costs_for_each(call):
    (row,) = rows(call, "llama-2-7b", "--tokens", "1,32,512", "--dtype", "bf16")
    d, f, layers = LLAMA
    assert [cost["tokens"] for cost in row["costs"]] == [1, 32, 512]
    assert row["tokens"] == 1
    for cost in row["costs"]:
        assert cost["matmul_flops"] == cost["tokens"] * layers * 2 * 3 * d * f
        assert cost["weight_bytes_read"] == layers * 3 * d * f * 2  # norms apart, as everywhere
        assert cost["activation_bytes_fused"] == layers * 2 * cost["tokens"] * d * 2
        moved = cost["weight_bytes_read"] + cost["activation_bytes"]
        assert cost["flops_per_byte"] == pytest.approx(cost["matmul_flops"] / moved)
    text = call("params", "llama-2-7b", "--tokens", "1,32,512")[1]
    assert "memory traffic, weights fp16, activations fp16, all layers" in text


def test_the_ridge_is_the_first_number_of_tokens_that_reaches_it(call):
    (row,) = rows(call, "llama-2-7b", "--ridge", "100", "--dtype", "bf16")
    first = row["ridge_tokens"]
    (around,) = rows(call, "llama-2-7b", "--dtype", "bf16", "--tokens", f"{first - 1},{first}")
    below, above = (cost["flops_per_byte"] for cost in around["costs"])
    assert below < 100 <= above
    assert (
        f"100 FLOPs per byte from {first:,} tokens on"
        in call("params", "llama-2-7b", "--ridge", "100", "--dtype", "bf16")[1]
    )
    (never,) = rows(call, "llama-2-7b", "--ridge", "1e9")
    assert never["ridge_tokens"] is None
    assert "never reached" in call("params", "llama-2-7b", "--ridge", "1e9")[1]


def test_the_floor_of_a_device_is_its_data_sheet(call):
    words = ["llama-2-7b", "--ridge", "h100,b200", "--tokens", "1,4096", "--dtype", "bf16"]
    (row,) = rows(call, *words)
    d, f, layers = LLAMA
    weights, flops = layers * 3 * d * f * 2, layers * 2 * 3 * d * f
    expected = []
    for device, peak, bandwidth in (("H100 SXM5", 989.4e12, 3350e9), ("B200", 2250e12, 8000e9)):
        for tokens in (1, 4096):
            memory, compute = (weights + layers * 2 * tokens * d * 2) / bandwidth, tokens * flops / peak
            expected.append((device, tokens, "memory" if tokens == 1 else "compute", max(memory, compute)))
    found = row["floors"]
    assert [(one["device"], one["tokens"], one["bound"]) for one in found] == [one[:3] for one in expected]
    assert [one["floor_s"] for one in found] == pytest.approx([one[3] for one in expected])
    assert [one["fits"] for one in found] == [True] * 4  # 13.5 GB
    first = found[0]["ridge_tokens_fused"]
    (around,) = rows(call, *words[:3], "--tokens", f"{first - 1},{first}", "--dtype", "bf16")
    assert [one["bound"] for one in around["floors"]][:2] == ["memory", "compute"]
    listed = list(csv.DictReader(io.StringIO(call("params", *words, "--csv")[1])))
    assert [(one["device"], int(one["tokens"]), one["bound"]) for one in listed] == [one[:3] for one in expected]
    text = call("params", *words)[1]
    rates = "989.4 TFLOP/s in bf16, 3,350 GB/s (NVIDIA H100 datasheet)"
    assert f"H100 SXM5: {rates}; compute bound from {first} tokens on" in text
    assert "time floor, weights bf16, all layers' FFNs forward" in text


def test_floors_can_be_asserted(call):
    assert call("params", "llama-3-70b", "--ridge", "h100", "--assert", "fits == false", "-q")[0] == 0
    failed = call("params", "llama-3-70b", "--ridge", "h100,b200", "--assert", "floor_s < 0.02", "-q")
    assert (failed[0], "in 'llama-3.1-70b device=H100 SXM5'" in failed[2]) == (1, True)
    expect_refusal(call("params", "gpt2", "--assert", "bound == memory"), "--ridge DEVICE")
    expect_refusal(call("params", "gpt2", "--ridge", "9", "--assert", "bound == memory"), "--ridge DEVICE")


# --- --dtype ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("fp32", 32), ("bf16", 16), ("fp8", 8), ("int8", 8), ("int4", 4), ("q4_0", 4.5), ("q8_0", 8.5), ("mxfp4", 4.25),
     ("nvfp4", 4.5), ("nf4", 4.5), ("q4_k", 4.5), ("q6_k", 6.5625)],
)  # fmt: skip
def test_weight_bytes_in_a_format(dtype: str, bits: float, call):
    d, f, layers = LLAMA
    (row,) = rows(call, "llama-2-7b", "--dtype", dtype)
    assert (row["dtype"], row["weight_bytes"]) == (dtype, layers * 3 * d * f * bits / 8)


def test_what_is_packed_are_the_matrices_alone(call):
    (row,) = rows(call, "64x256:gelu", "--dtype", "int8")
    half = torch.empty(256 + 64, dtype=torch.float16).nbytes  # biases
    assert row["weight_bytes"] == 2 * 64 * 256 + half


# --- what does not go together ----------------------------------------------------------------------------------------


# --- formats and pipes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
@pytest.mark.parametrize(
    "words",
    [["gpt2", "--sweep", "d_ff=1x,2x"], ["deepseek-v3", "--tp", "4"], ["llama-2-7b", "gpt2", "--tokens", "1,8"],
     ["gpt2", "--iso-params", "--ridge", "50"], ["--all"]],
    ids=" ".join,
)  # fmt: skip
def test_every_format(words: list[str], style: str, call):
    code, out, err = call("params", *words, "--format", style)
    assert (code, _but_notes(err), "\x1b" in out) == (0, "", False)
    if style == "json":
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if style == "csv":
        head, *lines = csv.reader(io.StringIO(out))
        assert len(head) == len(set(head))
        assert {len(line) for line in lines} == {len(head)}


def test_csv_columns_are_the_rows_keys_in_order(call):
    head, line = csv.reader(io.StringIO(call("params", "gpt2", "--csv")[1]))
    row = dict(rows(call, "gpt2")[0])
    added = {"model_weight_bytes": row.pop("model_weight_bytes")}
    cost = (
        "experts_touched weight_bytes_read activation_bytes activation_bytes_fused flops_per_byte flops_per_byte_fused"
    )
    assert head == [*(key for key in row if key not in ("groups", "costs", "not_counted")), *cost.split(), *added]
    values = dict(zip(head, line, strict=True))
    assert (values["gated"], values["bias"], values["stored_bytes"], values["differences"]) == ("false", "true", "", "")
    assert values["evidence"].split(";")[0] == row["evidence"][0]
    assert float(values["ffn_share_of_layer"]) == row["ffn_share_of_layer"]


@pytest.mark.parametrize("words", ["--all", "deepseek-v3 --tp 8", "gpt2 --sweep d_ff=1x,2x --csv"])
def test_a_reader_that_has_had_enough(words: str):
    line = f'"{sys.executable}" -m ffncli params {words} | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, _but_notes(done.stderr), len(done.stdout.splitlines())) == (0, "", 1)
