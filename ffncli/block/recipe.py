"""`FFNSpec` holds the choices that define a block; `steps` turns a spec into a list of assignments; other functions
modify that list."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from sys import float_info
from typing import Any, Literal, get_args

from ffncli.block import activations
from ffncli.block.activations import NO_LIMITS, Limits
from ffncli.block.steps import (
    NORM_GATE,
    ONE,
    Activation,
    Add,
    Axis,
    Dropout,
    Experts,
    Linear,
    Multiply,
    Norm,
    Op,
    Order,
    Route,
    RoutingRule,
    Score,
    ScoreDType,
    Step,
    block_inputs,
)
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.options.accept import MAX_SIZE, instance
from ffncli.options.arguments import check_types, checked, checked_record

NormKind = Literal["none", "layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post", "branch", "pre+branch"]
NormWeight = Literal["none", "plain", "one_plus"]
Weigh = Literal["output", "input"]


@checked_record
@dataclass(frozen=True)
class MoE(RoutingRule):
    """How tokens are routed to experts, and what runs in addition to these. `weigh` is as in `steps.Experts`.

    `shared_d_ff` is the total width of all shared experts (None: shared_experts × d_ff); `shared_gate` multiplies the
    shared experts' output by a sigmoid of one logit per token (Qwen2-MoE), `shared_scale` by a constant (Cohere 2 takes
    the mean). `identity_experts` receive tokens like other experts but return them unchanged (LongCat-Flash); active
    parameters are counted as if no token were routed to them. `latent` is the width of a narrower space in which the
    routed experts work, between a projection into that space and a projection back (Nemotron-H); `latent_norm`
    normalises the experts' input in that space; `mixed_norm` normalises the sum of their outputs, before the projection
    back (Kimi-K3). `expert_norm` adds a norm to every expert's output; all experts share its weight (Muse-Spark).
    `mixed_bias` adds a bias to the sum of the experts' outputs (JetMoE). `router_scale` multiplies the logits
    (Muse-Spark). `shared_routed`: the router also weights the shared experts, which are as wide as the routed experts
    and take part in the renormalisation (Inkling). `lookup` is the vocabulary of a table that lists the experts of each
    token id (DeepSeek-V4). `router_width` makes the router an MLP of that width, and `router_carries` adds the state of
    the previous layer's router to the state of this router; a token routed to one of the `skip_experts` gets no output
    (ZAYA). `router_norm`: the router reads the block's input x, normalised and multiplied by a learned factor per
    feature; `expert_scale` multiplies the weight of each expert by a learned factor (Gemma 4).
    """

    experts: int
    shared_experts: int = 0
    shared_d_ff: int | None = None
    shared_gate: bool = False
    shared_scale: float = 1.0
    router_bias: bool = False
    weigh: Weigh = "output"
    identity_experts: int = 0
    latent: int | None = None
    latent_norm: bool = False
    expert_norm: bool = False
    mixed_norm: bool = False
    mixed_bias: bool = False
    router_scale: float = 1.0
    shared_routed: bool = False
    lookup: int | None = None
    router_width: int | None = None
    router_carries: bool = False
    skip_experts: int = 0
    router_norm: bool = False
    expert_scale: bool = False

    def __post_init__(self) -> None:
        check_types(self)


@checked_record
@dataclass(frozen=True)
class FFNSpec:
    """One block. `d_ff` is the width of ONE projection (in MoE, of one expert's projection).

    `activation` may be any known spelling and is stored as the canonical name; names like `swiglu` also set `gated`,
    and names like `situ` also set the `limits` of gate and up, unless limits are given explicitly. `shared_limits`
    overrides `limits` for the shared experts. `bias` = None stands for the default: biases if and only if the block is
    not gated. A parallel block adds a second input, `attention`, to its residual; `shared_norm` means that attention
    uses the same norm. `down_bias` overrides `bias` for the down projection (GTE). `gate_scale` multiplies the gate
    before its activation (Falcon-H1). Norms after the FFN and after each expert may have a different eps,
    `post_norm_eps`, and may multiply the input by their weight (`post_norm_weigh`, as in `steps.Norm`);
    `post_norm_inside`: a norm on the branch is part of the FFN's module (A.X-K1). `norm_gate` is
    the rank of a gate on the norm before the FFN: y · sigmoid(W₂ · silu(W₁ · y)) (A.X-K2). `learned_scale`: one learned
    factor multiplies the output of a dense FFN, or the weights of a mixture's experts (Inkling). `tied` names the
    parameters of the down projection (`weight`, `bias`) that are tensors of up or gate, as in `steps.Linear`. Raises
    FFNError for values that do not describe a block.
    """

    d_model: int
    d_ff: int
    activation: str = "relu"
    gated: bool | None = None
    bias: bool | None = None
    dropout: float = 0.0
    norm: NormKind = "none"
    norm_position: NormPosition = "pre"
    norm_eps: float = 1e-5
    norm_weight: NormWeight = "plain"
    norm_bias: bool | None = None
    shared_norm: bool = False
    residual: bool = False
    residual_scale: float = 1.0
    parallel: bool = False
    sub_norm: bool = False
    limits: Limits = NO_LIMITS
    shared_limits: Limits | None = None
    down_bias: bool | None = None
    gate_scale: float = 1.0
    learned_scale: bool = False
    moe: MoE | None = None
    post_norm_eps: float | None = None
    post_norm_weigh: Weigh = "output"
    norm_gate: int | None = None
    tied: tuple[str, ...] = ()
    post_norm_inside: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if not all(isinstance(name, str) and name in ("weight", "bias") for name in self.tied):
            raise FFNError(f"tied must be names among weight and bias, got {shown(self.tied)}")
        name, implied = activations.resolve(self.activation, "activation")
        if implied and self.gated is False:
            raise FFNError(
                f"'{self.activation}' is a gated unit and cannot be plain", f"use activation '{name}' for a plain block"
            )
        gated = bool(implied or self.gated)
        implied_limits = activations.limits_of(self.activation) or NO_LIMITS
        values = {
            "limits": implied_limits if self.limits == NO_LIMITS else self.limits,
            "activation": name,
            "gated": gated,
            "bias": (not gated) if self.bias is None else self.bias,
            "norm_bias": (self.norm == "layernorm") if self.norm_bias is None else self.norm_bias,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)  # the dataclass is frozen
        self._check()

    def _check(self) -> None:
        size("d_model", self.d_model)
        size("d_ff", self.d_ff)
        one_of("norm", self.norm, NormKind)
        one_of("norm_position", self.norm_position, NormPosition)
        one_of("norm_weight", self.norm_weight, NormWeight)
        one_of("post_norm_weigh", self.post_norm_weigh, Weigh)
        if not 0 <= _number("dropout", self.dropout) < 1:
            raise FFNError(f"dropout must be at least 0 and below 1, got {shown(self.dropout)}")
        for eps in (self.norm_eps, 0.0 if self.post_norm_eps is None else self.post_norm_eps):
            if not 0 <= _number("norm eps", eps) < 1:
                raise FFNError(f"norm eps must be at least 0 and below 1, got {shown(eps)}")
        for limits in (self.limits, *([self.shared_limits] if self.shared_limits else [])):
            check_limits(limits, self.activation)
        if self.norm_gate is not None:
            size("norm_gate", self.norm_gate)
            if self.norm == "none" or self.norm_position not in ("pre", "pre+branch"):
                raise FFNError("norm_gate needs a norm before the FFN", "it multiplies that norm's output")
        _number("residual_scale", self.residual_scale)
        _number("gate_scale", self.gate_scale)
        if self.moe:
            check_moe(self.moe)

    @property
    def shared_width(self) -> int:
        """The total d_ff of the shared experts; 0 if there are no shared experts."""
        if not self.moe or not self.moe.shared_experts:
            return 0
        return self.moe.shared_d_ff or self.moe.shared_experts * self.d_ff


def size(field: str, value: Any, high: int = MAX_SIZE, low: int = 1) -> int:
    """Return `value` if it is a whole number from `low` to `high`; else raise an FFNError that names `field`."""
    if type(value) is not int or not low <= value <= high:
        raise FFNError(f"{field} must be a whole number from {low} to {high}, got {shown(value)}")
    return value


def one_of(field: str, value: Any, literal: Any) -> Any:
    """Return `value` if it is among the Literal's choices; else raise an FFNError that lists the choices."""
    choices = list(get_args(literal))
    if value not in choices:
        usage = "use one of " + ", ".join(choices)
        raise FFNError(f"{field}: unknown choice {shown(value)}", did_you_mean(str(value), choices, usage))
    return value


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= float_info.max:
        raise FFNError(f"{field} must be a number, got {shown(value)}")
    return value


def check_moe(moe: MoE) -> None:
    """Raise FFNError for impossible routing, such as more chosen experts than exist, or groups of unequal size."""
    for field, literal in (("score", Score), ("order", Order), ("score_dtype", ScoreDType), ("weigh", Weigh)):
        one_of(field, getattr(moe, field), literal)
    _number("scale", moe.scale)
    _number("shared_scale", moe.shared_scale)
    if not _number("router_scale", moe.router_scale) > 0:
        raise FFNError(f"router_scale must be positive, got {shown(moe.router_scale)}")
    size("experts", moe.experts)
    size("top_k", moe.top_k)
    if moe.top_k > moe.experts:
        raise FFNError(f"top_k ({moe.top_k}) exceeds the number of experts ({moe.experts})")
    size("shared_experts", moe.shared_experts, low=0)
    size("identity_experts", moe.identity_experts, low=0)
    if moe.identity_experts and moe.groups > 1:
        raise FFNError(f"identity_experts = {moe.identity_experts}: they cannot be combined with groups")
    if moe.latent is None and (moe.latent_norm or moe.mixed_norm):
        raise FFNError("latent_norm and mixed_norm need a latent width", "they are norms in that narrower space")
    for field in ("latent", "lookup", "router_width", "shared_d_ff"):
        if getattr(moe, field) is not None:
            size(field, getattr(moe, field))
    if moe.skip_experts and (moe.groups > 1 or moe.identity_experts or moe.shared_routed):
        raise FFNError("skip_experts cannot be combined with groups, identity experts or routed shared experts")
    _check_choice(moe)
    if moe.groups < 1 or moe.experts % moe.groups:
        raise FFNError(f"{moe.experts} experts do not divide into {moe.groups} groups")
    if not 1 <= moe.top_groups <= moe.groups or moe.top_k > moe.experts // moe.groups * moe.top_groups:
        raise FFNError(f"top_k = {moe.top_k} cannot be chosen from {moe.top_groups} of {moe.groups} groups")


def _check_choice(moe: MoE) -> None:
    """Raise FFNError for a combination of mutually exclusive ways to choose experts."""
    special = [name for name in ("lookup", "shared_routed") if getattr(moe, name)]
    special += ["one_by_one"] if moe.order == "one_by_one" else []
    plain = moe.order == "score_first" or special == ["one_by_one"]
    if len(special) > 1 or (special and (moe.groups > 1 or moe.identity_experts or not plain)):
        raise FFNError(f"{special[0]} cannot be combined with another way to choose experts")
    if moe.lookup and moe.correction:
        raise FFNError("lookup: the token ids choose the experts, so a correction has no effect")
    if moe.shared_routed and (not moe.shared_experts or moe.shared_d_ff or moe.shared_gate or moe.shared_scale != 1):
        raise FFNError(
            "shared_routed needs shared experts that are as wide as the routed experts, without a gate or scale"
        )


def check_limits(limits: Limits, function: str) -> None:
    """Raise FFNError for a limit that is not positive, and for a soft cap on a function that has no linear factor."""
    for name, value in limits.sizes.items():
        if not _number(name, value) > 0:
            raise FFNError(f"{name} must be positive, got {shown(value)}")
    _number("up_plus", limits.up_plus)
    if limits.gate_cap is not None and function not in activations.SOFT_CAPPED:
        raise FFNError(
            f"a soft cap of the gate needs a function with a linear factor, which {function} does not have",
            "use one of " + ", ".join(activations.SOFT_CAPPED),
        )


def unit_ops(function: str, limits: Limits) -> tuple[Activation, Activation]:
    """Return the activation on the gate and the one on up, for a gated unit with these limits."""
    low = None if limits.up_limit is None else -limits.up_limit
    return (
        Activation(function, high=limits.gate_high, soft_cap=limits.gate_cap, most=limits.act_high),
        Activation("identity", low, limits.up_limit, limits.up_plus, limits.up_cap),
    )


@checked(spec=instance(FFNSpec, "an ffncli.FFNSpec"))
def steps(spec: FFNSpec) -> tuple[Step, ...]:
    """Return the block as its list of assignments, norms and residual included, in the order of execution."""
    d_model = Axis("d_model", spec.d_model)
    pre = spec.norm != "none" and spec.norm_position in ("pre", "pre+branch")
    x = "norm" if pre else "x"
    out = [Step("norm", _norm(spec, d_model, shared=spec.shared_norm), ("x",))] if pre else []
    if spec.norm_gate:
        out += _gated_norm(d_model, Axis("rank", spec.norm_gate))
        x = out[-1].output
    out += _moe(spec, x) if spec.moe else ffn(spec, x, d_model)
    out += [Step("scaled", Multiply(learned=ONE), ("down",))] if spec.learned_scale and not spec.moe else []
    return (*out, *_closing(spec, d_model, out[-1].output))


def _gated_norm(d_model: Axis, rank: Axis) -> list[Step]:
    """Multiply the norm's output by a gate computed from that output through a low-rank projection."""
    return [
        Step(f"{NORM_GATE}narrow", Linear(d_model, rank), ("norm",)),
        Step(f"{NORM_GATE}silu", Activation("silu"), (f"{NORM_GATE}narrow",)),
        Step(f"{NORM_GATE}widen", Linear(rank, d_model), (f"{NORM_GATE}silu",)),
        Step(f"{NORM_GATE}score", Activation("sigmoid"), (f"{NORM_GATE}widen",)),
        Step("gated_norm", Multiply(), ("norm", f"{NORM_GATE}score")),
    ]


def ffn(spec: FFNSpec, x: str, d_model: Axis, width: int | None = None, prefix: str = "") -> list[Step]:
    """Build the steps `up` (and `gate`), `act` and `down` of a plain or gated block; every output name starts with
    `prefix`."""
    d_ff = Axis("d_ff", width or spec.d_ff)
    up_proj = Linear(d_model, d_ff, bool(spec.bias))
    down_bias = bool(spec.bias if spec.down_bias is None else spec.down_bias)
    down_proj = Linear(d_ff, d_model, down_bias, spec.tied)
    act, lift = unit_ops(spec.activation, spec.limits)
    if spec.gated:
        up_input = "up" if lift.unlimited else "lift"
        gate_input = "gate" if spec.gate_scale == 1 else "gate_scaled"
        body = [Step("gate", up_proj, (x,)), Step("up", up_proj, (x,))]
        body += [Step(gate_input, Add(spec.gate_scale), ("gate",))] if gate_input != "gate" else []
        body += [Step("act", act, (gate_input,))]
        body += [Step("lift", lift, ("up",))] if up_input == "lift" else []
        body += [Step("hidden", Multiply(), ("act", up_input))]
    else:
        body = [Step("up", up_proj, (x,)), Step("act", act, ("up",))]
    if spec.sub_norm:
        body.append(Step("sub_norm", _norm(spec, d_ff), (body[-1].output,)))
    if spec.dropout:
        body.append(Step("dropout", Dropout(spec.dropout), (body[-1].output,)))
    body.append(Step("down", down_proj, (body[-1].output,)))
    return [_prefixed(step, prefix, x) for step in body] if prefix else body


def route_of(spec: FFNSpec) -> Route:
    """Return a mixture's Route, with an entry per router logit: last those of identity, skip and shared experts."""
    assert spec.moe is not None
    moe = spec.moe
    always = moe.shared_experts if moe.shared_routed else 0
    logits = moe.experts + moe.identity_experts + moe.skip_experts + always
    rule = {field.name: getattr(moe, field.name) for field in fields(RoutingRule)}
    lookup = Axis("vocab", moe.lookup) if moe.lookup else None
    return Route(
        **{**rule, "experts": Axis("experts", logits)}, always=always, lookup=lookup,
        learned_scale=spec.learned_scale or moe.expert_scale, expert_scale=moe.expert_scale,
    )  # fmt: skip


def _moe(spec: FFNSpec, x: str) -> list[Step]:
    assert spec.moe is not None
    moe, d_model, experts = spec.moe, Axis("d_model", spec.d_model), Axis("experts", spec.moe.experts)
    route = route_of(spec)
    inner = Axis("latent", moe.latent) if moe.latent else d_model
    program, common = ffn(spec, "x", inner), ("expert_norm",) if moe.expert_norm else ()
    program += [Step(name, _norm(spec, inner, after=True), ("down",)) for name in common]
    mix = Experts(tuple(program), experts, moe.weigh, moe.identity_experts, common)
    if moe.router_width:
        inside = Axis("router", moe.router_width)
        body = router_steps(x, d_model, route.experts, _norm(spec, inside), moe.router_carries)
    else:
        body = []
        if moe.router_norm:
            body.append(Step("router_norm", replace(_norm(spec, d_model), weight="none", bias=False), ("x",)))
            body.append(Step("router_input", Multiply(learned=d_model), ("router_norm",)))
        reads = body[-1].output if body else x
        body.append(Step("router", Linear(d_model, route.experts, moe.router_bias), (reads,)))
    body += [Step("router_scaled", Add(moe.router_scale), ("router",))] if moe.router_scale != 1 else []
    body.append(Step("route", route, (body[-1].output, "token_ids") if moe.lookup else (body[-1].output,)))
    entering = x
    if moe.latent:
        body.append(Step("latent", Linear(d_model, inner), (x,)))
        body += [Step("latent_norm", _norm(spec, inner), ("latent",))] if moe.latent_norm else []
        entering = body[-1].output
    body.append(Step("experts", mix, (entering, "route")))
    body += [Step("mixed_norm", _norm(spec, inner), ("experts",))] if moe.mixed_norm else []
    body += [Step("widened", Linear(inner, d_model), (body[-1].output,))] if moe.latent else []
    body += [Step("biased", Add(bias=d_model), (body[-1].output,))] if moe.mixed_bias else []
    return body + _shared(spec, moe, x, d_model, body[-1].output)


def _shared(spec: FFNSpec, moe: MoE, x: str, d_model: Axis, mixed: str) -> list[Step]:
    """Build the steps of the shared experts, of their gate if any, and of the sum with the routed experts' output
    `mixed`; none without shared experts."""
    if not moe.shared_experts:
        return []
    shared_spec = spec if spec.shared_limits is None else replace(spec, limits=spec.shared_limits)
    if moe.shared_routed:
        always = Experts(tuple(ffn(shared_spec, "x", d_model)), Axis("experts", moe.shared_experts), always=True)
        return [Step("shared", always, (x, "route")), Step("moe", Add(), (mixed, "shared"))]
    body = ffn(shared_spec, x, d_model, spec.shared_width, "shared.")
    shared = "shared.down"
    if moe.shared_gate:
        body.append(Step("shared_gate", Linear(d_model, Axis("one", 1)), (x,)))
        body.append(Step("shared_score", Activation("sigmoid"), ("shared_gate",)))
        body.append(Step("shared", Multiply(), ("shared_score", "shared.down")))
        shared = "shared"
    return [*body, Step("moe", Add(moe.shared_scale), (mixed, shared))]


def _closing(spec: FFNSpec, d_model: Axis, last: str) -> list[Step]:
    """Build the steps after the FFN: a norm on the branch, the residual, a norm after the residual."""
    out: list[Step] = []
    normed = spec.norm != "none"
    if normed and spec.norm_position in ("branch", "pre+branch"):
        norm = replace(_norm(spec, d_model, after=True), inside=spec.post_norm_inside)
        out.append(Step("post_norm", norm, (last,)))
        last = "post_norm"
    if spec.residual or spec.parallel:
        stream = ("x", "attention") if spec.parallel else ("x",)
        out.append(Step("out", Add(spec.residual_scale), (*stream, last)))
        last = "out"
    if normed and spec.norm_position == "post":
        out.append(Step("post_norm", _norm(spec, d_model, after=True), (last,)))
    return out


def _norm(spec: FFNSpec, axis: Axis, shared: bool = False, after: bool = False) -> Norm:
    """Build a norm. A norm `after` the FFN or an expert may have another eps and apply its weight differently."""
    kind: Literal["layernorm", "rmsnorm"] = "rmsnorm" if spec.norm == "rmsnorm" else "layernorm"
    if spec.norm == "none":  # a sub_norm without any other norm is an RMSNorm (BitNet)
        kind = "rmsnorm"
    eps = spec.post_norm_eps if after and spec.post_norm_eps is not None else spec.norm_eps
    weigh = spec.post_norm_weigh if after else "output"
    return Norm(kind, axis, eps, spec.norm_weight, bool(spec.norm_bias), shared, weigh)


def _prefixed(step: Step, prefix: str, keep: str) -> Step:
    return replace(step, output=prefix + step.output, inputs=tuple(n if n == keep else prefix + n for n in step.inputs))


STATE = "previous_router_state"  # an additional input of the block


def router_steps(x: str, d_model: Axis, experts: Axis, norm: Norm, carries: bool) -> list[Step]:
    """Build the steps from `x` to the logits, `router`; `carries` adds the state of the previous layer's router."""
    width = norm.axis
    body = [Step("router_in", Linear(d_model, width, bias=True), (x,))]
    if carries:
        body.append(Step("router_carried", Multiply(learned=width), (STATE,)))
        body.append(Step("router_state", Add(), ("router_in", "router_carried")))
    body.append(Step("router_norm", norm, (body[-1].output,)))
    for layer in ("1", "2"):
        body.append(Step(f"router_fc{layer}", Linear(width, width, bias=True), (body[-1].output,)))
        body.append(Step(f"router_act{layer}", Activation("gelu"), (body[-1].output,)))
    return [*body, Step("router", Linear(width, experts), (body[-1].output,))]


def without_nonlinearity(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps with every activation, limits included, replaced by the identity, except inside experts."""
    return tuple(replace(s, op=Activation("identity")) if isinstance(s.op, Activation) else s for s in steps)


def with_biases(steps: Sequence[Step], bias: bool) -> tuple[Step, ...]:
    """Return the steps with a bias in every Linear (in none if `bias` is False), including inside experts."""

    def changed(op: Op) -> Op:
        if isinstance(op, Experts):
            return replace(op, program=with_biases(op.program, bias))
        return replace(op, bias=bias) if isinstance(op, Linear) else op

    return tuple(replace(step, op=changed(step.op)) for step in steps)


def final_layer(source: str, d_model: int, vocab: int, bias: bool) -> tuple[Step, ...]:
    """Return `logits = source · W (+ b)` over the vocabulary, and `probs = softmax(logits)`.

    The softmax is a Route that chooses every entry of the axis. Raises FFNError if `vocab` is not a valid size.
    """
    axis = Axis("vocab", size("vocab", vocab))
    softmax = Route(axis, vocab, renormalise=False, score_dtype="input")
    return (
        Step("logits", Linear(Axis("d_model", d_model), axis, bias), (source,)),
        Step("probs", softmax, ("logits",)),
    )


def merged_first(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Prepend `merged = x + attention` to the block, for engines that leave attention's residual add to the FFN."""
    (entry,) = block_inputs(steps)
    moved = [replace(s, inputs=tuple("merged" if name == entry else name for name in s.inputs)) for s in steps]
    return (Step("merged", Add(), (entry, "attention")), *moved)
