"""The form onnx: the block as a graph of standard operators, with weights, for any number of tokens.

Linear becomes Gemm with torch's [out, in]. Norms are written as formulas, because ONNX's norm operators do not accept
float64. An activation becomes the operator with its name if opset 20 has that operator in every dtype, otherwise a
formula. GELU in float64 is also computed from a formula, because its operator is defined with float32 constants.
Source: onnx 1.23.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ffncli.block import steps as ops
from ffncli.block.steps import Step, block_inputs, input_shapes, parameters
from ffncli.errors import FFNError, option
from ffncli.run.export.problem import CONVENTIONS, ExportProblem, refused
from ffncli.run.export.torch_code import FormulaTerm, formula_of, leaf
from ffncli.system.packages import require_extra
from ffncli.version import __version__

FORM = "onnx"
OPSET = 20
USUAL_BYTES, MOST_BYTES = 200_000_000, 2_000_000_000  # the limit without `large`; the limit of protobuf
_OPERATORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "relu": ("Relu", {}), "gelu": ("Gelu", {}), "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "sigmoid": ("Sigmoid", {}), "tanh": ("Tanh", {}),
}  # fmt: skip
_SIGNS = {
    "+": "Add", "-": "Sub", "*": "Mul", "/": "Div", "<": "Less", "<=": "LessOrEqual", ">": "Greater",
    ">=": "GreaterOrEqual", "==": "Equal", "&": "And", "where": "Where", "exp": "Exp", "erf": "Erf", "tanh": "Tanh",
    "sqrt": "Sqrt", "sigmoid": "Sigmoid", "abs": "Abs",
}  # fmt: skip


def check_exportable(problem: ExportProblem, large: bool) -> None:
    """Raise FFNError for a mixture, for a file that would be too large, and (exit 3) if onnx is not installed."""
    if any(isinstance(step.op, (ops.Experts, ops.Route)) for step in problem.steps):
        raise refused(FORM, problem, "is a mixture: which expert computes a token is not known before it runs")
    size = problem.params * problem.dtype.block_bytes
    if size > MOST_BYTES:
        what = f"{option('form', FORM)}: the file would be {size / 1e9:.1f} GB, but its format allows at most 2 GB"
        raise FFNError(what, f"take a smaller {option('dtype')} or block")
    if size > USUAL_BYTES and not large:
        what = f"{option('form', FORM)}: the file would be {size / 1e6:,.0f} MB, because it contains the weights"
        raise FFNError(what, f"{option('large', True)} writes it")
    require_extra("onnx", "onnx")


def onnx_bytes(problem: ExportProblem, weights: Mapping[str, Tensor], origin: str) -> bytes:
    """Return the model file. `weights` are canonical, in the problem's dtype; `origin` is stored in its metadata."""
    onnx = import_module("onnx")
    graph = _Graph(onnx, problem)
    for step in problem.steps:
        graph.add(step)
    made = graph.model(weights)
    figures = {
        "tolerance": repr(problem.tolerance), "weights": origin, "parameters": str(problem.params),
        "matmul_flops_per_token": str(problem.workloads[0].matmul_flops // problem.workloads[0].tokens),
        **{f"conventions.{name}": text for name, text in CONVENTIONS.items()},
    }  # fmt: skip
    onnx.helper.set_model_props(made, figures)
    onnx.checker.check_model(made, full_check=True)
    raw: bytes = made.SerializeToString()
    return raw


class _Graph:
    """A graph under construction: nodes in order; every intermediate has the name of its step."""

    def __init__(self, onnx: Any, problem: ExportProblem) -> None:
        self.onnx, self.problem = onnx, problem
        self.element = getattr(onnx.TensorProto, _ELEMENTS[problem.dtype.name])
        self.nodes: list[Any] = []
        self.constants: dict[tuple[float, int], Any] = {}
        self.alias: dict[str, str] = {}

    def add(self, step: Step) -> None:
        """Add the nodes of one step."""
        x = [self.alias.get(name, name) for name in step.inputs]
        params = {name.rpartition(".")[2]: name for name in step.parameters()}
        match step.op:
            case ops.Linear():
                self.node("Gemm", [x[0], *params.values()], step.output, transB=1)
            case ops.Activation() as op:
                self._activation(op, x[0], params, step.output)
            case ops.Multiply():
                self._chain("Mul", [*x, *params.values()], step.output)
            case ops.Add(scale=scale):
                last = x[-1] if scale == 1 else self.node("Mul", [x[-1], self.number(scale)])
                self._chain("Add", [*x[:-1], last, *params.values()], step.output)
            case ops.Norm() as op:
                self._norm(op, x[0], params, step.output)
            case ops.Dropout():  # dropout is the identity in eval mode
                self.node("Identity", x, step.output)
            case _:
                raise AssertionError(f"onnx has no branch for {type(step.op).__name__}")

    def node(self, kind: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output, which is generated if `output` is empty."""
        output = output or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def number(self, value: float, element: int | None = None) -> str:
        """Return the name of a constant, which is added if missing."""
        element = self.element if element is None else element
        tensor = self.onnx.helper.make_tensor(f"constant_{len(self.constants)}", element, [], [value])
        return str(self.constants.setdefault((value, element), tensor).name)

    def _chain(self, kind: str, inputs: Sequence[str], output: str) -> None:
        """Combine all inputs with the same binary operator; a single input is passed through."""
        if len(inputs) == 1:
            self.node("Identity", inputs, output)
            return
        total = inputs[0]
        for at, name in enumerate(inputs[1:], 2):
            total = self.node(kind, [total, name], output if at == len(inputs) else "")

    def _activation(self, op: ops.Activation, x: str, params: Mapping[str, str], output: str) -> None:
        if op.low is not None or op.high is not None:
            ends = [self.number(end) if end is not None else "" for end in (op.low, op.high)]
            x = self.node("Clip", [x, *ends] if ends[1] else [x, ends[0]])
        kind, attributes = _OPERATORS.get(op.function, ("", {}))
        if kind and op.soft_cap is None and not (kind == "Gelu" and self.problem.dtype.name == "fp64"):
            y = self.node(kind, [x], **attributes)
        else:
            y = self._formula(formula_of(op, leaf(x), {name: leaf(full) for name, full in params.items()}))
        y = y if op.most is None else self.node("Clip", [y, "", self.number(op.most)])
        y = self.node("Add", [y, self.number(op.plus)]) if op.plus else y
        self.node("Identity", [y], output)

    def _formula(self, term: FormulaTerm) -> str:
        """Add a formula's nodes and return their output's name; log1p and expm1 are composed of ONNX's operators."""
        if term.name == "leaf":
            return str(term.value)
        if term.name == "number":
            assert isinstance(term.value, float)
            return self.number(term.value)
        of = [self._formula(part) for part in term.of]
        if term.name == "log1p":
            return self.node("Log", [self.node("Add", [of[0], self.number(1.0)])])
        if term.name == "expm1":
            return self.node("Sub", [self.node("Exp", of), self.number(1.0)])
        return self.node(_SIGNS[term.name], of)

    def _norm(self, op: ops.Norm, x: str, params: Mapping[str, str], output: str) -> None:
        """Add a norm; its statistics are computed in at least float32."""
        narrow = self.problem.dtype.block_bytes < 4
        element = self.onnx.TensorProto.FLOAT if narrow else self.element

        def widened(name: str) -> str:
            return self.node("Cast", [name], to=element) if narrow else name

        weight = widened(params["weight"]) if "weight" in params else ""
        if op.weight == "one_plus":
            weight = self.node("Add", [weight, self.number(1.0, element)])
        y = widened(x)
        y = self.node("Mul", [y, weight]) if weight and op.weigh == "input" else y
        if op.kind == "layernorm":
            y = self.node("Sub", [y, self._mean(y)])
        variance = self._mean(self.node("Mul", [y, y]))
        spread = self.node("Sqrt", [self.node("Add", [variance, self.number(op.eps, element)])])
        y = self.node("Div", [y, spread])
        y = self.node("Mul", [y, weight]) if weight and op.weigh == "output" else y
        y = self.node("Add", [y, widened(params["bias"])]) if "bias" in params else y
        self.node("Cast", [y], output, to=self.element)

    def _mean(self, x: str) -> str:
        """Add a mean over the last axis, which is kept with size 1."""
        axes = self.constants.setdefault(
            (-1.0, self.onnx.TensorProto.INT64),
            self.onnx.helper.make_tensor("last_axis", self.onnx.TensorProto.INT64, [1], [-1]),
        )
        return self.node("ReduceMean", [x, axes.name], keepdims=1)

    def model(self, weights: Mapping[str, Tensor]) -> Any:
        """Return the model with all nodes; the weights are initializers under their canonical names."""
        helper, steps = self.onnx.helper, self.problem.steps
        shapes = input_shapes(steps, ())
        inputs = [self._value(name, shapes[name][-1]) for name in block_inputs(steps)]
        outputs = [self._value(steps[-1].output, self.problem.spec.d_model)]
        tensors = [self._tensor(name, weights[name]) for name in parameters(steps)]
        doc = "\n".join([self.problem.title, *self.problem.formulas])
        graph = helper.make_graph(
            self.nodes, "ffn", inputs, outputs, [*tensors, *self.constants.values()], doc_string=doc
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9,
            producer_name="ffn", producer_version=__version__,
        )  # fmt: skip

    def _value(self, name: str, width: int) -> Any:
        return self.onnx.helper.make_tensor_value_info(name, self.element, ["tokens", width])

    def _tensor(self, name: str, tensor: Tensor) -> Any:
        raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return self.onnx.helper.make_tensor(name, self.element, list(tensor.shape), raw, raw=True)


_ELEMENTS = {"fp64": "DOUBLE", "fp32": "FLOAT", "bf16": "BFLOAT16", "fp16": "FLOAT16"}
