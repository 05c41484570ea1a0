"""Every text architecture of transformers: what its config says is what its module holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from ffncli.models.config import from_config
from ffncli.models.count import ModelCount, count
from ffncli.models.model import Resolved
from ffncli.run.functions import function
from tests.oracles.architectures import Architecture, build, cases, matching, numbers, outside

CASES = cases()
BUILT = [name for name, case in CASES.items() if not case.reason]
_FUNCTIONS = (
    "act_fn",
    "activation_fn",
    "act",
    "intermediate_act_fn",
    "activation",
    "hidden_act",
    "gelu_impl",
    "nonlin",
)


@cache
def _module(name: str, factor: int = 1) -> nn.Module:
    return build(name, CASES[name], factor, meta=True)


@cache
def _model(name: str, factor: int = 1) -> Resolved:
    """What ffn makes of the config.json that transformers would write."""
    values = json.loads(json.dumps(_module(name, factor).config.to_dict(), default=str))  # type: ignore[union-attr]
    return from_config(values, name, f"{name}/config.json")


def _count(name: str, factor: int = 1) -> ModelCount:
    return count(_model(name, factor))


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("factor", [1, 2])
def test_config_count_is_the_modules(name: str, factor: int) -> None:
    assert _count(name, factor).ffn_params_total == numbers(_module(name, factor), CASES[name].ffn)


@pytest.mark.parametrize("name", BUILT)
def test_norms_are_the_modules(name: str) -> None:
    c = _count(name)
    counted = sum(group.norm_params_per_layer * len(group.layers) for group in c.groups)
    assert counted == numbers(_module(name), CASES[name].norm)


@pytest.mark.parametrize("name", BUILT)
def test_no_matrix_outside_the_ffn_depends_on_d_ff(name: str) -> None:
    assert outside(name, CASES[name]) == []


@pytest.mark.parametrize("name", BUILT)
def test_activation_is_the_modules(name: str) -> None:
    ours = {group.spec.activation for group in _model(name).groups}
    assert len(ours) == 1
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for where, theirs in _functions(_module(name), CASES[name]):
        expected = _plainly(theirs, x)  # first: it skips what has learned parameters
        assert torch.allclose(function(next(iter(ours)))(x), expected, atol=2e-4), where  # erf to tanh: 5e-4


def _functions(model: nn.Module, case: Architecture) -> Iterator[tuple[str, Any]]:
    """The activation functions that modules with FFN parameters hold, under the usual names."""
    owners = {name.rsplit(".", depth)[0] for name, _ in matching(model, case.ffn) for depth in (1, 2, 3)}
    for name, module in model.named_modules():
        for attribute in _FUNCTIONS:
            held = getattr(module, attribute, None)
            if name in owners and callable(held) and case.activation:
                yield f"{name}.{attribute}", held


def _plainly(held: Any, x: torch.Tensor) -> torch.Tensor:
    """The function on real numbers; one with parameters has them on meta, tests/block compares it."""
    if isinstance(held, nn.Module) and any(True for _ in held.parameters()):
        pytest.skip("a learned activation")
    y = held(x)
    return y[0] if isinstance(y, tuple) else y  # I-BERT's also gives a scaling factor
