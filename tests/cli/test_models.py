from __future__ import annotations

import json

import pytest

from tests.oracles.counts import MOE


def test_active_parameters_are_shown_where_any_model_has_experts(call):
    dense = call("models", "gpt2")[1]
    assert "active" not in dense
    both = call("models", "LLAMA")[1]
    assert [line.split()[0] for line in both.splitlines()[1:]][:2] == ["llama-65b", "llama-2-7b"]
    rows = {line.split()[0]: line.split() for line in call("models")[1].splitlines()[1:]}
    assert set(MOE) <= set(rows)
    assert rows["mixtral-8x7b"][-4:] == ["45.10", "B", "11.28", "B"]
    assert rows["llama-4-maverick"][-4:] == ["395.6", "B", "12.10", "B"]  # only every second layer has experts
    assert rows["llama-2-7b"][1:] == ["2023", "4,096", "11,008", "silu", "32", "4.329", "B"]
    assert max(map(len, call("models")[1].splitlines())) <= 80


def test_a_search_looks_at_every_name_a_model_has(call):
    found = json.loads(call("models", "Llama3", "--json")[1])["rows"]
    assert [(row["name"], row["aliases"]) for row in found] == [
        ("llama-3.1-8b", ["llama-3-8b"]), ("llama-3.1-70b", ["llama-3-70b", "llama-3.3-70b"]), ("llama-3.1-405b", []),
        ("llama-3.2-1b", []), ("llama-3.2-3b", []),
    ]  # fmt: skip
    assert call("models", "r1")[1].splitlines()[1].split()[0] == "deepseek-v3"
    assert call("models", "zzz")[0] == 2


def test_a_search_looks_at_years_and_organisations(call):
    rows = json.loads(call("models", "2026", "--json")[1])["rows"]
    assert {row["year"] for row in rows} == {2026}
    rows = json.loads(call("models", "meta", "--json")[1])["rows"]
    assert {"llama-2-7b", "opt-125m", "llama-4-scout"} <= {row["name"] for row in rows}
    assert {row["organisation"] for row in rows} == {"meta"}


LLAMA_3 = "did you mean 'llama-3.2-1b' or 'llama-3.2-3b' or 'llama-3.1-8b'?"
LLAMA_4 = "did you mean 'llama-4-scout' or 'llama-4-maverick' or 'llama-3.2-1b'?"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("llama", f"{LLAMA_4} `ffn models llama` lists 11"), ("lama", f"{LLAMA_4} `ffn models lama` lists 11"),
        ("llama3", f"{LLAMA_3} `ffn models llama3` lists 5"), ("llama-3", f"{LLAMA_3} `ffn models llama-3` lists 5"),
        ("phi", "did you mean 'phi-4' or 'phi-4-mini' or 'phi-3.5-moe'? `ffn models phi` lists 5"),
        ("lama2", "did you mean 'llama-2-7b' or 'llama-2-13b' or 'llama-2-70b'?"),
        ("lama-2-7b", "did you mean 'llama-2-7b'?"),
        ("mistrl", "did you mean 'mistral-small-4' or 'mistral-large-4' or 'mistral-medium-3.5'?"),
        ("mixtrl", "did you mean 'mixtral-8x7b' or 'mixtral-8x22b'?"),
        ("bert-base-uncasd", "did you mean 'bert-base'?"),  # of an alias the model's own name
        ("deepseek-v4.1", "did you mean 'deepseek-v4-flash' or 'deepseek-v4-pro'?"),  # an unknown generation
        ("qwen3.8-flash-next", "did you mean 'qwen3.8' or 'qwen3-8b'?"),
        ("llama-5", LLAMA_4),
        ("123", "`ffn models` lists the known ones; a path or 512x2048:gelu works too"),
    ],
)  # fmt: skip
def test_the_family_that_is_meant_is_offered_the_newest_first(call, typed, hint):
    assert call("params", typed) == (2, "", f"error: unknown model '{typed}'; {hint}\n")
