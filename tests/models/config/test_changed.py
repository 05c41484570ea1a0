"""Configs with fields changed: the tensors' own number, a note, or one line. `make fuzz` draws 2,000 of them."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

from ffncli.models.config.read import from_config
from ffncli.models.config.unread import UnknownField
from ffncli.models.counting.count import count
from tests.fuzz.configs import judge, specimens
from tests.fuzz.formats import FAMILIES, run_case


@pytest.mark.filterwarnings("ignore")
def test_drawn_changes_give_the_right_number_a_note_or_a_line() -> None:
    results: Counter[str] = Counter()
    for number in range(60):
        change, given = run_case(FAMILIES, number)
        assert not given.wrong, f"python -m tests.fuzz --only {FAMILIES}/{number}: {change}: {given.wrong}"
        results[given.text] += 1
    assert results["counted"] > 10
    assert results["refused"] > 10


def changed(name: str, **fields: Any) -> dict[str, Any]:
    """A family's tiny config with these fields; None takes one away."""
    values = {**copy.deepcopy(specimens()[name][1]), **fields}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(("name", "usual", "other"), [
    ("llama", "num_hidden_layers", "n_layers"), ("gpt2", "n_layer", "num_layers"),
    ("qwen3_moe", "num_local_experts", "moe_num_experts"), ("deepseek_v3", "n_routed_experts", "moe_num_experts"),
])  # fmt: skip
def test_a_name_that_the_familys_code_does_not_read_is_noted(name: str, usual: str, other: str) -> None:
    value = specimens()[name][1][usual]
    found = from_config(changed(name, **{usual: None, other: value}), name, "c")
    assert found.model.groups == from_config(specimens()[name][1], name, "c").model.groups
    assert found.notes[0].startswith(f"{other} = {value}: the code of {name} reads ")
    assert usual in found.notes[0]
    assert judge(name, changed(name, **{usual: None, other: value})) == ("noted", "")


@pytest.mark.parametrize(("name", "field", "value"), [
    ("marian", "hidden_size", 48), ("pix2struct_text_model", "num_hidden_layers", 9), ("xlstm", "num_blocks", 9),
])  # fmt: skip
def test_a_second_spelling_with_another_value_is_refused(name: str, field: str, value: int) -> None:
    with pytest.raises(UnknownField, match=f"{field} = {value}"):
        from_config(changed(name, **{field: value}), name, "c")


@pytest.mark.parametrize("bottleneck", [True, False])
def test_mobilebert_is_as_wide_as_its_code_reads(bottleneck: bool) -> None:
    values = changed("mobilebert", use_bottleneck=bottleneck, true_hidden_size=32)
    assert judge("mobilebert", values) == ("counted", "")
    assert count(from_config(values, "m", "c")).d_model == 32
