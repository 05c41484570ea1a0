"""Explaining one value of a gradient, `dW1[0,3]`, `dx[0,1]` or `dup[1,2]`, as the sum of its terms.

The gradient of a tensor is a sum over the steps that read it; the gradient of a weight is a sum over tokens. Terms are
computed in float64 from the gradients and tensors as they were rounded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.block import steps as ops
from ffncli.block.steps import Step, block_inputs
from ffncli.block.symbols import weight_symbol
from ffncli.errors import FFNError, shown
from ffncli.run.engine.backward import ForwardPass, Gradient, step_gradients
from ffncli.run.engine.changes import weight_at
from ffncli.run.explain.arithmetic import Factor, Quantity, Term
from ffncli.run.explain.explain import Explanation
from ffncli.run.explain.scene import TensorPlace, find, fitted
from ffncli.run.measure.gap import exact_sum, ulps
from ffncli.run.measure.statistics import unravel
from ffncli.show.tensors import written

Place = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Summands:
    """Summands of one value: their `values` in float64, the factors of each, and the gradient that each comes from."""

    values: Tensor
    factors: Callable[[int], tuple[Factor, ...]]
    origin: Callable[[int], Place]


@dataclass(frozen=True)
class GradientScene:
    """A block's steps, its forward pass, and its gradients by the tensors' names."""

    steps: Sequence[Step]
    ran: ForwardPass
    gradients: Mapping[str, Gradient]


def gradient_name(steps: Sequence[Step], name: str) -> str | None:
    """Return the tensor's name for the name of a gradient (`dup`, `d up`, `dW1`); None for the name of a step."""
    rest = name[1:].strip()
    try:
        find(steps, name)
    except FFNError:
        return rest if name.startswith("d") and rest else None
    return None


def explain_gradient(
    scene: GradientScene, name: str, index: tuple[int, ...], most: int = 8, depth: int = 1, option: str = "explain"
) -> list[Explanation]:
    """Explain `d name[index]` with its largest terms (at most `most`), then the gradient in its largest term, and so on
    for `depth` steps. A weight is named and indexed as in the formulas or as in torch (`W1`, `up.weight`)."""
    text = written(f"d{name}", index)
    place: Place = (name, index)
    symbol = ""
    if not _is_tensor(scene.steps, name):
        place = weight_at(scene.steps, name, index, option, text)
        symbol = text
    out: list[Explanation] = []
    while len(out) < depth:
        at, where = place
        gradient = scene.gradients.get(at)
        if gradient is None:
            raise FFNError(f"{option} {text}: {shown(at)} has no gradient", "the loss does not depend on it")
        where = fitted(tuple(gradient.tensor.shape), at, where, f"{option} {text}")
        summands = [*(_of_weight(scene, at, where) if gradient.weight else _of_tensor(scene, at, where))]
        one, origin = _explanation(gradient, where, summands, most, symbol or written(f"d{at}", where))
        out.append(one)
        if origin is None:
            break
        place, symbol = origin, ""
    return out


def _is_tensor(steps: Sequence[Step], name: str) -> bool:
    try:
        find(steps, name)
    except FFNError:
        return False
    return True


def _explanation(
    gradient: Gradient, index: tuple[int, ...], summands: Sequence[Summands], most: int, text: str
) -> tuple[Explanation, Place | None]:
    """Return the explanation, and the gradient of the largest term."""
    value = gradient.tensor[index].double().item()
    values = torch.cat([one.values.double() for one in summands]) if summands else torch.zeros(0)
    owners = [(one, at) for one in summands for at in range(len(one.values))]
    order = values.abs().argsort(descending=True, stable=True).tolist()
    terms = tuple(Term(owners[at][0].factors(owners[at][1]), values[at].item()) for at in order[:most])
    rest = values[order[most:]].tolist()
    computed = exact_sum(values.tolist()) if summands else value
    origin = owners[order[0]][0].origin(owners[order[0]][1]) if order else None
    same = value == computed or (value != value and computed != computed)
    quantities = () if summands else (Quantity(f"the loss's own gradient, {gradient.formula}", value),)
    tokens = gradient.tokens
    explained = Explanation(
        place=text, name=gradient.name, index=index, op="gradient", formula=f"{gradient.symbol} = {gradient.formula}",
        dtype=str(gradient.tensor.dtype).removeprefix("torch."),
        token=None if tokens is None or gradient.weight else int(tokens[index[0]]), terms=terms, others=len(rest),
        others_sum=exact_sum(rest), quantities=quantities, experts=(), notes=(),
        origin=None if origin is None else written(f"d{origin[0]}", origin[1]), computed=computed,
        rounding=0.0 if same else value - computed, ulps=0.0 if same else ulps(computed, value, gradient.tensor.dtype),
        value=value,
    )  # fmt: skip
    return explained, origin


# --- a tensor's gradient: a sum over the steps that read it -----------------------------------------------------------


def _of_tensor(scene: GradientScene, name: str, index: tuple[int, ...]) -> Iterator[Summands]:
    """Yield the summands that each step passes back to `name[index]`; none for a tensor that the loss itself reads."""
    place = find(scene.steps, name)
    local = name if place.outer is None else name.rpartition(".")[2]
    for step in place.program:
        for at, read in enumerate(step.inputs):
            outer = "" if place.outer is None else f"{place.outer.output}.{place.expert}."
            if read == local and outer + step.output in scene.gradients:
                yield from _passed(scene, step, at, index, outer, place)
    if place.outer is not None and local == place.program[-1].output:
        yield _of_mixed(scene, place, index)


def _of_mixed(scene: GradientScene, place: TensorPlace, index: tuple[int, ...]) -> Summands:
    """Return what the Experts step passes to the last step of an expert: its own gradient times the route's weight."""
    assert place.outer is not None
    assert place.expert is not None
    outer, op = place.outer, place.outer.op
    assert isinstance(op, ops.Experts)
    token = int(scene.ran.tokens[f"{outer.output}.{place.expert}"][index[0]])
    y, route = scene.gradients[outer.output].tensor, scene.ran.tensors[outer.inputs[1]]
    leading = unravel(token, y.shape[:-1])
    factors = [Factor(written(f"d{outer.output}", (*leading, index[1])), y[(*leading, index[1])].double().item())]
    if op.weigh == "output":
        column = range(route.shape[-1])[op.entries][place.expert - op.first]
        factors.append(Factor(written(outer.inputs[1], (*leading, column)), route[(*leading, column)].double().item()))
    return _one(factors, (outer.output, (*leading, index[1])))


def _one(factors: Sequence[Factor], origin: Place) -> Summands:
    value = torch.tensor([factor.value for factor in factors], dtype=torch.float64).prod().reshape(1)
    return Summands(value, lambda at: tuple(factors), lambda at: origin)


def _passed(
    scene: GradientScene, step: Step, which: int, index: tuple[int, ...], outer: str, place: TensorPlace
) -> Iterator[Summands]:
    """Yield the summands that one step passes to its input number `which`, at `index`."""
    if isinstance(step.op, ops.Experts):
        yield from _through_experts(scene, step, step.op, which, index)
        return
    leading, feature = index[:-1], index[-1]
    name = outer + step.output
    dy = scene.gradients[name].tensor[leading].double()
    expert = None if place.outer is None else place.expert
    params = _parameters(scene, step, place.outer, expert)

    def upstream(at: int) -> Place:
        return name, (*leading, at)

    if isinstance(step.op, ops.Linear):
        row = params["weight"][:, feature].double()
        symbol = weight_symbol(step.output, "weight", place.program)

        def factors(at: int) -> tuple[Factor, ...]:
            place_text = written(outer + symbol, (feature, at))
            return Factor(written(f"d{name}", (*leading, at)), dy[at].item()), Factor(place_text, row[at].item())

        yield Summands(dy * row, factors, upstream)
        return
    # Other steps work on one token: the Jacobian's column of this feature, found by passing back one-hot gradients.
    inputs = [_read(scene, n, outer, place)[leading][None] for n in step.inputs]
    mask = scene.ran.masks.get(name)
    kept = None if mask is None else mask[leading][None]
    many = isinstance(step.op, (ops.Norm, ops.Route)) or inputs[which].shape[-1] < len(dy)
    features = range(len(dy)) if many else [feature if len(dy) > 1 else 0]
    eye = torch.zeros(len(features), len(dy), dtype=torch.float64)
    for row_number, at in enumerate(features):
        eye[row_number, at] = 1.0
    wide = [(x.double() if x.is_floating_point() else x).expand(len(features), -1) for x in inputs]
    double = {n: p.double() if p.is_floating_point() else p for n, p in params.items()}
    symbols = {n: n for n in params}
    shares = step_gradients(step, symbols, double, wide, eye, None if kept is None else kept.expand_as(eye))
    share = shares.inputs[which]
    if share is None:
        return
    slopes = share[1][:, feature].double()
    read = written(outer + step.inputs[which], index)

    def with_slope(at: int) -> tuple[Factor, ...]:
        here = (*leading, features[at])
        text = f"∂{written(name, here)}/∂{read}"
        if isinstance(step.op, ops.Activation) and step.op.unlimited:
            text = f"{step.op.function}'({read})"
        slope = Factor(text, slopes[at].item())
        return Factor(written(f"d{name}", here), dy[features[at]].item()), slope

    yield Summands(dy[list(features)] * slopes, with_slope, lambda at: upstream(features[at]))


def _read(scene: GradientScene, name: str, outer: str, place: TensorPlace) -> Tensor:
    """Return the tensor that a step reads under this name; inside an expert, its input is the tokens routed to it."""
    if outer + name in scene.ran.tensors:
        return scene.ran.tensors[outer + name]
    assert place.outer is not None
    return _entering(scene, place.outer, place.expert or 0)


def _entering(scene: GradientScene, step: Step, expert: int) -> Tensor:
    """Return the rows that enter an expert, in float64."""
    op = step.op
    assert isinstance(op, ops.Experts)
    tokens = scene.ran.tokens[f"{step.output}.{expert}"]
    x, route = (scene.ran.tensors[name].flatten(0, -2)[tokens].double() for name in step.inputs)
    column = range(route.shape[-1])[op.entries][expert - op.first]
    return x * route[:, column, None] if op.weigh == "input" else x


def _parameters(scene: GradientScene, step: Step, outer: Step | None, expert: int | None) -> dict[str, Tensor]:
    """Return a step's parameters and tables by their last names; inside an expert, those of the expert."""
    weights = scene.ran.weights
    if outer is not None and expert is not None:
        assert isinstance(outer.op, ops.Experts)
        weights = outer.op.of_one(weights, expert - outer.op.first, outer.prefix)
    return {name.rpartition(".")[2]: weights[name] for name in (*step.parameters(), *step.tables())}


def _through_experts(
    scene: GradientScene, step: Step, op: ops.Experts, which: int, index: tuple[int, ...]
) -> Iterator[Summands]:
    """Yield what the experts pass to one token: to its features (`which` = 0) or to its weights in the route."""
    x, route = (scene.ran.tensors[name] for name in step.inputs)
    dy, leading = scene.gradients[step.output].tensor, index[:-1]
    flat = int(torch.arange(x[..., 0].numel()).reshape(x.shape[:-1])[leading])
    columns = range(route.shape[-1])[op.entries]
    identity = range(route.shape[-1])[-op.identity :] if op.identity else range(0)
    last, (entry,) = op.program[-1].output, block_inputs(op.program)
    if identity and (which == 0 or index[-1] in identity):
        other = x[leading].double() if which else route[leading].double()[list(identity)].sum()
        values = dy[leading].double() * other
        at_feature = values if which else values[index[-1]].reshape(1)
        offset = 0 if which else index[-1]
        label = step.inputs[0] if which else "weights of identity experts"
        spread = other.expand_as(values)
        yield Summands(
            at_feature,
            lambda at: (Factor(written(f"d{step.output}", (*leading, at + offset)), float(dy[(*leading, at + offset)])),
                        Factor(written(label, (*leading, at)) if which else label, float(spread[at + offset]))),
            lambda at: (step.output, (*leading, at + offset)),
        )  # fmt: skip
    for expert in range(op.first, op.first + op.experts.size):
        name, column = f"{step.output}.{expert}", columns[expert - op.first]
        tokens = scene.ran.tokens.get(name)
        if tokens is None or flat not in tokens.tolist() or (which == 1 and column != index[-1]):
            continue
        row, weight = tokens.tolist().index(flat), route[(*leading, column)].double().item()
        if which == 1 and op.weigh == "output":
            result = scene.ran.tensors[f"{name}.{last}"][row].double()
            yield Summands(
                dy[leading].double() * result,
                lambda at, name=name, row=row, result=result: (  # type: ignore[misc]
                    Factor(written(f"d{step.output}", (*leading, at)), float(dy[(*leading, at)])),
                    Factor(written(f"{name}.{last}", (row, at)), float(result[at]))),
                lambda at: (step.output, (*leading, at)),
            )  # fmt: skip
            continue
        place = TensorPlace(f"{name}.{entry}", None, op.program, step, expert)
        features = range(x.shape[-1]) if which == 1 else [index[-1]]
        for feature in features:
            scale = weight if which == 0 and op.weigh == "input" else 1.0
            factor = float(x[(*leading, feature)]) if which == 1 else scale
            text = written(step.inputs[1 - which], (*leading, feature if which else column))
            for inner in op.program:
                for at, read in enumerate(inner.inputs):
                    if read == entry:
                        for one in _passed(scene, inner, at, (row, feature), f"{name}.", place):
                            yield one if factor == 1.0 and which == 0 and op.weigh == "output" else Summands(
                                one.values * factor,
                                lambda n, one=one, t=text, f=factor: (*one.factors(n), Factor(t, f)),  # type: ignore[misc]
                                one.origin,
                            )  # fmt: skip


# --- a weight's gradient: a sum over tokens ---------------------------------------------------------------------------


def _of_weight(scene: GradientScene, name: str, index: tuple[int, ...]) -> Iterator[Summands]:
    """Yield the summands of a weight's gradient, one per token that reaches it."""
    step, outer, experts, parameter = _owner(scene.steps, name, index)
    inner = index[1:] if outer is not None and len(experts) == 1 and not _common(outer, name) else index
    for expert in experts:
        prefix = "" if outer is None else f"{outer.output}.{expert}."
        if prefix + step.output not in scene.gradients:
            continue
        program = scene.steps
        if outer is not None and isinstance(outer.op, ops.Experts):
            program = outer.op.program
        place = TensorPlace(prefix + step.output, step, program, outer, expert)
        yield _over_tokens(scene, step, parameter, inner, prefix, place)


def _common(outer: Step, name: str) -> bool:
    assert isinstance(outer.op, ops.Experts)
    return outer.op.is_common(name.removeprefix(outer.prefix))


def _owner(
    steps: Sequence[Step], name: str, index: tuple[int, ...]
) -> tuple[Step, Step | None, Sequence[int | None], str]:
    """Return (the step that reads a weight, its Experts step if it is inside experts, the experts to sum over, the
    parameter's last name)."""
    owner, _, parameter = name.rpartition(".")
    for step in steps:
        if isinstance(step.op, ops.Experts):
            for inner in step.op.program:
                if step.prefix + inner.output == owner:
                    every = range(step.op.first, step.op.first + step.op.experts.size)
                    experts: Sequence[int | None] = every if _common(step, name) else [every[index[0]]]
                    return inner, step, experts, parameter
        elif step.output == owner:
            return step, None, [None], parameter
    raise AssertionError(f"no step reads {name}")


def _over_tokens(
    scene: GradientScene, step: Step, parameter: str, index: tuple[int, ...], prefix: str, place: TensorPlace
) -> Summands:
    """Return one summand per token: x[t,i] · dy[t,o] for a Linear's weight, dy[t,o] for a bias; for another parameter,
    what the step alone passes to it from that token."""
    name = prefix + step.output
    dy = scene.gradients[name].tensor
    shape, flat = dy.shape[:-1], dy.flatten(0, -2).double()

    def leading(token: int) -> tuple[int, ...]:
        return unravel(token, shape)

    if isinstance(step.op, ops.Linear):
        column = flat[:, index[0]]

        def gradient(token: int) -> Factor:
            return Factor(written(f"d{name}", (*leading(token), index[0])), column[token].item())

        if parameter == "bias":
            return Summands(column, lambda t: (gradient(t),), lambda t: (name, (*leading(t), index[0])))
        x = _read(scene, step.inputs[0], prefix, place).flatten(0, -2).double()[:, index[1]]
        outside = place.outer is not None and prefix + step.inputs[0] not in scene.ran.tensors
        read = f"input of {prefix[:-1]}" if outside else prefix + step.inputs[0]
        return Summands(
            x * column,
            lambda t: (Factor(written(read, (*leading(t), index[1])), x[t].item()), gradient(t)),
            lambda t: (name, (*leading(t), index[0])),
        )
    params = _parameters(scene, step, place.outer, place.expert)
    double = {n: p.double() if p.is_floating_point() else p for n, p in params.items()}
    inputs = [_read(scene, n, prefix, place).flatten(0, -2) for n in step.inputs]
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    values = [
        step_gradients(step, {n: n for n in params}, double, [x[t : t + 1] for x in inputs], flat[t : t + 1])
        .parameters[parameter][1][index].double().item()
        for t in range(len(flat))
    ]  # fmt: skip
    feature = index[0] if dy.shape[-1] > 1 and len(index) == 1 and params[parameter].numel() > 1 else 0
    return Summands(
        torch.tensor(values, dtype=torch.float64),
        lambda t: (Factor(f"token {t}", values[t]),),
        lambda t: (name, (*leading(t), feature)),
    )
