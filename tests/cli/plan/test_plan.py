"""`ffn plan` as a user asks it; with `--simulate` the closed form is what the program exchanges, at up to 64 ranks."""

import json
import re
from dataclasses import fields, replace

import pytest

import ffncli
from ffncli.bench.results.csv_file import HEADER, read_rows, row_lines
from ffncli.bench.results.row import ResultRow
from ffncli.models.counting import plan
from ffncli.models.counting.plan import PlanRow
from tests.models.counting.test_count import SHAPES, block
from tests.oracles.checkpoints import expect_refusal


def test_the_sentence_comes_first(call):
    lines = call("plan", "llama-2-70b", "--device", "h100,mi300x", "-n", "1,16")[1].splitlines()
    speed, turn = r"FFNs: [\d.]+ ms {} \([\d.]+ to [\d.]+ ms\) on {}, {}-bound", r", compute-bound from [\d,]+ tokens"
    two = speed.format("a token", "2 × H100 SXM5 as tp2 in fp16", "memory") + turn
    assert re.fullmatch(two + "; llama-2-70b fits", lines[0])
    one = speed.format("a token", "1 × MI300X in fp16", "memory") + turn
    assert re.fullmatch(one + "; llama-2-70b fits", lines[2])
    many = call("plan", "llama-2-7b", "--tp", "1", "--tokens", "8192")[1].splitlines()[0]
    one = speed.format("for 8,192 tokens", "1 × H100 SXM5 in fp16", "compute")
    assert re.fullmatch(one + "; llama-2-7b fits", many)


def test_what_does_not_fit_says_by_how_much(call):
    first = call("plan", "llama-2-70b", "--tp", "1", "--tokens", "1")[1].splitlines()[0]
    needs = "needs 138.0 GB per device, has 76.97 GB"
    assert first == f"FFNs: llama-2-70b does not fit on 1 × H100 SXM5 in fp16: {needs}; fits on 2 with --tp 2"
    first = call("plan", "llama-2-7b", "--tp", "1,2", "--tokens", "1,2097152")[1].splitlines()[0]
    # 6.738 GB, and 4 (4096 + 5504) values a token, of which 4 · 4096 are on all devices
    needs = "needs 167.8 GB per device for 2,097,152 tokens, has 76.97 GB"
    assert first == f"FFNs: llama-2-7b does not fit on 2 × H100 SXM5 in fp16: {needs}; fits on 32 with --tp 32"
    first = call("plan", "llama-2-7b", "--device", "apple-m1", "--tp", "1", "--tokens", "1")[1].splitlines()[0]
    assert first.endswith("on 1 × Apple M1 in fp16, memory-bound; not known whether llama-2-7b fits")
    first = call("plan", "4096x11008:swiglu", "--dtype", "bf16", "--device", "v100,h100")[1].splitlines()[0]
    why = "no rate of V100 SXM2 is known in bf16; known: fp32, fp16, int8"
    assert first == f"FFNs: 4096x11008:swiglu (FFN weights only) has no figures on V100 SXM2: {why}"


def test_what_would_fit_is_the_smallest_split_that_does(call, json_of):
    for words, options in (("llama-3.1-405b", "--tp 16"), ("deepseek-v3 --device rtx-4090 --tp 1", "--tp 8 --ep 8")):
        first = call("plan", *words.split())[1].splitlines()[0]
        assert first.endswith(f"with {options}")
        devices = int(re.search(r"fits on (\d+) with", first)[1])
        (best,) = json_of("plan", *words.split())["would_fit"]
        (found,) = json_of("plan", *words.split(), *options.split())["cheapest"]
        assert found == best
        assert devices == best["devices"]
        powers = ",".join(str(2**n) for n in range(9))
        rows = json_of("plan", *words.split(), "--tp", powers, *(["--ep", powers] if "--ep" in options else []))["rows"]
        fits: dict = {}
        for row in rows:
            fits.setdefault((row["devices"], row["tp"]), []).append(row["fits"])
        assert min(n for (n, _), every in fits.items() if all(every)) == devices
    assert json_of("plan", "llama-3.1-405b", "--tp", "16")["would_fit"] == []
    never = call("plan", "4096x11008:swiglu", "--device", "t4", "--dtype", "fp16", "-n", "99999999")[1].splitlines()[0]
    assert "does not fit on 8 × T4" in never
    assert "; fits on" not in never
    first = call("plan", "llama-3.1-405b", "--tp", "2", "--dtype", "bf16,q4_0")[1].splitlines()[0]
    assert first.endswith("in q4_0: needs 168.8 GB per device, has 76.97 GB; fits on 8 with --tp 8")


def test_rows_of_json_csv_and_library_are_one(csv_of, json_of):
    words = ("mixtral-8x7b", "--device", "h100,a100", "--tp", "1,2", "--ep", "1,8", "-n", "1,64", "--dtype", "bf16,fp8")
    answer = json_of("plan", *words)
    plan = ffncli.plan("mixtral-8x7b", ["h100", "a100"], (1, 2), (1, 8), (1, 64), ["bf16", "fp8"])
    assert len(answer["rows"]) == len(plan.rows) == 2 * 2 * 2 * 2 * 2
    assert answer["rows"] == [json.loads(json.dumps(vars(row))) for row in plan.rows]
    assert [row["device"] for row in answer["cheapest"]] == ["H100 SXM5", "A100 80GB SXM"]
    lines = csv_of("plan", *words)
    assert list(lines[0]) == ["name", *(field.name for field in fields(PlanRow))]
    assert [float(line["time_s"]) for line in lines] == [row.time_s for row in plan.rows]


def test_a_table_for_each_device_and_format(stdout_of):
    out = stdout_of("plan", "llama-2-7b", "--device", "h100,a100", "--dtype", "bf16,fp8", "--tp", "1,3")
    titles = [line for line in out.splitlines() if "FLOPs/byte" in line]
    assert [title.partition(":")[0] for title in titles] == [
        "H100 SXM5, bf16", "H100 SXM5, fp8", "A100 80GB SXM, bf16", "A100 80GB SXM, fp8 computed in bf16",
    ]  # fmt: skip
    assert out.count("no figures for tp3: d_ff = 11008 does not divide over 3 ranks; nearest: 2 and 4") == 1
    assert "times: ai-dynamo/aiconfigurator" in out


def test_assumptions_are_shown_and_change_the_time(call, json_of):
    words = ("llama-2-7b", "--tp", "2", "--tokens", "4096", "--dtype", "bf16")
    slow = json_of("plan", *words, "--gemm-efficiency", "0.4", "--link", "pcie5", "--network", "hdr", "--per-node", "4")
    fast = json_of("plan", *words)
    whole = json_of("plan", *words, "--gemm-efficiency", "0.8")
    assert slow["rows"][0]["compute_s"] == pytest.approx(2 * whole["rows"][0]["compute_s"])
    assert fast["assumed"][0]["gemm_efficiency"] is None
    assert slow["assumed"][0]["changed"] == ["gemm_efficiency", "link", "network", "per_node"]
    page = call("plan", *words, "--gemm-efficiency", "0.4", "--link", "pcie5")[1]
    assert "0.40 of the peak" in page
    assert "pcie5 (63 GB/s)" in page
    assert "options --gemm-efficiency, --link" in page
    assert "0.90 of the memory; 0.80 of ndr (50 GB/s) between nodes;" in call("plan", *words, "--per-node", "1")[1]


def test_the_list_of_devices_is_that_of_params(call):
    plan, params = (
        json.loads(call(*words, "list", "--json")[1]) for words in (("plan", "--device"), ("params", "--ridge"))
    )
    assert plan["devices"] == params["devices"]
    h100 = next(one for one in plan["devices"] if one["device"] == "h100")
    assert (h100["link"], h100["per_node"], h100["network"]) == ("nvlink4", 8, "ndr")


def test_deployments_in_one_table(call, json_of):
    words = ("plan", "deepseek-v3", "--device", "h100", "--tp", "1", "--ep", "64", "-n", "64,8192", "--price", "2.5")
    body = json_of(*words, "--nodes", "8")
    few, many = body["rows"]
    assert few["links"] == "nvlink4 + ndr"
    assert few["dispatch"] == "fp8"
    assert few["waiting_s"] == pytest.approx(few["time_s"] - few["balanced_time_s"])
    assert few["cost_per_million_tokens"] == pytest.approx(2.5 * 64 / 3600 * few["time_s"] / 64 * 1e6)
    assert few["time_low_s"] < few["time_s"] < few["time_high_s"]
    wide = json_of(*words, "--dispatch", "bf16", "--rows-per", "choice")["rows"][1]
    assert wide["sent_bytes"] > 1.3 * many["sent_bytes"]
    assert json_of(*words, "--overlap-shared")["rows"][1]["time_s"] < json_of(*words)["rows"][1]["time_s"]
    page = call(*words)[1]
    for text in ("waiting", "$/M tokens", "$", "80 % interval", "tokens are sent to their experts in fp8"):
        assert text in page


def test_the_turn_from_memory_to_compute_is_said(call, json_of):
    words = ("plan", "llama-2-7b", "--tp", "1", "--dtype", "bf16", "-n", "1,64,4096")
    (turn,) = json_of(*words)["crossings"]
    assert f", compute-bound from {turn['tokens']:,} tokens;" in call(*words)[1].splitlines()[0]
    bounds = [
        json_of(*words[:-1], str(n))["rows"][0]["bound"] for n in (round(turn["tokens"] * 0.97) - 1, turn["tokens"])
    ]
    assert bounds == ["memory", "compute"]
    assert json_of(*words[:-1], "1")["crossings"] == []


def test_memory_says_what_the_rest_is(call):
    page = call("plan", "llama-2-7b", "--tp", "1", "-n", "1")[1]
    assert "needs: 8.657 GB of FFN weights, 4.820 GB of attention, embeddings, norms and head" in page
    assert page.count("the KV cache comes on top") == 1
    assert "the rest of the model and the KV cache come on top" in call("plan", "64x256:relu", "--tp", "1")[1]


def test_the_rate_of_a_mesh_is_that_of_its_wires(call, json_of):
    """Of seven wires of 64 GB/s, four devices use three each."""
    (row,) = json_of("plan", "llama-2-7b", "--device", "mi300x", "--tp", "4", "-n", "1")["rows"]
    assert row["link_gbytes_per_s"] == pytest.approx(0.8 * 3 * 64)
    assert (
        "tp4 reaches 153.6 GB/s, by its wires of the mesh"
        in call("plan", "llama-2-7b", "--device", "mi300x", "--tp", "4,8", "-n", "1")[1]
    )


def test_a_device_without_times_says_so(call):
    assert (
        "wide interval, no times of MI300X in bf16" in call("plan", "gpt2", "--device", "mi300x", "--dtype", "bf16")[1]
    )
    assert "wide interval" not in call("plan", "gpt2", "--dtype", "bf16")[1]


# --- measured ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path):
    """A file of a made-up CPU, the times of two kernels each, the second slower."""
    rows = [
        ResultRow(
            device="cpu", d_model=d, d_ff=f, activation="gelu", gated=False, bias=True, experts=0, tokens=n,
            dtype="fp32", passes="forward", kernel=kernel, status="ok", time_s=slower * block(d, f, n, 0.5).time_s,
            case=f"{d}x{f}:gelu, {n} tokens, fp32",
        )
        for d, f in SHAPES for n in (1, 8, 64, 512) for kernel, slower in (("eager", 1.0), ("slow", 3.0))
    ]  # fmt: skip
    path = tmp_path / "a.csv"
    path.write_text(HEADER + row_lines(rows), "utf-8")
    return str(path)


def test_a_cpu_by_what_was_measured_on_it(call, json_of, measured):
    answer = json_of("plan", "768x3072:gelu", "--device", "cpu", "--measured", measured, "--tp", "1", "-n", "32")
    (row,) = answer["rows"]
    assert row["time_s"] == pytest.approx(block(768, 3072, 32, 0.5).time_s, rel=0.03)
    assert answer["assumed"] == []
    assert len(answer["measured"]) == 12
    assert {one["kernel"] for one in answer["measured"]} == {"eager"}
    assert max(abs(one["error"]) for one in answer["measured"]) < 0.1
    page = call("plan", "768x3072:gelu", "--measured", measured, "--tp", "1")[1]
    assert "absolute error: median" in page
    assert "no times for H100" in call("plan", "gpt2", "--device", "h100", "--measured", measured)[2]
    split = call("plan", "768x3072:gelu", "--measured", measured, "--tp", "1,2", "-n", "1")[1]
    assert "no figures for tp2: no link of cpu is known\n" in split
    of_sheet = ("plan", "768x3072:gelu", "--memory-efficiency", "0.5", "--measured", measured, "-n", "1", "--device")
    assert "--memory-efficiency contradicts --measured" in call(*of_sheet, "cpu")[2]
    assert "0.50 of the bandwidth" in call(*of_sheet, "cpu,h100", "--tp", "1")[1]


@pytest.mark.parametrize("part", [{"kernel": "step gate"}, {"world_size": 2, "layout": "tp2"}])
def test_steps_and_ranks_are_no_times_of_a_block_on_one_device(call, measured, part):
    words = ("plan", "768x3072:gelu", "--tp", "1", "--json", "--measured")
    whole = call(*words, measured)[1]
    rows = [replace(row, time_s=0.1 * (row.time_s or 1), **part) for row in read_rows(measured)]
    with open(measured, "a", encoding="utf-8") as file:
        file.write(row_lines(rows))
    assert call(*words, measured)[1] == whole
    with open(measured, "w", encoding="utf-8") as file:
        file.write(HEADER + row_lines(rows))
    assert "no forward time of a block on one device" in call(*words, measured)[2]


def test_a_file_without_a_forward_time_is_refused(call, measured):
    with open(measured, encoding="utf-8") as file:
        text = file.read().replace(",forward,", ",forward+backward,")
    with open(measured, "w", encoding="utf-8") as file:
        file.write(text)
    expect_refusal(call("plan", "gpt2", "--measured", measured), "no forward time of a block on one device")


@pytest.mark.parametrize(
    "words",
    [
        "512x2048:swiglu --norm rmsnorm --residual --tp 2,8,64 -n 1,5",
        "512x2048:gelu --bias --norm layernorm --tp 2,8,64 -n 3",
        "mixtral-8x7b --tp 1,2,8 --ep 1,2,8 -n 1,33",
        "deepseek-v3 --tp 1 --ep 2,8,64 -n 100 --dtype fp8",
    ],
)
def test_closed_form_and_simulation_are_the_same(json_of, words):
    body = json_of("plan", *words.split(), "--simulate")
    assert body["collectives"]
    assert all(one["same"] and one["counted"] == one["simulated"] for one in body["collectives"])
    for one in body["collectives"]:
        mixture = one["ep"] > 1 and not (body["name"] == "deepseek-v3" and one["layers"] == [0, 1, 2])
        assert one["counted"]["all_reduces"] == (one["tp"] > 1)
        assert one["counted"]["all_to_alls"] == (2 if mixture else 0)


def test_a_wrong_closed_form_is_exit_1(call, monkeypatch):
    whole = plan.Planner.collectives
    monkeypatch.setattr(
        plan.Planner, "collectives", lambda *args: replace(whole(*args), all_reduce_bytes=1, all_reduces=2)
    )
    code, out, err = call("plan", "64x256:relu", "--tp", "2", "-n", "1", "--simulate", "--json")
    assert code == 1
    assert "all_reduces 2 and 1; all_reduce_bytes 1 and 256" in err
    assert not json.loads(out)["collectives"][0]["same"]


def test_the_page_says_so(call):
    out = call("plan", "64x256:relu", "--tp", "1,2,3", "-n", "1", "--simulate")[1]
    assert out.count("the same") == 1
    assert "block layer 0  tp2" in out
