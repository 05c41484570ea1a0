"""The block language: a block is a tuple of named assignments, and these are the nine ops they may use.

    up   = x · W1 + b1       Step("up",   Linear(d_model, d_ff, bias=True), ("x",))
    act  = relu(up)          Step("act",  Activation("relu"),               ("up",))
    down = act · W2 + b2     Step("down", Linear(d_ff, d_model, bias=True), ("act",))

An op defines four things: its parameters (shapes over named axes, torch's `[out, in]`), how it maps shapes, how its
formula prints, and which axis its input has. Everything else (costs, weights, execution, sharding) is a reader in a
separate file with one arm per op. A name that no step produces is an input of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

from ffncli.block import activations
from ffncli.errors import FFNError

Shape: TypeAlias = tuple[int, ...]
Symbols: TypeAlias = Callable[[str], str]  # parameter name ("weight") → how a formula prints it ("W1")


@dataclass(frozen=True)
class Axis:
    """A dimension with a name, so that 'split every d_ff' means something: d_model, d_ff, experts, vocab."""

    name: str
    size: int


ONE = Axis("one", 1)


class Op:
    """The base of all nine. By default `parameters` is empty and shapes pass through."""

    @property
    def name(self) -> str:
        """In one word, as records have it: `linear`, `activation`, `allreduce`."""
        return type(self).__name__.lower()

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Parameter name → its axes, in torch's order (`weight` of a Linear: out, in)."""
        return {}

    def tables(self) -> dict[str, tuple[Axis, ...]]:
        """Table of integers → its axes. A checkpoint stores them, training does not change them: not parameters."""
        return {}

    def shape(self, *inputs: Shape) -> Shape:
        """The output's shape. Leading axes are tokens (or batch, position); the last one is the feature axis."""
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """The right-hand side as it prints."""
        raise AssertionError(f"{type(self).__name__} prints no formula")

    def into_axis(self) -> Axis | None:
        """The feature axis that the op requires of its first input; None if any axis will do."""
        return None


def require_axis(axis: Axis, shape: Shape, op: str) -> None:
    """Raises FFNError unless the last axis of a shape is this one."""
    if not shape or shape[-1] != axis.size:
        raise FFNError(f"{op} expects {axis.name} = {axis.size} values per token, got shape {list(shape)}")


@dataclass(frozen=True)
class Multiply(Op):
    """Elementwise product; a width of 1 broadcasts (a gate with one number per token).

    `learned`: one more factor is learned, one number (the dense layers of Inkling) or one per feature (ZAYA's router).
    """

    learned: Axis | None = None

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """`factor [1]`, or `[feature]`, if it is learned."""
        return {"factor": (self.learned,)} if self.learned else {}

    def shape(self, *inputs: Shape) -> Shape:
        """The wider of the two; FFNError if they differ and neither is 1 wide."""
        wide = max(inputs, key=lambda s: s[-1])
        if any(s[:-1] != wide[:-1] or s[-1] not in (1, wide[-1]) for s in inputs):
            raise FFNError(f"Multiply: shapes {list(inputs)} do not broadcast")
        if self.learned and self.learned.size > 1:
            require_axis(self.learned, wide, "Multiply")
        return wide

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`act ⊙ up`."""
        return " ⊙ ".join([*([symbol("factor")] if self.learned else []), *inputs])

    def into_axis(self) -> Axis | None:
        """The learned factors', if there are several."""
        return None if self.learned == ONE else self.learned


@dataclass(frozen=True)
class Add(Op):
    """Sum of all inputs; the last one times `scale` (Granite's residual multiplier). A single input is just scaled.

    `bias` is the axis of a learned vector that is added too (JetMoE's, after its experts are mixed).
    """

    scale: float = 1.0
    bias: Axis | None = None

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """`bias [feature]`, if there is one."""
        return {"bias": (self.bias,)} if self.bias else {}

    def shape(self, *inputs: Shape) -> Shape:
        """All inputs have the same shape."""
        if len(set(inputs)) != 1:
            raise FFNError(f"Add: shapes {list(inputs)} differ")
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`x + down`, `x + 0.22 · down`, `experts + b_biased`."""
        last = inputs[-1] if self.scale == 1 else f"{self.scale:g} · {inputs[-1]}"
        return " + ".join([*inputs[:-1], last, *([symbol("bias")] if self.bias else [])])


Score: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Order: TypeAlias = Literal["score_first", "choose_first", "one_by_one"]
ScoreDType: TypeAlias = Literal["fp32", "input"]


@dataclass(frozen=True)
class RoutingRule:
    """How each token's experts are chosen, and how their outputs are weighed.

    score_first scores all experts and keeps top_k (Mixtral, Qwen, DeepSeek); choose_first keeps the top_k logits and
    scores those (gpt-oss); one_by_one (Phi-3.5-MoE) takes the largest logit m, scored by a softmax over the logits with
    m - logit ≤ `threshold` · max(|logit|, m), then leaves that expert out and takes the next. With groups, only experts
    of the `top_groups` best groups may be chosen; a group is ranked by the sum of its `group_best` best scores
    (DeepSeek-V2: 1, V3: 2). With `zero_outside` the others have the score 0 for the choice, and are chosen where those
    of the best groups have less (A.X-K2). `correction` is added to the scores for the choice alone (to the logits if
    the choice comes first). Scores are computed in `score_dtype` ("fp32", or "input" for the logits' dtype). `eps` is
    added to the sum that renormalises (LFM2).
    """

    experts: Any  # how many, or the axis of the logits
    top_k: int
    _: KW_ONLY
    score: Score = "softmax"
    order: Order = "score_first"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    zero_outside: bool = False
    correction: bool = False
    score_dtype: ScoreDType = "fp32"
    eps: float = 0.0
    threshold: float = 0.0


@dataclass(frozen=True)
class Route(Op, RoutingRule):
    """Router logits [..., experts] → weights [..., experts]; zero means 'not chosen'.

    The last `always` experts are taken by every token and share in the renormalisation (Inkling); top_k and
    correction concern the others. `learned_scale` multiplies the weights by one learned number. With a `lookup`, whose
    axis is the vocabulary, a second input of token ids [..., 1] chooses: the token's row of a table of integers
    [vocabulary, top_k] lists its experts (the first layers of DeepSeek-V4).
    """

    experts: Axis
    always: int = 0
    learned_scale: bool = False
    lookup: Axis | None = None

    @property
    def chooses(self) -> bool:
        """Whether any expert can be left out: a Route that keeps all of its axis is a softmax (or sigmoid) over it."""
        return self.taken < self.experts.size

    @property
    def taken(self) -> int:
        """How many experts each token goes to."""
        return self.top_k + self.always

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """`correction [experts]` (DeepSeek-V3's e_score_correction_bias) and `factor [1]`, where it has them."""
        choosable = Axis(self.experts.name, self.experts.size - self.always)
        correction: dict[str, tuple[Axis, ...]] = {"correction": (choosable,)} if self.correction else {}
        return correction | ({"factor": (ONE,)} if self.learned_scale else {})

    def tables(self) -> dict[str, tuple[Axis, ...]]:
        """`lookup [vocabulary, top_k]`: the experts of each token id."""
        return {"lookup": (self.lookup, Axis("top_k", self.top_k))} if self.lookup else {}

    def shape(self, *inputs: Shape) -> Shape:
        """Unchanged; FFNError if token ids are not one for each token."""
        if self.lookup:
            require_axis(ONE, inputs[1], "Route, of token ids,")
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`normalise(top2(softmax(router)))`, `softmax(top4(router))`; `softmax(logits)` where all are chosen.

        If the choice uses numbers other than the scores, they follow a bar: `top8(sigmoid(router) | + b_route, 4 of 8
        groups)`. A table's choice is an index: `sqrtsoftplus(router)[lookup_route[token_ids]]`.
        """
        text = self._choice(inputs, symbol)
        if self.order == "score_first" and self.renormalise:
            plus = f", sum + {self.eps:g}" if self.eps else ""
            text = f"normalise({text}{plus})"
        text = f"{symbol('factor')} · {text}" if self.learned_scale else text
        return text if self.scale == 1 else f"{self.scale:g} · {text}"

    def _choice(self, inputs: Sequence[str], symbol: Symbols) -> str:
        how = [f"+ {symbol('correction')}"] if self.correction else []
        if self.groups > 1:
            others = ", 0 for the others" if self.zero_outside else ""
            how.append(f"{self.top_groups} of {self.groups} groups{others}")
        if self.order == "one_by_one":
            how.append(f"one by one, of logits within {100 * self.threshold:.4g} % of the best")
        bar = " | " + ", ".join(how) if how else ""
        scores = f"{self.score}({inputs[0]})"
        if self.lookup:
            return f"{scores}[{symbol('lookup')}[{inputs[1]}]]"
        if not (self.chooses or self.renormalise or how):
            return scores
        if self.order == "choose_first":
            return f"{self.score}(top{self.top_k}({inputs[0]}{bar}))"
        return f"top{self.top_k}({scores}{bar})" + (f" and the last {self.always}" if self.always else "")

    def into_axis(self) -> Axis:
        """`experts`."""
        return self.experts


@dataclass(frozen=True)
class Linear(Op):
    """x · Wᵀ + b with W of torch's `[out, in]`: up, gate, down, router, shared-expert gate."""

    into: Axis
    out: Axis
    bias: bool = False

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """`weight [out, in]`, and `bias [out]` if there is one."""
        return {"weight": (self.out, self.into)} | ({"bias": (self.out,)} if self.bias else {})

    def shape(self, *inputs: Shape) -> Shape:
        """[..., in] → [..., out]; FFNError if the input's width is not `into`."""
        require_axis(self.into, inputs[0], "Linear")
        return (*inputs[0][:-1], self.out.size)

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`x · W1 + b1`."""
        return f"{inputs[0]} · {symbol('weight')}" + (f" + {symbol('bias')}" if self.bias else "")

    def into_axis(self) -> Axis:
        """`into`."""
        return self.into


@dataclass(frozen=True)
class Activation(Op):
    """min(f(clip(x, low, high)), most) + plus, elementwise; most blocks have none of these limits.

    `soft_cap` c bounds the linear factor of f: silu(x) = x · sigmoid(x) becomes c · tanh(x / c) · sigmoid(x), and the
    identity c · tanh(x / c). Only functions of `activations.SOFT_CAPPED` have such a factor.
    """

    function: str
    low: float | None = None
    high: float | None = None
    plus: float = 0.0
    soft_cap: float | None = None
    most: float | None = None

    @property
    def unlimited(self) -> bool:
        """Whether it is the function alone."""
        return self == Activation(self.function)

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """The function's learned parameters (xielu's two alphas, prelu's slope): one number each."""
        return dict.fromkeys(activations.TABLE[self.function].learned, (ONE,))

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`gelu(up)`, `quick_gelu(min(gate, 7))`, `clip(up, -7, 7) + 1`, `min(silu(gate), 7)`."""
        x = inputs[0]
        if self.low is not None and self.high is not None:
            x = f"clip({x}, {self.low:g}, {self.high:g})"
        elif self.high is not None:
            x = f"min({x}, {self.high:g})"
        elif self.low is not None:
            x = f"max({x}, {self.low:g})"
        if self.soft_cap is not None:
            share = activations.SOFT_CAPPED[self.function]
            y = f"{self.soft_cap:g} · tanh({x} / {self.soft_cap:g})" + (f" · {share}({x})" if share else "")
        else:
            y = x if x.endswith(")") and self.function == "identity" else f"{self.function}({x})"
        y = y if self.most is None else f"min({y}, {self.most:g})"
        return y + (f" + {self.plus:g}" if self.plus else "")


@dataclass(frozen=True)
class Norm(Op):
    """LayerNorm or RMSNorm over the last axis; `one_plus` multiplies by 1 + weight (Gemma).

    `weigh` says whether the weight multiplies the normalised values or, before that, the input (Muse-Spark).
    `shared` marks a norm whose output another branch reads too (Falcon-7B, Phi-2): it is computed here, but its
    parameters belong to the layer and are not counted as the FFN's.
    """

    kind: Literal["layernorm", "rmsnorm"]
    axis: Axis
    eps: float
    weight: Literal["none", "plain", "one_plus"] = "plain"
    bias: bool = False
    shared: bool = False
    weigh: Literal["output", "input"] = "output"

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """`weight` and `bias`, one number per feature, where the norm has them."""
        names = (["weight"] if self.weight != "none" else []) + (["bias"] if self.bias else [])
        return dict.fromkeys(names, (self.axis,))

    def shape(self, *inputs: Shape) -> Shape:
        """Unchanged; FFNError if the width is not `axis`."""
        require_axis(self.axis, inputs[0], "Norm")
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`rmsnorm(x)`; `rmsnorm((1 + W_post_norm) ⊙ x)` where the weight multiplies the input."""
        weight = "" if self.weight == "none" else symbol("weight")
        if self.weigh == "output" or not weight:
            return f"{self.kind}({inputs[0]})"
        return f"{self.kind}({f'(1 + {weight})' if self.weight == 'one_plus' else weight} ⊙ {inputs[0]})"

    def into_axis(self) -> Axis:
        """`axis`."""
        return self.axis


@dataclass(frozen=True)
class Dropout(Op):
    """Zero each value with probability p and divide the kept ones by 1 - p; identity in eval mode."""

    p: float

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`dropout(act, 0.1)`."""
        return f"dropout({inputs[0]}, {self.p:g})"


@dataclass(frozen=True)
class Experts(Op):
    """The one op that contains a program: every expert runs it, with its own weights, on the tokens routed to it.

    Inputs are (x, route). `weigh` says whether the route's weight multiplies the expert's output or its input (Llama
    4). The route has `identity` further entries, for experts that return the token unchanged (LongCat-Flash). `common`
    names the program's norms whose weights are the same for all experts (Muse-Spark). Experts that are `always` taken
    have the route's last entries, as many as they are (Inkling's shared experts). Where the
    experts are split over `ranks` ranks, these are one rank's, from number `first` on (`shard.shard_experts`).
    """

    program: tuple[Step, ...]
    experts: Axis
    weigh: Literal["output", "input"] = "output"
    identity: int = 0
    common: tuple[str, ...] = ()
    always: bool = False
    first: int = 0
    ranks: int = 1

    @property
    def entries(self) -> slice:
        """Which entries of the route are these experts'."""
        return slice(-self.experts.size, None) if self.always else slice(self.first, self.first + self.experts.size)

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """The program's parameters under their names in it ("up.weight"); each has a leading experts axis, but those of
        `common`."""
        inner = parameters(self.program)
        return {n: axes if self.is_common(n) else (self.experts, *axes) for n, axes in inner.items()}

    def is_common(self, parameter: str) -> bool:
        """Whether all experts have one tensor of that parameter."""
        return parameter.rpartition(".")[0] in self.common

    def of_one(self, weights: Mapping[str, Any], expert: int, prefix: str = "") -> dict[str, Any]:
        """The parameters of one expert's program among those of all, whose names begin with `prefix`."""
        of_all = {name: weights[prefix + name] for name in self.parameters()}
        return {name: tensor if self.is_common(name) else tensor[expert] for name, tensor in of_all.items()}

    def shape(self, *inputs: Shape) -> Shape:
        """The program's output shape."""
        (name,) = block_inputs(self.program)
        return shapes(self.program, {name: inputs[0]})[self.program[-1].output]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`Σ route[e] · expert_e(norm)`, with `, the last 256 are identities` if there are any."""
        x, route = inputs
        rest = f", the last {self.identity} are identities" if self.identity else ""
        rest += f", the last {self.experts.size} of {route}" if self.always else ""
        rest += f", e from {self.first} to {self.first + self.experts.size - 1}" if self.ranks > 1 else ""
        if self.weigh == "input":
            return f"Σ expert_e({route}[e] · {x}){rest}"
        return f"Σ {route}[e] · expert_e({x}){rest}"

    def into_axis(self) -> Axis | None:
        """The axis that the program's first step requires."""
        return feature_axis(self.program)


@dataclass(frozen=True)
class AllReduce(Op):
    """Sum over `ranks` devices. Only `shard.py` makes it."""

    ranks: int

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`all_reduce(down, 4)`."""
        return f"all_reduce({inputs[0]}, {self.ranks})"


OPS: tuple[type[Op], ...] = (Linear, Activation, Multiply, Add, Norm, Dropout, Route, Experts, AllReduce)


@dataclass(frozen=True)
class Step:
    """One assignment: `output = op(inputs)`."""

    output: str
    op: Op
    inputs: tuple[str, ...]

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Full parameter name → axes: `up.weight`; for Experts, the names of its program (`gate.weight`)."""
        return {self.prefix + name: axes for name, axes in self.op.parameters().items()}

    @property
    def prefix(self) -> str:
        """What the names of its parameters start with: nothing for the routed experts' (`gate.weight`)."""
        return "" if isinstance(self.op, Experts) and not self.op.always else f"{self.output}."

    def tables(self) -> dict[str, tuple[Axis, ...]]:
        """Full name → axes of its tables of integers: `route.lookup`."""
        return {f"{self.output}.{name}": axes for name, axes in self.op.tables().items()}


def parameters(steps: Sequence[Step]) -> dict[str, tuple[Axis, ...]]:
    """All parameters of a block in step order, name → axes."""
    return {name: axes for step in steps for name, axes in step.parameters().items()}


def tables(steps: Sequence[Step]) -> dict[str, tuple[Axis, ...]]:
    """All tables of integers of a block, name → axes."""
    return {name: axes for step in steps for name, axes in step.tables().items()}


def experts_per_token(steps: Sequence[Step]) -> dict[str, int]:
    """By the name of an Experts step, how many of its experts each token goes to."""
    top_k = {step.output: step.op.top_k for step in steps if isinstance(step.op, Route)}
    return {
        step.output: step.op.experts.size if step.op.always else top_k[step.inputs[1]]
        for step in steps
        if isinstance(step.op, Experts)
    }


def routes(steps: Sequence[Step]) -> dict[str, Experts]:
    """The steps whose output assigns tokens to experts → the experts that it chooses among."""
    return {step.inputs[1]: step.op for step in steps if isinstance(step.op, Experts) and not step.op.always}


def block_inputs(steps: Sequence[Step]) -> tuple[str, ...]:
    """The names that no step produces, in order of first use."""
    produced = {step.output for step in steps}
    return tuple(dict.fromkeys(name for step in steps for name in step.inputs if name not in produced))


def feature_axis(steps: Sequence[Step]) -> Axis | None:
    """The axis of the block's inputs (d_model): the axis of the first step that requires one."""
    return next((axis for step in steps if (axis := step.op.into_axis())), None)


def shapes(steps: Sequence[Step], inputs: Mapping[str, Shape]) -> dict[str, Shape]:
    """Every name's shape, from the inputs'.

    Raises FFNError for a name used too early or assigned twice, and for shapes that do not fit.
    """
    by_name = dict(inputs)
    for step in steps:
        for name in step.inputs:
            if name not in by_name:
                raise FFNError(f"step '{step.output}' uses '{name}' before anything produced it")
        if step.output in by_name:
            raise FFNError(f"step '{step.output}' is assigned twice")
        by_name[step.output] = step.op.shape(*(by_name[name] for name in step.inputs))
    return by_name


def input_shapes(steps: Sequence[Step], leading: Shape) -> dict[str, Shape]:
    """The shapes of the block's inputs for tokens of shape `leading`: [*leading, d_model], 1 for token ids, and the
    axis of the step that reads it for another layer's state."""
    axis, ids, states = feature_axis(steps), id_inputs(steps), state_inputs(steps)
    if axis is None:
        raise FFNError("the block has no step that fixes its width")
    return {n: (*leading, 1 if n in ids else states.get(n, axis).size) for n in block_inputs(steps)}


def id_inputs(steps: Sequence[Step]) -> Mapping[str, int]:
    """The inputs of a block that are token ids → the size of their vocabulary."""
    return {step.inputs[1]: step.op.lookup.size for step in steps if isinstance(step.op, Route) and step.op.lookup}


def state_inputs(steps: Sequence[Step]) -> Mapping[str, Axis]:
    """The inputs of a block that are the router's state in the layer before → their axis."""
    scaled = {step.inputs[0]: step.op.into_axis() for step in steps if isinstance(step.op, Multiply)}
    return {name: axis for name, axis in scaled.items() if axis and name in block_inputs(steps)}


NORM_GATE = "norm_gate."  # begins the names of the steps that gate the norm before an FFN


def of_norm(step: Step) -> bool:
    """Whether a step's parameters are a norm's: of the norm itself, or of a gate that multiplies its output."""
    return isinstance(step.op, Norm) or step.output.startswith(NORM_GATE)


def ffn_span(steps: Sequence[Step]) -> tuple[str, str]:
    """(ffn_input, ffn_output): the tensors that enter and leave what a model calls its FFN or MLP module.

    Residuals and the norms around the module are outside: the input is what the first projection or router reads, the
    output is what the down projection, or the (mixed) experts, produce; for the final layer alone, its logits.
    """
    first = next(s for s in steps if isinstance(s.op, Linear) and not of_norm(s))
    names = {s.output for s in steps}
    output = next((n for n in ("moe", "biased", "widened", "experts", "scaled", "down") if n in names), "logits")
    reduced = next((s.output for s in steps if isinstance(s.op, AllReduce) and s.inputs == (output,)), output)
    return first.inputs[0], reduced


def ffn_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The part of a block from ffn_input to ffn_output."""
    start, end = ffn_span(steps)
    names = [s.output for s in steps]
    return tuple(steps[names.index(start) + 1 if start in names else 0 : names.index(end) + 1])


def walk(steps: Sequence[Step], prefix: str = "") -> Iterator[tuple[str, Step]]:
    """Every step with its printed name, programs of Experts included (`experts[e].gate`)."""
    for step in steps:
        yield prefix + step.output, step
        if isinstance(step.op, Experts):
            yield from walk(step.op.program, f"{prefix}{step.output}[e].")


def right_hand_side(step: Step, steps: Sequence[Step]) -> str:
    """`x · W1 + b1`."""
    return step.op.formula(step.inputs, lambda parameter: weight_symbol(step.output, parameter, steps))


def weight_symbol(output: str, parameter: str, steps: Sequence[Step]) -> str:
    """How a formula prints a parameter. Gated: W1 gate, W3 up, W2 down; plain: W1 up, W2 down. W_router, shared.W1.

    The final layer's are plain W and b.
    """
    prefix, _, name = output.rpartition(".")
    gated = any(s.output == f"{prefix}.gate".lstrip(".") for _, s in walk(steps))
    number = {"gate": "1", "up": "3" if gated else "1", "down": "2", "logits": ""}.get(name, f"_{name}")
    letter = {"weight": "W", "bias": "b", "correction": "b", "factor": "s"}.get(parameter, parameter)
    return (f"{prefix}." if prefix else "") + letter + number
