"""FFNs inside a user's model: torch's own layers, and modules that are used several times. torch counts the parameters,
and FlopCounterMode the products of the FFNs."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ffncli
from ffncli.models.counting.count import count
from ffncli.run.user.load import load

MODELS = """
import torch
from torch import nn
class FF(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
class Block(nn.Module):
    def __init__(self, ff):
        super().__init__()
        self.mix, self.ff = nn.Linear(ff.up.in_features, ff.up.in_features), ff
    def forward(self, x):
        return x + self.ff(self.mix(x))
class Model(nn.Module):
    def __init__(self, dim=12, hidden=20):
        super().__init__()
        self.emb, self.layers = nn.Embedding(9, dim), nn.ModuleList(self.blocks(dim, hidden))
    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return x
class OneBlock(Model):
    def blocks(self, d, h):
        return [Block(FF(d, h))] * 4
class OneFFN(Model):
    def blocks(self, d, h):
        ff = FF(d, h)
        return [Block(ff) for _ in range(3)]
class Pairs(Model):
    def blocks(self, d, h):
        return [block for block in (Block(FF(d, h)), Block(FF(d, h))) for _ in range(2)]
class InTurn(Model):
    def blocks(self, d, h):
        a, b = Block(FF(d, h)), Block(FF(d, 2 * h))
        return [a, b, a, b, a]
class Looped(Model):
    def blocks(self, d, h):
        return [Block(FF(d, h))]
    def forward(self, ids):
        x = self.emb(ids)
        for _ in range(6):
            x = self.layers[0](x)
        return x
class SharedParameters(Model):
    def blocks(self, d, h):
        made = [Block(FF(d, h)) for _ in range(3)]
        for block in made[1:]:
            block.ff.up, block.ff.down = nn.Linear(d, h), nn.Linear(h, d)
            for name in ("up", "down"):
                for kind in ("weight", "bias"):
                    setattr(getattr(block.ff, name), kind, getattr(getattr(made[0].ff, name), kind))
        return made
class Named(OneBlock):
    def blocks(self, d, h):
        block = super().blocks(d, h)[0]
        block.ff.fc1, block.ff.fc2 = block.ff.up, block.ff.down
        return [block] * 2
class Different(Model):
    def blocks(self, d, h):
        return [Block(FF(d, h)) for _ in range(3)]
class Twice(nn.Module):
    def __init__(self, dim=12, hidden=20):
        super().__init__()
        self.ff = FF(dim, hidden)
        self.again = self.ff
    def forward(self, x):
        return self.again(self.ff(x))
class HalfShared(Model):
    def blocks(self, d, h):
        made = [Block(FF(d, h)) for _ in range(3)]
        for block in made:
            block.ff.up.weight = made[0].ff.up.weight
        return made
"""
_LAYER = {"d_model": 12, "nhead": 2, "dim_feedforward": 20}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(MODELS)
    return tmp_path / "own.py"


def module_of(source: Path, name: str) -> nn.Module:
    namespace: dict[str, type[nn.Module]] = {}
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    return namespace[name]()


def ffns_of(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if type(part).__name__ == "FF"]


def flops_of_ffns(module: nn.Module, given: torch.Tensor) -> int:
    """The FLOPs per token of the FFNs in a forward pass."""
    counter = FlopCounterMode(display=False)
    total = 0

    def before(*_: object) -> None:
        counter.__enter__()

    def after(*_: object) -> None:
        nonlocal total
        counter.__exit__(None, None, None)
        total += counter.get_total_flops()
        counter.flop_counts.clear()

    for part in ffns_of(module):
        part.register_forward_pre_hook(before)
        part.register_forward_hook(after)
    with torch.no_grad():
        module(given)
    return total // given.shape[:2].numel()


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("OneBlock", [4]),
        ("OneFFN", [3]),
        ("Pairs", [2, 2]),
        ("InTurn", [3, 2]),
        ("Looped", [6]),
        ("SharedParameters", [3]),
        ("Named", [2]),
        ("Different", [1, 1, 1]),
        ("Twice", [2]),
    ],
)
def test_a_module_that_is_used_several_times_is_counted_once(source: Path, name: str, runs: list[int]) -> None:
    module = module_of(source, name)
    distinct = {id(p): p.numel() for part in ffns_of(module) for p in part.parameters()}
    found = load(f"{source}:{name}")
    row = count(found)
    assert [group.runs for group in found.model.groups for _ in group.layers] == runs
    assert (row.ffn_params_total, row.layers) == (sum(distinct.values()), len(runs))
    given = torch.zeros(1, 5, 12) if name == "Twice" else torch.zeros(1, 5, dtype=torch.long)
    assert row.matmul_flops_total == flops_of_ffns(module, given)
    assert any("counted once" in note for note in found.notes) == (max(runs) > 1)


def test_tensors_that_some_ffns_share_are_named(source: Path) -> None:
    """12 × 20 numbers of up are one tensor in three FFNs of 512."""
    (note,) = [note for note in load(f"{source}:HalfShared").notes if "share" in note]
    assert note == "FFNs share some of their tensors: 1,536 parameters are counted, 1,056 are distinct"


def test_a_shared_ffn_is_traced_with_its_weights(source: Path) -> None:
    torch.manual_seed(0)
    module = module_of(source, "OneFFN")
    traced = ffncli.trace(module, layer=0, input="randn", seed=3)
    with torch.no_grad():
        torch.testing.assert_close(traced["down"], module.layers[0].ff(traced["x"]))  # type: ignore[index, union-attr]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("activation", ["gelu", torch.nn.functional.silu])
def test_torchs_stacks(norm_first: bool, bias: bool, batch_first: bool, activation: object) -> None:
    options = {**_LAYER, "norm_first": norm_first, "bias": bias, "batch_first": batch_first, "activation": activation}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), 3, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 2)
    both = nn.Transformer(12, 2, 3, 2, **{name: options[name] for name in options if name not in ("d_model", "nhead")})
    name = activation if isinstance(activation, str) else "silu"
    one = sum(p.numel() for part in ("linear1", "linear2") for p in getattr(encoder.layers[0], part).parameters())
    for module, layers in ((encoder, 3), (decoder, 2), (both, 5), (encoder.layers[0], 1), (decoder.layers[1], 1)):
        row = ffncli.count(module)
        assert (row.ffn_params_total, row.layers, row.activation, row.bias) == (layers * one, layers, name, bias)
        assert row.matmul_flops_total == layers * 4 * 12 * 20
    assert [group.stack for group in ffncli.count(both).groups] == ["encoder", "decoder"]
    for module in (encoder.layers[2], decoder.layers[1]):
        traced = ffncli.trace(module.eval(), tokens=4, input="randn")
        with torch.no_grad():
            expected = module.linear2(module.activation(module.linear1(traced["x"])))
        torch.testing.assert_close(traced["down"], expected)
