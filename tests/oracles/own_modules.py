"""FFN modules as learners write them, as the source of a Python file, and the kind of block that each one is."""

HEAD = """
import math
import torch
from torch import nn
import torch.nn.functional as F

"""

MODULES = (
    HEAD
    + """
class FeedForwardBlock(nn.Module):
    def __init__(self, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)
        self.linear_2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.linear_2(self.dropout(torch.relu(self.linear_1(x))))

class Needs3D(nn.Module):
    def __init__(self, n_embd, dropout=0.0, bias=True):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, 4 * n_embd, bias=bias), nn.GELU(),
                                 nn.Linear(4 * n_embd, n_embd, bias=bias), nn.Dropout(dropout))
    def forward(self, x):
        B, T, C = x.shape
        return self.net(x)

class SwiGLU(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

class OtherOrder(SwiGLU):
    def forward(self, x):
        return self.w2(self.w1(x) * F.gelu(self.w3(x), approximate="tanh"))

class Fused(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * up)

class Interleaved(Fused):
    def forward(self, x):
        both = self.gate_up(x)
        return self.down(both[..., ::2] * torch.sigmoid(both[..., 1::2]))

class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(nf))
    def forward(self, x):
        return x @ self.weight + self.bias

class GPT2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Conv1D(config.n_inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_inner)
        self.dropout = nn.Dropout(config.resid_pdrop)
    def forward(self, x):
        x = self.c_fc(x)
        x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
        return self.dropout(self.c_proj(x))

class Raw(nn.Module):
    def __init__(self, d_model=6, d_ff=6):
        super().__init__()
        self.W1, self.b1 = nn.Parameter(torch.randn(d_model, d_ff)), nn.Parameter(torch.zeros(d_ff))
        self.W2, self.b2 = nn.Parameter(torch.randn(d_ff, d_model)), nn.Parameter(torch.zeros(d_model))
        self.spare = nn.Parameter(torch.zeros(3))
    def forward(self, x):
        return F.silu(x @ self.W1 + self.b1) @ self.W2 + self.b2

class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight

class PreNorm(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.norm, self.ffn = RMSNorm(dim), SwiGLU(dim, hidden_dim)
    def forward(self, x):
        return x + self.ffn(self.norm(x))

class PostNorm(nn.Module):
    def __init__(self, d_model, d_ff, activation="relu"):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm = nn.LayerNorm(d_model, eps=1e-12)
        self.act = {"relu": F.relu, "gelu": F.gelu}[activation]
    def forward(self, x):
        return self.norm(x + self.down(self.act(self.up(x))))

class Branch(PostNorm):
    def forward(self, x):
        return x + self.norm(self.down(self.act(self.up(x))))

class TorchRMS(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.norm, self.ffn = nn.RMSNorm(d_model), SwiGLU(d_model, d_ff)
    def forward(self, x):
        return self.ffn(self.norm(x))

class Pointwise(nn.Module):
    def __init__(self, d_model, d_ff, act_layer=nn.ReLU):
        super().__init__()
        self.conv1, self.act, self.conv2 = nn.Conv1d(d_model, d_ff, 1), act_layer(), nn.Conv1d(d_ff, d_model, 1)
    def forward(self, x):
        return self.conv2(self.act(self.conv1(x)))

class Wants(nn.Module):
    def __init__(self, d_model, d_ff, flavour):
        super().__init__()

class Deep(nn.Module):
    def __init__(self, d_model=8, d_ff=16):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_ff), nn.Linear(d_ff, d_model)
    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))

class HalfBias(nn.Module):
    def __init__(self, d_model=8, d_ff=16):
        super().__init__()
        self.a, self.b = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model, bias=False)
    def forward(self, x):
        return self.b(F.gelu(self.a(x)))

class GateBias(nn.Module):
    def __init__(self, d_model=8, d_ff=16):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d_model, d_ff), *(nn.Linear(*n, bias=False) for n in ((8, d_ff), (d_ff, 8)))
    def forward(self, x):
        return self.c(F.gelu(self.a(x)) * self.b(x))

class Head(nn.Module):
    def __init__(self, d_model=8, d_ff=16):
        super().__init__()
        self.a, self.b = nn.Linear(d_model, d_ff), nn.Linear(d_ff, 3)
    def forward(self, x):
        return self.b(F.gelu(self.a(x)))

class RawHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 3))
    def forward(self, x):
        return F.relu(x @ self.a) @ self.b

class MLP(SwiGLU):
    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)

class FFN(SwiGLU):
    def __init__(self, hidden_dim, ffn_dim):
        super().__init__(hidden_dim, ffn_dim)

class BadConstructor(nn.Module):
    def __init__(self, d_model):
        raise ValueError("d_model must be\\nodd")

class BadForward(Deep):
    def forward(self, x):
        return self.a(x) @ self.c.weight

built = nn.Sequential(nn.Linear(8, 24), nn.GELU("tanh"), nn.Linear(24, 8))
number = 3
"""
)
