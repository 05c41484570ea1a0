"""The form latex: the block's formulas with shapes, and a small table of its cost, for \\input in a paper."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from ffncli.block import steps as ops
from ffncli.block.activations import TABLE
from ffncli.block.steps import Shape, Step, block_inputs, input_shapes, shapes, walk
from ffncli.block.symbols import weight_symbol
from ffncli.errors import clean
from ffncli.run.export.problem import ExportProblem
from ffncli.version import __version__

_ESCAPED = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip
_UNICODE = {"×": r"$\times$", "·": r"$\cdot$", "−": "$-$", "√": r"$\surd$", "≤": r"$\le$"}


def latex_text(problem: ExportProblem) -> str:
    """Return an align* environment with a line per step, a second one for the steps inside an expert, and a table."""
    rows: Any = ("T",), ("T_e",)  # symbols instead of sizes; `shapes` only passes them on
    blocks = [_aligned(problem.steps, problem.steps, input_shapes(problem.steps, rows[0]))]
    for step in problem.steps:
        if isinstance(step.op, ops.Experts):
            name = _name(step.output)
            inner = _aligned(step.op.program, problem.steps, input_shapes(step.op.program, rows[1]))
            where = f"where $\\operatorname{{expert}}_e$ of ${name}$, on the $T_e$ tokens that chose it, is"
            blocks.append(f"{where}\n{inner}")
    head = [
        f"% {clean(problem.title)}",
        f"% Written by ffn {__version__}; needs amsmath and amssymb. T is the number of tokens.",
        *(f"% {name}(x) = {TABLE[name].formula}" for name in _functions(problem.steps)),
    ]
    return "\n".join([*head, *blocks, _table(problem)]) + "\n"


def escaped(text: str) -> str:
    """Escape a string for LaTeX."""
    out = "".join(_ESCAPED.get(letter, _UNICODE.get(letter, letter)) for letter in clean(text))
    return out.encode("latin-1", "replace").decode("latin-1")


def _functions(steps: Sequence[Step]) -> list[str]:
    """Return the names of the activation functions in a block, including its experts."""
    names = [step.op.function for _, step in walk(steps) if isinstance(step.op, ops.Activation)]
    return [name for name in dict.fromkeys(names) if name != "identity"]


def _aligned(steps: Sequence[Step], every: Sequence[Step], inputs: Mapping[str, Shape]) -> str:
    known = shapes(steps, inputs)
    given = ",\\quad ".join(f"{_name(name)} \\in {_space(inputs[name])}" for name in block_inputs(steps))
    lines = [f"  & {given}"]
    for step in steps:
        out = f"{_name(step.output)} &= {_formula(step, every)}"
        lines.append(f"  {out} && \\in {_space(known[step.output])}")
    for step in steps:  # as the formulas multiply; torch stores the transpose
        if isinstance(step.op, ops.Linear):
            matrix = f"{_symbol(step.output, 'weight', every)} &= {_name(step.output + '.weight')}^\\top"
            lines.append(f"  {matrix} && \\in {_space((step.op.into.size, step.op.out.size))}")
    return "\n".join(["\\begin{align*}", " \\\\\n".join(lines), "\\end{align*}"])


def _space(shape: Shape) -> str:
    return "\\mathbb{R}^{" + " \\times ".join(map(str, shape)) + "}"


def _name(name: str) -> str:
    """Return a step's name in upright type, `\\mathrm{up}`; a single character stays unchanged."""
    return name if len(name) == 1 else "\\mathrm{" + name.replace("_", "\\_") + "}"


def _symbol(output: str, parameter: str, steps: Sequence[Step]) -> str:
    r"""Return a parameter's symbol: `W_{1}`, `b_{\mathrm{router}}`, `\mathrm{alpha\_p}_{\mathrm{act}}`."""
    prefix, _, rest = weight_symbol(output, parameter, steps).rpartition(".")
    letter, _, name = rest.partition("_") if len(rest.partition("_")[0]) == 1 else (rest[:1], "", rest[1:])
    if parameter not in ("weight", "bias", "correction", "factor"):  # parameters with names, such as xielu's alphas
        letter, name = _name(parameter), output.rpartition(".")[2]
    under = [_name(part) for part in (prefix, name) if part]
    return letter + (f"_{{{', '.join(under)}}}" if under else "")


def _formula(step: Step, steps: Sequence[Step]) -> str:
    op, x = step.op, [_name(name) for name in step.inputs]
    symbols = {name: _symbol(step.output, name, steps) for name in op.parameters()}
    match op:
        case ops.Linear():
            return f"{x[0]} \\, {symbols['weight']}" + (f" + {symbols['bias']}" if op.bias else "")
        case ops.Activation():
            return _activation(op, x[0])
        case ops.Multiply():
            return " \\odot ".join([*symbols.values(), *x])
        case ops.Add():
            last = x[-1] if op.scale == 1 else f"{op.scale:g} \\, {x[-1]}"
            return " + ".join([*x[:-1], last, *symbols.values()])
        case ops.Norm():
            return _norm(op, x[0], symbols)
        case ops.Dropout():
            return f"\\operatorname{{dropout}}_{{{op.p:g}}}({x[0]})"
        case ops.Route():
            return _route(op, x, symbols)
        case ops.Experts():
            return _experts(op, x)
        case _:
            raise AssertionError(f"latex has no branch for {type(op).__name__}")


def _function(name: str) -> str:
    return "\\operatorname{" + name.replace("_", "\\_") + "}"


def _activation(op: ops.Activation, x: str) -> str:
    if op.low is not None and op.high is not None:
        x = f"\\operatorname{{clip}}({x}, {op.low:g}, {op.high:g})"
    elif op.high is not None:
        x = f"\\min({x}, {op.high:g})"
    elif op.low is not None:
        x = f"\\max({x}, {op.low:g})"
    if op.soft_cap is not None:
        capped = f"{op.soft_cap:g} \\tanh({x} / {op.soft_cap:g})"
        y = capped if op.function == "identity" else f"{capped} \\cdot \\operatorname{{sigmoid}}({x})"
    else:
        y = x if op.function == "identity" else f"{_function(op.function)}({x})"
    y = y if op.most is None else f"\\min({y}, {op.most:g})"
    return y + (f" + {op.plus:g}" if op.plus else "")


def _norm(op: ops.Norm, x: str, symbols: Mapping[str, str]) -> str:
    """Return the formula of a norm with its weight and bias: x divided by its root mean square, or x standardised."""
    weight = f"(1 + {symbols['weight']})" if op.weight == "one_plus" else symbols.get("weight", "")
    bias = f" + {symbols['bias']}" if "bias" in symbols else ""
    inner = f"{weight} \\odot {x}" if weight and op.weigh == "input" else x
    center = inner if op.kind == "rmsnorm" else f"{inner} - \\operatorname{{mean}}({inner})"
    square = f"({inner})^2" if " " in inner else f"{inner}^2"
    spread = f"\\operatorname{{mean}}({square})" if op.kind == "rmsnorm" else f"\\operatorname{{var}}({inner})"
    y = f"\\frac{{{center}}}{{\\sqrt{{{spread} + {_number(op.eps)}}}}}"
    return y + (f" \\odot {weight}" if weight and op.weigh == "output" else "") + bias


def _number(value: float) -> str:
    """Return a value in LaTeX: `10^{-5}`, `1.5 \\cdot 10^{-5}`, `0.01`."""
    digits, _, exponent = f"{value:g}".partition("e")
    if not exponent:
        return digits
    power = f"10^{{{int(exponent)}}}"
    return power if digits == "1" else f"{digits} \\cdot {power}"


def _route(op: ops.Route, x: Sequence[str], symbols: Mapping[str, str]) -> str:
    score = "\\operatorname{softmax}" if op.score == "softmax" else _function(op.score)
    scores = f"{score}({x[0]})"
    how = [f"+\\,{symbols['correction']}"] if "correction" in symbols else []
    if op.groups > 1:
        how.append(f"\\text{{{op.top_groups} of {op.groups} groups}}")
    if op.order == "one_by_one":
        how.append(f"\\text{{one by one, within }}{100 * op.threshold:.4g}\\,\\%")
    bar = " \\mid " + ", ".join(how) if how else ""
    top = f"\\operatorname{{top}}_{{{op.top_k}}}"
    if op.lookup:
        text = f"{scores}[\\mathrm{{lookup}}[{x[1]}]]"
    elif not (op.chooses or op.renormalise or how):
        text = scores
    elif op.order == "choose_first":
        text = f"{score}({top}({x[0]}{bar}))"
    else:
        text = f"{top}({scores}{bar})" + (f"\\text{{ and the last {op.always}}}" if op.always else "")
    if op.order == "score_first" and op.renormalise:
        text = f"\\operatorname{{normalise}}({text})"
    factors = [symbols["factor"]] if op.learned_scale else []
    factors += [f"{op.scale:g}"] if op.scale != 1 else []
    return " \\cdot ".join([*factors, text])


def _experts(op: ops.Experts, x: Sequence[str]) -> str:
    share = f"{x[1]}_e"
    if op.weigh == "input":
        return f"\\sum_e \\operatorname{{expert}}_e({share} \\, {x[0]})"
    return f"\\sum_e {share} \\, \\operatorname{{expert}}_e({x[0]})"


def _table(problem: ExportProblem) -> str:
    """Return a table with the number of parameters, and the FLOPs and bytes for each token count."""
    figures = [(one.tokens, one.matmul_flops, one.elementwise_flops, one.bytes) for one in problem.workloads]
    rows = [f"  {' & '.join(map(_grouped, row))} \\\\" for row in figures]
    return "\n".join([
        *(f"% {line}" for name, text in problem.conventions.items() for line in wrap(f"{name}: {text}", 108)),
        "\\begin{tabular}{rrrr}",
        f"  \\multicolumn{{4}}{{l}}{{{escaped(problem.title)}: {_grouped(problem.params)} parameters}} \\\\",
        "  \\hline",
        f"  tokens & matmul FLOPs & elementwise FLOPs & bytes ({problem.dtype.name}) \\\\",
        "  \\hline",
        *rows,
        "\\end{tabular}",
    ])  # fmt: skip


def _grouped(number: int) -> str:
    """Return a number with grouped digits: `135{,}266{,}304`."""
    return f"{number:,}".replace(",", "{,}")
