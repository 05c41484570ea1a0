from __future__ import annotations

import pytest

from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.models.model import Group, Model, grouped

SMALL, LARGE = FFNSpec(4, 8), FFNSpec(4, 16)


def model(*groups: tuple[str, tuple[int, ...], FFNSpec]) -> Model:
    return Model("m", tuple(Group(*g) for g in groups))


def test_layers_with_equal_specs_are_one_group():
    assert grouped("decoder", {0: SMALL, 1: LARGE, 2: SMALL}) == [
        Group("decoder", (0, 2), SMALL),
        Group("decoder", (1,), LARGE),
    ]


def test_the_main_group_has_most_layers_or_comes_first():
    tied = model(("decoder", (0, 2), SMALL), ("decoder", (1, 3), LARGE))
    assert tied.main.spec == SMALL
    assert tied.layer_count == 4
    assert model(("decoder", (0,), SMALL), ("decoder", (1, 2), LARGE)).main.spec == LARGE


def test_a_layer_is_found_in_its_group_and_stack():
    both = model(("encoder", (0, 2), SMALL), ("encoder", (1,), LARGE), ("decoder", (0,), LARGE))
    assert (both.layer(None).stack, both.layer(None).index) == ("encoder", 0)
    assert both.layer("encoder.1").spec == both.layer("decoder.0").spec == LARGE
    with pytest.raises(FFNError, match=r"ambiguous; write encoder\.0 or decoder\.0"):
        both.layer("0")
    with pytest.raises(FFNError, match=r"'2' is ambiguous; write encoder\.2$"):
        both.layer("2")
    with pytest.raises(FFNError, match=r"m has encoder layers 0 to 2 and decoder layers 0 to 0"):
        both.layer("decoder.1")
