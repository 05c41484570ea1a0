"""The block language: a block is a tuple of named assignments, whose right-hand sides use nine ops.

    up   = x · W1 + b1       Step("up",   Linear(d_model, d_ff, bias=True), ("x",))
    act  = relu(up)          Step("act",  Activation("relu"),               ("up",))
    down = act · W2 + b2     Step("down", Linear(d_ff, d_model, bias=True), ("act",))

An op defines four things: its parameters (shapes over named axes, torch's `[out, in]`), how it maps shapes, how its
formula is printed, and which axis its input must have. Everything else (costs, weights, execution, sharding) lives in
separate files that read the steps and handle each op in a branch of its own. A name that no step produces is an input
of the block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

from ffncli.block import activations
from ffncli.errors import FFNError

Shape: TypeAlias = tuple[int, ...]
Symbols: TypeAlias = Callable[[str], str]  # parameter name ("weight") → its symbol in a printed formula ("W1")


@dataclass(frozen=True)
class Axis:
    """A named dimension, so that 'split every d_ff' is well defined: d_model, d_ff, experts, vocab."""

    name: str
    size: int


ONE = Axis("one", 1)


class Op:
    """The base class of all nine ops. By default an op has no parameters and leaves shapes unchanged."""

    @property
    def name(self) -> str:
        """The op's name in one word, as used in records: `linear`, `activation`, `allreduce`."""
        return type(self).__name__.lower()

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return a mapping from parameter name to axes, in torch's order (`weight` of a Linear: out, in)."""
        return {}

    def tables(self) -> dict[str, tuple[Axis, ...]]:
        """Return a mapping from each table of integers to its axes. A checkpoint stores tables, but training does not
        change tables, so they are not parameters."""
        return {}

    def shape(self, *inputs: Shape) -> Shape:
        """Return the output's shape: leading axes are tokens (or batch, position), the last axis holds features. Raises
        FFNError if the width does not fit."""
        if axis := self.into_axis():
            require_axis(axis, inputs[0], type(self).__name__)
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return the right-hand side of the printed formula."""
        raise AssertionError(f"{type(self).__name__} prints no formula")

    def into_axis(self) -> Axis | None:
        """Return the feature axis that the op requires of its first input, or None if any axis will do."""
        return None


def require_axis(axis: Axis, shape: Shape, op: str) -> None:
    """Raise FFNError unless the last axis of `shape` has the size of `axis`."""
    if not shape or shape[-1] != axis.size:
        raise FFNError(f"{op} expects {axis.name} = {axis.size} values per token, got shape {list(shape)}")


@dataclass(frozen=True)
class Multiply(Op):
    """Elementwise product; a width of 1 broadcasts (a gate with one value per token).

    `learned` adds a learned factor: a single value (the dense layers of Inkling), or one value per feature (ZAYA's
    router).
    """

    learned: Axis | None = None

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return `factor [1]` or `factor [feature]` if there is a learned factor."""
        return {"factor": (self.learned,)} if self.learned else {}

    def shape(self, *inputs: Shape) -> Shape:
        """Return the wider of the two shapes. Raises FFNError if they differ and neither is 1 wide."""
        wide = max(inputs, key=lambda s: s[-1])
        if any(s[:-1] != wide[:-1] or s[-1] not in (1, wide[-1]) for s in inputs):
            raise FFNError(f"Multiply: shapes {list(inputs)} do not broadcast")
        if self.learned and self.learned.size > 1:
            require_axis(self.learned, wide, "Multiply")
        return wide

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `act ⊙ up`."""
        return " ⊙ ".join([*([symbol("factor")] if self.learned else []), *inputs])

    def into_axis(self) -> Axis | None:
        """Return the axis of the learned factors if there is more than one factor."""
        return None if self.learned == ONE else self.learned


@dataclass(frozen=True)
class Add(Op):
    """The sum of all inputs; the last input is multiplied by `scale` (Granite's residual multiplier). A single input is
    only scaled.

    `bias` is the axis of a learned vector that is also added (JetMoE adds it to the mixed output of its experts).
    """

    scale: float = 1.0
    bias: Axis | None = None

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return `bias [feature]` if there is a bias."""
        return {"bias": (self.bias,)} if self.bias else {}

    def shape(self, *inputs: Shape) -> Shape:
        """Return the common shape of all inputs."""
        if len(set(inputs)) != 1:
            raise FFNError(f"Add: shapes {list(inputs)} differ")
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `x + down`, `x + 0.22 · down` or `experts + b_biased`."""
        last = inputs[-1] if self.scale == 1 else f"{self.scale:g} · {inputs[-1]}"
        return " + ".join([*inputs[:-1], last, *([symbol("bias")] if self.bias else [])])


Score: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Order: TypeAlias = Literal["score_first", "choose_first", "one_by_one"]
ScoreDType: TypeAlias = Literal["fp32", "input"]


@dataclass(frozen=True)
class RoutingRule:
    """The rule that chooses each token's experts and the weights of their outputs.

    `order`: score_first scores all experts and keeps top_k (Mixtral, Qwen, DeepSeek); choose_first keeps the top_k
    logits and scores only these (gpt-oss); one_by_one (Phi-3.5-MoE) takes the largest logit m, scored by a softmax over
    the logits with m - logit ≤ `threshold` · max(|logit|, m), then excludes that expert and repeats. With groups, only
    experts in the best `top_groups` groups may be chosen; a group is ranked by the sum of its `group_best` best scores
    (DeepSeek-V2: 1, V3: 2). With `zero_outside`, experts outside these groups compete with a score of 0, so they are
    chosen over experts with a negative score (A.X-K2). `correction` is added to the scores only for the choice (to the
    logits if the choice comes first). Scores are computed in `score_dtype`: "fp32", or "input" for the logits' dtype.
    `eps` is added to the sum that renormalisation divides by (LFM2).
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
    """Turns router logits [..., experts] into weights [..., experts]; a weight of zero means 'not chosen'.

    Every token goes to the last `always` experts, which take part in the renormalisation (Inkling); top_k and
    correction apply to the other experts. `learned_scale` multiplies the weights by one learned factor, or by one for
    each expert (`expert_scale`: Gemma 4). With a `lookup`, whose axis is the vocabulary, a second input of token ids
    [..., 1] determines the experts: each token's experts are listed in its row of a table of integers [vocabulary,
    top_k] (the first layers of DeepSeek-V4).
    """

    experts: Axis
    always: int = 0
    learned_scale: bool = False
    lookup: Axis | None = None
    expert_scale: bool = False

    @property
    def chooses(self) -> bool:
        """Whether the route can leave out an expert; if not, it is a plain softmax (or sigmoid)."""
        return self.taken < self.experts.size

    @property
    def taken(self) -> int:
        """The number of experts that each token goes to."""
        return self.top_k + self.always

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return `correction [experts]` (DeepSeek-V3's e_score_correction_bias) and `factor [1]` or `factor [experts]`,
        if they exist."""
        choosable = Axis(self.experts.name, self.experts.size - self.always)
        correction: dict[str, tuple[Axis, ...]] = {"correction": (choosable,)} if self.correction else {}
        factor = self.experts if self.expert_scale else ONE
        return correction | ({"factor": (factor,)} if self.learned_scale else {})

    def tables(self) -> dict[str, tuple[Axis, ...]]:
        """Return `lookup [vocabulary, top_k]`, which lists the experts of each token id."""
        return {"lookup": (self.lookup, Axis("top_k", self.top_k))} if self.lookup else {}

    def shape(self, *inputs: Shape) -> Shape:
        """Return the logits' shape, unchanged. Raises FFNError unless there is exactly one token id per token."""
        if self.lookup:
            require_axis(ONE, inputs[1], "Route, for its token ids,")
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `normalise(top2(softmax(router)))`, or `softmax(logits)` if all experts are chosen.

        If the choice depends on more than the scores, the rest follows a bar: `top8(sigmoid(router) | + b_route, 4 of 8
        groups)`. A choice by table is printed as an index: `sqrtsoftplus(router)[lookup_route[token_ids]]`.
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
        """Return `experts`."""
        return self.experts


@dataclass(frozen=True)
class Linear(Op):
    """x · Wᵀ + b with W in torch's layout `[out, in]`: up, gate, down, router, shared-expert gate.

    `tied` names the parameters that are tensors of another step (its transpose, for a weight), and so are not counted.
    """

    into: Axis
    out: Axis
    bias: bool = False
    tied: tuple[str, ...] = ()

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return `weight [out, in]`, and `bias [out]` if there is a bias."""
        return {"weight": (self.out, self.into)} | ({"bias": (self.out,)} if self.bias else {})

    def shape(self, *inputs: Shape) -> Shape:
        """Return the shape [..., out] for an input [..., in]. Raises FFNError if the input's width is not `into`."""
        require_axis(self.into, inputs[0], "Linear")
        return (*inputs[0][:-1], self.out.size)

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `x · W1 + b1`."""
        return f"{inputs[0]} · {symbol('weight')}" + (f" + {symbol('bias')}" if self.bias else "")

    def into_axis(self) -> Axis:
        """Return `into`."""
        return self.into


@dataclass(frozen=True)
class Activation(Op):
    """min(f(clip(x, low, high)), most) + plus, elementwise; most blocks set none of these limits.

    `soft_cap` c bounds the linear factor of f: silu(x) = x · sigmoid(x) becomes c · tanh(x / c) · sigmoid(x), and the
    identity becomes c · tanh(x / c). Only functions of `activations.SOFT_CAPPED` have such a factor.
    """

    function: str
    low: float | None = None
    high: float | None = None
    plus: float = 0.0
    soft_cap: float | None = None
    most: float | None = None

    @property
    def unlimited(self) -> bool:
        """Whether the step is f(x) without limits, soft cap or offset."""
        return self == Activation(self.function)

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return the function's learned parameters (xielu's two alphas, prelu's slope), each a single value."""
        return dict.fromkeys(activations.TABLE[self.function].learned, (ONE,))

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `gelu(up)`, `quick_gelu(min(gate, 7))` or `clip(up, -7, 7) + 1`."""
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

    `weigh` selects what the weight multiplies: the normalised values, or the input before normalisation (Muse-Spark).
    `shared` marks a norm whose output is also read by another branch (Falcon-7B, Phi-2): it is computed here, but its
    parameters belong to the layer and are not counted as the FFN's. `inside` marks a norm of the FFN's output that is
    part of the module that the model calls its FFN, so that its output leaves the module (A.X-K1).
    """

    kind: Literal["layernorm", "rmsnorm"]
    axis: Axis
    eps: float
    weight: Literal["none", "plain", "one_plus"] = "plain"
    bias: bool = False
    shared: bool = False
    weigh: Literal["output", "input"] = "output"
    inside: bool = False

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return `weight` and `bias`, one value per feature, if the norm has them."""
        names = (["weight"] if self.weight != "none" else []) + (["bias"] if self.bias else [])
        return dict.fromkeys(names, (self.axis,))

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `rmsnorm(x)`, or `rmsnorm((1 + W_post_norm) ⊙ x)` if the weight multiplies the input."""
        weight = "" if self.weight == "none" else symbol("weight")
        if self.weigh == "output" or not weight:
            return f"{self.kind}({inputs[0]})"
        return f"{self.kind}({f'(1 + {weight})' if self.weight == 'one_plus' else weight} ⊙ {inputs[0]})"

    def into_axis(self) -> Axis:
        """Return `axis`."""
        return self.axis


@dataclass(frozen=True)
class Dropout(Op):
    """Zeroes each value with probability p and divides the kept values by 1 - p; the identity in eval mode."""

    p: float

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `dropout(act, 0.1)`."""
        return f"dropout({inputs[0]}, {self.p:g})"


@dataclass(frozen=True)
class Experts(Op):
    """The only op that contains a program: every expert runs it, with weights of its own, on the tokens routed to it.

    Inputs are (x, route). `weigh` selects what the route's weight multiplies: the expert's output, or the expert's
    input (Llama 4). The route has `identity` additional entries, for experts that return the token unchanged
    (LongCat-Flash). `common` lists the norms of the program whose weights are the same for all experts (Muse-Spark).
    Experts that every token uses (`always`, Inkling's shared experts) have the last entries of the route, one per
    expert. If the experts are split over `ranks` ranks, this op holds one rank's experts, numbered from `first`
    (`shard.shard_experts`).
    """

    program: "tuple[Step, ...]"
    experts: Axis
    weigh: Literal["output", "input"] = "output"
    identity: int = 0
    common: tuple[str, ...] = ()
    always: bool = False
    first: int = 0
    ranks: int = 1

    @property
    def entries(self) -> slice:
        """The slice of the route that belongs to these experts."""
        return slice(-self.experts.size, None) if self.always else slice(self.first, self.first + self.experts.size)

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return the program's parameters, with their names in the program ("up.weight"); each has a leading experts
        axis, except the parameters of `common` norms."""
        inner = parameters(self.program)
        return {n: axes if self.is_common(n) else (self.experts, *axes) for n, axes in inner.items()}

    def is_common(self, parameter: str) -> bool:
        """Return True if all experts use the same tensor for this parameter."""
        return parameter.rpartition(".")[0] in self.common

    def of_one(self, weights: Mapping[str, Any], expert: int, prefix: str = "") -> dict[str, Any]:
        """Return one expert's parameters from the parameters of all experts, whose names begin with `prefix`."""
        of_all = {name: weights[prefix + name] for name in self.parameters()}
        return {name: tensor if self.is_common(name) else tensor[expert] for name, tensor in of_all.items()}

    def shape(self, *inputs: Shape) -> Shape:
        """Return the program's output shape."""
        (name,) = block_inputs(self.program)
        return shapes(self.program, {name: inputs[0]})[self.program[-1].output]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `Σ route[e] · expert_e(norm)`, followed by `, the last 256 are identities` if any are."""
        x, route = inputs
        rest = f", the last {self.identity} are identities" if self.identity else ""
        rest += f", the last {self.experts.size} of {route}" if self.always else ""
        rest += f", e from {self.first} to {self.first + self.experts.size - 1}" if self.ranks > 1 else ""
        if self.weigh == "input":
            return f"Σ expert_e({route}[e] · {x}){rest}"
        return f"Σ {route}[e] · expert_e({x}){rest}"

    def into_axis(self) -> Axis | None:
        """Return the axis that the program's first step requires."""
        return feature_axis(self.program)


@dataclass(frozen=True)
class AllReduce(Op):
    """The sum over `ranks` devices. Only `shard.py` creates this op."""

    ranks: int

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """Return text such as `all_reduce(down, 4)`."""
        return f"all_reduce({inputs[0]}, {self.ranks})"


OPS: tuple[type[Op], ...] = (Linear, Activation, Multiply, Add, Norm, Dropout, Route, Experts, AllReduce)


@dataclass(frozen=True)
class Step:
    """One assignment: `output = op(inputs)`."""

    output: str
    op: Op
    inputs: tuple[str, ...]

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return a mapping from full name to axes: `up.weight`; for Experts, a name in its program (`gate.weight`)."""
        return {self.prefix + name: axes for name, axes in self.op.parameters().items()}

    def untied_parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Return `parameters` without those that are tensors of another step."""
        tied = {self.prefix + name for name in (self.op.tied if isinstance(self.op, Linear) else ())}
        return {name: axes for name, axes in self.parameters().items() if name not in tied}

    @property
    def prefix(self) -> str:
        """The prefix of the step's parameter names: `up.`, but empty for the routed experts (`gate.weight`)."""
        return "" if isinstance(self.op, Experts) and not self.op.always else f"{self.output}."

    def tables(self) -> dict[str, tuple[Axis, ...]]:
        """Return a mapping from the full name of each table of integers (`route.lookup`) to its axes."""
        return {f"{self.output}.{name}": axes for name, axes in self.op.tables().items()}


def untied_parameters(steps: Sequence[Step]) -> dict[str, tuple[Axis, ...]]:
    """Return `parameters` without those that are tensors of another step."""
    return {name: axes for step in steps for name, axes in step.untied_parameters().items()}


def parameters(steps: Sequence[Step]) -> dict[str, tuple[Axis, ...]]:
    """Return a mapping from the name of each of a block's parameters, in step order, to its axes."""
    return {name: axes for step in steps for name, axes in step.parameters().items()}


def tables(steps: Sequence[Step]) -> dict[str, tuple[Axis, ...]]:
    """Return a mapping from the name of each of a block's tables of integers to its axes."""
    return {name: axes for step in steps for name, axes in step.tables().items()}


def experts_per_token(steps: Sequence[Step]) -> dict[str, int]:
    """Return a mapping from the name of each Experts step to the number of its experts that process each token."""
    top_k = {step.output: step.op.top_k for step in steps if isinstance(step.op, Route)}
    return {
        step.output: step.op.experts.size if step.op.always else top_k[step.inputs[1]]
        for step in steps
        if isinstance(step.op, Experts)
    }


def routes(steps: Sequence[Step]) -> dict[str, Experts]:
    """Return a mapping from each routing step to the experts that it chooses among."""
    return {step.inputs[1]: step.op for step in steps if isinstance(step.op, Experts) and not step.op.always}


def block_inputs(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the names that no step produces, in order of first use."""
    produced = {step.output for step in steps}
    return tuple(dict.fromkeys(name for step in steps for name in step.inputs if name not in produced))


def feature_axis(steps: Sequence[Step]) -> Axis | None:
    """Return the axis of the block's inputs (d_model), which is the axis of the first step that requires one."""
    return next((axis for step in steps if (axis := step.op.into_axis())), None)


def shapes(steps: Sequence[Step], inputs: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return every name's shape, derived from the shapes of the inputs.

    Raises FFNError for a name that is assigned twice or used before it is assigned, and for shapes that do not fit.
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
    """Return the shapes of the block's inputs for tokens of shape `leading`: [*leading, d_model], or [*leading, 1] for
    token ids. A router state carried over from another layer has the width of the step that reads it."""
    axis, ids, states = feature_axis(steps), id_inputs(steps), state_inputs(steps)
    if axis is None:
        raise FFNError("the block has no step that fixes its width")
    return {n: (*leading, 1 if n in ids else states.get(n, axis).size) for n in block_inputs(steps)}


def id_inputs(steps: Sequence[Step]) -> Mapping[str, int]:
    """Return a mapping from a block's inputs that are token ids to the sizes of their vocabularies."""
    return {step.inputs[1]: step.op.lookup.size for step in steps if isinstance(step.op, Route) and step.op.lookup}


def state_inputs(steps: Sequence[Step]) -> Mapping[str, Axis]:
    """Return a mapping from a block's inputs that are the previous layer's router state to their axes."""
    scaled = {step.inputs[0]: step.op.into_axis() for step in steps if isinstance(step.op, Multiply)}
    return {name: axis for name, axis in scaled.items() if axis and name in block_inputs(steps)}


NORM_GATE = "norm_gate."  # prefix of the names of the steps that gate the norm before an FFN


def of_norm(step: Step) -> bool:
    """Return True for a norm and for the steps that gate a norm's output: their parameters count as norm parameters."""
    return isinstance(step.op, Norm) or step.output.startswith(NORM_GATE)


def ffn_span(steps: Sequence[Step]) -> tuple[str, str]:
    """Return (ffn_input, ffn_output): the tensors that enter and leave what a model calls its FFN or MLP module.

    Residuals and the norms around the module are excluded: the input is the tensor that the first projection or router
    reads; the output is `ffn_sum`, after a norm that is part of the module. Raises FFNError for steps without a
    projection.
    """
    first = next((s for s in steps if isinstance(s.op, Linear) and not of_norm(s)), None)
    if first is None:
        raise FFNError("these steps have no projection, so they are not an FFN")
    total = ffn_sum(steps)
    inside = (s.output for s in steps if isinstance(s.op, Norm) and s.op.inside and s.inputs == (total,))
    return first.inputs[0], next(inside, total)


def ffn_sum(steps: Sequence[Step]) -> str:
    """Return the name of the sum of what an FFN's units write: the result of the down projection or the mixed experts;
    in a lone final layer, its logits."""
    names = {s.output for s in steps}
    # In reverse order of execution: `moe` adds to `biased`, which adds to `widened`, which projects `experts`.
    output = next((n for n in ("moe", "biased", "widened", "experts", "scaled", "down") if n in names), "logits")
    return next((s.output for s in steps if isinstance(s.op, AllReduce) and s.inputs == (output,)), output)


def ffn_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the part of a block from ffn_input to ffn_output."""
    start, end = ffn_span(steps)
    names = [s.output for s in steps]
    return tuple(steps[names.index(start) + 1 if start in names else 0 : names.index(end) + 1])


def walk(steps: Sequence[Step], prefix: str = "") -> Iterator[tuple[str, Step]]:
    """Yield every step with its printed name, including the programs of Experts (`experts[e].gate`)."""
    for step in steps:
        yield prefix + step.output, step
        if isinstance(step.op, Experts):
            yield from walk(step.op.program, f"{prefix}{step.output}[e].")
