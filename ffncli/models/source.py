"""One string from the user → the Model it means; and the dimension options that make or change one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ffncli.block import activations, dtypes
from ffncli.block.recipe import FFNSpec, MoE, NormKind, NormPosition, one_of, size
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.models import catalog, layout
from ffncli.models.checkpoint import Checkpoint, check_shapes, open_checkpoint
from ffncli.models.config import read_config
from ffncli.models.model import Model, block_model
from ffncli.models.strict_json import shown_path

_INLINE = re.compile(r"(?P<d_model>[^x:/\\]+)x(?P<d_ff>[\d.]+x?|-?\w+?)(?::(?P<activation>[^:/\\]*))?")
_UNREAD = {
    ".gguf": "GGUF files", ".bin": "pickled weights", ".pt": "pickled weights", ".pth": "pickled weights",
    ".py": "modules from Python files",
}  # fmt: skip
_SUFFIXES = (".json", ".safetensors", *_UNREAD)


@dataclass(frozen=True)
class Dimensions:
    """What the dimension options said; None is "not said". d_ff is a number or a multiple of d_model (`4x`)."""

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

    def said(self) -> bool:
        """Whether any option was given."""
        return any(getattr(self, f.name) is not None for f in fields(self))


def load(source: str | None = None, dimensions: Dimensions | None = None) -> Model:
    """The Model for a SOURCE and dimension options: resolved, corrected by its tensor names, then overridden.

    Without a source the options alone make a block. Raises FFNError for whatever cannot be a block.
    """
    said = dimensions or Dimensions()
    if source is None:
        return from_dimensions(said)
    if inline := _inline(source):
        return from_dimensions(_merged(inline, said), source)
    return with_dimensions(with_evidence(resolve(source)), said)


def resolve(text: str) -> Model:
    """The Model that SOURCE means, if it is no inline block: a path, a catalog name, a directory of that name.

    Raises FFNError with the nearest known names where it means nothing.
    """
    if text.startswith("hf://"):
        raise FFNError(f"{shown(text)}: this version does not read from the Hub", "give a local directory of the model")
    if "\0" in text:
        raise FFNError(f"source {shown(text)} holds a NUL character")
    path = Path(os.path.expanduser(text))
    looks_like_path = "/" in text or os.sep in text or text[:1] in (".", "~") or path.suffix in _SUFFIXES
    if not looks_like_path and (model := catalog.find(text)):
        return (
            _noted(model, f"{text} is the known model; for the directory say ./{text}")
            if os.path.isdir(text)
            else model
        )
    try:
        exists = path.exists()
    except OSError as error:  # a name too long for any file system
        raise FFNError(f"source {shown(text)}: {error.strerror}") from None
    if text and exists:
        return _from_path(path, text)
    if looks_like_path and text:
        raise FFNError(f"{shown_path(path)} does not exist", _path_hint(text))
    hint = did_you_mean(
        text, catalog.spellings(), "`ffn models` lists the known ones; a path or 512x2048:gelu works too"
    )
    raise FFNError(f"unknown model {shown(text)}", hint)


def _path_hint(text: str) -> str:
    name = text.rpartition("/")[2]
    if catalog.find(name):
        return f"the catalog has '{name}'"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith("."):
        hub = "this version does not read from the Hub: give a local directory"
        near = did_you_mean(name, catalog.spellings(), "")
        return f"{hub}; for counts alone, {near}" if near else hub
    return "give a model directory, a config.json or a .safetensors file"


def _from_path(path: Path, text: str) -> Model:
    """A directory or file on disk: its config, and what the tensor names say of the first layer of each group."""
    if path.suffix in _UNREAD and path.is_file():
        raise FFNError(f"{shown_path(path)}: {_UNREAD[path.suffix]} are not read by this version", "use safetensors")
    folder = path if path.is_dir() else path.parent
    config = (
        path if path.suffix == ".json" and not path.name.endswith(".safetensors.index.json") else folder / "config.json"
    )
    if path.is_file() and path.suffix not in _SUFFIXES:
        raise FFNError(f"{shown_path(path)} is no model", "give a directory, a config.json or a .safetensors file")
    if not config.exists():
        raise FFNError(f"{shown_path(config)} is missing", "give a directory that has one: it holds the widths")
    model = read_config(config, text)
    location = path if path.is_dir() or config != path else (folder if config.name == "config.json" else None)
    return replace(model, location=location) if location else model


def with_evidence(model: Model) -> Model:
    """The model corrected by its tensors, where there are any: gatedness, biases and dtype follow the file."""
    if model.location is None:
        return model
    checkpoint = open_checkpoint(model.location)
    if checkpoint is None:
        if model.source.endswith(".json"):  # the config is what was asked for
            return model
        pickled = any(any(model.location.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
        also = " (pickled weights are not read: save them as safetensors)" if pickled else ""
        return _noted(model, f"no safetensors in {shown_path(model.location)}{also}: taken from the config alone")
    model = _present(replace(model, checkpoint=checkpoint), checkpoint)
    specs, seen = [], []
    for group in model.groups:
        names = layer_names(model, checkpoint, group.stack, group.layers[0])
        if packed := names.packed(group.spec):
            return _noted(model, f"{packed} is packed (quantized): taken from the config alone")
        found = layout.inspect(names, group.spec)
        layer_names(model, checkpoint, group.stack, group.layers[-1]).way(
            found.spec
        )  # the config's last layer is there
        check_shapes(checkpoint, layout.locate(names, found.spec))
        specs.append(found.spec)
        seen += [line for line in found.evidence if line not in seen]
    evidence = (*seen, *model.evidence)  # tensor names decide before the config
    return replace(model.with_specs(specs), evidence=evidence, dtype=_stored_dtype(model, checkpoint, specs[0]))


def layer_names(model: Model, checkpoint: Checkpoint, stack: str, layer: int) -> layout.Names:
    """The tensor names among which one layer's parameters are looked for."""
    return layout.Names(checkpoint.files, model.model_type, stack, layer, checkpoint.where)


def _present(model: Model, checkpoint: Checkpoint) -> Model:
    """Without the stacks that the file does not have; with all of them where it has none: their error says more."""
    stacks = layout.present_stacks(checkpoint.files, model.model_type)
    absent = sorted({group.stack for group in model.groups} - stacks) if stacks else []
    if not absent:
        return model
    kept = tuple(group for group in model.groups if group.stack in stacks)
    return _noted(replace(model, groups=kept), *(f"no {s} tensors in {checkpoint.where}: left out" for s in absent))


def _stored_dtype(model: Model, checkpoint: Checkpoint, spec: FFNSpec) -> str | None:
    """The dtype of the first layer's first matrix by its header; the config's where that shard is not here."""
    first = model.groups[0]
    located = layout.locate(layer_names(model, checkpoint, first.stack, first.layers[0]), spec)
    name = next(item.names[0] for item in located if item.parameter in ("up.weight", "router.weight"))
    if not os.path.exists(checkpoint.files[name]):
        return model.dtype
    code = checkpoint.info(name).dtype
    row = dtypes.find(code)
    return row.name if row else code


def _noted(model: Model, *notes: str) -> Model:
    return replace(model, notes=(*model.notes, *notes))


# --- blocks from dimensions -------------------------------------------------------------------------------------------


def _inline(text: str) -> Dimensions | None:
    """What `512x2048:gelu` says: a number before the x, so that no model name is taken for one."""
    match = _INLINE.fullmatch(text)
    if not match or not re.fullmatch(r"[-+]?[0-9][0-9.e^]*", match["d_model"]):
        return None
    return Dimensions(d_model=match["d_model"], d_ff=match["d_ff"], activation=match["activation"])


def _merged(first: Dimensions, over: Dimensions) -> Dimensions:
    said = {f.name: value for f in fields(over) if (value := getattr(over, f.name)) is not None}
    return replace(first, **said)


def from_dimensions(said: Dimensions, source: str | None = None) -> Model:
    """A block from dimensions alone: relu, plain, bias, d_ff = 4x, no norm unless said.

    `source` is the inline text they came from, if any; without one, the defaults taken are noted.
    """
    if said.d_model is None:
        raise FFNError("--d-model is missing", "give a SOURCE (a model, a directory, 512x2048:gelu) or --d-model N")
    names = (f"{source}: d_model", f"{source}: d_ff") if source else ("--d-model", "--d-ff")
    d_model = whole(names[0], said.d_model)
    d_ff = width(names[1], "4x" if said.d_ff is None else said.d_ff, d_model)
    spec = FFNSpec(d_model, d_ff, **_choices(said, "relu"), moe=_moe(said, None))
    if source:
        return block_model(spec, source)
    defaults = [
        *(["d_ff = 4x"] if said.d_ff is None else []),
        *([f"activation {spec.activation}"] if said.activation is None else []),
        *([f"{'biases' if spec.bias else 'no biases'}"] if said.bias is None else []),
    ]
    defaults += ["top_k = 2"] if said.experts and said.experts > 1 and said.top_k is None else []
    name = f"{spec.d_model}x{spec.d_ff}:{spec.activation}"
    return block_model(spec, "", name, notes=(f"not said, so taken: {', '.join(defaults)}",) if defaults else ())


def with_dimensions(model: Model, said: Dimensions) -> Model:
    """The model with the options that were given put over its specs.

    Where dense and MoE layers mix, --d-ff and the MoE options mean the layers of the kind that the model has most of
    (its "per layer" numbers); the others keep theirs, and a note says so.
    """
    if not said.said():
        return model
    main = model.main.spec.moe is not None
    others = replace(said, d_ff=None, experts=None, top_k=None, shared_experts=None)
    mixed = any((group.spec.moe is not None) != main for group in model.groups)
    specs = [_changed(g.spec, said if (g.spec.moe is not None) == main else others) for g in model.groups]
    given = ", ".join(f.name for f in fields(said) if getattr(said, f.name) is not None)
    changed = replace(model.with_specs(specs), evidence=(f"changed by options: {given}", *model.evidence))
    if not mixed or others == said:
        return changed
    kind = "MoE" if main else "dense"
    return replace(changed, notes=(*model.notes, f"widths and experts are changed in the {kind} layers only"))


def _changed(spec: FFNSpec, said: Dimensions) -> FFNSpec:
    d_model = whole("--d-model", said.d_model) if said.d_model is not None else spec.d_model
    d_ff = width("--d-ff", said.d_ff, d_model) if said.d_ff is not None else spec.d_ff
    choices = _choices(said, None)
    if "norm" in choices and choices["norm"] != spec.norm:
        choices["norm_bias"] = None  # the new kind's default
    return replace(spec, d_model=d_model, d_ff=d_ff, moe=_moe(said, spec.moe), **choices)


def _choices(said: Dimensions, default_activation: str | None) -> dict[str, Any]:
    """The keyword arguments of FFNSpec for everything but the sizes; only what was said."""
    out: dict[str, Any] = {n: getattr(said, n) for n in ("bias", "residual", "dropout") if getattr(said, n) is not None}
    name = said.activation if said.activation is not None else default_activation
    if name is not None:
        out["activation"], implied = activations.resolve(name)
        if implied and said.gated is False:
            raise FFNError(
                f"--activation {name} is gated and contradicts --plain",
                f"for a plain block: --activation {out['activation']}",
            )
        if implied:
            out["gated"] = True
    if said.gated is not None:
        out["gated"] = said.gated
    if said.norm is not None:
        out["norm"] = one_of("--norm", said.norm, NormKind)
    if said.norm_position is not None:
        out["norm_position"] = one_of("--norm-position", said.norm_position, NormPosition)
        if said.norm == "none" or (said.norm is None and default_activation is not None):
            raise FFNError(f"--norm-position {said.norm_position} needs --norm", "there is no norm to place")
    return out


def _moe(said: Dimensions, given: MoE | None) -> MoE | None:
    """The routing after --experts, --top-k and --shared-experts; `given` is the source's own."""
    if said.experts is None and given is None:
        if said.top_k is not None or said.shared_experts is not None:
            option = "--top-k" if said.top_k is not None else "--shared-experts"
            raise FFNError(f"{option} needs --experts", "a dense block has no router")
        return None
    base = given or MoE(said.experts or 0, min(2, said.experts or 0))
    changes: dict[str, Any] = {
        n: getattr(said, n) for n in ("experts", "top_k", "shared_experts") if getattr(said, n) is not None
    }
    if said.shared_experts is not None:
        changes["shared_d_ff"] = None  # so many experts of the routed ones' width
    moe = replace(base, **changes)
    if moe.top_k > moe.experts:
        raise FFNError(f"--top-k {moe.top_k} exceeds the {moe.experts} experts", "choose at most as many as there are")
    return moe


def whole(option: str, text: str) -> int:
    """A size from text: `4096`. Raises FFNError for zero, negative, huge, or no whole number."""
    if re.fullmatch(r"[-+]?[0-9]{1,4000}", text.strip()):
        return size(option, int(text))
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
