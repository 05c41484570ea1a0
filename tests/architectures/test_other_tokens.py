"""FFNs for tokens that are no text: not counted, and their parameters are those of transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ffncli.models.config.other_tokens import _ROWS
from tests.oracles.architectures import numbers
from tests.oracles.architectures.tiny import statement, tiny

_BERT = r"encoder\.layer\.\d+\."
# Which parameters are the second FFN's, its norms included, by their names in memory.
SECOND: Mapping[str, str] = {
    "ernie4_5_vl_moe_text": r"layers\.\d+\.mlp\.vision_moe\..*",
    "evolla": r"(?:.*\.)?layers\.\d+\.adapter\.(?:.*\.)?ff\..*",
    "higgs_audio_v2": r"layers\.\d+\.(audio_mlp|audio_post_attention_layernorm)\..*",
    "instructblip_qformer": _BERT + r"(intermediate|output)_query\..*",
    "lilt": _BERT + r"layout_(intermediate|output)\..*",
    "lxmert": r"encoder\.(r_layers\.\d+\.(intermediate|output)|x_layers\.\d+\.visn_(inter|output))\..*",
}


@statement
@pytest.mark.parametrize("name", SECOND)
def test_their_parameters_are_the_modules(name: str) -> None:
    one = tiny(name)
    (second,) = (part for part in one.saved_model.not_counted if part.what.startswith("FFNs of "))
    assert second.parameters == numbers(one.module, SECOND[name]) > 0
    assert second in one.model.not_counted


def test_every_family_that_has_them_is_here() -> None:
    assert _ROWS.keys() == SECOND.keys()
