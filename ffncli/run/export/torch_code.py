"""A block's steps as lines of torch code, for the methods of a module and for plain functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from ffncli.block.activations import TABLE
from ffncli.block.formulas import SCALAR, with_learned
from ffncli.block.steps import Activation, Add, Dropout, Experts, Linear, Multiply, Norm, Route, Step, block_inputs
from ffncli.block.value import unlimited
from ffncli.kernels.choice import by_argument

_WRITTEN = {  # the same functions as the formulas in TABLE, but shorter code
    "identity": "{x}",
    "relu2": "F.relu({x}).square()",
    "gelu_10": "F.gelu({x}).clamp(max=10.0)",
    "sqrtsoftplus": "F.softplus({x}, threshold=40.0).sqrt()",
}


@dataclass(frozen=True)
class Spelling:
    """The names in generated code. `parameters` maps canonical names to expressions; `modules` maps a step to the
    module that computes it (empty in a plain function); `names` maps a step to its variable if that is not its own
    name. `training` is the expression for whether dropout applies; `of_one` is the index that selects one expert's
    tensor from the tensor of all experts."""

    parameters: Mapping[str, str]
    modules: Mapping[str, str]
    names: Mapping[str, str]
    training: str = "False"
    of_one: str = "[e]"

    def variable(self, name: str) -> str:
        """Return the variable that holds a step's output: `shared__gate` for shared.gate."""
        return self.names.get(name, name.replace(".", "__"))

    def of(self, step: Step) -> dict[str, str]:
        """Return the expressions of a step's parameters, keyed by the last part of each parameter's name."""
        names = (*step.parameters(), *step.tables())
        return {name.rpartition(".")[2]: self.parameters[name] for name in names if name in self.parameters}


def plain_spelling(steps: Sequence[Step]) -> Spelling:
    """Return the names for `def run(x, gate, up, down)`, with the same arguments as a user's kernel in `ffn bench`."""
    arguments = by_argument(steps)
    parameters = {name: argument for argument, name in arguments.items()}
    outputs = {step.output: step.output.replace(".", "__") for step in steps}
    clash = {name: f"{variable}_out" for name, variable in outputs.items() if variable in arguments}
    return Spelling(parameters, {}, clash)


def body_lines(steps: Sequence[Step], spelling: Spelling) -> list[str]:
    """Return one or more lines per step, followed by the return statement."""
    lines = [line for step in steps for line in step_lines(step, spelling)]
    return [*lines, f"return {spelling.variable(steps[-1].output)}"]


def step_lines(step: Step, spelling: Spelling) -> list[str]:
    """Return the lines of one step, such as `up = F.linear(x, up)` or `up = self.up(x)`."""
    out, x = spelling.variable(step.output), [spelling.variable(name) for name in step.inputs]
    params = spelling.of(step)
    match step.op:
        case Linear() | Norm() if step.output in spelling.modules:
            return [f"{out} = {spelling.modules[step.output]}({x[0]})"]
        case Linear():
            bias = f", {params['bias']}" if "bias" in params else ""
            return [f"{out} = F.linear({x[0]}, {params['weight']}{bias})"]
        case Activation() as op:
            return _activation(op, out, x[0], params)
        case Multiply():
            return [f"{out} = {' * '.join([*x, *params.values()])}"]
        case Add(scale=scale):
            last = x[-1] if scale == 1 else f"{scale!r} * {x[-1]}"
            return [f"{out} = {' + '.join([*x[:-1], last, *params.values()])}"]
        case Norm() as op:
            return [f"{out} = {_norm(op, x[0], params)}"]
        case Dropout(p=p):
            return [f"{out} = F.dropout({x[0]}, {p!r}, {spelling.training})"]
        case Route() as op:
            return _route(op, out, x, params)
        case Experts() as op:
            return _experts(step, op, out, x, spelling)
        case _:
            raise AssertionError(f"export has no branch for {type(step.op).__name__}")


def _activation(op: Activation, out: str, x: str, params: Mapping[str, str]) -> list[str]:
    """Return the lines for clipping x, the function and its upper limit; a single line if there is nothing to clip."""
    limits = ", ".join(f"{name}={v!r}" for name, v in (("min", op.low), ("max", op.high)) if v is not None)
    lines = [f"{out} = {x}.clamp({limits})"] if limits else []
    inner = out if limits else x
    text = call(op.function, inner) if op.soft_cap is None else None
    if text is None:
        text = as_torch(formula_of(op, leaf(inner), {name: leaf(p) for name, p in params.items()}))
    if op.most is not None:
        text = f"({text}).clamp(max={op.most!r})"
    text += f" + {op.plus!r}" if op.plus else ""
    return lines if text == out else [*lines, f"{out} = {text}"]


def call(function: str, x: str) -> str | None:
    """Return a call such as `F.silu(x)`; None for a function that has to be written as a formula."""
    native = TABLE[function].native
    if native is None:
        return _WRITTEN[function].format(x=x) if function in _WRITTEN else None
    name, options = native
    return f"F.{name}({', '.join([x, *(f'{key}={value!r}' for key, value in options.items())])})"


def _norm(op: Norm, x: str, params: Mapping[str, str]) -> str:
    weight = params.get("weight")
    if weight and op.weight == "one_plus":
        weight = f"1 + {weight}"
    if weight and op.weigh == "input":
        x, weight = f"{x} * ({weight})", None
    name = "layer_norm" if op.kind == "layernorm" else "rms_norm"
    bias = params.get("bias")
    inside = f", {bias}" if op.kind == "layernorm" else ""
    text = f"F.{name}({x}, ({op.axis.size},), {weight}{inside}, {op.eps!r})"
    return f"{text} + {bias}" if bias and op.kind == "rmsnorm" else text


# --- mixtures ---------------------------------------------------------------------------------------------------------


def _route(op: Route, out: str, x: Sequence[str], params: Mapping[str, str]) -> list[str]:
    """Return the lines for the router's weights [tokens, experts]; unchosen experts have weight 0."""
    work = x[0] if op.score_dtype == "input" else f"{x[0]}.float()"
    if not (op.chooses or op.renormalise):
        scale = "" if op.scale == 1 else f" * {op.scale!r}"
        return [f"{out} = ({_score(op, work)}{scale}).to({x[0]}.dtype)"]
    if op.order == "one_by_one":
        lines = _one_by_one(op, work)
    elif op.order == "choose_first":
        choice = f"(scores + {params['correction']}.to(scores.dtype))" if "correction" in params else "scores"
        lines = [f"scores = {work}", f"chosen = {choice}.topk({op.top_k}, -1).indices"]
        lines += [f"weights = {_score(op, 'scores.gather(-1, chosen)')}"]
    else:
        lines = _score_first(op, work, x, params)
    lines += [] if op.scale == 1 else [f"weights = weights * {op.scale!r}"]
    lines += [f"weights = weights * {params['factor']}.to(weights.dtype)"] if op.learned_scale else []
    return [*lines, f"{out} = torch.zeros_like(scores).scatter_add(-1, chosen, weights).to({x[0]}.dtype)"]


def _score(op: Route, x: str) -> str:
    return f"torch.softmax({x}, -1)" if op.score == "softmax" else str(call(op.score, x))


def _score_first(op: Route, work: str, x: Sequence[str], params: Mapping[str, str]) -> list[str]:
    lines, choosable = [f"scores = {_score(op, work)}"], op.experts.size - op.always
    choice = f"scores[..., :{choosable}]" if op.always else "scores"
    choice += f" + {params['correction']}.to(scores.dtype)" if "correction" in params else ""
    if 1 <= op.top_groups < op.groups:
        most = min(op.group_best, choosable // op.groups)
        lines += [
            f"groups = {f'({choice})' if ' ' in choice else choice}.unflatten(-1, ({op.groups}, -1))",
            f"best = groups.topk({most}, -1).values.sum(-1)",
            f"best = best.topk({op.top_groups}, -1).indices",
            "kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)",
        ]
        outside = "0.0" if op.zero_outside else "-torch.inf"
        choice = f"groups.masked_fill(~kept.unsqueeze(-1), {outside}).flatten(-2)"
    elif " " in choice:
        choice = f"({choice})"
    if op.lookup:
        lines.append(f"chosen = {params['lookup']}[{x[1]}.squeeze(-1)]")
    else:
        lines.append(f"chosen = {choice}.topk({op.top_k}, -1).indices")
    if op.always:
        last = f"torch.arange({choosable}, {op.experts.size}, device=chosen.device)"
        lines.append(f"chosen = torch.cat([chosen, {last}.expand(*chosen.shape[:-1], -1)], -1)")
    lines.append("weights = scores.gather(-1, chosen)")
    plus = f" + {op.eps!r}" if op.eps else ""
    total = f"(weights.sum(-1, keepdim=True){plus})" if plus else "weights.sum(-1, keepdim=True)"
    return lines + ([f"weights = weights / {total}"] if op.renormalise else [])


def _one_by_one(op: Route, work: str) -> list[str]:
    return [
        f"scores = {work}",
        "left, picked, shares = scores, [], []",
        f"for _ in range({op.top_k}):",
        "    best, top = left.max(-1, keepdim=True)",
        f"    close = best - left <= {op.threshold!r} * torch.maximum(scores.abs(), best)",
        f"    shares.append({_score(op, 'left.masked_fill(~close, -torch.inf)')}.gather(-1, top))",
        "    picked.append(top)",
        "    left = left.scatter(-1, top, -torch.inf)",
        "chosen, weights = torch.cat(picked, -1), torch.cat(shares, -1)",
    ]


def expert_name(step: Step) -> str:
    """Return the name of the function or method that runs one expert."""
    return "expert" if not step.prefix else f"{step.prefix.rstrip('.')}_expert"


def expert_arguments(step: Step) -> dict[str, str]:
    """Return the argument of a plain function for each parameter of one expert's program."""
    assert isinstance(step.op, Experts)
    return {name: argument for argument, name in by_argument(step.op.program).items()}


def _experts(step: Step, op: Experts, out: str, x: Sequence[str], spelling: Spelling) -> list[str]:
    """Return the lines that run every expert on the tokens routed to it. In a module, an expert's method is passed the
    expert's index; a plain function is passed the expert's weights."""
    entries, size = op.entries, op.experts.size
    part = f"[:, -{size}:]" if op.always else f"[:, {entries.start}:{entries.stop}]"
    if spelling.modules:
        call_text = f"self.{expert_name(step)}({{x}}, e)"
    else:
        weights = [
            spelling.parameters[step.prefix + name] + ("" if op.is_common(name) else spelling.of_one)
            for name in expert_arguments(step)
        ]
        call_text = f"{expert_name(step)}({', '.join(['{x}', *weights])})"
    weighed, received = "made * share[token, e, None]", "flat[token]"
    if op.weigh == "input":
        weighed, received = "made", "flat[token] * share[token, e, None]"
    every = f"{x[1]}.flatten(0, -2)"
    first = f"flat * {every}[:, -{op.identity}:].sum(-1, keepdim=True)" if op.identity else "torch.zeros_like(flat)"
    return [
        f"flat, share = {x[0]}.flatten(0, -2), {every}{part}",
        f"{out} = {first}",
        "for e in share.any(0).nonzero().flatten().tolist():",
        "    token = share[:, e].nonzero().flatten()",
        f"    made = {call_text.format(x=received)}",
        f"    {out}.index_add_(0, token, {weighed})",
        f"{out} = {out}.reshape({x[0]}.shape)",
    ]


def function_text(name: str, steps: Sequence[Step], spelling: Spelling, arguments: Sequence[str], doc: str) -> str:
    """Return the code of a plain function of the block's inputs and weights."""
    head = f"def {name}({', '.join([*map(spelling.variable, block_inputs(steps)), *arguments])}):"
    return "\n".join([head, f'    """{doc}"""', *(f"    {line}" for line in body_lines(steps, spelling))]) + "\n"


def plain_functions(steps: Sequence[Step], name: str, doc: str, of_one: str = "[e]") -> str:
    """Return the code of `name(x, gate, up, down)`, after a function for one expert if there are experts."""
    texts, spelling = [], replace(plain_spelling(steps), of_one=of_one)
    for step in steps:
        if isinstance(step.op, Experts):
            inner = plain_spelling(step.op.program)
            arguments = list(expert_arguments(step).values())
            about = "One expert on the tokens that chose it."
            texts.append(function_text(expert_name(step), step.op.program, inner, arguments, about))
    return "\n\n".join([*texts, function_text(name, steps, spelling, list(by_argument(steps)), doc)])


# A formula of the activation table becomes a tree by calling its `f(x, m)` with a term and a namespace of functions on
# terms. The tree is then printed as torch code, or becomes nodes of an ONNX graph.

# Maps operators to precedences. In Python, & binds closer than comparisons, so these are printed in parentheses.
_BINARY = {"+": 3, "-": 3, "*": 4, "/": 4, "<": 1, "<=": 1, ">": 1, ">=": 1, "==": 1, "&": 2}
_ATOM = 5


_Operator = Callable[["FormulaTerm", Any], "FormulaTerm"]


def _binary(sign: str) -> _Operator:
    return lambda self, other: FormulaTerm(sign, self, term(other))


def _reflected(sign: str) -> _Operator:
    return lambda self, other: FormulaTerm(sign, term(other), self)


class FormulaTerm:
    """A node of a formula: the name of a function or operator and its operands (`of`); a leaf has a `value`."""

    def __init__(self, name: str, *of: "FormulaTerm", value: object = None) -> None:
        self.name, self.of, self.value = name, of, value

    __hash__ = None  # type: ignore[assignment]  # == makes a term
    __add__, __radd__ = _binary("+"), _reflected("+")
    __sub__, __rsub__ = _binary("-"), _reflected("-")
    __mul__, __rmul__ = _binary("*"), _reflected("*")
    __truediv__ = _binary("/")
    __lt__, __le__, __gt__, __ge__ = _binary("<"), _binary("<="), _binary(">"), _binary(">=")
    __eq__ = _binary("==")  # type: ignore[assignment]
    __and__ = _binary("&")

    def __neg__(self) -> "FormulaTerm":
        return FormulaTerm("-", term(0.0), self)


def term(value: Any) -> FormulaTerm:
    """Return a term unchanged; convert a number to a leaf."""
    return value if isinstance(value, FormulaTerm) else FormulaTerm("number", value=float(value))


def leaf(value: object) -> FormulaTerm:
    """Return the leaf for an input or learned parameter; `value` is its expression in code, or its name in a graph."""
    return FormulaTerm("leaf", value=value)


def _call(name: str, *of: Any) -> FormulaTerm:
    return FormulaTerm(name, *map(term, of))


_NAMESPACE = SimpleNamespace(**{name: partial(_call, name) for name in vars(SCALAR)})


def formula_of(op: Activation, x: FormulaTerm, learned: Mapping[str, FormulaTerm]) -> FormulaTerm:
    """Return the formula of an activation without its limits, but with its soft cap."""
    out: FormulaTerm = unlimited(op, x, with_learned(_NAMESPACE, learned))
    return out


def as_torch(node: FormulaTerm) -> str:
    """Return the formula as a torch expression; the values of leaves are printed unchanged."""
    return _printed(node)[0]


def _printed(node: FormulaTerm) -> tuple[str, int]:
    """Return (the expression as a string, the precedence of its outermost operator)."""
    if node.name == "leaf":
        text = str(node.value)
        return text, _ATOM
    if node.name == "number":
        return repr(node.value), _ATOM
    if node.name not in _BINARY:
        return f"torch.{node.name}({', '.join(as_torch(part) for part in node.of)})", _ATOM
    binds = _BINARY[node.name]
    (a, left), (b, right) = _printed(node.of[0]), _printed(node.of[1])
    a = f"({a})" if left < binds else a
    b = f"({b})" if right <= binds else b
    return f"{a} {node.name} {b}", binds
