"""The block as anybody would write it in torch, from plain nn modules: steps, costs and traces are compared with it."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Plain(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, d_model: int, d_ff: int, bias: bool = True, act=functional.relu) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Gated(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, d_model: int, d_ff: int, bias: bool = False, act=functional.silu) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class ClampedGated(Gated):
    """gpt-oss: (up + 1) * quick_gelu(gate), gate at most 7, up within ±7."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).clamp(max=7.0), self.up(x).clamp(-7.0, 7.0)
        return self.down((up + 1) * (gate * torch.sigmoid(1.702 * gate)))


class SwigluStep(Gated):
    """Step-3.5: silu(gate) at most 7, up within ±7."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)).clamp(max=7.0) * self.up(x).clamp(-7.0, 7.0))


class Situ(Gated):
    """Kimi-K3: 4 tanh(gate / 4) sigmoid(gate) * 25 tanh(up / 25)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down(100 * torch.tanh(gate / 4) * torch.sigmoid(gate) * torch.tanh(up / 25))


class MoE(nn.Module):
    """Computes every expert on every token and multiplies by the router's weights: slow, but too simple to be wrong."""

    def __init__(self, d_model: int, d_ff: int, experts: int, top_k: int, shared: int = 0) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, experts, bias=False)
        self.experts = nn.ModuleList(Gated(d_model, d_ff) for _ in range(experts))
        self.shared = Gated(d_model, shared * d_ff) if shared else None
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        kept = share >= share.topk(self.top_k, -1).values[..., -1:]
        share = share * kept
        share = share / share.sum(-1, keepdim=True)
        out = sum(share[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
        return out + self.shared(x) if self.shared is not None else out


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| / max|b|."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
