"""A whole model of the user's: `my.py:GPT --layer 1` traces the FFN of that layer, held to the module itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ffncli
from ffncli.errors import FFNError

GPT = '''
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.c_proj(nn.functional.gelu(self.c_fc(x), approximate="tanh"))


class Gated(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(d_model, d_ff, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, d_model, mlp):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attn, self.mlp = nn.MultiheadAttention(d_model, 2, batch_first=True), mlp

    def forward(self, x):
        h = self.ln_1(x)
        x = x + self.attn(h, h, h)[0]
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=50, d_model=16, d_ff=48, layers=3):
        super().__init__()
        self.wte = nn.Embedding(vocab, d_model)
        self.h = nn.ModuleList(Block(d_model, MLP(d_model, d_ff)) for _ in range(layers))

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return x @ self.wte.weight.T


class Mixed(GPT):
    def __init__(self):
        super().__init__()
        self.h[2].mlp = Gated(16, 24)


class Flat(nn.Module):
    """Its matrices lie in the layer itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    def forward(self, ids):
        return ids
'''


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "my.py"
    path.write_text(GPT)
    return str(path)


def module_of(source: str, name: str) -> nn.Module:
    namespace: dict[str, type[nn.Module]] = {}
    exec(compile(Path(source).read_text(), source, "exec"), namespace)
    torch.manual_seed(0)
    return namespace[name]().eval()


@pytest.mark.parametrize("name", ["GPT", "Mixed"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layers_ffn_is_traced_with_its_weights(source: str, name: str, layer: int) -> None:
    session = ffncli.trace(f"{source}:{name}", layer=layer, tokens=5)
    ffn = module_of(source, name).h[layer].mlp  # type: ignore[index, union-attr]
    with torch.no_grad():
        assert torch.allclose(session[session.ffn_output], ffn(session["x"]), atol=1e-6)
    assert session.block.layer == layer
    gated = name == "Mixed" and layer == 2
    assert (session.block.activation, session.block.gated) == (("silu", True) if gated else ("gelu_tanh", False))


def test_a_layer_with_torchs_attention(source: str) -> None:
    """Its FFN is taken out at once: no block has such outputs."""
    block = module_of(source, "GPT").h[1]  # type: ignore[index, union-attr]
    session = ffncli.trace(block, tokens=3)
    with torch.no_grad():
        assert torch.allclose(session["down"], block.mlp(session["x"]), atol=1e-6)
    with pytest.raises(FFNError, match="in the layer itself"):
        ffncli.trace(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), tokens=2)


def test_it_is_counted_and_surveyed(source: str) -> None:
    module = module_of(source, "Mixed")
    params = sum(p.numel() for block in module.h for p in block.mlp.parameters())  # type: ignore[union-attr]
    row = ffncli.count(f"{source}:Mixed")
    assert (row.ffn_params_total, row.layers) == (params, 3)
    assert [one.layer for one in ffncli.survey(f"{source}:Mixed").rows] == [0, 1, 2]


def test_a_module_that_is_built_already(source: str) -> None:
    module = module_of(source, "GPT")
    with torch.no_grad():
        module.h[1].mlp.c_fc.weight.mul_(2)  # type: ignore[index, union-attr]
    session = ffncli.trace(module, layer=1, tokens=2)
    with torch.no_grad():
        assert torch.allclose(session["down"], module.h[1].mlp(session["x"]), atol=1e-6)  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("GPT", {"layer": 3}, "GPT has decoder layers 0 to 2"),
        ("GPT", {"d_ff": 64, "layer": 0}, ""),
        ("Flat", {"layer": 0}, "in the layer itself"),
    ],
)
def test_what_it_does_not_have(source: str, name: str, arguments: dict[str, int], words: str) -> None:
    if not words:  # the constructor takes the dimension
        assert ffncli.trace(f"{source}:{name}", **arguments).block.d_ff == 64
        return
    with pytest.raises(FFNError, match=words):
        ffncli.trace(f"{source}:{name}", **arguments)


def test_verify_names_the_class_of_one_ffn(source: str) -> None:
    with pytest.raises(FFNError, match="is a model with 3 FFNs; give the class of one, MLP"):
        ffncli.verify(f"{source}:GPT")
