"""The flow of dimensions through a block, as text: `x 512 ──W1──▶ up 2048 ──gelu──▶ act 2048 ──W2──▶ down 512`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ffncli.block import steps as ops
from ffncli.block.steps import Step, input_shapes, shapes
from ffncli.block.symbols import weight_symbol


def flow(steps: Sequence[Step], aliases: Mapping[str, str] = {}) -> tuple[str, ...]:
    """Return the lines of the picture, one per unbranched run of steps: names with their widths, and operations on the
    arrows.

    A line starts at each name that several steps read, and at each step that reads several names. `aliases` are printed
    in brackets.
    """
    shapes_by_name = shapes(steps, input_shapes(steps, (1,)))
    readers = Counter(name for step in steps for name in step.inputs)
    lines: list[str] = []
    ending: dict[str, int] = {}  # name → the line that currently ends with it
    named: set[str] = set()

    def node(name: str) -> str:
        """Return a name; at its first mention, with its width."""
        if name in named:
            return name
        named.add(name)
        alias = f" ({aliases[name]})" if name in aliases else ""
        return f"{name}{alias} {shapes_by_name[name][-1]}"

    for step in steps:
        first = step.inputs[0]
        if len(step.inputs) > 1 or readers[first] > 1 or first not in ending:
            at = len(lines)
            lines.append(", ".join(node(name) for name in step.inputs))
        else:
            at = ending.pop(first)
        lines[at] += f" ──{_label(step, steps)}──▶ {node(step.output)}"
        ending[step.output] = at
    return tuple(lines)


def _label(step: Step, steps: Sequence[Step]) -> str:
    """Return an arrow's label: the weight's symbol, the function, or the operation's sign."""
    op = step.op
    match op:
        case ops.Linear():
            return weight_symbol(step.output, "weight", steps)
        case ops.Activation():
            return _activation(op)
        case ops.Norm():
            return op.kind
        case ops.Add():
            return "+" if op.scale == 1 else f"{op.scale:g}·" if len(step.inputs) == 1 else f"+ {op.scale:g}·"
        case ops.Multiply():
            return "⊙"
        case ops.Dropout():
            return f"dropout {op.p:g}"
        case ops.Route():
            choice = "by table" if op.lookup else f"top {op.top_k}"
            return f"{op.score}, {choice}" if op.chooses else op.score
        case ops.Experts():
            return f"{op.experts.size} experts"
        case ops.AllReduce():
            return f"all_reduce {op.ranks}"
        case _:
            raise AssertionError(f"flow has no branch for {type(op).__name__}")


def _activation(op: ops.Activation) -> str:
    """Return the function and its limits in order: `min 10, silu`, `silu, min 7`, `clip -7 to 7, + 1`."""
    before = _clip(op.low, op.high)
    after = [
        *([] if op.soft_cap is None else [f"soft cap {op.soft_cap:g}"]),
        *_clip(None, op.most),
        *([f"+ {op.plus:g}"] if op.plus else []),
    ]
    named = [] if op.function == "identity" and (before or after) else [op.function]
    return ", ".join([*before, *named, *after])


def _clip(low: float | None, high: float | None) -> list[str]:
    if low is not None and high is not None:
        return [f"clip {low:g} to {high:g}"]
    return [f"min {high:g}"] if high is not None else [f"max {low:g}"] if low is not None else []
