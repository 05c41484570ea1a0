"""Data that a kernel creates from its params for one number of tokens, such as packed weights. It is created once and
kept while the params exist.

If a library cannot multiply 16-bit numbers, weights are converted to float32 once. Leaving the products to torch would
be slower: on a processor with only AVX2, torch multiplies 16-bit numbers one at a time, at an eighth of float32's rate.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeAlias, TypeVar
from weakref import ref

import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels.kernel import Build, Computes, Params, Prepare, Steps

_MOST = 8  # maximum kinds of x that are kept per set of weights
Made = TypeVar("Made")
# (number of tokens, whether x is from inference mode, which torch treats differently)
Kind: TypeAlias = tuple[int, bool]


def aliases(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Return the weights in step order as new tensors on the same memory, for which `PerWeights` creates new
    results."""
    return tuple(weights[name].detach() for name in parameters(steps))


class PerWeights(Generic[Made]):
    """A cache: `get(x, params)` returns the result of `make(x, params)` for these params and this number of tokens.

    Params are identified by their first tensor. A result is dropped when that tensor is freed, so the result must not
    hold a reference to it; for each set of params the latest eight kinds of x are kept.
    """

    def __init__(self, make: Callable[[Tensor, Params], Made]) -> None:
        self._make = make
        self._made: dict[int, tuple[ref[Tensor], dict[Kind, Made]]] = {}

    def get(self, x: Tensor, params: Params) -> Made:
        """Return the result for these params and len(x) tokens, creating it at the first such call."""
        entry, kind = self._made.get(id(params[0])), (len(x), x.is_inference())
        if entry is not None and kind in entry[1]:
            return entry[1][kind]
        return self._new(x, params, kind)

    def _new(self, x: Tensor, params: Params, kind: Kind) -> Made:
        key, made = id(params[0]), self._made
        if key not in made:  # the entry is removed with its tensor: Python may reuse the id
            made[key] = ref(params[0], lambda dead: made.pop(key, None) and None), {}
        with torch.no_grad():
            new = self._make(x, params)
        of_kinds = made[key][1]
        while len(of_kinds) >= _MOST:  # drop the oldest: packed weights take as much memory as the weights
            del of_kinds[next(iter(of_kinds))]
        of_kinds[kind] = new
        return new


Multiplies = Callable[[torch.dtype], bool]


def widened_weights(prepare: Prepare, multiplies: Multiplies) -> Prepare:
    """Return a `prepare` that gets the weights in float32, twice their size, if their dtype cannot be multiplied."""

    def prepared(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        return prepare(steps, _InFloat32(weights, multiplies))

    return prepared


class _InFloat32(Mapping[str, Tensor]):
    """Weights that are converted one by one, when they are read."""

    def __init__(self, weights: Mapping[str, Tensor], multiplies: Multiplies) -> None:
        self._weights, self._multiplies = weights, multiplies

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        return tensor if self._multiplies(tensor.dtype) else tensor.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def widened(multiplies: Multiplies) -> Callable[[Build], Build]:
    """Decorate a `build`: if its dtype cannot be multiplied, it computes in float32, from x to the output."""

    def decorated(build: Build) -> Build:
        def built(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
            if multiplies(dtype):
                return build(steps, device, dtype)
            compute = build(steps, device, torch.float32)
            return lambda x, params: compute(x.float(), params).to(dtype)

        return built

    return decorated
