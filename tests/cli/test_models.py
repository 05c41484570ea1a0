from __future__ import annotations

from tests.oracles.counts import MOE


def test_active_parameters_are_shown_where_any_model_has_experts(call):
    dense = call("models", "gpt2")[1]
    assert "active" not in dense
    both = call("models", "LLAMA")[1]
    assert [line.split()[0] for line in both.splitlines()[1:]][:1] == ["llama-2-7b"]
    rows = {line.split()[0]: line.split() for line in call("models")[1].splitlines()[1:]}
    assert set(MOE) <= set(rows)
    assert rows["mixtral-8x7b"][-4:] == ["45.10", "B", "11.28", "B"]
    assert rows["llama-2-7b"][-3:] == ["32", "4.329", "B"]
