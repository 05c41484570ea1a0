from __future__ import annotations

import json

import pytest

from tests.oracles.counts import MOE


def test_active_parameters_are_shown_where_any_model_has_experts(call):
    dense = call("models", "gpt2")[1]
    assert "active" not in dense
    both = call("models", "LLAMA")[1]
    assert [line.split()[0] for line in both.splitlines()[1:]][:1] == ["llama-2-7b"]
    rows = {line.split()[0]: line.split() for line in call("models")[1].splitlines()[1:]}
    assert set(MOE) <= set(rows)
    assert rows["mixtral-8x7b"][-4:] == ["45.10", "B", "11.28", "B"]
    assert rows["llama-2-7b"][-5:] == ["32", "4.329", "B", "llama-7b,", "llama-1-7b"]


def test_a_search_looks_at_every_name_a_model_has(call):
    found = json.loads(call("models", "Llama3", "--json")[1])["rows"]
    assert [(row["name"], row["aliases"]) for row in found] == [
        ("llama-3.1-8b", ["llama-3-8b"]), ("llama-3.1-70b", ["llama-3-70b"]), ("llama-3.1-405b", []),
    ]  # fmt: skip
    assert call("models", "r1")[1].splitlines()[1].split()[0] == "deepseek-v3"
    assert call("models", "zzz")[0] == 2


LLAMA_3 = "did you mean 'llama-3.1-8b' or 'llama-3.1-70b' or 'llama-3.1-405b'?"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("llama", f"{LLAMA_3} `ffn models llama` lists 7"), ("llama3", LLAMA_3), ("llama-3", LLAMA_3),
        ("lama", f"{LLAMA_3} `ffn models lama` lists 7"), ("phi", "did you mean 'phi-4' or 'phi-3-mini' or 'phi-2'?"),
        ("lama2", "did you mean 'llama-2-7b' or 'llama-2-13b' or 'llama-2-70b'?"),
        ("lama-2-7b", "did you mean 'llama-2-7b'?"), ("mistrl", "did you mean 'mistral-7b-v0.3' or 'mistral-7b'?"),
        ("mixtrl", "did you mean 'mixtral-8x7b' or 'mixtral-8x22b'?"),
        ("deepseek", "did you mean 'deepseek-v3' or 'deepseek-v2'?"),
        ("bert-base-uncasd", "did you mean 'bert-base' or 'bert-large'?"),  # of an alias the model's own name
        ("123", "`ffn models` lists the known ones; a path or 512x2048:gelu works too"),
    ],
)  # fmt: skip
def test_the_family_that_is_meant_is_offered_the_newest_first(call, typed, hint):
    assert call("params", typed) == (2, "", f"error: unknown model '{typed}'; {hint}\n")
