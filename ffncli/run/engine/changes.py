"""Changes to a block, parsed from strings: a weight or a step with other values, or an ablated unit, expert or gate.

act[:,3]=2           sets unit 3 of the step act for every token (also *=, +=, -=, /=); in expert 2 it is experts.2.act
W1[0,3]=5            sets a weight, named and indexed as in formulas: W1 is [d_model, d_ff]; in expert 2 it is
experts.2.W1 up.weight[3,0]=5     sets the same weight in torch's layout, [out, in] unit:358             removes hidden
unit 358: its column of the down projection becomes 0 (in expert 7: unit:7:358) expert:5             removes expert 5:
it contributes nothing to the tokens routed to it gate                 sets act := 1, so that hidden = up
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add, mul, truediv
from operator import sub as subtract
from typing import TYPE_CHECKING, Any

from ffncli.block.steps import Activation, Experts, Linear, Multiply, Step
from ffncli.block.symbols import weight_symbol
from ffncli.block.value import unit_steps
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.options.accept import outside_brackets

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightChange:
    """A change that sets the elements at `index` of the parameter `name` (canonical); `text` is the change as typed."""

    text: str
    name: str
    index: tuple[int | slice, ...]
    value: float

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Change the weights in place."""
        import torch

        with torch.no_grad():
            weights[self.name][self.index] = self.value


@dataclass(frozen=True)
class NoUnit(WeightChange):
    """The removal of hidden unit `unit` of a block without experts: nothing reads it any more. `step` has the unit."""

    step: str
    unit: int


@dataclass(frozen=True)
class NoGate:
    """A change that sets act := 1 in every gated part of the block."""

    text: str = "gate"


@dataclass(frozen=True)
class StepEdit:
    """A change of the output of the step with the printed name `step`: `edit` returns what later steps read instead."""

    text: str
    step: str
    edit: Callable[[Tensor], Tensor]


Change = WeightChange | NoGate | StepEdit


def changes_of(
    steps: Sequence[Step], sets: Sequence[str], ablations: Sequence[str],
    means: Callable[[int | None, int], float] | None = None,
) -> tuple[Change, ...]:  # fmt: skip
    """Parse the strings `sets` and `ablations` into changes to a block. `means` returns the mean of a unit (expert,
    unit), which then replaces the values of removed units; by default they become 0."""
    out: list[Change] = [_set(steps, text.strip()) for several in sets for text in outside_brackets(several)]
    for several in ablations:
        for text in several.split(","):
            out += _ablated(steps, text.strip()) if means is None else [_averaged(steps, text.strip(), means)]
    return tuple(out)


def edits_of(changes: Sequence[Change]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what `Mode.edits` needs: a function for each step whose output changes, the changes in order."""
    out: dict[str, Callable[[Tensor], Tensor]] = {}
    for change in changes:
        if isinstance(change, StepEdit):
            before = out.get(change.step)
            out[change.step] = change.edit if before is None else partial(_both, before, change.edit)
    return out


def _both(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return second(first(x))


def function_edit(steps: Sequence[Step], name: str, function: Callable[[Tensor], Any]) -> StepEdit:
    """Return the change that replaces a step's output by a function of it, which must keep its shape."""
    asked = f"{option('edit')}[{shown(name)}]"
    if _step(steps, name) is None:
        names = [step.output for step in steps]
        hint = did_you_mean(name, names, f"it has {', '.join(names)}")
        raise FFNError(f"{asked}: the block has no step {shown(name)}", hint)

    def edit(x: Tensor) -> Tensor:
        import torch

        try:
            new = function(x.clone())
        except FFNError:
            raise
        except Exception as error:  # it is the caller's function
            raise FFNError(f"{asked}: {type(error).__name__}: {str(error)[:200]}") from None
        if not isinstance(new, torch.Tensor) or new.shape != x.shape:
            shape = [*new.shape] if isinstance(new, torch.Tensor) else type(new).__name__
            raise FFNError(f"{asked} returned {shape}", f"it must return a tensor {[*x.shape]}")
        return new.to(x.dtype)

    return StepEdit(f"{name}: {getattr(function, '__name__', 'a function')}", name, edit)


def _step(steps: Sequence[Step], name: str) -> Step | None:
    """Return the step with this printed name, such as `act` or `experts.2.act`."""
    for step in steps:
        if step.output == name:
            return step
        match = re.fullmatch(rf"{re.escape(step.output)}\.([0-9]{{1,9}})\.(.+)", name)
        if match and isinstance(step.op, Experts) and int(match[1]) < step.op.experts.size:
            return next((one for one in step.op.program if one.output == match[2]), None)
    return None


_OPERATORS: Mapping[str, Callable[[Any, float], Any]] = {
    "": lambda old, value: value, "*": mul, "+": add, "-": subtract, "/": truediv,
}  # fmt: skip
_EDIT = re.compile(r"([\w.]+?)\s*(?:\[([^\[\]]*)\])?\s*([*+/-]?)=\s*(\S+)")


def _step_edit(steps: Sequence[Step], text: str) -> StepEdit | None:
    """Return the change that a text such as `act[:,3]*=0.5` makes; None if it does not name a step."""
    asked = f"{option('set')} {shown(text)}"
    plain = re.sub(r"^(\w+)\[([0-9]{1,9})\]\.", r"\1.\2.", text)
    match = _EDIT.fullmatch(plain)
    step = None if match is None else _step(steps, match[1])
    if match is None or step is None:
        return None
    words = [] if match[2] is None else [word.strip() for word in match[2].split(",")]
    if not all(re.fullmatch(r"-?[0-9]{1,9}|(-?[0-9]{1,9})?:(-?[0-9]{1,9})?", word) for word in words):
        raise FFNError(f"{asked}: {shown(match[2])} is not an index", "give numbers, : or ranges such as 2:5")
    index = tuple(
        slice(*(int(end) if end else None for end in word.split(":"))) if ":" in word else int(word) for word in words
    )
    try:
        value = float(match[4])
    except ValueError:
        raise FFNError(f"{asked}: {shown(match[4])} is not a number") from None
    return StepEdit(text, match[1], partial(_with_value, index, match[3], value, f"{asked}: {step.output}"))


def _with_value(index: tuple[int | slice, ...], how: str, value: float, asked: str, x: Tensor) -> Tensor:
    """Return a copy of a step's output whose elements at `index` are set to a value, or changed by it."""
    new = x.clone()
    try:
        old = new[index]
        new[index] = _OPERATORS[how](old, value)
    except IndexError:
        raise FFNError(f"{asked} is {[*x.shape]}", "the index is out of range") from None
    return new


def _averaged(steps: Sequence[Step], text: str, means: Callable[[int | None, int], float]) -> StepEdit:
    """Return the change that replaces a unit's values by its mean."""
    units = [*_ablated(steps, text)]
    match = re.fullmatch(r"unit:(?:([0-9]+):)?([0-9]+)", text)
    if match is None or len(units) != 1:
        raise FFNError(f"{option('ablate')} {text}: only units have a mean", "give unit:358 or unit:7:3")
    expert, unit = int(match[1]) if match[1] else None, int(match[2])
    outer = next((step for step in steps if isinstance(step.op, Experts)), None)
    program = outer.op.program if outer is not None and isinstance(outer.op, Experts) else steps
    read = next(step for step in program if step.output == "down").inputs[0]
    step = read if outer is None else f"{outer.output}.{expert}.{read}"
    index = (Ellipsis, unit)
    return StepEdit(text, step, partial(_with_value, index, "", means(expert, unit), f"{option('ablate')} {text}"))  # type: ignore[arg-type]


def changed(
    steps: Sequence[Step], weights: Mapping[str, Tensor], changes: Sequence[Change]
) -> tuple[tuple[Step, ...], dict[str, Tensor]]:
    """Return the steps and weights with the changes applied; tensors that change are copied."""
    names = {change.name for change in changes if isinstance(change, WeightChange)}
    copies = {name: tensor.clone() if name in names else tensor for name, tensor in weights.items()}
    for change in changes:
        if isinstance(change, WeightChange):
            change.apply(copies)
    return (ungated(steps) if any(isinstance(c, NoGate) for c in changes) else tuple(steps)), copies


# --- a weight ---------------------------------------------------------------------------------------------------------


def _set(steps: Sequence[Step], text: str) -> Change:
    if (edit := _step_edit(steps, text)) is not None:
        return edit
    plain = re.sub(r"^(\w+)\[([0-9]{1,9})\]\.", r"\1.\2.", text)
    if (named := _EDIT.fullmatch(plain)) is not None:
        _check_named(steps, named[1])
        if named[3]:
            raise FFNError(
                f"{option('set')} {shown(text)}: {named[3]}= changes the values of a step, not a weight",
                f"give the weight's new value: {named[1]}[{named[2] or 'i,j'}]=VALUE",
            )
    match = re.fullmatch(r"([^\[\]=]+)\[([^\[\]]*)\]\s*=\s*(\S+)", plain)
    if match is None or not all(re.fullmatch(r"\s*-?[0-9]{1,9}\s*", word, re.ASCII) for word in match[2].split(",")):
        raise FFNError(
            f"{option('set')}: expected a weight or a step followed by its value, got {shown(text)}",
            "give W1[i,j]=VALUE, as printed in the formula, or act[:,3]=VALUE",
        )
    try:
        value = float(match[3])
    except ValueError:
        raise FFNError(f"{option('set')} {shown(text)}: {shown(match[3])} is not a number") from None
    name, index = match[1].strip(), tuple(int(word) for word in match[2].split(","))
    return WeightChange(text, *weight_at(steps, name, index, option("set"), text), value)


def _check_named(steps: Sequence[Step], name: str) -> None:
    """Raise FFNError for a name that is neither a step, as `_step` finds it, nor a weight."""
    routed = re.sub(r"^\w+\.[0-9]{1,9}\.", "", name)
    if routed in (symbols := _symbols(steps)):
        return
    inside = {one.output: step for step in steps if isinstance(step.op, Experts) for one in step.op.program}
    known = [*symbols, *(step.output for step in steps), *inside]
    hint = did_you_mean(routed, known, f"it has {', '.join(known[:12])}")
    if (outer := inside.get(routed)) is not None:
        hint = f"give {outer.output}.N.{routed}, with an expert N from 0 to {(_experts(steps) or 1) - 1}"
    raise FFNError(f"{option('set')}: the block has no step and no weight {shown(name)}", hint)


def weight_at(
    steps: Sequence[Step], name: str, index: tuple[int, ...], asked: str, text: str
) -> tuple[str, tuple[int, ...]]:
    """Return (the canonical name of a parameter, torch's index) for a name and an index as in a formula (`W1`,
    `shared.W1`, `experts.2.W1`) or as in torch (`up.weight`).

    Raises FFNError if there is no such element; it begins with the option `asked` and its value `text`.
    """
    symbols = _symbols(steps)
    expert = re.fullmatch(r"(\w+)\.([0-9]{1,9})\.(\S+)", name)
    routed = expert[3] if expert else name
    if routed not in symbols:
        raise FFNError(
            f"{asked}: the block has no weight {shown(name)}",
            did_you_mean(routed, [*symbols], f"it has {', '.join([*symbols][:12])}"),
        )
    full, shape, transposed, per_expert = symbols[routed]
    if per_expert and not expert:
        raise FFNError(f"{asked} {shown(text)}: every expert has this weight", f"give experts.0.{name}[...]")
    if expert and not per_expert:
        raise FFNError(f"{asked} {shown(text)}: it is not an expert's weight", f"give {routed}[...]")
    printed = shape[::-1] if transposed else shape
    if len(index) != len(printed) or not all(-n <= i < n for i, n in zip(index, printed, strict=True)):
        raise FFNError(f"{asked} {shown(text)}: the index is out of range", f"{name} is {[*printed]}")
    index = index[::-1] if transposed else index
    if expert:
        experts = _experts(steps)
        assert experts is not None
        if int(expert[2]) >= experts:
            raise FFNError(f"{asked} {shown(text)}: expert {expert[2]} is out of range", f"there are {experts}")
        index = (int(expert[2]), *index)
    return full, index


def _symbols(steps: Sequence[Step]) -> dict[str, tuple[str, tuple[int, ...], bool, bool]]:
    """Return, for each accepted name of a weight (`W1`, `shared.W1`, `up.weight`), (canonical name, torch's shape,
    whether formulas print it transposed, whether every expert has its own)."""
    out: dict[str, tuple[str, tuple[int, ...], bool, bool]] = {}
    for step in steps:
        inner = step.op.program if isinstance(step.op, Experts) else (step,)
        per_expert, prefix = isinstance(step.op, Experts), step.prefix if isinstance(step.op, Experts) else ""
        for one in inner:
            for name, axes in one.parameters().items():
                parameter = name.rpartition(".")[2]
                shape = tuple(axis.size for axis in axes)
                matrix = parameter == "weight" and isinstance(one.op, Linear)
                symbol = weight_symbol(one.output, parameter, inner if per_expert else steps)
                each = isinstance(step.op, Experts) and not step.op.is_common(name)
                out.setdefault(symbol, (prefix + name, shape, matrix, each))
                out.setdefault(name, (prefix + name, shape, False, each))
    return out


def _experts(steps: Sequence[Step]) -> int | None:
    return next((step.op.experts.size for step in steps if isinstance(step.op, Experts)), None)


# --- an ablation ------------------------------------------------------------------------------------------------------


def _ablated(steps: Sequence[Step], text: str) -> Iterator[Change]:
    """Yield the changes for `unit:358`, `unit:7:3`, `expert:5` or `gate`."""
    experts = _experts(steps)
    match = re.fullmatch(r"(unit|expert):([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if text == "gate":
        if ungated(steps) == tuple(steps):
            raise FFNError(f"{option('ablate')} gate: the block has no gate")
        yield NoGate()
        return
    if match is None or (match[1] == "expert" and match[3]):
        what = f"{option('ablate')} {shown(text)} is not a part of a block"
        raise FFNError(what, "give unit:358, unit:7:3, expert:5 or gate")
    if match[1] == "expert":
        number = _below(text, int(match[2]), experts or 0, "experts")
        yield from _silent(steps, text, (number,))
        return
    down = next((s for step in steps for s in (step.op.program if isinstance(step.op, Experts) else (step,))
                 if s.output == "down"), None)  # fmt: skip
    if down is None or not isinstance(down.op, Linear):
        raise FFNError(f"{option('ablate')} {text}: the block has no down projection")
    unit = _below(text, int(match[3] or match[2]), down.op.into.size, "units")
    if experts and not match[3]:
        raise FFNError(f"{option('ablate')} {text}: each of {experts} experts has this unit", f"give unit:0:{unit}")
    if match[3] and not experts:
        raise FFNError(f"{option('ablate')} {text}: the block has no experts", f"give unit:{unit}")
    if match[3]:
        expert = _below(text, int(match[2]), experts or 0, "experts")
        yield WeightChange(text, "down.weight", (expert, slice(None), unit), 0.0)
    else:
        yield NoUnit(text, "down.weight", (slice(None), unit), 0.0, down.inputs[0], unit)


def _silent(steps: Sequence[Step], text: str, at: tuple[int, ...]) -> Iterator[WeightChange]:
    """Yield the changes that set an expert's down projection and its bias to 0."""
    for step in steps:
        if isinstance(step.op, Experts):
            last = step.op.program[-1]
            for name in last.parameters():
                if not step.op.is_common(name):
                    yield WeightChange(text, step.prefix + name, at, 0.0)


def _below(text: str, number: int, count: int, what: str) -> int:
    if number >= count:
        raise FFNError(f"{option('ablate')} {text} is out of range", f"there are {count or 'no'} {what}")
    return number


def ungated(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the block with every gate's activation replaced by the constant 1, expressed as a clamp to [1, 1]."""
    read = {name for step in steps if isinstance(step.op, Multiply) for name in step.inputs}
    gates = read & set(unit_steps(steps))
    out = []
    for step in steps:
        if isinstance(step.op, Experts):
            step = replace(step, op=replace(step.op, program=ungated(step.op.program)))
        elif isinstance(step.op, Activation) and step.output in gates and step.op.function != "identity":
            step = replace(step, op=Activation("identity", low=1.0, high=1.0))
        out.append(step)
    return tuple(out)
