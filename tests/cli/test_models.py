from __future__ import annotations

import json

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


def test_names_that_begin_as_typed_are_offered_first(call):
    llama = "error: unknown model 'llama'; did you mean 'llama-2-7b' or 'llama-2-13b' or 'llama-65b'?"
    assert call("params", "llama")[2] == llama + " `ffn models llama` lists 7\n"
    llama3 = "error: unknown model 'llama3'; did you mean 'llama-3.1-8b' or 'llama-3.1-70b' or 'llama-3.1-405b'?\n"
    assert call("params", "llama3") == (2, "", llama3)
    assert "did you mean 'mixtral-8x7b'" in call("params", "mixtrl")[2]
