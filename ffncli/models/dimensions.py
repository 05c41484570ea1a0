"""The dimension options: they describe a block, or change a model's blocks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import prod
from typing import Annotated, Any

from ffncli.block import activations
from ffncli.block.recipe import FFNSpec, MoE, NormKind, NormPosition, one_of, size
from ffncli.errors import FFNError, option, shown
from ffncli.models.model import Resolved, block_model, unknown_note
from ffncli.options.accept import COUNT, MAX_SIZE, PROBABILITY, listed, number_or_text
from ffncli.options.accept import whole as whole_from
from ffncli.options.opt import SOURCE, Opt, Options

_SIZE = number_or_text("a whole number or a string such as '4x'")


@dataclass(frozen=True, kw_only=True)
class Dimensions(Options):
    """The dimension options; an option that is not set is None. `d_ff` is a width or a multiple of d_model (`4x`)."""

    d_model: Annotated[
        int | str | None,
        Opt(
            "--d-model", metavar="N", group=SOURCE, accepts=_SIZE,
            help="Width of the model. This and the following options override SOURCE.",
        ),
    ] = None  # fmt: skip
    d_ff: Annotated[
        int | str | None,
        Opt(
            "--d-ff", metavar="N|4x", group=SOURCE, accepts=_SIZE,
            help="Width of one projection: a number, or a multiple of d_model.",
        ),
    ] = None  # fmt: skip
    activation: Annotated[
        str | None,
        Opt(
            "--activation", metavar="NAME", group=SOURCE, completes="functions gates limited",
            help="Activation, such as gelu or silu; swiglu, geglu and reglu are gated.",
        ),
    ] = None  # fmt: skip
    gated: Annotated[bool | None, Opt("--gated/--plain", group=SOURCE, help="With a gate projection, or without.")] = (
        None
    )
    bias: Annotated[
        bool | None,
        Opt("--bias/--no-bias", group=SOURCE, help="Add biases to the projections. [default: in plain blocks]"),
    ] = None
    norm: Annotated[
        str | None,
        Opt("--norm", metavar="NAME", group=SOURCE, completes="norms", help="Norm: none, layernorm or rmsnorm."),
    ] = None
    norm_position: Annotated[
        str | None,
        Opt(
            "--norm-position", metavar="PLACE", group=SOURCE, completes="norm_positions",
            help="Position of the norm: pre, post, branch or pre+branch.",
        ),
    ] = None  # fmt: skip
    residual: Annotated[
        bool | None, Opt("--residual/--no-residual", group=SOURCE, help="Add the input to the output.")
    ] = None
    dropout: Annotated[
        float | None,
        Opt(
            "--dropout", metavar="P", group=SOURCE, accepts=PROBABILITY,
            help="Dropout probability before the down projection.",
        ),
    ] = None  # fmt: skip
    experts: Annotated[
        int | None,
        Opt("--experts", metavar="N", group=SOURCE, accepts=COUNT, help="Routed experts (mixture of experts)."),
    ] = None
    top_k: Annotated[
        int | None, Opt("--top-k", metavar="N", group=SOURCE, accepts=COUNT, help="Experts per token. [default: 2]")
    ] = None
    shared_experts: Annotated[
        int | None,
        Opt(
            "--shared-experts", metavar="N", group=SOURCE, accepts=whole_from(0, MAX_SIZE),
            help="Shared experts, which every token uses.",
        ),
    ] = None  # fmt: skip

    def any_set(self) -> bool:
        """Return whether any option is set."""
        return any(getattr(self, f.name) is not None for f in fields(Dimensions))

    @property
    def dimensions(self) -> "Dimensions":
        """Return the dimension options alone, from a record that also has other options."""
        return Dimensions(**{f.name: getattr(self, f.name) for f in fields(Dimensions)})


def merged(first: Dimensions, over: Dimensions) -> Dimensions:
    """Return `first`, overridden by the options that are set in `over`."""
    changes = {f.name: value for f in fields(Dimensions) if (value := getattr(over, f.name)) is not None}
    return replace(first, **changes)


def from_dimensions(options: Dimensions, source: str | None = None) -> Resolved:
    """Build a block from dimensions only; by default it is plain, with relu, biases and d_ff = 4x, and has no norm.

    `source` is the inline source that specified them, such as `512x2048:gelu`; without it, a note lists the defaults.
    """
    if options.d_model is None:
        raise FFNError(
            f"{option('d_model')} is missing",
            f"give a SOURCE (a model, a directory, 512x2048:gelu) or {option('d_model')}",
        )
    label = source if source is None or len(source) <= 80 else source[:60] + "…"
    names = (f"{label}: d_model", f"{label}: d_ff") if source else (option("d_model"), option("d_ff"))
    d_model = whole(names[0], options.d_model)
    d_ff = width(names[1], "4x" if options.d_ff is None else options.d_ff, d_model)
    spec = FFNSpec(d_model, d_ff, **_choices(options, "relu"), moe=_moe(options, None))
    if source:
        return block_model(spec, source)
    defaults = [
        *(["d_ff = 4x"] if options.d_ff is None else []),
        *([f"activation {spec.activation}"] if options.activation is None else []),
        *([f"{'biases' if spec.bias else 'no biases'}"] if options.bias is None else []),
    ]
    defaults += ["top_k = 2"] if options.experts and options.experts > 1 and options.top_k is None else []
    name = f"{spec.d_model}x{spec.d_ff}:{spec.activation}"
    return block_model(spec, "", name, notes=(f"assuming {', '.join(defaults)}",) if defaults else ())


def with_dimensions(resolved: Resolved, options: Dimensions) -> Resolved:
    """Return the model with its specs overridden by the options that are set. Modules in memory are rejected, because
    their code determines the spec.

    If a model mixes dense and MoE layers, `d_ff` and the MoE options change only layers of the main group's kind (dense
    or MoE); the other layers keep their values, and a note says so. `top_k` without `experts` applies to the model's
    MoE layers. Fields that an option sets are no longer unknown.
    """
    if not options.any_set():
        return resolved
    if resolved.weights is not None:
        raise FFNError("the dimension options cannot change a module that is already built", "give its class")
    model = resolved.model
    main = model.main.spec.moe is not None
    others = replace(options, d_ff=None, experts=None, top_k=None, shared_experts=None)
    mixed = any((group.spec.moe is not None) != main for group in model.groups)
    ours = options
    if mixed and not main and options.experts is None:  # `top_k` and `shared_experts` can only apply to MoE layers
        ours = replace(options, top_k=None, shared_experts=None)
        others = replace(others, top_k=options.top_k, shared_experts=options.shared_experts)
    specs = [_changed(g.spec, ours if (g.spec.moe is not None) == main else others) for g in model.groups]
    names = ", ".join(f.name for f in fields(Dimensions) if getattr(options, f.name) is not None)
    unknown = frozenset(name for name in model.unknown if getattr(options, name) is None)
    notes = resolved.notes
    if unknown != model.unknown:
        was, now = unknown_note(model.unknown), (unknown_note(unknown),) if unknown else ()
        notes = tuple(text for note in notes for text in (now if note == was else (note,)))
    if mixed and others != options and (ours == options or options.d_ff is not None):
        notes = (*notes, f"widths and experts are changed in the {'MoE' if main else 'dense'} layers only")
    outside = model.non_ffn if options.d_model is None else None  # a new d_model would change the attention too
    changed = replace(model.with_specs(specs), unknown=unknown, non_ffn=outside)
    evidence = (f"changed by options: {names}", *resolved.evidence)
    return replace(resolved, model=changed, evidence=evidence, stored=None, notes=notes, published_as=None)


def _changed(spec: FFNSpec, options: Dimensions) -> FFNSpec:
    d_model = whole(option("d_model"), options.d_model) if options.d_model is not None else spec.d_model
    d_ff = width(option("d_ff"), options.d_ff, d_model) if options.d_ff is not None else spec.d_ff
    choices = _choices(options, None)
    if "norm" in choices and choices["norm"] != spec.norm:
        choices["norm_bias"] = None  # use the default of the new norm
    return replace(spec, d_model=d_model, d_ff=d_ff, moe=_moe(options, spec.moe), **choices)


def _choices(options: Dimensions, default_activation: str | None) -> dict[str, Any]:
    """Return the options that are set, except for sizes, as keyword arguments of FFNSpec."""
    flags = {name: getattr(options, name) for name in ("bias", "residual", "dropout")}
    out: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    name = options.activation if options.activation is not None else default_activation
    if name is not None:
        out["activation"], implied = activations.resolve(name)
        if implied and options.gated is False:
            raise FFNError(
                f"{option('activation', name)} is gated and contradicts {option('gated', False)}",
                f"for a plain block: {option('activation', out['activation'])}",
            )
        if implied:
            out |= {"gated": True, "limits": activations.limits_of(name), "shared_limits": None}
    if options.gated is not None:
        out["gated"] = options.gated
    if options.norm is not None:
        out["norm"] = one_of(option("norm"), options.norm, NormKind)
    if options.norm_position is not None:
        out["norm_position"] = one_of(option("norm_position"), options.norm_position, NormPosition)
        if options.norm == "none" or (options.norm is None and default_activation is not None):
            raise FFNError(
                f"{option('norm_position', options.norm_position)} needs {option('norm')}", "there is no norm to place"
            )
    return out


def _moe(options: Dimensions, routing: MoE | None) -> MoE | None:
    """Return the routing with `experts`, `top_k` and `shared_experts` applied; `routing` is the source's routing."""
    if options.experts is None and routing is None:
        if options.top_k is not None or options.shared_experts is not None:
            name = "top_k" if options.top_k is not None else "shared_experts"
            raise FFNError(f"{option(name)} needs {option('experts')}", "a dense block has no router")
        return None
    base = routing or MoE(options.experts or 0, min(2, options.experts or 0))
    changes: dict[str, Any] = {
        n: getattr(options, n) for n in ("experts", "top_k", "shared_experts") if getattr(options, n) is not None
    }
    if options.shared_experts is not None:
        changes["shared_d_ff"] = None  # each shared expert is as wide as a routed expert
    moe = replace(base, **changes)
    if moe.top_k > moe.experts:
        if options.top_k is None:
            what = f"{option('experts', moe.experts)} is fewer than the {moe.top_k} that each token uses"
            raise FFNError(what, f"add {option('top_k')}, at most {moe.experts}")
        raise FFNError(
            f"{option('top_k', moe.top_k)} exceeds the {moe.experts} experts",
            "choose top_k up to the number of experts",
        )
    return moe


def whole(name: str, text: int | str, high: int = MAX_SIZE) -> int:
    """Convert a size such as `4096`: a whole number from 1 to `high`."""
    if re.fullmatch(r"[-+]?[0-9]{1,4000}", str(text).strip()):
        return size(name, int(text), high)
    raise FFNError(f"{name} must be a whole number, got {shown(text)}")


def width(name: str, text: int | str, d_model: int) -> int:
    """Return d_ff from a width (`2048`) or from a multiple of d_model (`4x`, `2.6875x`) that yields a whole number."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)x", str(text).strip())
    if not match:
        return whole(name, text)
    exact = Fraction(match[1]) * d_model
    if exact.denominator != 1:
        raise FFNError(f"{name} {text} of d_model {d_model} is {float(exact):g}, not a whole number")
    return size(name, int(exact))


def leading_axes(tokens: int | None, batch: int | None, seq_len: int | None) -> tuple[int, ...] | None:
    """Return the axes before d_model; None if no option is set. Raises FFNError for `tokens` with `batch`."""
    if batch is None and seq_len is None:
        return None if tokens is None else (tokens,)
    if tokens is not None:
        raise FFNError(
            f"{option('tokens')} contradicts {option('batch')} and {option('seq_len')}", "give one or the other"
        )
    return (batch or 1, seq_len or 1)


def token_counts(tokens: int | Sequence[int] | None, batch: int | None, seq_len: int | None) -> tuple[int, ...]:
    """Return the token counts, from a list or from one batch; () if no option is set. Raises FFNError if `tokens` is
    combined with `batch` or `seq_len`."""
    if batch is None and seq_len is None:
        return listed(tokens)
    return (prod(leading_axes(None if tokens is None else 1, batch, seq_len) or ()),)
