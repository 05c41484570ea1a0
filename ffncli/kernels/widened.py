"""16-bit blocks computed in float32, where a library does not multiply 16-bit numbers: weights are converted once.

torch still multiplies them, but one number at a time: on a processor with AVX2 alone at an eighth of float32's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ffncli.kernels.kernel import Build, Computes, Params, Prepare, Steps

Multiplies = Callable[[torch.dtype], bool]


def widened_weights(prepare: Prepare, multiplies: Multiplies) -> Prepare:
    """`prepare`, given float32 in place of a dtype that is not multiplied: twice the bytes."""

    def prepared(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        return prepare(steps, _InFloat32(weights, multiplies))

    return prepared


class _InFloat32(Mapping[str, Tensor]):
    """Weights that are converted as they are read, one after the other."""

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
    """Decorates a `build`: in a dtype that is not multiplied it computes in float32, from x to the output."""

    def decorated(build: Build) -> Build:
        def built(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
            if multiplies(dtype):
                return build(steps, device, dtype)
            compute = build(steps, device, torch.float32)
            return lambda x, params: compute(x.float(), params).to(dtype)

        return built

    return decorated
