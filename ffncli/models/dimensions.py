"""The dimension options: they make a block, or change a model's blocks."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from ffncli.block import activations
from ffncli.block.recipe import MAX_SIZE, FFNSpec, MoE, NormKind, NormPosition, one_of, size
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.models.model import Resolved, block_model, unknown_note


@dataclass(frozen=True)
class Dimensions:
    """The dimension options; None where one is not set. d_ff is a number or a multiple of d_model (`4x`)."""

    d_model: str | None = None
    d_ff: str | None = None
    activation: str | None = None
    gated: bool | None = None
    bias: bool | None = None
    norm: str | None = None
    norm_position: str | None = None
    residual: bool | None = None
    dropout: float | None = None
    experts: int | None = None
    top_k: int | None = None
    shared_experts: int | None = None

    def any_set(self) -> bool:
        """Whether any option is set."""
        return any(getattr(self, f.name) is not None for f in fields(self))


def merged(first: Dimensions, over: Dimensions) -> Dimensions:
    """`first`, overridden by the options that `over` sets."""
    changes = {f.name: value for f in fields(over) if (value := getattr(over, f.name)) is not None}
    return replace(first, **changes)


def from_dimensions(options: Dimensions, source: str | None = None) -> Resolved:
    """A block from dimensions alone; by default relu, plain, with bias, d_ff = 4x, no norm.

    `source` is the inline text they came from, if any; without one, a note lists the defaults.
    """
    if options.d_model is None:
        raise FFNError("--d-model is missing", "give a SOURCE (a model, a directory, 512x2048:gelu) or --d-model N")
    label = source if source is None or len(source) <= 80 else source[:60] + "…"
    names = (f"{label}: d_model", f"{label}: d_ff") if source else ("--d-model", "--d-ff")
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
    """The model with its specs overridden by the options that are set.

    In a mix of dense and MoE layers, --d-ff and the MoE options apply to the kind of most layers (the model's
    "per layer" numbers); the other layers keep their values, and a note says so. --top-k without --experts applies to
    the model's experts. A field that an option sets is no longer unknown. Raises FFNError for a user's module: its code
    decides what it computes.
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
    if mixed and not main and options.experts is None:  # these options can only mean the MoE layers
        ours = replace(options, top_k=None, shared_experts=None)
        others = replace(others, top_k=options.top_k, shared_experts=options.shared_experts)
    specs = [_changed(g.spec, ours if (g.spec.moe is not None) == main else others) for g in model.groups]
    names = ", ".join(f.name for f in fields(options) if getattr(options, f.name) is not None)
    unknown = frozenset(name for name in model.unknown if getattr(options, name) is None)
    notes = resolved.notes
    if unknown != model.unknown:
        was, now = unknown_note(model.unknown), (unknown_note(unknown),) if unknown else ()
        notes = tuple(text for note in notes for text in (now if note == was else (note,)))
    if mixed and others != options and (ours == options or options.d_ff is not None):
        notes = (*notes, f"widths and experts are changed in the {'MoE' if main else 'dense'} layers only")
    outside = model.non_ffn if options.d_model is None else None  # the attention's width would change too
    changed = replace(model.with_specs(specs), unknown=unknown, non_ffn=outside)
    evidence = (f"changed by options: {names}", *resolved.evidence)
    return replace(resolved, model=changed, evidence=evidence, stored=None, notes=notes)


def _changed(spec: FFNSpec, options: Dimensions) -> FFNSpec:
    d_model = whole("--d-model", options.d_model) if options.d_model is not None else spec.d_model
    d_ff = width("--d-ff", options.d_ff, d_model) if options.d_ff is not None else spec.d_ff
    choices = _choices(options, None)
    if "norm" in choices and choices["norm"] != spec.norm:
        choices["norm_bias"] = None  # the new kind's default
    return replace(spec, d_model=d_model, d_ff=d_ff, moe=_moe(options, spec.moe), **choices)


def _choices(options: Dimensions, default_activation: str | None) -> dict[str, Any]:
    """The keyword arguments of FFNSpec for everything but the sizes; only the options that are set."""
    flags = {name: getattr(options, name) for name in ("bias", "residual", "dropout")}
    out: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    name = options.activation if options.activation is not None else default_activation
    if name is not None:
        out["activation"], implied = activations.resolve(name)
        if implied and options.gated is False:
            raise FFNError(
                f"--activation {name} is gated and contradicts --plain",
                f"for a plain block: --activation {out['activation']}",
            )
        if implied:
            out |= {"gated": True, "limits": activations.limits_of(name), "shared_limits": None}
    if options.gated is not None:
        out["gated"] = options.gated
    if options.norm is not None:
        out["norm"] = one_of("--norm", options.norm, NormKind)
    if options.norm_position is not None:
        out["norm_position"] = one_of("--norm-position", options.norm_position, NormPosition)
        if options.norm == "none" or (options.norm is None and default_activation is not None):
            raise FFNError(f"--norm-position {options.norm_position} needs --norm", "there is no norm to place")
    return out


def _moe(options: Dimensions, routing: MoE | None) -> MoE | None:
    """The routing after --experts, --top-k and --shared-experts; `routing` is the source's."""
    if options.experts is None and routing is None:
        if options.top_k is not None or options.shared_experts is not None:
            option = "--top-k" if options.top_k is not None else "--shared-experts"
            raise FFNError(f"{option} needs --experts", "a dense block has no router")
        return None
    base = routing or MoE(options.experts or 0, min(2, options.experts or 0))
    changes: dict[str, Any] = {
        n: getattr(options, n) for n in ("experts", "top_k", "shared_experts") if getattr(options, n) is not None
    }
    if options.shared_experts is not None:
        changes["shared_d_ff"] = None  # each as wide as a routed one
    moe = replace(base, **changes)
    if moe.top_k > moe.experts:
        if options.top_k is None:
            what = f"--experts {moe.experts} is fewer than the {moe.top_k} that each token uses"
            raise FFNError(what, f"add --top-k, at most {moe.experts}")
        raise FFNError(f"--top-k {moe.top_k} exceeds the {moe.experts} experts", "choose at most as many as there are")
    return moe


def whole(option: str, text: str, high: int = MAX_SIZE) -> int:
    """A size from text: `4096`. Raises FFNError unless it is a whole number from 1 to `high`."""
    if re.fullmatch(r"[-+]?[0-9]{1,4000}", text.strip()):
        return size(option, int(text), high)
    raise FFNError(f"{option} must be a whole number, got {shown(text)}")


def width(option: str, text: str, d_model: int) -> int:
    """d_ff from `2048` or, as a multiple of d_model, `4x` or `2.6875x`, which must give a whole number."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)x", text.strip())
    if not match:
        return whole(option, text)
    exact = Fraction(match[1]) * d_model
    if exact.denominator != 1:
        raise FFNError(f"{option} {text} of d_model {d_model} is {float(exact):g}, not a whole number")
    return size(option, int(exact))


def leading_axes(tokens: int | None, batch: int | None, seq_len: int | None) -> tuple[int, ...] | None:
    """An input's axes before d_model; None if no option sets them. Raises FFNError if two options do."""
    if batch is None and seq_len is None:
        return None if tokens is None else (tokens,)
    if tokens is not None:
        raise FFNError("--tokens contradicts --batch and --seq-len", "give one or the other")
    return (batch or 1, seq_len or 1)
