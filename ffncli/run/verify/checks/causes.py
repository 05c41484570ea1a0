"""Where a wrong output differs from the reference, and which slip would explain it: a misread weight, another
activation, a forgotten bias, a missing tile."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ffncli.block import activations
from ffncli.block.cost import cost
from ffncli.block.steps import Activation, Experts, Route, Step, walk
from ffncli.run.engine.reference import in_float64
from ffncli.run.measure.gap import gap, size
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow
from ffncli.run.verify.checks.layouts import readings
from ffncli.show.text import counted

_LARGE = 50_000_000  # above this many parameters, no slip is tried
_TOKENS = 64  # slips are tried on this many tokens


def place(output: Tensor, reference: Tensor, limit: float) -> str:
    """Return where two finite tensors differ by more than `limit`, such as `worst at [3, 7]: 0.5 instead of 0.25; 1 of
    17 rows and 12 of 12 columns are wrong`. A row is a token, or an output of a weight."""
    apart = gap(output, reference)
    at = [int(i) for i in torch.unravel_index(torch.tensor(apart.at), reference.shape)]
    given, expected = (tensor.flatten()[apart.at].item() for tensor in (output, reference))
    text = f"worst at {at}: {given:.6g} instead of {expected:.6g}"
    if reference.dim() != 2:
        return text
    wrong = (output.double() - reference.to(output.device)).abs() > limit
    rows, columns = wrong.any(1), wrong.any(0)
    parts = [f"{int(one.sum())} of {len(one)} {name}" for one, name in ((rows, "rows"), (columns, "columns"))]
    ends = [f"the last {name}" for one, name in ((rows, "rows"), (columns, "columns")) if _is_end(one)]
    return f"{text}; {' and '.join(parts)} are wrong" + (f" ({' and '.join(ends)})" if ends else "")


def _is_end(wrong: Tensor) -> bool:
    """Return whether all wrong places are together at the end, as if a tile that is not full were left out."""
    count = int(wrong.sum())
    return 0 < count < len(wrong) and bool(wrong[-count:].all())


@dataclass(frozen=True)
class Trial:
    """A kernel's output for x, the reference, both [tokens, d_model], and the row that compares them."""

    row: CheckRow
    x: Tensor
    output: Tensor
    reference: Tensor


def explained(case: CheckedBlock, tried: Sequence[Trial]) -> list[CheckRow]:
    """Return the rows; the note of the first wrong one says which slip explains the output, and where it is wrong, as
    seen in the wrong output with the most tokens."""
    rows = [one.row for one in tried]
    wrong = [at for at, one in enumerate(tried) if one.row.passed is False and _comparable(one)]
    if not wrong:
        return rows
    most = max((tried[at] for at in wrong), key=lambda one: len(one.x))
    limit = (most.row.tolerance or 0.0) * size(most.reference)
    where = place(most.output, most.reference, limit)
    if len(tried) > 1:
        where = f"with {counted(len(most.x), 'token')} {where}"
    why = _slip(case, most) if cost(case.ffn).params <= _LARGE else ""
    first = rows[wrong[0]]
    rows[wrong[0]] = replace(first, note="; ".join(filter(None, (why, where, first.note))))
    return rows


def _comparable(one: Trial) -> bool:
    return one.row.max_error is not None and not gap(one.output, one.reference).unlike


def _slip(case: CheckedBlock, one: Trial) -> str:
    """Return the first slip that gives the kernel's output, in words; empty if there is none."""
    scaled = ""
    x, output, tolerance = one.x[:_TOKENS], one.output[:_TOKENS], one.row.tolerance or 0.0
    for name, steps, weights in _slips(case):
        try:
            other, _ = in_float64(steps, weights, {case.entry: x})
        except (RuntimeError, KeyError):  # a slip that this block cannot have
            continue
        for more, tensor in (("", other), (" and the residual added", other + x)):
            apart = gap(output, tensor)
            if not apart.unlike and apart.relative <= tolerance:
                text = f"{name}{more}" if name else more.removeprefix(" and ")
                return f"it computes the block with {text}" if text else ""
        if not name and (factor := _factor(output, other, tolerance)):
            scaled = f"every value is {factor:.6g} times the right one"  # unless a slip says why
    return scaled


def _factor(output: Tensor, reference: Tensor, tolerance: float) -> float:
    """Return the factor by which all values are too large; 0 if there is none."""
    wide = output.double()
    factor = float((wide * reference).sum() / reference.square().sum()) if bool(reference.any()) else 0.0
    if not 1e-6 < abs(factor) < 1e6:
        return 0.0
    return factor if gap(output, factor * reference).relative <= tolerance else 0.0


def _slips(case: CheckedBlock) -> Iterator[tuple[str, tuple[Step, ...], Mapping[str, Tensor]]]:
    """Yield (name, steps, weights) of the block itself and of every slip that is tried, the likeliest first."""
    steps, weights = case.ffn, case.ffn_weights
    yield "", steps, weights
    for name, changed in readings(replace(case, model=replace(case.model, checkpoint=None)), ()):
        yield name, steps, changed
    for name, weight in weights.items():
        if weight.dim() > 1:  # its numbers in memory taken for those of the transposed matrix, or the reverse
            for turned in (weight.mT.reshape(weight.shape), weight.reshape(weight.mT.shape).mT):
                yield f"{name.removesuffix('.weight')} transposed", steps, {**weights, name: turned}
    biases = [name for name in weights if name.endswith("bias")]
    for names in (*([name] for name in biases), *([biases] if len(biases) > 1 else [])):
        zeros = {name: torch.zeros_like(weights[name]) for name in names}
        yield f"{' and '.join(names)} left out", steps, {**weights, **zeros}
    for _, step in walk(steps):
        op = step.op
        if isinstance(op, Activation):
            for function, row in activations.TABLE.items():
                if not row.learned and function != op.function:
                    other = replace(op, function=function)
                    yield f"{function} instead of {op.function}", _with_op(steps, op, other), weights
            if not op.unlimited:
                yield f"no limits on {step.output}", _with_op(steps, op, Activation(op.function)), weights
        if isinstance(op, Route):
            renormalised = "without" if op.renormalise else "with"
            other_route = replace(op, renormalise=not op.renormalise)
            yield f"scores {renormalised} renormalisation", _with_op(steps, op, other_route), weights
            if op.scale != 1:
                yield "the router's scale left out", _with_op(steps, op, replace(op, scale=1.0)), weights
        if isinstance(op, Experts):
            other_experts = replace(op, weigh="input" if op.weigh == "output" else "output")
            name = f"the scores applied to the experts' {other_experts.weigh}"
            yield name, _with_op(steps, op, other_experts), weights


def _with_op(steps: tuple[Step, ...], op: object, other: object) -> tuple[Step, ...]:
    """Return the steps with one op replaced, also inside experts."""
    changed = []
    for step in steps:
        if step.op == op:
            changed.append(replace(step, op=other))  # type: ignore[arg-type]
        elif isinstance(step.op, Experts):
            changed.append(replace(step, op=replace(step.op, program=_with_op(step.op.program, op, other))))
        else:
            changed.append(step)
    return tuple(changed)
