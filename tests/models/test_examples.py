"""The blocks of the texts, as data."""

from __future__ import annotations

import pytest

from ffncli.block.cost import cost
from ffncli.block.steps import right_hand_side
from ffncli.errors import FFNError
from ffncli.models.examples import EXAMPLES, final_layer_alone, find

# What the texts say: d_model, d_ff, activation, gated.
SAID = {
    "notebook": (4, 8, "relu", False),
    "explained": (512, 2048, "gelu", False),
    "llama": (4096, 11008, "silu", True),
    "conv": (512, 2048, "relu", False),
    "bert": (768, 3072, "gelu", False),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_dimensions_are_the_texts(name):
    spec = find(name).model.main.spec
    assert (spec.d_model, spec.d_ff, spec.activation, spec.gated) == SAID[name]
    assert spec.bias == (name != "llama")
    assert find(name).example.shape[-1] == spec.d_model


def test_what_is_not_given_is_said():
    for name in EXAMPLES:
        assert bool(find(name).evidence) == (not find(name).example.weights)
    assert find("explained").example.given == {(0, 0): 0.146, (0, 1): 0.108, (0, 2): 0.192, (0, 511): 0.11}


def test_llama_merges_first():
    block = find(" LLama ").example.block
    assert [right_hand_side(s, block) for s in block] == [
        "x + attention", "rmsnorm(merged)", "norm · W1", "norm · W3", "silu(gate)", "act ⊙ up", "hidden · W2",
    ]  # fmt: skip
    assert cost(block).params == 3 * 4096 * 11008


@pytest.mark.parametrize(("name", "hint"), [("notbook", "did you mean 'notebook'"), ("xyz", "use one of notebook, ex")])
def test_unknown_names(name, hint):
    with pytest.raises(FFNError, match=hint) as error:
        find(name)
    assert all(known in str(error.value) for known in EXAMPLES)


def test_a_final_layer_alone():
    assert [s.output for s in final_layer_alone(8, 30, True).example.block] == ["logits", "probs"]
    assert cost(final_layer_alone(8, 30, False).example.block).params == 240
