"""Mixtures of experts and plain objects as people write them, as a user's file."""

from tests.oracles.own_modules import HEAD

MIXTURES = (
    HEAD
    + """
class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
    def forward(self, x):
        return self.w2(F.relu(self.w1(x)))
class Listed(nn.Module):
    def __init__(self, dim, hidden, n_experts=4, k=2):
        super().__init__()
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.experts, self.k = nn.ModuleList(Expert(dim, hidden) for _ in range(n_experts)), k
    def forward(self, x):
        top, at = self.gate(x).softmax(-1).topk(self.k)
        parts = torch.stack([expert(x) for expert in self.experts], -2)
        chosen = parts.gather(-2, at[..., None].expand(*at.shape, x.shape[-1]))
        return (chosen * top[..., None]).sum(-2)
class Keyed(Listed):
    def __init__(self, dim, hidden):
        super().__init__(dim, hidden, 3)
        self.experts = nn.ModuleDict({str(n): Expert(dim, hidden) for n in range(3)})
    def forward(self, x):
        return self.gate(x).softmax(-1)[..., :1] * self.experts["0"](x)
class Stacked(nn.Module):
    def __init__(self, dim, hidden, experts=4):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden))
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim))
    def forward(self, x):
        y = torch.einsum("...d,ndh->...nh", x, self.w1).relu()
        return torch.einsum("...nh,nhd,...n->...d", y, self.w2, self.router(x).softmax(-1))
class Layers(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"moe": Listed(dim, hidden)}) for _ in range(3))
class Twice(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.parts = nn.ModuleList(Expert(dim, hidden) for _ in range(2))
    def forward(self, x):
        return self.parts[1](self.parts[0](x))
class Mixtral(nn.Module):
    def __init__(self, d_model, d_ff, num_experts, top_k):
        super().__init__()
        self.top_k, self.n, self.drop = top_k, num_experts, nn.Dropout(0.1)
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        for name, (out, into) in {"w1": (d_ff, d_model), "w2": (d_model, d_ff), "w3": (d_ff, d_model)}.items():
            setattr(self, name, nn.ModuleList(nn.Linear(into, out, bias=False) for _ in range(num_experts)))
    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        logits = self.gate(x)
        share, chosen = F.softmax(logits, -1, dtype=torch.float).topk(self.top_k, -1)
        share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for e in range(self.n):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            y = self.w2[e](self.drop(F.silu(self.w1[e](x[token])) * self.w3[e](x[token])))
            out.index_add_(0, token, y * share[token, slot, None])
        return out.view(shape), logits
class Corrected(nn.Module):
    def __init__(self, d_model, d_ff, num_experts, top_k, n_shared_experts=1):
        super().__init__()
        self.top_k, shared = top_k, n_shared_experts * d_ff
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.correction = nn.Parameter(torch.zeros(num_experts))
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * d_ff, d_model) * 0.1)
        self.down = nn.Parameter(torch.randn(num_experts, d_model, d_ff) * 0.1)
        self.s_gate, self.s_up = (nn.Linear(d_model, shared, bias=False) for _ in range(2))
        self.s_down = nn.Linear(shared, d_model, bias=False)
    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.correction).topk(self.top_k, -1).indices
        share = scores.gather(-1, chosen)
        share = torch.zeros_like(scores).scatter(-1, chosen, 2.5 * share / share.sum(-1, keepdim=True))
        gate, up = torch.einsum("...d,nhd->...nh", x, self.gate_up).chunk(2, -1)
        y = torch.einsum("...nh,ndh,...n->...d", F.silu(gate) * up, self.down, share)
        return y + self.s_down(F.silu(self.s_gate(x)) * self.s_up(x))
class Biased(nn.Module):
    def __init__(self, d_model, d_ff, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Parameter(torch.randn(d_model, num_experts) * 0.1)
        self.router_bias = nn.Parameter(torch.zeros(num_experts))
        self.w1, self.b1 = (nn.Parameter(torch.randn(num_experts, *s)) for s in ((d_ff, d_model), (d_ff,)))
        self.w2, self.b2 = (nn.Parameter(torch.randn(num_experts, *s)) for s in ((d_model, d_ff), (d_model,)))
    def forward(self, x):
        top, chosen = (x @ self.router + self.router_bias).topk(self.top_k)
        share = x.new_zeros(*x.shape[:-1], len(self.router_bias)).scatter(-1, chosen, top.softmax(-1))
        y = F.gelu(torch.einsum("...d,nhd->...nh", x, self.w1) + self.b1)
        y = torch.einsum("...nh,ndh->...nd", y, self.w2) + self.b2
        return (y * share[..., None]).sum(-2)
class WeighedInput(Stacked):
    def forward(self, x):
        y = torch.einsum("...d,...n->...nd", x, self.router(x).sigmoid())
        y = F.gelu(torch.einsum("...nd,ndh->...nh", y, self.w1))
        return torch.einsum("...nh,nhd->...d", y, self.w2)
class OtherShared(Corrected):
    def forward(self, x):
        return super().forward(x) + self.s_down(F.gelu(self.s_gate(x)))
class Unusual(Listed):
    def forward(self, x):
        share = self.gate(x).exp() / (1 + self.gate(x).exp().sum(-1, keepdim=True))
        return sum(share[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
"""
)

PLAIN = (
    HEAD
    + """
import numpy as np
class Attributes:
    def __init__(self, d_model, d_ff):
        self.w1, self.b1 = torch.randn(d_ff, d_model) * 0.1, torch.zeros(d_ff)
        self.w2, self.b2 = torch.randn(d_model, d_ff) * 0.1, torch.zeros(d_model)
        self.calls, self.table = 0, torch.arange(3)
    def __call__(self, x):
        self.calls += 1
        return F.gelu(x @ self.w1.T + self.b1) @ self.w2.T + self.b2
class OfModules:
    def __init__(self, d_model, d_ff):
        self.layers = [nn.Linear(d_model, d_ff, bias=False) for _ in range(2)] + [nn.Linear(d_ff, d_model, bias=False)]
    def forward(self, x):
        return self.layers[2](F.silu(self.layers[0](x)) * self.layers[1](x))
class InADict:
    def __init__(self, d_model, d_ff):
        made = torch.randn(d_model, d_ff, requires_grad=True) * 0.1  # not a leaf
        self.weights = {"in.w": made, "out": torch.randn(d_ff, d_model) * 0.1}
    def __call__(self, x):
        return torch.relu(x @ self.weights["in.w"]).square() @ self.weights["out"]
class Slotted:
    __slots__ = ("up", "down")
    def __init__(self, d_model, d_ff):
        self.up, self.down = torch.randn(d_ff, d_model), torch.randn(d_model, d_ff)
    def __call__(self, x):
        return torch.tanh(x @ self.up.T) @ self.down.T
class Mixture:
    def __init__(self, d_model, d_ff, num_experts, top_k):
        self.top_k, self.gate = top_k, torch.randn(num_experts, d_model)
        self.experts = [Attributes(d_model, d_ff) for _ in range(num_experts)]
    def __call__(self, x):
        logits = x @ self.gate.T
        top, chosen = logits.topk(self.top_k)
        share = torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))
        return sum(share[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
class Arrays:
    def __init__(self, d_model, d_ff):
        self.w1, self.w2 = np.zeros((d_ff, d_model)), np.zeros((d_model, d_ff))
    def __call__(self, x):
        return x
class Empty:
    def __call__(self, x):
        return x
class NotCalled:
    def __init__(self, d_model, d_ff):
        self.w1 = torch.zeros(d_ff, d_model)
class Other(Attributes):
    def __call__(self, x):
        return super().__call__(x).sin()
built = Attributes(8, 24)
"""
)
