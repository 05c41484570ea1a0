"""A second, independent implementation of the block: an nn.Module of torch's own layers, built from the spec, not from
the steps.

`kernels/module.py` is separate on purpose: it is a kernel to be timed, built from the steps.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffncli.block.activations import TABLE, Limits
from ffncli.block.recipe import FFNSpec, route_of
from ffncli.block.steps import Activation
from ffncli.kernels.dense import activation, places
from ffncli.kernels.routing import choice

_MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity, "relu": nn.ReLU, "relu6": nn.ReLU6, "leaky_relu": nn.LeakyReLU, "prelu": nn.PReLU,
    "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("tanh"), "silu": nn.SiLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh,
    "mish": nn.Mish, "hardswish": nn.Hardswish, "softplus": lambda: nn.Softplus(threshold=40), "elu": nn.ELU,
    "selu": nn.SELU,
}  # fmt: skip


class Act(nn.Module):
    """An activation that has no torch module, computed by `kernels.dense.activation`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for parameter, value in TABLE[name].learned.items():
            self.register_parameter(parameter, nn.Parameter(torch.full((1,), value)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x."""
        return activation(Activation(self.name))(x, *self.parameters())


class FFNModule(nn.Module):
    """A dense FFN: down(dropout(act(up(x)))), or down(dropout(act(gate(x)) · up(x))) with a gate."""

    def __init__(self, spec: FFNSpec, d_model: int, d_ff: int, limits: Limits) -> None:
        super().__init__()
        if spec.gated:
            self.gate = nn.Linear(d_model, d_ff, bias=bool(spec.bias))
        self.up = nn.Linear(d_model, d_ff, bias=bool(spec.bias))
        self.act = _MODULES.get(spec.activation, lambda: Act(spec.activation))()
        if spec.sub_norm:
            self.sub_norm = norm_module(spec, d_ff)
        self.dropout = nn.Dropout(spec.dropout)
        self.down = nn.Linear(d_ff, d_model, bias=bool(spec.bias if spec.down_bias is None else spec.down_bias))
        self.spec, self.limits = spec, limits

    def forward(self, x: Tensor) -> Tensor:
        """Return the FFN's output [tokens, d_model] for x [tokens, d_model]."""
        spec, limits = self.spec, self.limits
        up = self.up(x)
        hidden = self._activated(spec.gate_scale * self.gate(x) if spec.gated else up)
        if spec.gated:
            up = up if limits.up_limit is None else up.clamp(-limits.up_limit, limits.up_limit)
            up = up if limits.up_cap is None else limits.up_cap * torch.tanh(up / limits.up_cap)
            hidden = hidden * (up + limits.up_plus)
        if spec.sub_norm:
            hidden = self.sub_norm(hidden)
        out: Tensor = self.down(self.dropout(hidden))
        return out

    def _activated(self, driven: Tensor) -> Tensor:
        """Return the activation within its limits; a soft cap replaces silu's factor x, and all of identity."""
        limits = self.limits
        driven = driven if limits.gate_high is None else driven.clamp(max=limits.gate_high)
        if limits.gate_cap is None:
            out: Tensor = self.act(driven)
        else:
            out = limits.gate_cap * torch.tanh(driven / limits.gate_cap)
            out = out if self.spec.activation == "identity" else out * torch.sigmoid(driven)
        return out if limits.act_high is None else out.clamp(max=limits.act_high)


class Mixture(nn.Module):
    """A mixture: each expert's output on its tokens times its weight; shared experts run on all tokens."""

    def __init__(self, spec: FFNSpec) -> None:
        super().__init__()
        assert spec.moe is not None
        moe = self.moe = spec.moe
        every, inner = moe.experts + moe.identity_experts, moe.latent or spec.d_model
        self.route = route_of(spec)
        self.router = nn.Linear(spec.d_model, self.route.experts.size, bias=moe.router_bias)
        if moe.correction:
            self.correction = nn.Parameter(torch.zeros(every))
        if spec.learned_scale:
            self.factor = nn.Parameter(torch.ones(1))
        if moe.lookup:
            self.register_buffer("lookup", torch.zeros(moe.lookup, moe.top_k, dtype=torch.long))
        if moe.latent:
            self.latent = nn.Linear(spec.d_model, inner, bias=False)
            self.widened = nn.Linear(inner, spec.d_model, bias=False)
        self.latent_norm = norm_module(spec, inner) if moe.latent_norm else nn.Identity()
        self.mixed_norm = norm_module(spec, inner) if moe.mixed_norm else nn.Identity()
        self.expert_norm = norm_module(spec, inner, after=True) if moe.expert_norm else nn.Identity()
        self.biased = AddedBias(spec.d_model) if moe.mixed_bias else nn.Identity()
        self.experts = nn.ModuleList(FFNModule(spec, inner, spec.d_ff, spec.limits) for _ in range(moe.experts))
        limits = spec.limits if spec.shared_limits is None else spec.shared_limits
        if moe.shared_routed:
            apart = (FFNModule(spec, spec.d_model, spec.d_ff, limits) for _ in range(moe.shared_experts))
            self.shared: nn.Module = nn.ModuleList(apart)
        elif moe.shared_experts:
            self.shared = FFNModule(spec, spec.d_model, spec.shared_width, limits)
        if moe.shared_gate:
            self.shared_gate = nn.Linear(spec.d_model, 1, bias=False)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the output for x [tokens, d_model]; `ids` [tokens, 1] are needed if a table chooses by them."""
        params = {name: getattr(self, name) for name in ("correction", "factor", "lookup") if hasattr(self, name)}
        choose = choice(self.route, places(params), x.dtype)
        chosen, weights = choose(self.moe.router_scale * self.router(x), (*params.values(), None), ids)
        inner = self.latent_norm(self.latent(x)) if self.moe.latent else x
        mixed = torch.stack([self._one(inner[t], chosen[t], weights[t]) for t in range(len(x))])
        out: Tensor = self.biased(self.widened(self.mixed_norm(mixed)) if self.moe.latent else mixed)
        if self.moe.shared_experts and not self.moe.shared_routed:
            shared = self.shared(x)
            shared = torch.sigmoid(self.shared_gate(x)) * shared if self.moe.shared_gate else shared
            out = out + self.moe.shared_scale * shared
        return out

    def _one(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run one token [d_model] through its experts."""
        out = torch.zeros_like(x)
        for e, weight in zip(chosen.tolist(), weights, strict=True):
            routed = e < self.moe.experts
            run = nn.Sequential(self.experts[e], self.expert_norm) if routed else self._further(e - self.moe.experts)
            out = out + (run(weight * x) if self.moe.weigh == "input" else weight * run(x))
        return out

    def _further(self, number: int) -> nn.Module:
        """Return the module for an entry of the route beyond the routed experts: a shared expert, or the identity."""
        if self.moe.shared_routed:
            return self.shared.get_submodule(str(number))
        return nn.Identity()


class AddedBias(nn.Module):
    """A learned bias: x + bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias to x [..., width]."""
        return x + self.bias


class BlockModule(nn.Module):
    """A block: norms, FFN and residual in the spec's order; a parallel block also adds `attention`."""

    def __init__(self, spec: FFNSpec) -> None:
        super().__init__()
        normed = spec.norm != "none"
        self.norm = norm_module(spec, spec.d_model) if normed and spec.norm_position.startswith("pre") else None
        self.norm_gate = NormGate(spec.d_model, spec.norm_gate) if spec.norm_gate else nn.Identity()
        self.ffn = Mixture(spec) if spec.moe else FFNModule(spec, spec.d_model, spec.d_ff, spec.limits)
        self.post_norm = norm_module(spec, spec.d_model, after=True) if normed and spec.norm_position != "pre" else None
        if spec.learned_scale and not spec.moe:
            self.factor = nn.Parameter(torch.ones(1))
        self.spec = spec

    def forward(self, x: Tensor, attention: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
        """Return the block's output for x [tokens, d_model]; `attention` and `token_ids` are a block's other inputs."""
        spec = self.spec
        normed = x if self.norm is None else self.norm_gate(self.norm(x))
        out: Tensor = self.ffn(normed) if token_ids is None else self.ffn(normed, token_ids)
        out = out * self.factor if spec.learned_scale and not spec.moe else out
        last = spec.norm_position == "post"
        out = out if self.post_norm is None or last else self.post_norm(out)
        if spec.residual or spec.parallel:
            out = x + spec.residual_scale * out if attention is None else x + attention + spec.residual_scale * out
        return out if self.post_norm is None or not last else self.post_norm(out)


class NormGate(nn.Module):
    """A gate on a norm's output: y · sigmoid(widen(silu(narrow(y))))."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.narrow, self.widen = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        """Multiply y [..., width] by its gate."""
        out: Tensor = y * torch.sigmoid(self.widen(functional.silu(self.narrow(y))))
        return out


class NormModule(nn.Module):
    """A norm that has no torch module: with 1 + weight, a weight on the input, or a bias but no weight."""

    def __init__(self, spec: FFNSpec, width: int, eps: float, first: bool) -> None:
        super().__init__()
        self.kind, self.eps, self.plus = spec.norm, eps, 1.0 if spec.norm_weight == "one_plus" else 0.0
        self.first = first
        if spec.norm_weight != "none":
            self.weight = nn.Parameter(torch.ones(width))
        if spec.norm_bias:
            self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., width]."""
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        weight = weight if weight is None else weight + self.plus
        if self.first and weight is not None:
            x, weight = x * weight, None
        if self.kind == "layernorm":
            return functional.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)
        out = functional.rms_norm(x, (x.shape[-1],), weight, self.eps)
        return out if bias is None else out + bias


def norm_module(spec: FFNSpec, width: int, after: bool = False) -> nn.Module:
    """Return torch's own norm if its parameters match, else a NormModule. A norm `after` the FFN or an expert may have
    its own epsilon and multiply its input by the weight."""
    eps = spec.post_norm_eps if after and spec.post_norm_eps is not None else spec.norm_eps
    first = after and spec.post_norm_weigh == "input"
    plain = spec.norm_weight == "plain" and not first
    if plain and spec.norm == "layernorm":
        return nn.LayerNorm(width, eps, bias=bool(spec.norm_bias))
    if plain and spec.norm == "rmsnorm" and not spec.norm_bias:
        return nn.RMSNorm(width, eps)
    return NormModule(spec, width, eps, first)


def block_module(spec: FFNSpec, weights: Mapping[str, Tensor]) -> BlockModule:
    """Return the block's module in eval mode; its parameters are the tensors of `weights` (canonical names), not
    copies."""
    with torch.device("meta"):
        module = BlockModule(spec)
    state: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.startswith(("norm.", "post_norm.", "norm_gate.")):
            state[name] = tensor
        elif name == "scaled.factor":
            state["factor"] = tensor
        elif spec.moe and spec.moe.shared_routed and name.startswith("shared."):
            inner = name.removeprefix("shared.")
            state |= {f"ffn.shared.{e}.{inner}": tensor[e] for e in range(spec.moe.shared_experts)}
        elif spec.moe and name.startswith(("gate.", "up.", "act.", "sub_norm.", "down.")):
            state |= {f"ffn.experts.{e}.{name}": tensor[e] for e in range(spec.moe.experts)}
        else:
            state[f"ffn.{name.removeprefix('route.')}"] = tensor
    module.load_state_dict(state, strict=True, assign=True)
    return module.requires_grad_(False).eval()
