"""`ffn trace --tp` and `--ep` as a user asks them."""

import csv
import io
import json
from dataclasses import asdict

import pytest

import ffncli
from ffncli.show.text import width


def test_the_page_shows_slices_that_multiply_partial_sums_and_bytes(call):
    code, out, err = call("trace", "16x64:swiglu", "--tp", "4", "-n", "1")
    assert (code, err) == (0, "")
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


def test_json_is_the_librarys_record_and_csv_a_row_for_each_rank(call):
    words = ["trace", "8x16:swiglu", "--experts", "4", "--tp", "2", "--ep", "2"]
    found = json.loads(call(*words, "--json")[1])["over_ranks"]
    expected = asdict(ffncli.trace("8x16:swiglu", experts=4, tp=2, ep=2).over_ranks)
    assert found == json.loads(json.dumps(expected))
    rows = list(csv.DictReader(io.StringIO(call(*words, "--csv")[1])))
    assert [row["rank"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["experts"] for row in rows] == ["0;1", "0;1", "2;3", "2;3"]
    assert [float(row["dispatch_bytes"]) for row in rows] == [share["dispatch_bytes"] for share in expected["shares"]]
