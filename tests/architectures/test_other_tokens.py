"""FFNs for tokens that are not text: not counted, and their parameters are those of transformers' modules."""

from __future__ import annotations

import pytest

from ffncli.models.config.families import BY_TYPE
from ffncli.models.config.read import FFNS
from ffncli.models.tensors.matching import block_tensors
from tests.oracles.architectures import Architecture, numbers, towers
from tests.oracles.architectures.tiny import statement, tiny

CASES = [name for name, case in towers().items() if case.second != Architecture().second]
COMPOSITES = ["ernie4_5_vl_moe"]  # whose files have them in one list with the text's


@statement
@pytest.mark.parametrize("name", [*CASES, *COMPOSITES])
def test_their_parameters_are_the_modules(name: str) -> None:
    one = tiny(name)
    (second,) = (part for part in one.saved_model.not_counted if part.what.startswith("FFNs of "))
    assert second.parameters == numbers(one.module, one.case.second) > 0
    assert second in one.model.not_counted


@statement
@pytest.mark.parametrize("name", COMPOSITES)
def test_a_layer_read_by_itself_has_the_texts_experts_alone(name: str) -> None:
    model = tiny(name).saved_model
    assert model.checkpoint is not None
    layer = block_tensors(model, model.checkpoint, "decoder", 1)
    assert layer is not None
    experts = {name: item.count for name, item in layer.items.items() if name.startswith("mlp.experts.")}
    assert experts == {f"mlp.experts.#.{which}_proj.weight": 8 for which in ("gate", "up", "down")}


def test_every_family_that_has_them_is_here() -> None:
    assert FFNS.keys() == {BY_TYPE[name] for name in CASES}
