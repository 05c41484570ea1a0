"""Units ablated in 30 families: the prediction is bitwise that of transformers' model with columns of zeros."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import functional

import ffncli
from tests.oracles.prompted import DENSE, PROMPT, SINGLE, ids, in_double

UNITS = range(4, 12)  # several, since a relu may be 0 for one
_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")


def with_head(name: str) -> Any:
    """The model with its head as transformers loads it, in float64 where its code allows that."""
    import transformers

    path, model = in_double(name)
    kind = next(kind for kind in _CLASSES if type(model.config) in getattr(transformers, kind)._model_mapping)
    if type(model) is getattr(transformers, kind)._model_mapping[type(model.config)]:
        return deepcopy(model)  # it has the head and the dtype already: units are set to 0 in the copy
    dtype = torch.float32 if name in SINGLE else torch.float64
    return getattr(transformers, kind).from_pretrained(path, dtype=dtype).eval()


def zeroed(model: Any, name: str, layer: int) -> None:
    """The units write nothing: by hand, in the module that they enter."""
    at = DENSE[name][0].format(i=layer)
    down = dict(model.named_modules()).get(at) or model.base_model.get_submodule(at)
    columns = down.weight if type(down).__name__ == "Conv1D" else down.weight.T  # [d_ff, d_model]
    columns[UNITS.start : UNITS.stop] = 0


@pytest.mark.parametrize("name", DENSE)
def test_the_prediction_is_that_of_the_model_with_zeros(name: str) -> None:
    model, layer = with_head(name), 0 if name.startswith("t5") else 1
    dtype = "fp32" if name in SINGLE else "fp64"
    where = f"encoder.{layer}" if name.startswith("t5") else layer
    units = [f"unit:{unit}" for unit in UNITS]
    change = ffncli.trace(
        in_double(name)[0],
        prompt=PROMPT,
        layer=where,
        dtype=dtype,
        ablate=units,
        top_tokens=1000,
    ).prediction
    given = {"input_ids": ids()} | ({"decoder_input_ids": torch.tensor([[0]])} if name.startswith("t5") else {})
    with torch.no_grad():
        old = model(**given).logits[0, -1]
        zeroed(model, name, layer)
        new = model(**given).logits[0, -1]
    assert change is not None
    assert {t.id: t.old_logit for t in change.tokens} == dict(enumerate(old.double().tolist()))
    assert {t.id: t.new_logit for t in change.tokens} == dict(enumerate(new.double().tolist()))
    assert change.logit_change == float((new.double() - old.double()).abs().max()) > 0
    old, new = old.double(), new.double()
    expected = functional.kl_div(new.log_softmax(-1), old.log_softmax(-1), log_target=True, reduction="sum")
    assert change.divergence == pytest.approx(float(expected), abs=1e-9)
