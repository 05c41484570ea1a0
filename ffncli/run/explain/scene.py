"""Places in a trace, such as `experts.3.gate[0,5]`: the step that computed the value there, and what the step read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ffncli.block.steps import Experts, Step, block_inputs
from ffncli.block.symbols import weight_symbol
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.run.engine.execute import EVAL, Mode
from ffncli.run.measure.statistics import unravel
from ffncli.show.tensors import written


@dataclass(frozen=True)
class TensorPlace:
    """A step under its printed name, and the program that contains it; `step` is None for an input of the block.

    For a step inside an expert, `outer` is the Experts step and `expert` the expert's index.
    """

    name: str
    step: Step | None
    program: Sequence[Step]
    outer: Step | None = None
    expert: int | None = None

    def printed(self, name: str) -> str:
        """Return the printed name of one of the step's inputs. Inside an expert, a name that is not a step of the
        expert means the input of the experts."""
        if self.outer is None:
            return name
        inside = any(step.output == name for step in self.program)
        return f"{self.outer.output}.{self.expert}.{name}" if inside else self.outer.inputs[0]


@dataclass(frozen=True)
class Read:
    """One input of a step for one token: its printed name, the token's indices (`leading`), its float64 values."""

    name: str
    leading: tuple[int, ...]
    row: Tensor

    def at(self, feature: int) -> str:
        """Return the place of a value, such as `x[0,3]`."""
        return written(self.name, (*self.leading, feature))


@dataclass(frozen=True)
class Scene:
    """A traced block: its steps and weights, the kept tensors by printed name, and the mode."""

    steps: Sequence[Step]
    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    mode: Mode = EVAL

    def tokens(self, place: TensorPlace) -> list[int]:
        """Return the flat indices of the tokens routed to a place's expert, in the order of its rows."""
        assert place.outer is not None
        assert place.expert is not None
        assert isinstance(place.outer.op, Experts)
        share = self.tensors[place.outer.inputs[1]].flatten(0, -2)[:, place.outer.op.entries]
        return [int(token) for token in share[:, place.expert].nonzero().flatten()]

    def read(self, place: TensorPlace, which: int, leading: tuple[int, ...]) -> Read:
        """Read the input with index `which` of a step, for the token at `leading`."""
        assert place.step is not None
        name = place.printed(place.step.inputs[which])
        if place.outer is None or name != place.outer.inputs[0]:
            return Read(name, leading, self.tensors[name][leading].double())
        x, route = (self.tensors[n] for n in place.outer.inputs)
        token = unravel(self.tokens(place)[leading[0]], x.shape[:-1])
        op = place.outer.op
        assert isinstance(op, Experts)
        if op.weigh == "output":
            return Read(name, token, x[token].double())
        label = f"{written(place.outer.inputs[1], (*token, place.expert or 0))} · {name}"
        return Read(label, token, (x[token] * route[(*token, place.expert)]).double())

    def weight(self, place: TensorPlace, parameter: str) -> tuple[str, Tensor, tuple[int, ...], str] | None:
        """Return (canonical name, values, index of the expert in the tensor, symbol) of a step's parameter; None if the
        step does not have it."""
        assert place.step is not None
        prefix = place.outer.prefix if place.outer else ""
        name = f"{prefix}{place.step.output}.{parameter}"
        if name.removeprefix(prefix) not in place.step.parameters():
            return None
        op = place.outer.op if place.outer else None
        common = isinstance(op, Experts) and op.is_common(name.removeprefix(prefix))
        share = () if place.expert is None or common else (place.expert,)
        return name, self.weights[name][share], share, weight_symbol(place.step.output, parameter, place.program)


def find(steps: Sequence[Step], name: str) -> TensorPlace:
    """Return the place of a printed name; raise FFNError, with the nearest names, if the block has no such step."""
    names = [*block_inputs(steps), *(step.output for step in steps)]
    if name in names:
        return TensorPlace(name, next((step for step in steps if step.output == name), None), steps)
    for step in steps:
        if not isinstance(step.op, Experts) or not (inner := _inner(step.output, name)):
            continue
        expert, inner_name = int(inner[1]), inner[2]
        program = step.op.program
        if expert >= step.op.experts.size:
            raise FFNError(f"no expert {expert}", f"{step.output} has experts 0 to {step.op.experts.size - 1}")
        for inner_step in program:
            if inner_step.output == inner_name:
                return TensorPlace(name, inner_step, program, step, expert)
        names = [f"{step.output}.{expert}.{inner_step.output}" for inner_step in program]
    inside = [f"{s.output}.0.{i.output}" for s in steps if isinstance(s.op, Experts) for i in s.op.program]
    ending = [full for full in (*names, *inside) if full.endswith(f".{name}")]
    either = "did you mean " + " or ".join(f"'{full}'" for full in ending) + "?"
    hint = either if ending else did_you_mean(name, [*names, *inside], "steps: " + ", ".join(names))
    raise FFNError(f"no step {shown(name)}", hint)


def _inner(output: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(re.escape(output) + r"\.([0-9]{1,9})\.(.+)", name)


def sources(place: TensorPlace) -> tuple[str, ...]:
    """Return the printed names of the tensors from which the value at a place is computed."""
    if place.step is None:
        return ()
    names = tuple(place.printed(name) for name in place.step.inputs)
    if place.outer is not None:  # the route determines the expert's tokens and their weights
        names += place.outer.inputs
    if isinstance(place.step.op, Experts):
        last = place.step.op.program[-1].output
        names += tuple(f"{place.name}.{expert}.{last}" for expert in range(place.step.op.experts.size))
    return names


def needed(steps: Sequence[Step], names: Sequence[str], depth: int = 1) -> frozenset[str]:
    """Return the tensors needed to explain the steps `names`, and their origins up to `depth` - 1 steps back."""
    wanted, edge = {*names}, {*names}
    for _ in range(depth):
        edge = {source for name in edge for source in sources(find(steps, name))} - wanted
        wanted |= edge
    return frozenset(wanted)


def checked(scene: Scene, place: TensorPlace, index: tuple[int, ...], option: str) -> tuple[int, ...]:
    """Return the index with negative entries resolved; raise FFNError, with the shape, if the index does not fit."""
    request = f"{option} {written(place.name, index)}"
    tensor = scene.tensors.get(place.name)
    if tensor is None:
        raise FFNError(f"{request}: no token is routed to expert {place.expert}")
    return fitted(tuple(tensor.shape), place.name, index, request, _rows(scene, place))


def _rows(scene: Scene, place: TensorPlace) -> str:
    """Return a description of the rows of an expert's tensor."""
    if place.outer is None:
        return ""
    tokens = ", ".join(map(str, scene.tokens(place)[:8]))
    return f"; its rows are the tokens routed to expert {place.expert}: {tokens}"


def fitted(shape: tuple[int, ...], name: str, index: tuple[int, ...], request: str, rows: str = "") -> tuple[int, ...]:
    """Return the index into `shape` with negative entries resolved; raise FFNError if the index does not fit."""
    has = f"{name} has shape {list(shape)}{rows}"
    if len(index) != len(shape):
        example = written(name, [0] * len(shape))
        raise FFNError(f"{request}: {has}, so it needs {len(shape)} indices, not {len(index)}", f"such as {example}")
    for at, size in zip(index, shape, strict=True):
        if not -size <= at < size:
            raise FFNError(f"{request}: {at} is out of range, {has}")
    return tuple(at % size for at, size in zip(index, shape, strict=True))
