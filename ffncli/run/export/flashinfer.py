"""The form flashinfer-trace: the files that FlashInfer-Bench and SOL-ExecBench load (Definition, Workloads, a
Solution).

Definition, Workload and Solution are schemas of flashinfer-bench 0.1.2 (`flashinfer_bench.data`): named axes, tensors
over these axes, and a reference whose function `run` takes the inputs in order. SOL-ExecBench reads the same files, and
requires that arguments have the names of the inputs. Neither program has a field for FLOPs, bytes or a tolerance
relative to the largest value, so these figures are in a folder `figures`, which both ignore.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from ffncli.block.steps import Axis, Experts, block_inputs, feature_axis, id_inputs, parameters, state_inputs
from ffncli.errors import FFNError, clean, option
from ffncli.kernels.choice import argument
from ffncli.run.export.problem import CONVENTIONS, ExportProblem, refused
from ffncli.run.export.torch_code import plain_functions
from ffncli.version import __version__

FORM = "flashinfer-trace"
_DTYPES = ("fp32", "bf16", "fp16")
_OUTPUT = "output"
_IMPORTS = "import torch\nimport torch.nn.functional as F\n\n\n"
_REFERENCE = """

def run({arguments}):
    \"\"\"The block in float64, from the same rounded numbers; the output is rounded once.\"\"\"
    return block({wide}).to({first}.dtype)
"""


def trace_files(problem: ExportProblem) -> dict[str, str]:
    """Return the files' contents by path in the data set; raise FFNError for a block outside the schema."""
    if problem.dtype.name not in _DTYPES:
        why = f"{problem.dtype.name} is not a dtype of its schema"
        raise FFNError(f"{option('form', FORM)}: {why}", f"choose {' or '.join(_DTYPES)} as {option('dtype')}")
    if id_inputs(problem.steps):
        raise refused(FORM, problem, "chooses experts by token ids, which the arena draws outside the vocabulary")
    name, kind = _name(problem), "moe" if problem.spec.moe else "ffn"
    files = {
        f"definitions/{kind}/{name}.json": _json(definition(problem, name, kind)),
        f"workloads/{kind}/{name}.jsonl": "".join(f"{json.dumps(one)}\n" for one in _workloads(problem, name)),
        f"solutions/{kind}/{name}/{name}_torch.json": _json(_solution(problem, name)),
    }
    return files | {f"figures/{kind}/{name}.json": _json(_figures(problem, name))}


def notes(problem: ExportProblem) -> tuple[str, ...]:
    """Return notes that the arena's limits are absolute, and that its weights are random."""
    drawn = "the arena draws weights from N(0, 1) too, so outputs are large"
    limit = f"its --atol 0.01 is too strict; {problem.tolerance:.2g} times the largest output is the right tolerance"
    overflow = ["fp16 may overflow there; --dtype bf16 does not"] if problem.dtype.name == "fp16" else []
    return (f"{drawn}: {limit}", *overflow)


def definition(problem: ExportProblem, name: str, kind: str) -> dict[str, Any]:
    """Return the Definition: every axis except `tokens` is constant; the inputs are x and the weights in step order."""
    axes = _Axes(problem)
    inputs = {argument_: {"shape": shape, "dtype": problem.dtype.torch} for argument_, shape in axes.inputs().items()}
    output = {"shape": ["tokens", axes.name(_d_model(problem))], "dtype": problem.dtype.torch}
    allowed = f"{CONVENTIONS['tolerance']}: at most {problem.tolerance:.3g}"
    return {
        "name": name,
        "op_type": kind,
        "description": f"{clean(problem.title)}. {'; '.join(map(clean, problem.formulas))}. Right answers: {allowed}.",
        "tags": ["status:draft", *([] if problem.bare else [f"model:{clean(problem.name)}"])],
        "axes": {
            "tokens": {"type": "var", "description": "rows of the input"},
            **{axis: {"type": "const", "value": size} for axis, size in axes.sizes.items()},
        },
        "inputs": inputs,
        "outputs": {_OUTPUT: output},
        "reference": reference(problem),
        "constraints": [],
    }


def reference(problem: ExportProblem) -> str:
    """Return the source code of `run(x, gate, up, down)`, which computes in float64 and rounds its output to x's dtype.

    Only one expert's weights are widened at a time, because all of them in float64 would take four times the memory of
    bf16.
    """
    about = "One assignment for each step of the block."
    block = _IMPORTS + plain_functions(problem.steps, "block", about, "[e].double()")
    stacked = {argument(name) for step in problem.steps if isinstance(step.op, Experts) for name in step.parameters()}
    names = list(_Axes(problem).inputs())
    wide = ", ".join(name if name in stacked else f"{name}.double()" for name in names)
    return block + _REFERENCE.format(arguments=", ".join(names), wide=wide, first=names[0])


def _d_model(problem: ExportProblem) -> Axis:
    return Axis("d_model", problem.spec.d_model)


class _Axes:
    """The axes of a definition; an axis's name is extended if an input or an axis of another size has the same name."""

    def __init__(self, problem: ExportProblem) -> None:
        self.steps = problem.steps
        self.taken = {*block_inputs(self.steps), *map(argument, parameters(self.steps)), "tokens", _OUTPUT}
        self.sizes: dict[str, int] = {}

    def name(self, axis: Axis) -> str:
        """Return the name of an axis in this definition."""
        name = axis.name if axis.name not in self.taken else f"{axis.name}_width"
        name = name if self.sizes.get(name, axis.size) == axis.size else f"{axis.name}_{axis.size}"
        self.sizes[name] = axis.size
        return name

    def inputs(self) -> dict[str, list[str]]:
        """Return the axes' names of x, of inputs computed elsewhere in the model, and of the weights in step order."""
        axis, states = feature_axis(self.steps), state_inputs(self.steps)
        assert axis is not None
        shapes = {name: ["tokens", self.name(states.get(name, axis))] for name in block_inputs(self.steps)}
        return shapes | {
            argument(name): [self.name(one) for one in axes] for name, axes in parameters(self.steps).items()
        }


def _name(problem: ExportProblem) -> str:
    """Return a name such as `ffn_llama_2_7b_d4096_f11008_fp16`; a bare block is named after its activation."""
    spec, moe = problem.spec, problem.spec.moe
    kind = f"{spec.activation}_{'gated' if spec.gated else 'plain'}" if problem.bare else problem.name
    layer = "" if problem.bare or not problem.layer.index else f"_l{problem.layer.index}"
    experts = f"_e{moe.experts}_k{moe.top_k}" if moe else ""
    whole = "block" if problem.part == "block" else "ffn"
    text = f"{whole}_{clean(kind)[:60]}{layer}{experts}_d{spec.d_model}_f{spec.d_ff}_{problem.dtype.name}"
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _workloads(problem: ExportProblem, name: str) -> Sequence[Mapping[str, Any]]:
    """Return every workload as a Trace without a solution, the format in which the data set stores workloads."""
    names = list(_Axes(problem).inputs())
    return [
        {
            "definition": name,
            "workload": {
                "uuid": str(uuid5(NAMESPACE_URL, f"ffn/{name}/{one.tokens}")),
                "axes": {"tokens": one.tokens},
                "inputs": {argument_: {"type": "random"} for argument_ in names},
            },
            "solution": None,
            "evaluation": None,
        }
        for one in problem.workloads
    ]


def _solution(problem: ExportProblem, name: str) -> dict[str, Any]:
    """Return a Solution that is the kernels' baseline: the same steps in the inputs' dtype, one torch call per step."""
    source = _IMPORTS + plain_functions(problem.steps, "run", "One assignment for each step of the block.")
    return {
        "name": f"{name}_torch",
        "definition": name,
        "author": "ffn",
        "description": "plain torch in the dtype of the inputs: the baseline; the reference is slower, in float64",
        "spec": {
            "language": "python",
            "target_hardware": ["cpu", "cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["torch"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": source}],
    }


def _figures(problem: ExportProblem, name: str) -> dict[str, Any]:
    """Return the figures for which the schemas have no field."""
    return {
        "schema_version": 1,
        "written_by": f"ffn {__version__}",
        "definition": name,
        "conventions": CONVENTIONS,
        "tolerance": problem.tolerance,
        "params": problem.params,
        "workloads": [vars(one) for one in problem.workloads],
    }


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
