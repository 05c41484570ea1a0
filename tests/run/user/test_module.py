"""A user's own module or whole model as a source: what it is found to be, against itself; and every way it can fail."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ffncli
from ffncli.block.recipe import steps
from ffncli.errors import FFNError
from ffncli.models.counting.count import count
from ffncli.models.dimensions import Dimensions
from ffncli.run.engine.execute import run
from ffncli.run.user.module import LoadedModule, load_module
from tests.oracles.own_modules import HEAD, MODULES

SMALL = {"d_model": "8", "d_ff": "20"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "zoo.py"
    path.write_text(MODULES)
    return str(path)


def _assert_same(found: LoadedModule) -> None:
    """The block's float64 outputs with the reported weights are the module's, which has just the counted parameters."""
    module, spec = found.module.double(), found.model.model.main.spec
    x = torch.randn(2, 5, spec.d_model, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    weights = {name: tensor.double() for name, tensor in found.weights.items()}
    transposed = any(isinstance(part, torch.nn.Conv1d) for part in module.modules())
    with torch.no_grad():
        expected = module(x.transpose(1, 2)).transpose(1, 2) if transposed else module(x)
        torch.testing.assert_close(run(steps(spec), weights, {"x": x}), expected, rtol=1e-6, atol=1e-6)
    row = count(found.model)
    own = sum(p.numel() for name, p in module.named_parameters() if name != "spare")
    assert row.ffn_params_total + row.norm_params_per_layer == own


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("FeedForwardBlock", SMALL, {"activation": "relu", "gated": False, "bias": True, "d_ff": 20}),
        ("FeedForwardBlock", {**SMALL, "dropout": 0.25}, {"dropout": 0.25}),
        ("FeedForwardBlock", {"d_model": "8"}, {"d_ff": 32}),
        ("Needs3D", {"d_model": "8"}, {"activation": "gelu", "d_ff": 32, "bias": True}),
        ("Needs3D", {"d_model": "8", "bias": False}, {"activation": "gelu", "bias": False}),
        ("SwiGLU", SMALL, {"activation": "silu", "gated": True, "bias": False, "d_ff": 20}),
        ("SwiGLU", {"d_model": "8", "d_ff": "1x"}, {"activation": "silu", "gated": True, "d_ff": 8}),
        ("MLP", SMALL, {"d_model": 8, "d_ff": 20}),
        ("FFN", SMALL, {"d_model": 8, "d_ff": 20}),
        ("OtherOrder", SMALL, {"activation": "gelu_tanh", "gated": True}),
        ("Fused", SMALL, {"activation": "gelu", "gated": True, "bias": True, "d_ff": 20}),
        ("Interleaved", SMALL, {"activation": "sigmoid", "gated": True, "bias": True}),
        ("GPT2MLP", SMALL, {"activation": "gelu_tanh", "gated": False, "bias": True, "d_ff": 20}),
        ("Raw", {}, {"activation": "silu", "gated": False, "bias": True, "d_model": 6, "d_ff": 6}),
        ("PreNorm", SMALL, {"norm": "rmsnorm", "norm_position": "pre", "norm_eps": 1e-6, "residual": True}),
        ("PostNorm", SMALL, {"norm": "layernorm", "norm_position": "post", "norm_eps": 1e-12, "residual": True}),
        ("PostNorm", {**SMALL, "activation": "gelu"}, {"activation": "gelu", "norm_bias": True}),
        ("Branch", SMALL, {"norm": "layernorm", "norm_position": "branch", "residual": True}),
        ("TorchRMS", SMALL, {"norm": "rmsnorm", "residual": False, "norm_eps": torch.finfo(torch.float32).eps}),
        ("Pointwise", SMALL, {"activation": "relu", "d_ff": 20}),
        ("Pointwise", {**SMALL, "activation": "mish"}, {"activation": "mish"}),
        ("built", {}, {"activation": "gelu_tanh", "d_model": 8, "d_ff": 24}),
        ("HalfBias", {}, {"activation": "gelu", "bias": True, "down_bias": False}),
    ],
)
def test_what_a_module_is_found_to_be(zoo: str, name: str, options: dict, expected: dict):
    found = load_module(f"{zoo}:{name}", Dimensions(**options))
    spec = found.model.model.main.spec
    assert {key: getattr(spec, key) for key in expected} == expected
    assert (found.model.model.name, found.model.model.bare, found.model.model.dtype) == (name, True, "fp32")
    _assert_same(found)


def test_evidence_names_the_runner_up_and_where_the_weights_lie(zoo: str):
    activation, gated, d_ff = load_module(f"{zoo}:GPT2MLP", Dimensions(**SMALL)).model.evidence
    assert activation.startswith("activation: gelu_tanh matches its outputs to ")
    assert "(next best: gelu, " in activation
    assert gated == "plain: up = c_fc.weightᵀ, down = c_proj.weightᵀ"
    assert d_ff == "d_ff: 20, from c_proj.weight [20, 8]"
    assert "up = gate_up.weight[20:]" in load_module(f"{zoo}:Fused", Dimensions(**SMALL)).model.evidence[1]


def test_weights_are_those_that_the_constructor_draws_under_the_seed(zoo: str):
    torch.manual_seed(7)
    up, before = torch.nn.Linear(8, 20).weight.detach(), torch.random.get_rng_state()
    found = load_module(f"{zoo}:FeedForwardBlock", Dimensions(**SMALL), seed=7)
    assert torch.equal(found.weights["up.weight"], up)
    assert torch.equal(found.module.linear_1.weight, up)  # the probing worked on a copy
    assert torch.equal(torch.random.get_rng_state(), before)
    tried_twice = load_module(f"{zoo}:Pointwise", Dimensions(**SMALL, activation="gelu"), seed=7)
    torch.manual_seed(7)
    assert torch.equal(tried_twice.weights["up.weight"], torch.nn.Conv1d(8, 20, 1).weight.detach()[..., 0])


@pytest.mark.parametrize(
    ("name", "options", "note"),
    [
        ("FeedForwardBlock", {"d_model": "8"}, "assuming d_ff = 4x, dropout = 0.0"),
        ("Raw", {}, "parameters that this block does not use, not counted: spare [3]"),
        ("GPT2MLP", {**SMALL, "dropout": 0.5}, "dropout 0.5 not directly before the down projection is"),
    ],
)
def test_notes(zoo: str, name: str, options: dict, note: str):
    assert any(text.startswith(note) for text in load_module(f"{zoo}:{name}", Dimensions(**options)).model.notes)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (":Deep", {}, r"Deep does not match any block .* nearest: .*, off by .*; it has 552 parameters in all"),
        (":GateBias", {}, "GateBias has a bias on only one of gate and up; .* 400 parameters"),
        (":Head", {}, r"Head returns \[1, 24, 3\] for input \[1, 24, 8\]"),
        (":RawHead", {}, r"RawHead returns \[1, 24, 3\] for input \[1, 24, 8\]"),
        (":Wants", SMALL, r"Wants\(d_model, d_ff, flavour\) needs flavour, which no option sets"),
        (":SwiGLU", {"d_ff": "8"}, r"SwiGLU\(dim, hidden_dim\) needs dim; give --d-model N"),
        (
            ":SwiGLU",
            {**SMALL, "activation": "relu"},
            r"--activation: no argument of SwiGLU\(dim, hidden_dim\) accepts it",
        ),
        (":SwiGLU", {**SMALL, "norm_position": "pre"}, "--norm-position: no argument"),
        (":built", {"d_ff": "8"}, "cannot change a module that is already built"),
        (":BadConstructor", SMALL | {"d_ff": None}, r"zoo.py, line \d+: ValueError: d_model must be odd; raised while"),
        (":BadForward", {}, r"zoo.py, line \d+: RuntimeError: .*; raised by its forward on an input \[batch, tokens"),
        (":swiglu", {}, "zoo.py has no 'swiglu'; did you mean 'SwiGLU'"),
        (":zzz", {}, "zoo.py has no 'zzz'; its nn.Module classes: FeedForwardBlock, "),
        (":number", {}, "number is not an nn.Module class .it is a int"),
        ("", {}, "zoo.py has 25 nn.Module classes; name one, as in zoo.py:FeedForwardBlock"),
        (":PostNorm", {**SMALL, "activation": "rleu"}, "unknown activation 'rleu'; did you mean 'relu'"),
        (":SwiGLU", {"d_model": "8", "d_ff": "1.3x"}, "not a whole number"),
    ],
)
def test_what_cannot_be_is_one_line(zoo: str, name: str, options: dict, message: str):
    with pytest.raises(FFNError, match=message) as error:
        load_module(zoo + name, Dimensions(**options))
    assert error.value.code == 2
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class X(:\n", "own.py, line 1: SyntaxError: "),
        ("\n1 / 0\n", "own.py, line 2: ZeroDivisionError: division by zero; raised while it was imported"),
        ("raise SystemExit(3)\n", "own.py, line 1: SystemExit: 3"),
        ("import no_such_neighbour\n", "own.py, line 1: ModuleNotFoundError"),
        ("x = 1\n", "own.py has no nn.Module class"),
        (HEAD + "class NoWeights(nn.Module):\n    forward = lambda self, x: x\n", "NoWeights has no weight matrix"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(FFNError, match=message):
        load_module(str(tmp_path / "own.py"), Dimensions())
    with pytest.raises(FFNError, match=r"other\.py does not exist"):
        load_module(str(tmp_path / "other.py"), Dimensions())


def test_neighbours_import_and_nothing_stays_behind(tmp_path: Path):
    for folder, activation in (("a", "relu"), ("b", "tanh")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "neighbour_of_own.py").write_text(f"from torch import {activation} as act\n")
        text = MODULES.replace("import math", "import math\nfrom neighbour_of_own import act").replace(
            "torch.relu", "act"
        )
        (tmp_path / folder / "own.py").write_text(text)
    before = list(sys.path)
    found = [load_module(f"{tmp_path}/{folder}/own.py:FeedForwardBlock", Dimensions(**SMALL)) for folder in "ab"]
    assert [f.model.model.main.spec.activation for f in found] == ["relu", "tanh"]
    assert sys.path == before
    assert not {"neighbour_of_own", "own"} & set(sys.modules)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ffn_kit/ffn_kit.py", "from ffn_kit.parts import act"),
        ("ffn_kit/own.py", "from .parts import act"),
        ("ffn_kit/own.py", "from parts import act"),
        ("ffn_kit/deep/own.py", "from ..parts import act"),
        ("ffn_kit/deep/own.py", "from . import near\nact = near.act"),
    ],
)
def test_a_file_of_a_package_imports_from_it(tmp_path: Path, file: str, line: str):
    (tmp_path / "ffn_kit" / "deep").mkdir(parents=True)
    for place in ("", "deep/"):
        (tmp_path / "ffn_kit" / place / "__init__.py").touch()
    (tmp_path / "ffn_kit" / "parts.py").write_text("from torch import tanh as act\n")
    (tmp_path / "ffn_kit" / "deep" / "near.py").write_text("from ffn_kit.parts import act\n")
    path = tmp_path / file
    path.write_text(MODULES.replace("import math", f"import math\n{line}").replace("torch.relu", "act"))
    before = list(sys.path)
    found = load_module(f"{path}:FeedForwardBlock", Dimensions(**SMALL))
    assert found.model.model.main.spec.activation == "tanh"
    assert sys.path == before
    assert not {"ffn_kit", "ffn_kit.parts", "parts"} & set(sys.modules)


def test_a_relative_import_without_a_package_is_told_what_it_needs(tmp_path: Path):
    (tmp_path / "own.py").write_text("from .parts import act\n")
    with pytest.raises(FFNError, match=r"line 1: .*: every folder of a package needs an __init__\.py; raised while"):
        load_module(f"{tmp_path}/own.py:Block", Dimensions())


TIED = """
class Base(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.build(dim, hidden)
class Transposed(Base):
    def build(self, dim, hidden):
        self.up = nn.Linear(dim, hidden, bias=False)
    def forward(self, x):
        return torch.tanh(self.up(x)) @ self.up.weight
class BiasOfUp(Base):
    def build(self, dim, hidden):
        self.up = nn.Linear(dim, hidden)
    def forward(self, x):
        return F.gelu(self.up(x)) @ self.up.weight
class Autoencoder(Base):
    def build(self, dim, hidden):
        self.W, self.b = nn.Parameter(torch.randn(dim, hidden)), nn.Parameter(torch.randn(hidden))
        self.c = nn.Parameter(torch.randn(dim))
    def forward(self, x):
        return torch.relu((x @ self.W) + self.b) @ self.W.T + self.c
class BiasOfDown(Base):
    def build(self, dim, hidden):
        self.W, self.shift = nn.Parameter(torch.randn(hidden, dim)), nn.Parameter(torch.randn(dim))
    def forward(self, x):
        return torch.relu(F.linear(x, self.W)) @ self.W + self.shift
class Square(Base):
    def build(self, dim, hidden):
        self.one = nn.Linear(dim, dim)
    def forward(self, x):
        return self.one(torch.relu(self.one(x)))
class Assigned(Base):
    def build(self, dim, hidden):
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.down.weight = self.up.weight
    def forward(self, x):
        return self.down(F.silu(self.up(x)))
class Gated(Base):
    def build(self, dim, hidden):
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
    def forward(self, x):
        return (F.silu(self.gate(x)) * self.up(x)) @ self.up.weight
class GatedByDown(Gated):
    def forward(self, x):
        return (F.gelu(self.gate(x)) * self.up(x)) @ self.gate.weight
"""


@pytest.mark.parametrize(
    ("name", "tied", "biases"),
    [
        ("Transposed", ("weight",), (False, None)),
        ("BiasOfUp", ("weight",), (True, False)),
        ("Autoencoder", ("weight",), (True, None)),
        ("BiasOfDown", ("weight",), (False, True)),
        ("Square", ("weight", "bias"), (True, None)),
        ("Assigned", ("weight",), (True, None)),
        ("Gated", ("weight",), (False, None)),
        ("GatedByDown", ("weight",), (False, None)),
    ],
)
def test_tied_parameters_count_once(tmp_path: Path, name: str, tied: tuple[str, ...], biases: tuple[bool, bool | None]):
    (tmp_path / "own.py").write_text(HEAD + TIED)
    found = load_module(f"{tmp_path}/own.py:{name}", Dimensions(d_model="6", d_ff="20"))
    spec, row = found.model.model.main.spec, count(found.model)
    assert (spec.tied, (spec.bias, spec.down_bias)) == (tied, biases)
    _assert_same(found)
    stored = sum(p.numel() for p in found.module.parameters())
    assert (row.weight_bytes, sum(t.params for t in row.groups[0].tensors)) == (4 * stored, stored)
    assert any(note.endswith("used by two projections, counted once") for note in found.model.notes)
    traced = ffncli.trace(f"{tmp_path}/own.py:{name}", d_model=6, d_ff=20)
    assert sum(event.params for event in traced.steps) == stored


CONFIGS = """
from argparse import Namespace
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, TypedDict
class Sizes(TypedDict):
    emb_dim: int
class Free:
    def __init__(self, **settings):
        self.__dict__.update(settings)
def built(base, sizes, bias=True, act="relu"):
    d, h = sizes
    base.up, base.down = nn.Linear(d, h, bias=bias), nn.Linear(h, d, bias=bias)
    base.act = getattr(F, act)
class Base(nn.Module):
    def forward(self, x):
        return self.down(self.act(self.up(x)))
class Items(Base):
    def __init__(self, cfg):
        super().__init__()
        built(self, (cfg["emb_dim"], cfg["hidden_dim"]))
class Typed(Base):
    def __init__(self, cfg: Sizes):
        super().__init__()
        built(self, (cfg["emb_dim"], 4 * cfg["emb_dim"]))
class Plain(Base):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        built(self, (config.get("n_embd", 3), config["d_ff"]), act=config.get("hidden_act", "gelu"))
class Mapped(Base):
    def __init__(self, config: Mapping):
        super().__init__()
        built(self, (config["dim"], config["ffn_dim"] if "ffn_dim" in config else 1), **{"bias": config["bias"]})
class Named(Base):
    def __init__(self, args: Namespace):
        super().__init__()
        built(self, (args.d_model, args.d_ff), getattr(args, "bias", False))
class Spaced(Base):
    def __init__(self, params: SimpleNamespace):
        super().__init__()
        built(self, (params.hidden_size, params.intermediate_size))
class Settable(Base):
    def __init__(self, config: Free):
        super().__init__()
        built(self, (config.n_embd, config.n_inner))
class Both(Base):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        built(self, (cfg.d_model, cfg["d_ff"]))
    def forward(self, x):
        return super().forward(x) * (1 if self.cfg.d_ff else 0)
class LacksItem(Base):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg["n_special"]
class LacksName(Base):
    def __init__(self, config: dict):
        super().__init__()
        self.heads = config.n_special
"""


@pytest.mark.parametrize("name", ["Items", "Typed", "Plain", "Mapped", "Named", "Spaced", "Settable", "Both"])
def test_a_config_is_a_dict_or_has_attributes(tmp_path: Path, name: str):
    (tmp_path / "own.py").write_text(HEAD + CONFIGS)
    found = load_module(f"{tmp_path}/own.py:{name}", Dimensions(d_model="6", d_ff="24"))
    spec = found.model.model.main.spec
    assert (spec.d_model, spec.d_ff, spec.activation, spec.bias) == (6, 24, "relu", True)
    _assert_same(found)


@pytest.mark.parametrize("name", ["LacksItem", "LacksName"])
def test_a_field_that_no_option_sets_is_named(tmp_path: Path, name: str):
    (tmp_path / "own.py").write_text(HEAD + CONFIGS)
    words = "no option sets the config's n_special: name an instance, as in my.py:block"
    with pytest.raises(FFNError, match=words.replace("n_special", "'?n_special'?")):
        load_module(f"{tmp_path}/own.py:{name}", Dimensions(d_model="6"))


def test_a_config_class_in_the_file_is_filled_too(tmp_path: Path):
    text = HEAD + (
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    n_embd: int = 12\n    bias: bool = True\n"
        "class MLP(nn.Module):\n    def __init__(self, config: Config):\n        super().__init__()\n"
        "        n = config.n_embd\n        self.up = nn.Linear(n, 4 * n, bias=config.bias)\n"
        "        self.down = nn.Linear(4 * n, n, bias=config.bias)\n"
        "    def forward(self, x):\n        return self.down(F.gelu(self.up(x)))\n"
    )
    (tmp_path / "own.py").write_text(text)
    spec = load_module(str(tmp_path / "own.py"), Dimensions()).model.model.main.spec  # its one nn.Module class
    assert (spec.d_model, spec.d_ff, spec.bias) == (12, 48, True)
    spec = load_module(str(tmp_path / "own.py"), Dimensions(d_model="8", bias=False)).model.model.main.spec
    assert (spec.d_model, spec.d_ff, spec.bias) == (8, 32, False)


def test_the_library_loads_and_traces_it(zoo: str):
    model = ffncli.load(f"{zoo}:PreNorm", Dimensions(**SMALL))
    found = load_module(f"{zoo}:PreNorm", Dimensions(**SMALL))
    result = ffncli.trace(model, input="ones", batch=1, seq_len=2, show=None)
    with torch.no_grad():
        expected = found.module(torch.ones(1, 2, 8))
    torch.testing.assert_close(result["out"], expected)


def test_the_command_line_runs_it(call, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("print('hello')\n" + MODULES)
    code, out, err = call("params", "my.py:FeedForwardBlock", "512x2048:relu", "--d-model", "64", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["ffn_params_total"] for row in rows] == [64 * 256 * 2 + 256 + 64, 64 * 2048 * 2 + 2048 + 64]
    assert "hello" in err
    code, out, err = call("trace", "my.py:FeedForwardBlock", "--d-model", "8", "--d-ff", "12", "--seed", "3", "--json",
                          "--input", "ones", "--tokens", "1", "--show", "all")  # fmt: skip
    assert code == 0, err
    answer = json.loads(out)
    assert answer["block"]["weights"] == "the module's own weights"
    torch.manual_seed(3)
    up, down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
    with torch.no_grad():
        expected = down(up(torch.ones(1, 8)).relu())
    torch.testing.assert_close(torch.tensor(answer["steps"][-1]["values"]), expected)
    code, out, err = call("trace", "my.py:BadForward")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err


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


class FlatLayer(nn.Module):
    """Its matrices lie in the layer itself."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.attn(x, x, x)[0])))


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FlatLayer() for _ in range(2))

    def forward(self, ids):
        return ids


class Torchs(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

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
    flat = module_of(source, "FlatLayer")
    with pytest.raises(FFNError, match="in the layer itself"):
        ffncli.trace(flat, tokens=2)


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_torchs_own_layers(kind: type[nn.Module], source: str) -> None:
    """The matrices lie in the layer itself, whose code is torch's."""
    layer = kind(16, 2, 32, batch_first=True).eval()
    session = ffncli.trace(layer, tokens=3)
    with torch.no_grad():
        assert torch.allclose(session["down"], layer.linear2(layer.linear1(session["x"]).relu()), atol=1e-6)
    assert ffncli.count(layer).ffn_params_total == 2 * 16 * 32 + 32 + 16
    row = ffncli.count(f"{source}:Torchs")
    assert (row.ffn_params_total, row.layers, row.activation) == (3 * (2 * 16 * 32 + 32 + 16), 3, "gelu")


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
    with pytest.raises(FFNError, match="is a model with 3 FFNs; give the class of one FFN, MLP"):
        ffncli.verify(f"{source}:GPT")


RANDOM = [
    "nn.functional.dropout(torch.relu(self.up(x)), 0.1, True)",
    "torch.relu(self.up(x)) + 0.1 * torch.randn(1)",
    "nn.functional.rrelu(self.up(x), training=True)",
    "torch.relu(self.up(x)) * torch.empty(len(x), 1, 1).bernoulli_(0.5)",
    "torch.relu(self.up(x)) * (torch.rand(()) < 0.3)",
]


@pytest.mark.parametrize("hidden", RANDOM)
def test_a_module_that_is_random_in_eval_mode(tmp_path: Path, hidden: str) -> None:
    """Calls on one input that give two answers, for some only now and then."""
    text = (
        "import torch\nfrom torch import nn\nclass Drop(nn.Module):\n    def __init__(self, dim, hidden):\n"
        "        super().__init__()\n        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)\n"
        f"    def forward(self, x):\n        return self.down({hidden})\n"
    )
    (tmp_path / "my.py").write_text(text)
    with pytest.raises(FFNError, match=r"Drop gives two answers to one input, .* apart: it is random in eval mode"):
        ffncli.trace(f"{tmp_path}/my.py:Drop", d_model=16)
