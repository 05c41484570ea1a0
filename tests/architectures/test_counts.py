"""Every text architecture of transformers: what its config says is what its module holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ffncli.models.counting.count import count
from ffncli.run.engine.functions import function
from tests.oracles.architectures import Architecture, cases, matching, numbers, outside
from tests.oracles.architectures.tiny import statement, tiny

CASES = cases()
BUILT = [name for name, case in CASES.items() if not case.reason]
_FUNCTIONS = (
    "act_fn",
    "activation_fn",
    "act",
    "intermediate_act_fn",
    "activation",
    "hidden_act",
    "gelu",
    "gelu_impl",
    "nonlin",
)


@statement
@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("factor", [1, 2])
def test_config_count_is_the_modules(name: str, factor: int) -> None:
    one = tiny(name)
    model, module = (one.model, one.module) if factor == 1 else (one.wide_model, one.wide)
    assert count(model).ffn_params_total == numbers(module, one.case.ffn)


@statement
@pytest.mark.parametrize("name", BUILT)
def test_norms_are_the_modules(name: str) -> None:
    counted = sum(group.norm_params_per_layer * len(group.layers) for group in count(tiny(name).model).groups)
    assert counted == numbers(tiny(name).module, CASES[name].norm)


@statement
@pytest.mark.parametrize("name", BUILT)
def test_no_matrix_outside_the_ffn_depends_on_d_ff(name: str) -> None:
    assert outside(tiny(name).module, tiny(name).wide, CASES[name]) == []


@statement
@pytest.mark.parametrize("name", BUILT)
def test_activation_is_the_modules(name: str) -> None:
    ours = {group.spec.activation for group in tiny(name).model.model.groups}
    assert len(ours) == 1
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for where, theirs in _functions(tiny(name).module, CASES[name]):
        expected = _plainly(theirs, x)  # first: it skips what has learned parameters
        assert torch.allclose(function(next(iter(ours)))(x), expected, atol=2e-4), where  # erf to tanh: 5e-4


def _functions(model: nn.Module, case: Architecture) -> Iterator[tuple[str, Any]]:
    """The activation functions that modules with FFN parameters hold, under the usual names."""
    owners = {name.rsplit(".", depth)[0] for name, _ in matching(model, case.ffn) for depth in (1, 2, 3)}
    for name, module in model.named_modules():
        for attribute in _FUNCTIONS:
            held = getattr(module, attribute, None)
            if name.endswith("router_mlp"):  # its function is not the experts': see test_router_mlp.py
                continue
            if name in owners and callable(held) and case.activation:
                yield f"{name}.{attribute}", held


def _plainly(held: Any, x: torch.Tensor) -> torch.Tensor:
    """The function on real numbers; one with parameters is compared by tests/block."""
    if isinstance(held, nn.Module) and any(True for _ in held.parameters()):
        pytest.skip("a learned activation")
    y = held(x)
    return y[0] if isinstance(y, tuple) else y  # I-BERT's also gives a scaling factor
