"""What an unfused eager forward pass keeps for the backward pass, tensor by tensor, each storage once; no torch needed.

A tape runs the steps on the shapes alone and notes what torch's autograd saves in every operation of
`run/engine/execute.py`: a product saves its factors, a sigmoid its result, a clamp its input. Formulas of activations
are run on the tape as they stand in the table. Parameters are not counted, since they are in memory anyway.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

from ffncli.block import steps as ops
from ffncli.block.activations import TABLE
from ffncli.block.formulas import with_learned
from ffncli.block.steps import Step, block_inputs, experts_per_token, id_inputs, input_shapes
from ffncli.block.value import unlimited

Recompute: TypeAlias = Literal["none", "act", "block"]
RECOMPUTE: tuple[str, ...] = get_args(Recompute)
_INDEX = 8  # bytes of an index
_OUTPUT_KEPT = ("relu", "sigmoid", "tanh")  # functions of torch that keep their result; all others keep their argument


@dataclass(frozen=True)
class KeptTensor:
    """One tensor that is kept: the step that keeps it first (`experts[e].act` inside experts), the tensor's name, or
    what it is if no step returns it, and its bytes. Inside experts, bytes are summed over experts."""

    step: str
    tensor: str
    bytes: int


@dataclass(eq=False)
class _TapedValue:
    """A tensor on the tape: its number of elements, the bytes of each, and whether it needs a gradient."""

    tape: "_SavingTape"
    elements: int
    size: int
    label: str = "inside"
    grad: bool = True
    parameter: bool = False
    made_by: str = ""

    def new(
        self, *others: Any, size: int | None = None, grad: bool | None = None, label: str = "inside"
    ) -> "_TapedValue":
        """Return a new tensor computed from this one and others, broadcast."""
        every = [self, *(one for one in others if isinstance(one, _TapedValue))]
        needs = any(one.grad for one in every) if grad is None else grad
        count = max(one.elements for one in every)
        width = max(one.size for one in every if one.elements == count) if size is None else size
        return _TapedValue(self.tape, count, width, label, needs, made_by=self.tape.step)

    def saving(self, *saved: "_TapedValue", **options: Any) -> "_TapedValue":
        """Return a new tensor, computed by an operation that keeps these tensors."""
        for one in saved:
            self.tape.save(one)
        return self.new(**options)

    def __mul__(self, other: Any) -> "_TapedValue":
        if isinstance(other, _TapedValue):
            if other.grad:
                self.tape.save(self)
            if self.grad:
                self.tape.save(other)
        return self.new(other)

    def __truediv__(self, other: Any) -> "_TapedValue":
        if isinstance(other, _TapedValue):
            self.tape.save(other)
            if other.grad:
                self.tape.save(self)
        return self.new(other)

    def __add__(self, other: Any) -> "_TapedValue":
        return self.new(other)

    def __neg__(self) -> "_TapedValue":
        return self.new()

    def __gt__(self, other: Any) -> "_TapedValue":
        return self.new(other, size=1, grad=False)

    __radd__ = __sub__ = __rsub__ = __add__
    __rmul__ = __mul__
    __lt__ = __le__ = __ge__ = __and__ = __gt__

    def __eq__(self, other: object) -> Any:
        return self.new(other, size=1, grad=False)

    def to(self, size: int, label: str = "inside") -> "_TapedValue":
        """Return the tensor with values of this size: itself if it has that size."""
        return self if size == self.size else self.new(size=size, label=label)


def _where(condition: _TapedValue, a: Any, b: Any) -> _TapedValue:
    first = next(one for one in (a, b) if isinstance(one, _TapedValue))
    if any(one.grad for one in (a, b) if isinstance(one, _TapedValue)):
        condition.tape.save(condition)
    return first.new(a, b, condition, size=first.size)


def _keeps_result(x: _TapedValue) -> _TapedValue:
    y = x.new()
    x.tape.save(y)
    return y


def _keeps_argument(x: _TapedValue) -> _TapedValue:
    return x.saving(x)


_NAMESPACE = SimpleNamespace(
    exp=_keeps_result, expm1=_keeps_result, log1p=_keeps_argument, erf=_keeps_argument, erfc=_keeps_argument,
    tanh=_keeps_result, sqrt=_keeps_result, sigmoid=_keeps_result, abs=_keeps_argument, where=_where,
)  # fmt: skip


@dataclass
class _SavingTape:
    """What has been kept so far, by storage; `step` is the step that runs. What the steps `again` compute is not kept,
    because they run again."""

    again: frozenset[str] = frozenset()
    kept: dict[int, tuple[_TapedValue, str]] = field(default_factory=dict)
    step: str = ""

    def save(self, value: _TapedValue) -> None:
        """Keep a tensor, unless it is a parameter or is computed again."""
        if not value.parameter and value.made_by not in self.again:
            self.kept.setdefault(id(value), (value, self.step))


def kept(
    steps: Sequence[Step], tokens: int = 1, width: int = 4, recompute: Recompute = "none",
    loads: Mapping[str, Sequence[int]] | None = None, train: bool = False,
) -> tuple[KeptTensor, ...]:  # fmt: skip
    """Return what is kept for `tokens` tokens, with activations of `width` bytes a value.

    `loads` maps an Experts step to the tokens of each of its experts (by default spread evenly). With `recompute` =
    "act", the elementwise steps between the projections run again from their inputs, which are kept; with "block", only
    the block's inputs are kept. `train`: dropout is on.
    """
    tape, ids = _SavingTape(elementwise(steps) if recompute == "act" else frozenset()), id_inputs(steps)
    values = {
        name: _TapedValue(tape, prod(shape), _INDEX if name in ids else width, name, name not in ids)
        for name, shape in input_shapes(steps, (tokens,)).items()
    }
    if recompute == "block":
        return tuple(KeptTensor(name, name, one.elements * one.size) for name, one in values.items())
    _TapedRun(tape, width, train, loads or {}, experts_per_token(steps)).run(steps, values, tokens)
    rows: dict[tuple[str, str], int] = {}
    for value, step in tape.kept.values():
        rows[step, value.label] = rows.get((step, value.label), 0) + value.elements * value.size
    return tuple(KeptTensor(*at, size) for at, size in rows.items())


def elementwise(steps: Sequence[Step], prefix: str = "") -> frozenset[str]:
    """Return the printed names of the elementwise steps that are as wide as d_ff."""
    wide, out = set[str](), set[str]()
    for step in steps:
        match step.op:
            case ops.Linear(out=axis) if axis.name == "d_ff":
                wide.add(step.output)
            case ops.Activation() | ops.Multiply() | ops.Add() | ops.Dropout() if wide & set(step.inputs):
                wide.add(step.output)
                out.add(prefix + step.output)
            case ops.Experts(program=program):
                out |= elementwise(program, f"{prefix}{step.output}[e].")
    return frozenset(out)


@dataclass(frozen=True)
class _TapedRun:
    """One run on the tape, with a branch per op, as in `execute.apply`."""

    tape: _SavingTape
    width: int
    train: bool
    loads: Mapping[str, Sequence[int]]
    taken: Mapping[str, int]

    @property
    def wide(self) -> int:
        """Bytes of a value in at least float32."""
        return max(4, self.width)

    def value(self, elements: int, size: int, label: str, grad: bool = True) -> _TapedValue:
        """Return a tensor that an operation makes."""
        return _TapedValue(self.tape, elements, size, label, grad, made_by=self.tape.step)

    def parameter(self, elements: int) -> _TapedValue:
        """Return a parameter of the step."""
        return _TapedValue(self.tape, elements, self.width, "parameter", parameter=True)

    def run(self, steps: Sequence[Step], values: dict[str, _TapedValue], rows: int, prefix: str = "") -> _TapedValue:
        """Run a program on `rows` tokens; return its last tensor. `values` gets every tensor by name."""
        out = next(iter(values.values()))
        for step in steps:
            self.tape.step = prefix + step.output
            x = [values[name] for name in step.inputs]
            if self.tape.step in self.tape.again:
                for one in x:
                    self.tape.save(one)
            out = self._step(step, x, rows, prefix)
            if out.label in ("inside", "parameter"):
                out.label = step.output
            values[step.output] = out
        return out

    def _step(self, step: Step, x: Sequence[_TapedValue], rows: int, prefix: str) -> _TapedValue:
        op = step.op
        match op:
            case ops.Linear():
                self.tape.save(x[0])
                return self.value(rows * op.out.size, self.width, step.output)
            case ops.Activation():
                return self._activation(op, x[0])
            case ops.Multiply():
                out = x[0]
                for factor in x[1:]:
                    out = out * factor
                return out * self.parameter(op.learned.size) if op.learned else out
            case ops.Add():
                return x[0] if len(x) == 1 and op.scale == 1 and not op.bias else x[0].new(*x[1:])
            case ops.Norm():
                return self._norm(op, x[0], rows)
            case ops.Dropout():
                if not self.train:
                    return x[0]
                self.tape.save(self.value(x[0].elements, 1, "mask", grad=False))
                return x[0].new()
            case ops.Route():
                return self._route(op, x[0], rows)
            case ops.Experts():
                return self._experts(step, op, x[0], x[1], rows, prefix)
            case ops.AllReduce():
                return x[0]
            case _:
                raise AssertionError(f"kept has no branch for {type(op).__name__}")

    def _activation(self, op: ops.Activation, x: _TapedValue) -> _TapedValue:
        row = TABLE[op.function]
        learned = {name: self.parameter(1) for name in row.learned}
        m = with_learned(_NAMESPACE, learned) if learned else _NAMESPACE
        if op.low is not None or op.high is not None:
            x = x.saving(x)
        if op.soft_cap is None and row.native is not None:
            y = _keeps_result(x) if row.native[0] in _OUTPUT_KEPT else x.saving(x)
        else:
            y = unlimited(op, x, m)
        y = y if op.most is None else y.saving(y)
        return y.new() if op.plus else y

    def _norm(self, op: ops.Norm, x: _TapedValue, rows: int) -> _TapedValue:
        weight = None if op.weight == "none" else self.parameter(op.axis.size)
        if op.weigh == "input" and weight is not None:
            factor = self.value(op.axis.size, self.wide, "weight in float32")
            scaled = (x.to(self.wide, "in float32") * factor).to(x.size)
            return self._norm(replace(op, weight="none", weigh="output"), scaled, rows)
        if op.kind == "layernorm":
            self.tape.save(x)
            for label in ("mean", "1 / std"):
                self.tape.save(self.value(rows, self.width, label))
            if op.weight == "one_plus":
                self.tape.save(self.value(op.axis.size, self.width, "1 + weight"))
            return x.new()
        wide = x.to(self.wide, "in float32")
        self.tape.save(wide)  # its square
        inverse = self.value(rows, self.wide, "1 / rms")
        self.tape.save(inverse)
        normed = wide * inverse
        normed.label = "normalised"
        if op.weight == "one_plus":
            return (normed * self.value(op.axis.size, self.wide, "1 + weight")).to(x.size)
        normed = normed.to(x.size, "normalised")
        out = normed if weight is None else normed * weight
        return out.new() if op.bias else out

    def _scores(self, op: ops.Route, logits: _TapedValue) -> _TapedValue:
        if op.score == "softmax":
            return _keeps_result(logits)
        row = TABLE[op.score]
        return _keeps_result(logits) if row.native else row.f(logits, _NAMESPACE)

    def _route(self, op: ops.Route, logits: _TapedValue, rows: int) -> _TapedValue:
        work = logits if op.score_dtype == "input" else logits.to(4)
        size, count = work.size, rows * op.taken
        if not (op.chooses or op.renormalise):
            return self._scores(op, work).new().to(logits.size)
        chosen = self.value(count, _INDEX, "chosen experts", grad=False)
        self.tape.save(chosen)
        if op.order == "one_by_one":
            left = work
            for _ in range(op.top_k):
                self.tape.save(self.value(work.elements, 1, "experts left out", grad=False))
                expert = self.value(rows, _INDEX, "the best expert", grad=False)
                self.tape.save(expert)
                self._named(self._scores(op, left.new()), "scores")
                left = left.new()
            values = self.value(count, size, "weights")
        elif op.order == "choose_first":
            self.tape.save(work)
            values = self._named(self._scores(op, self.value(count, size, "logits of the chosen")), "scores")
        else:
            scores = self._named(self._scores(op, work), "scores")
            self.tape.save(scores)
            values = self.value(count, size, "scores of the chosen")
            if op.renormalise:
                values = values / self.value(rows, size, "sum of the chosen scores")
                values.label = "weights"
        values = values if op.scale == 1 else values.new(label="weights")
        if op.learned_scale:
            factor = self.parameter(op.experts.size if op.expert_scale else 1)
            if op.expert_scale:
                factor = self.value(count, self.width, "factors of the chosen")
            values = values * factor.to(size, "factor in float32")
        return self.value(work.elements, size, "weights of all").to(logits.size)

    def _named(self, value: _TapedValue, label: str) -> _TapedValue:
        value.label = label
        return value

    def _experts(
        self, step: Step, op: ops.Experts, x: _TapedValue, route: _TapedValue, rows: int, prefix: str
    ) -> _TapedValue:  # fmt: skip
        here, features = self.tape.step, x.elements // rows
        if op.identity:
            self.tape.save(x)
            self.tape.save(self.value(rows, route.size, "weights of identity experts"))
        (entry,), outputs = block_inputs(op.program), 0
        for load in self.loads.get(step.output) or _evenly(rows * self.taken[step.output], op):
            if not load:
                continue
            self.tape.step = here
            self.tape.save(self.value(load, _INDEX, "tokens of each expert", grad=False))
            share = self.value(load, route.size, "weights of each expert's tokens")
            entering = self.value(load * features, x.size, "rows of each expert")
            if op.weigh == "input":
                entering = self._named(entering * share, "weighted rows of each expert")
            result = self.run(op.program, {entry: entering}, load, f"{prefix}{step.output}[e].")
            self.tape.step = here
            if op.weigh == "output":
                result = self._named(result * share, "weighted outputs")
            self.tape.save(result)  # index_add_ keeps what it adds
            outputs = result.elements // load
        return self.value(rows * (outputs or features), self.width, step.output)


def _evenly(rows: int, op: ops.Experts) -> list[int]:
    """Spread the rows as evenly as possible over the experts (and over identity experts, which keep nothing)."""
    each, more = divmod(rows, op.experts.size + (0 if op.always else op.identity))
    return [each + (e < more) for e in range(op.experts.size)]
