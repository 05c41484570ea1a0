"""`ffn plan --simulate`: the closed form is what the program exchanges, at 2, 8 and 64 ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ffncli.models.counting import plan


def answer(call, *words: str) -> tuple[int, dict, str]:
    code, out, err = call("plan", *words, "--simulate", "--json")
    return code, json.loads(out), err


@pytest.mark.parametrize(
    "words",
    [
        "512x2048:swiglu --norm rmsnorm --residual --tp 2,8,64 -n 1,5",
        "512x2048:gelu --bias --norm layernorm --tp 2,8,64 -n 3",
        "mixtral-8x7b --tp 1,2,8 --ep 1,2,8 -n 1,33",
        "deepseek-v3 --tp 1 --ep 2,8,64 -n 100 --dtype fp8",
    ],
)
def test_closed_form_and_simulation_are_the_same(call, words):
    code, body, err = answer(call, *words.split())
    assert (code, err) == (0, "")
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
    code, body, err = answer(call, "64x256:relu", "--tp", "2", "-n", "1")
    assert code == 1
    assert "all_reduces 2 and 1; all_reduce_bytes 1 and 256" in err
    assert not body["collectives"][0]["same"]


def test_the_page_says_so(call):
    out = call("plan", "64x256:relu", "--tp", "1,2,3", "-n", "1", "--simulate")[1]
    assert out.count("the same") == 1
    assert "block layer 0  tp2" in out
