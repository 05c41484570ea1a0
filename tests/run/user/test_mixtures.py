"""A user's mixture of experts, and plain objects that keep weights: what they are found to be, against themselves; as
kernels, against the block; and what is refused."""

from typing import Any

import pytest
import torch

import ffncli
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.kernels.choice import parse
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.counting.count import count
from ffncli.models.dimensions import Dimensions
from ffncli.run.engine.execute import run
from ffncli.run.engine.weights import random_weights
from ffncli.run.user.kernels import kernel_of
from ffncli.run.user.module import LoadedModule, load_module
from tests.oracles.own_mixtures import MIXTURES, PLAIN

SIZES = {"d_model": "8", "d_ff": "24"}
ROUTED = {**SIZES, "experts": 4, "top_k": 2}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own")
    (path / "mixtures.py").write_text(MIXTURES)
    (path / "plain.py").write_text(PLAIN)
    return str(path)


def assert_same(found: LoadedModule, tolerance: float) -> None:
    """In float64 the block with the reported weights gives the module's outputs; it has all of its parameters."""
    module, spec = found.module.double(), found.model.model.main.spec
    x = torch.randn(2, 7, spec.d_model, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    with torch.no_grad():
        expected = module(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    weights = {name: tensor.double() for name, tensor in found.weights.items()}
    ours = run(steps(spec), weights, {"x": x.flatten(0, 1)}).view_as(expected)
    assert (ours - expected).abs().max() <= tolerance * expected.abs().max()
    assert count(found.model).ffn_params_total == sum(p.numel() for p in module.parameters())


SOFTMAX = {"score": "softmax", "order": "score_first"}
FOUND: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Listed": (SIZES, {"activation": "relu", "bias": True}, {**SOFTMAX, "renormalise": False, "top_k": 2}),
    "Stacked": (SIZES, {"activation": "relu", "bias": False}, {**SOFTMAX, "top_k": 4, "router_bias": True}),
    "Mixtral": (ROUTED, {"activation": "silu", "gated": True}, {**SOFTMAX, "renormalise": True, "score_dtype": "fp32"}),
    "Corrected": (
        {**ROUTED, "experts": 8, "top_k": 3, "shared_experts": 2}, {"activation": "silu", "gated": True},
        {"score": "sigmoid", "renormalise": True, "scale": 2.5, "correction": True, "shared_d_ff": 48},
    ),
    "Biased": (ROUTED, {"activation": "gelu", "bias": True}, {**SOFTMAX, "renormalise": True, "router_bias": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_mixture_is_found_by_its_outputs(file: str, name: str) -> None:
    options, block, routing = FOUND[name]
    found = load_module(f"{file}/mixtures.py:{name}", Dimensions(**options))
    spec = found.model.model.main.spec
    assert spec.moe is not None
    assert {key: getattr(spec, key) for key in block} == block
    assert {key: getattr(spec.moe, key) for key in routing} == routing
    assert_same(found, 1e-6 if name == "Mixtral" else 1e-12)  # it scores in float32
    assert any(line.startswith("route: ") for line in found.model.evidence)


@pytest.mark.parametrize("d_model", ["4", "8", "24"])
def test_equal_sizes_of_experts_and_widths_are_told_apart(file: str, d_model: str) -> None:
    options = {"d_model": d_model, "d_ff": "8", "experts": 8, "top_k": 2}
    for name in ("Biased", "Corrected"):
        assert_same(load_module(f"{file}/mixtures.py:{name}", Dimensions(**options)), 1e-12)


def test_it_is_traced_and_counted_with_its_own_weights(file: str, json_of) -> None:
    source = f"{file}/mixtures.py:Listed"
    row = json_of("params", source, "--d-model", "8", "--d-ff", "24", notes=True)["rows"][0]
    assert (row["experts"], row["top_k"], row["ffn_params_total"]) == (4, 2, 4 * (2 * 8 * 24 + 32) + 32)
    session = ffncli.trace(source, d_model=8, d_ff=24, tokens=3, seed=1)
    module = load_module(source, Dimensions(**SIZES), seed=1).module
    with torch.no_grad():
        torch.testing.assert_close(session[session.ffn_output], module(session["x"]), rtol=1e-5, atol=1e-6)
    assert (
        "dropout 0.1 inside a mixture is ignored"
        in load_module(f"{file}/mixtures.py:Mixtral", Dimensions(**ROUTED)).model.notes
    )


@pytest.mark.parametrize(("name", "why"), [
    ("Keyed", "is a mixture of experts, but its routing is none known here; give its sizes, as in 16x24:swiglu"),
    ("Layers", "is a mixture of experts, but a model's mixtures are not read: name the class of one"),
    ("WeighedInput", "is a mixture of experts, but its experts compute no block known here"),
    ("OtherShared", "is a mixture of experts, but its shared experts compute another block than the others"),
    ("Unusual", "is a mixture of experts, but its routing is none known here"),
])  # fmt: skip
def test_what_no_block_computes_is_one_line(file: str, name: str, why: str) -> None:
    options: dict[str, Any] = ROUTED if name == "OtherShared" else SIZES
    with pytest.raises(FFNError) as caught:
        ffncli.count(f"{file}/mixtures.py:{name}", **{k: int(v) for k, v in options.items()})
    assert why in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_modules_in_a_row_are_no_mixture(file: str) -> None:
    with pytest.raises(FFNError, match="Twice does not match any block known here"):
        load_module(f"{file}/mixtures.py:Twice", Dimensions(**SIZES))


# --- kernels ----------------------------------------------------------------------------------------------------------

GATED = FFNSpec(8, 24, "swiglu")
KERNELS = {
    "mixtures.py:Listed": FFNSpec(8, 24, "relu", moe=MoE(4, 2, renormalise=False, score_dtype="input")),
    "mixtures.py:Mixtral": FFNSpec(8, 24, "swiglu", moe=MoE(6, 2)),
    "mixtures.py:Biased": FFNSpec(8, 24, "gelu", moe=MoE(5, 3, router_bias=True, score_dtype="input")),
    "mixtures.py:Corrected": FFNSpec(
        8, 24, "swiglu", moe=MoE(8, 2, 2, score="sigmoid", correction=True, scale=2.5, score_dtype="input")
    ),
    "plain.py:Attributes": FFNSpec(8, 24, "gelu"),
    "plain.py:built": FFNSpec(8, 24, "gelu"),
    "plain.py:OfModules": GATED,
    "plain.py:InADict": FFNSpec(8, 24, "relu2", bias=False),
    "plain.py:Slotted": FFNSpec(8, 24, "tanh", bias=False),
    "plain.py:Mixture": FFNSpec(8, 24, "gelu", moe=MoE(4, 2, score_dtype="input")),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_runs_on_the_blocks_weights(file: str, name: str) -> None:
    spec = KERNELS[name]
    block = kernel_steps(steps(spec))
    generator = torch.Generator().manual_seed(3)
    weights = random_weights(block, generator, torch.float64)
    weights = {n: torch.randn(w.shape, generator=generator, dtype=torch.float64) for n, w in weights.items()}
    kernel = kernel_of(parse(f"{file}/{name}"), block, spec)
    x = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    params = tuple(p.requires_grad_() for p in kernel.prepare(block, weights))
    found = kernel.build(block, "cpu", torch.float64)(x, params)
    expected = run(block, weights, {"x": x})
    assert (found - expected).abs().max() <= (1e-5 if "Mixtral" in name else 1e-12) * expected.abs().max()
    found.sum().backward()
    graded = [p.grad is not None for p in params if p.dim() > 1]
    assert any(graded) if "Mixtral" in name else all(graded)  # an expert without tokens has no gradient


def test_verify_says_pass_and_fail(file: str, call) -> None:
    words = ("verify", "8x24:swiglu", "--experts", "4", "--top-k", "2", "--check", "kernels")
    code, out, _ = call(*words, "-k", f"{file}/mixtures.py:Mixtral")
    assert (code, "PASS" in out) == (0, True)
    code, _, err = call(*words, "-k", f"{file}/mixtures.py:Corrected")
    assert (code, "computes a block with down.weight" in err) == (2, True)


@pytest.mark.parametrize(("name", "spec", "why"), [
    ("mixtures.py:Listed", FFNSpec(8, 24, "relu"), "is 8x24 with 4 experts, top 2, but this block is 8x24"),
    ("plain.py:Arrays", GATED, "keeps NumPy arrays (w1); keep torch tensors"),
    ("plain.py:Empty", GATED, "keeps no weight matrices of torch as attributes"),
    ("plain.py:NotCalled", GATED, "is not a kernel (it is a class without __call__ or forward)"),
    ("plain.py:Other", FFNSpec(8, 24, "gelu"), "does not match any block known here"),
])  # fmt: skip
def test_what_cannot_be_a_kernel_is_one_line(file: str, name: str, spec: FFNSpec, why: str) -> None:
    with pytest.raises(FFNError) as caught:
        kernel_of(parse(f"{file}/{name}"), kernel_steps(steps(spec)), spec)
    assert why in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# --- plain objects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options", "expected"), [
    ("Attributes", SIZES, {"activation": "gelu", "gated": False, "bias": True}),
    ("OfModules", SIZES, {"activation": "silu", "gated": True, "bias": False}),
    ("InADict", SIZES, {"activation": "relu2", "gated": False, "bias": False}),
    ("Slotted", SIZES, {"activation": "tanh", "gated": False, "bias": False}),
    ("built", {}, {"activation": "gelu", "d_ff": 24}),
    ("Mixture", ROUTED, {"activation": "gelu", "bias": True}),
])  # fmt: skip
def test_a_plain_object_is_a_block(file: str, name: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    found = load_module(f"{file}/plain.py:{name}", Dimensions(**options))
    spec = found.model.model.main.spec
    assert {key: getattr(spec, key) for key in expected} == expected
    assert_same(found, 1e-12)
    assert found.model.model.name == name


@pytest.mark.parametrize(("name", "why"), [
    ("Arrays", "keeps NumPy arrays (w1); keep torch tensors"),
    ("Empty", "keeps no weight matrices of torch as attributes"),
    ("NotCalled", "it is a class without __call__ or forward"),
    ("Other", "does not match any block known here"),
])  # fmt: skip
def test_what_is_no_block_is_one_line(file: str, name: str, why: str) -> None:
    sizes = {} if name == "Empty" else {"d_model": 8, "d_ff": 24}
    with pytest.raises(FFNError) as caught:
        ffncli.count(f"{file}/plain.py:{name}", **sizes)
    assert why in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
