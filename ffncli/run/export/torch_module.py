"""The form torch: a Python file with an nn.Module, its reference in float64, its workloads and its tolerance."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from ffncli.block.activations import TABLE
from ffncli.block.steps import Activation, Experts, Linear, Norm, Op, Step, block_inputs, id_inputs, input_shapes
from ffncli.errors import clean
from ffncli.run.export.problem import CONVENTIONS, ExportProblem
from ffncli.run.export.torch_code import Spelling, body_lines, expert_name
from ffncli.version import __version__

_REFERENCE = '''
def reference(block, *inputs):
    """The block's output in float64, from the same rounded numbers, without dropout."""
    with torch.device("meta"):
        wide = Block()
    state = block.state_dict().items()
    wide.load_state_dict({name: _wide(tensor) for name, tensor in state}, assign=True)
    with torch.no_grad():
        return wide.eval()(*map(_wide, inputs))


def _wide(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def errors(output, exact):
    """Each token's max|a - b|, relative to the largest |b| of all."""
    return (output.double() - exact).abs().amax(-1) / exact.abs().max()
'''
_MAIN = """
if __name__ == "__main__":
    torch.manual_seed(0)
    block = Block().to(DTYPE).eval()
    for workload in WORKLOADS:
        inputs = example_inputs(workload["tokens"])
        with torch.no_grad():
            apart = errors(block(*inputs), reference(block, *inputs))
        print(f"{workload['tokens']} tokens: error {apart.max():.2e}, allowed {TOLERANCE:.2e}%s")
"""
_BEYOND = "; {(apart > TOLERANCE).sum()} tokens beyond it"
_NEAR_TIES = "# Rounding may send a token with nearly tied experts to others: above TOLERANCE, it is still right.\n"
_HOLDER = '''
class Parameters(nn.Module):
    """Named tensors that belong to none of torch's layers."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def drawn(fan_in, *shape):
    """Uniform within ±1/√fan_in, as nn.Linear draws."""
    return torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5)

'''


def torch_file(problem: ExportProblem) -> str:
    """Return the contents of the file, which needs only torch and contains no weights."""
    made = list(_initial_lines(problem.steps))
    holder = _HOLDER if any("Parameters(" in line for line in made) else ""
    body = [
        *_header(problem),
        "",
        "import torch",
        "from torch import nn",
        "from torch.nn import functional as F",
        "",
        *_constants(problem),
        "",
        holder,
        "class Block(nn.Module):",
        f'    """{_shapes(problem)}"""',
        "",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in made),
        *_methods(problem.steps),
    ]
    main = f"\n{_NEAR_TIES if problem.routed else ''}{_MAIN.lstrip() % (_BEYOND if problem.routed else '')}"
    text = "\n".join([*body, "", _REFERENCE, _inputs(problem), main])
    return re.sub(r"\n{4,}", "\n\n\n", text)


def _header(problem: ExportProblem) -> list[str]:
    """Return the comments at the top. Strings from model files are cleaned, so they cannot break out of a comment."""
    about = "the whole block" if problem.part == "block" else "only the FFN, without residual and surrounding norms"
    return [
        f"# {clean(problem.title)}; {about}.",
        f"# Written by ffn {__version__}; python THIS_FILE compares the module with its reference.",
        "#",
        *(f"#     {clean(line)}" for line in problem.formulas),
        *(["#", *_wrapped(f"Dimensions: {clean(problem.citation)}")] if problem.citation else []),
    ]


def _constants(problem: ExportProblem) -> list[str]:
    names = ("tokens", "matmul_flops", "elementwise_flops", "bytes")
    rows = [", ".join(f'"{name}": {getattr(one, name)}' for name in names) for one in problem.workloads]
    return [
        f"DTYPE = torch.{problem.dtype.torch}",
        f"TOLERANCE = {problem.tolerance!r}  # {CONVENTIONS['tolerance']}",
        f"PARAMETERS = {problem.params}  # learned values, norms included",
        *(line for name, text in problem.conventions.items() for line in _wrapped(f"{name}: {text}.")),
        "WORKLOADS = (",
        *(f"    {{{row}}}," for row in rows),
        ")",
    ]


def _wrapped(text: str) -> list[str]:
    """Return a string as comment lines of at most 110 characters."""
    return [f"# {line}" for line in textwrap.wrap(text, 108)]


def _shapes(problem: ExportProblem) -> str:
    """Return the block's docstring, which begins with `x [..., 4096] → [..., 4096]`."""
    shapes = input_shapes(problem.steps, ())
    inputs = ", ".join(f"{name} [..., {shape[-1]}]" for name, shape in shapes.items())
    return (
        f"{inputs} → [..., {problem.spec.d_model}]. Weights are [out, in]; weights of experts are [experts, out, in]."
    )


def _inputs(problem: ExportProblem) -> str:
    """Return the code of a function that draws the block's inputs."""
    ids, drawn = id_inputs(problem.steps), []
    for name, shape in input_shapes(problem.steps, ()).items():
        ids_text = f"torch.randint({ids.get(name)}, (tokens, 1))"
        drawn.append(ids_text if name in ids else f"torch.randn(tokens, {shape[-1]}).to(DTYPE)")
    head = 'def example_inputs(tokens):\n    """Random inputs of the block."""\n'
    return f"\n{head}    return ({', '.join(drawn)},)\n"


# --- the module -------------------------------------------------------------------------------------------------------


def _initial_lines(steps: Sequence[Step]) -> Iterator[str]:
    """Yield the lines of __init__ in step order, with torch's layers named as the canonical weights."""
    made: set[str] = set()
    for step in steps:
        for name, value in _modules(step).items():
            outer = name.rpartition(".")[0]
            if outer and outer not in made:
                made.add(outer)
                yield f"self.{outer} = nn.Module()"
            made.add(name)
            yield f"self.{name} = {value}"
        for name, axes in step.tables().items():
            home, _, table = name.rpartition(".")
            if home not in made:
                yield f"self.{home} = nn.Module()"
            shape = ", ".join(str(axis.size) for axis in axes)
            yield f'self.{home}.register_buffer("{table}", torch.zeros({shape}, dtype=torch.long))'


def _modules(step: Step) -> dict[str, str]:
    """Return the expressions that create a step's modules, by the modules' names."""
    op = step.op
    if text := _layer(op):
        return {step.output: text}
    if isinstance(op, Experts):
        made: dict[str, str] = {}
        for inner in op.program:
            stack = () if inner.output in op.common else (op.experts.size,)
            if tensors := _tensors(inner.op, stack):
                made[step.prefix + inner.output] = tensors
        return made
    tensors = _tensors(op, ())
    return {step.output: tensors} if tensors else {}


def _layer(op: Op) -> str:
    """Return the expression for torch's own layer for an op; empty if torch has no layer with the same parameters."""
    if isinstance(op, Linear):
        return f"nn.Linear({op.into.size}, {op.out.size}, bias={op.bias})"
    if isinstance(op, Norm) and op.weight == "plain" and op.weigh == "output":
        if op.kind == "layernorm":
            return f"nn.LayerNorm({op.axis.size}, {op.eps!r}, bias={op.bias})"
        if not op.bias:
            return f"nn.RMSNorm({op.axis.size}, {op.eps!r})"
    return ""


def _tensors(op: Op, stack: tuple[int, ...]) -> str:
    """Return code such as `Parameters(weight=drawn(...))` with leading axes `stack`; empty without parameters."""
    given = []
    for name, axes in op.parameters().items():
        shape = ", ".join(str(size) for size in (*stack, *(axis.size for axis in axes)))
        given.append(f"{name}={_first(op, name, shape)}")
    return f"Parameters({', '.join(given)})" if given else ""


def _first(op: Op, name: str, shape: str) -> str:
    """Return the expression for a parameter's initial value, which matches ffncli's random weights."""
    if isinstance(op, Linear):
        return f"drawn({op.into.size}, {shape})"
    if isinstance(op, Activation):
        return f"torch.full(({shape},), {TABLE[op.function].learned[name]!r})"
    one = name == "factor" or (name == "weight" and isinstance(op, Norm) and op.weight == "plain")
    return f"torch.{'ones' if one else 'zeros'}({shape})"


def _methods(steps: Sequence[Step]) -> Iterator[str]:
    """Yield the lines of forward, and of a method for one expert of every mixture."""
    names = {name: f"self.{name}" for step in steps for name in (*step.parameters(), *step.tables())}
    modules = {step.output: f"self.{step.output}" for step in steps if _layer(step.op)}
    spelling = Spelling(names, modules, {}, "self.training")
    inputs = [spelling.variable(name) for name in block_inputs(steps)]
    yield from _method("forward", inputs, body_lines(steps, spelling))
    for step in steps:
        if isinstance(step.op, Experts):
            inner = Spelling(_of_one(step, step.op), {}, {}, "self.training")
            yield from _method(expert_name(step), ["x", "e"], body_lines(step.op.program, inner))


def _of_one(step: Step, op: Experts) -> Mapping[str, str]:
    return {name: f"self.{step.prefix}{name}" + ("" if op.is_common(name) else "[e]") for name in op.parameters()}


def _method(name: str, arguments: Sequence[str], lines: Sequence[str]) -> Iterator[str]:
    yield ""
    yield f"    def {name}({', '.join(['self', *arguments])}):"
    yield from (f"        {line}" for line in lines)
