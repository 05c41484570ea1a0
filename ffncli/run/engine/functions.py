"""Activation rows as torch functions: the native call if the table names one, else the row's own formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.block.formulas import SCALAR, with_learned

# torch has every name that SCALAR has.
NAMESPACE = SimpleNamespace(**{name: getattr(torch, name) for name in vars(SCALAR)})


def function(name: str, learned: Mapping[str, Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """f for tensors of any shape; `learned` has the row's learned parameters (one element each), if any."""
    row = TABLE[name]
    if row.native is not None:
        call, options = row.native
        return partial(getattr(functional, call), **options)
    return partial(_call, row.f, with_learned(NAMESPACE, _numbers(learned)))


def slope(name: str, learned: Mapping[str, Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """df/dx for tensors, from the row's own formula."""
    return partial(_call, TABLE[name].slope, with_learned(NAMESPACE, _numbers(learned)))


def _call(f: Callable[[Any, Any], Any], m: Any, x: Tensor) -> Tensor:
    result: Tensor = f(x, m)
    return result


def _numbers(learned: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Parameters of one element as plain numbers, so that they broadcast without adding an axis."""
    return {name: value.reshape(()) for name, value in (learned or {}).items()}
