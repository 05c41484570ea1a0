"""What a kernel makes of its params for one number of tokens: packed weights, say. Made once, kept while they live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeAlias, TypeVar
from weakref import ref

import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels.kernel import Params, Steps

_MOST = 8  # kinds of x of which each set of weights keeps one
Made = TypeVar("Made")
Kind: TypeAlias = tuple[int, bool]  # the number of tokens, whether x is from inference mode: torch tells them apart


def aliases(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """The weights in step order as new tensors with the same memory: what is made of them is made again after this."""
    return tuple(weights[name].detach() for name in parameters(steps))


class PerWeights(Generic[Made]):
    """`get(x, params)`: what `make(x, params)` returned for these params and as many tokens.

    Params are the same if their first tensor is. What was made lives no longer than that tensor, so it must not hold
    it; the latest eight kinds of x are kept of each.
    """

    def __init__(self, make: Callable[[Tensor, Params], Made]) -> None:
        self._make = make
        self._made: dict[int, tuple[ref[Tensor], dict[Kind, Made]]] = {}

    def get(self, x: Tensor, params: Params) -> Made:
        """What belongs to these params and len(x) tokens; made at the first such call."""
        entry, kind = self._made.get(id(params[0])), (len(x), x.is_inference())
        if entry is not None and kind in entry[1]:
            return entry[1][kind]
        return self._new(x, params, kind)

    def _new(self, x: Tensor, params: Params, kind: Kind) -> Made:
        key, made = id(params[0]), self._made
        if key not in made:
            made[key] = ref(params[0], lambda dead: made.pop(key, None) and None), {}
        with torch.no_grad():
            new = self._make(x, params)
        of_kinds = made[key][1]
        while len(of_kinds) >= _MOST:
            del of_kinds[next(iter(of_kinds))]
        of_kinds[kind] = new
        return new
