"""How far a gated and a plain block of equal size bend, against torch's own layers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ffncli.run.texts.fact import drawn
from ffncli.run.texts.llama import bends


@pytest.mark.parametrize("name", ["swiglu", "silu", "gelu", "relu"])
def test_departures_are_those_of_torchs_layers(name: str):
    d_model, generator = 12, torch.Generator().manual_seed(0)
    width = 32 if name == "swiglu" else 48

    def layer(into: int, out: int) -> torch.Tensor:
        weight = torch.empty(out, into)
        torch.nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator)
        return weight.double()

    first, *gate = [layer(d_model, width) for _ in range(2 if name == "swiglu" else 1)]
    down = layer(width, d_model)
    bend = functional.silu if name == "swiglu" else getattr(functional, name)

    def f(x: torch.Tensor) -> torch.Tensor:
        hidden = bend(x @ first.T)
        return (hidden * (x @ gate[0].T) if gate else hidden) @ down.T

    a, b = drawn(512, d_model), drawn(512, d_model, seed=1)
    wanted = (f(a + b) - f(a) - f(b) + f(0 * a)).abs().max() / f(a + b).abs().max()
    assert bends(d_model)[name] == pytest.approx(wanted.item(), rel=1e-12)
    assert first.numel() * (3 if gate else 2) == 1152  # the same number of parameters in all four
