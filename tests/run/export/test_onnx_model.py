"""--as onnx: checked by onnx, and run by its reference evaluator against the block in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

import ffncli
from ffncli.block.activations import TABLE
from ffncli.block.formulas import zero
from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import Activation
from ffncli.errors import ExitCode, FFNError
from ffncli.models.source import load
from ffncli.run.export import onnx_model
from ffncli.run.export.onnx_model import check_exportable, onnx_bytes
from ffncli.run.export.problem import problem_of
from ffncli.run.export.torch_code import as_torch, formula_of, leaf
from tests.run.export.blocks import DENSE, MIXTURES, close, drawn, expected, problem


def outputs(raw: bytes, inputs: dict) -> np.ndarray:
    """What onnx's evaluator computes; its Erf rounds to float32, so that it gets one that does not."""
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class Erf(OpRun):
        op_domain = ""

        def _run(self, x):
            return (np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64)).astype(x.dtype),)

    (out,) = ReferenceEvaluator(onnx.load_model_from_string(raw), new_ops=[Erf]).run(None, inputs)
    return out


@pytest.mark.parametrize("name", DENSE)
def test_it_computes_the_block_in_float64(name):
    pytest.importorskip("onnx")
    block = problem(DENSE[name], "ffn" if name == "dropout" else "block")
    weights, inputs = drawn(block)
    raw = onnx_bytes(block, weights, "test")
    close(
        torch.from_numpy(outputs(raw, {key: t.numpy() for key, t in inputs.items()})),
        expected(name, block, weights, inputs),
    )


@pytest.mark.parametrize("name", ["gelu, plain", "gated", "bias, after", "situ", "xielu, plain"])
def test_in_bf16_norms_are_computed_in_float32(name):
    onnx = pytest.importorskip("onnx")
    import ml_dtypes

    block = problem(DENSE[name], dtype="bf16")
    weights, inputs = ({key: t.bfloat16() for key, t in some.items()} for some in drawn(block))
    raw = onnx_bytes(block, weights, "test")
    out = outputs(raw, {key: t.float().numpy().astype(ml_dtypes.bfloat16) for key, t in inputs.items()})
    exact = expected(name, block, *({key: t.double() for key, t in some.items()} for some in (weights, inputs)))
    close(torch.from_numpy(out.astype(np.float64)), exact, block.tolerance)
    graph = onnx.load_model_from_string(raw).graph
    assert any(node.op_type == "Cast" for node in graph.node) == (
        "norm" in dict(weights) or any("norm" in key for key in weights)
    )


def test_names_axes_and_figures():
    onnx = pytest.importorskip("onnx")
    made = ffncli.export("8x16:swiglu", form="onnx", norm="rmsnorm", seed=4)
    model = onnx.load_model_from_string(made.files["block.onnx"])
    from onnx.numpy_helper import to_array

    ours = {tensor.name: to_array(tensor) for tensor in model.graph.initializer if "." in tensor.name}
    torch.manual_seed(4)
    gate = torch.nn.Linear(8, 16, bias=False)
    assert list(ours) == ["norm.weight", "gate.weight", "up.weight", "down.weight"]
    assert np.array_equal(ours["gate.weight"], gate.weight.detach().numpy())
    assert [dim.dim_param or dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] == ["tokens", 8]
    assert (model.graph.input[0].name, model.graph.output[0].name) == ("x", "down")
    assert {node.output[0] for node in model.graph.node} >= {"norm", "gate", "up", "act", "hidden", "down"}
    props = {one.key: one.value for one in model.metadata_props}
    assert (props["matmul_flops_per_token"], props["weights"]) == ("768", "random weights, seed 4")
    assert float(props["tolerance"]) == made.problem.tolerance
    assert "gate = norm · W1" in model.graph.doc_string


def test_a_gelu_is_the_operator_where_that_is_exact():
    onnx = pytest.importorskip("onnx")
    for dtype, there in (("fp32", True), ("fp64", False)):
        raw = ffncli.export("4x8:gelu", form="onnx", dtype=dtype).files["block.onnx"]
        assert any(node.op_type == "Gelu" for node in onnx.load_model_from_string(raw).graph.node) == there


def test_a_checkpoints_own_weights(tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx.numpy_helper import to_array

    from tests.oracles.checkpoints import LLAMA, folder, tensors

    stored = tensors("llama")
    made = ffncli.export(folder(tmp_path / "m", LLAMA, stored), form="onnx", layer=1)
    ours = {
        tensor.name: to_array(tensor)
        for tensor in onnx.load_model_from_string(made.files["block.onnx"]).graph.initializer
    }
    assert np.array_equal(ours["down.weight"], stored["model.layers.1.mlp.down_proj.weight"].numpy())
    assert np.array_equal(ours["norm.weight"], stored["model.layers.1.post_attention_layernorm.weight"].numpy())
    assert made.notes[-1] == "with weights of decoder layer 1"


def test_what_it_refuses(monkeypatch):
    for spec in MIXTURES.values():
        with pytest.raises(FFNError, match=r"is a mixture: .*; form='torch' writes it"):
            check_exportable(problem(spec), large=True)
    big = problem_of(load("llama-2-7b"), "block")
    with pytest.raises(FFNError, match=r"would be 271 MB, because it contains the weights; large=True writes it"):
        check_exportable(big, large=False)
    with pytest.raises(FFNError, match=r"10.5 GB, but its format allows at most 2 GB"):
        check_exportable(problem_of(load("llama-3.1-405b"), "block", dtype_name="fp32"), large=True)


def test_without_onnx_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FFNError) as caught:
        check_exportable(problem(DENSE["gated"]), large=False)
    assert (str(caught.value), caught.value.code) == (
        "onnx is not installed; in a clone of ffn: pip install -e '.[onnx]'", ExitCode.ENVIRONMENT,
    )  # fmt: skip
    assert onnx_model.USUAL_BYTES < onnx_model.MOST_BYTES


def test_both_of_two_comparisons(monkeypatch):
    """x between 0 and 1, else 0: a formula may use `&`, in torch's code as in a graph."""
    row = replace(TABLE["quick_gelu"], f=lambda x, m: m.where((x > 0) & (x < 1), x, zero(x, m)))
    monkeypatch.setitem(TABLE, "quick_gelu", row)
    block = problem(FFNSpec(6, 10, "quick_gelu"))
    weights, inputs = drawn(block)
    x = torch.linspace(-2, 3, 101, dtype=torch.float64)
    text = as_torch(formula_of(Activation("quick_gelu"), leaf("x"), {}))
    assert "(x > 0.0) & (x < 1.0)" in text
    right = torch.where((x > 0) & (x < 1), x, 0.0)
    assert eval(text, {"torch": torch, "x": x}).equal(right)
    up = functional.linear(inputs["x"], weights["up.weight"], weights["up.bias"])
    hidden = torch.where((up > 0) & (up < 1), up, 0.0)
    out = outputs(onnx_bytes(block, weights, "test"), {name: tensor.numpy() for name, tensor in inputs.items()})
    close(torch.from_numpy(out), functional.linear(hidden, weights["down.weight"], weights["down.bias"]))
