"""Write the formats chosen within a budget for the programs that quantize models.

- llm-compressor reads a YAML recipe: a QuantizationModifier with a config group for each format, whose `targets` are
  regular expressions of module names and whose fields are compressed-tensors' `QuantizationArgs`
  (examples/quantization_non_uniform in github.com/vllm-project/llm-compressor).
- ModelOpt's `load_recipe` reads a YAML recipe whose `quant_cfg` is a list of wildcards of quantizers' names; a later
  entry replaces an earlier one (nvidia.github.io/Model-Optimizer/guides/_quant_cfg.html). Not JSON, because the keys of
  `block_sizes` are integers.
- `llama-quantize --tensor-type-file` reads words `NAME=TYPE`; NAME is a regular expression that is searched for in a
  tensor's name (tools/quantize/quantize.cpp in github.com/ggml-org/llama.cpp).
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ffncli.block.formats import FORMATS, Format
from ffncli.block.recipe import steps
from ffncli.errors import FFNError, clean, option
from ffncli.models.model import Layer
from ffncli.run.engine.weights import located_weights
from ffncli.run.precision.question import PrecisionQuestion, PrecisionSubject
from ffncli.run.precision.results import Budget
from ffncli.run.precision.rounding import for_inputs, matrices
from ffncli.show.text import counted
from ffncli.system.files import check_writable, written_whole

Args = dict[Any, Any]
Names = Mapping[tuple[str, int, str], tuple[str, ...]]  # for a stack, a layer and a matrix, the names of its modules
_UNQUANTIZED = ("bf16", "fp16")
_STACKS = {"encoder": "enc.", "decoder": "dec."}


def recipe_writer(question: PrecisionQuestion, subject: PrecisionSubject) -> Callable[[Budget], list[str]] | None:
    """Return a function that writes the recipe of a choice and returns notes; None if none is requested.

    Raises FFNError, before anything is measured, for a file that cannot be written, a format that the target lacks, and
    matrices without names of their own.
    """
    if question.recipe is None:
        return None
    target, _, file = question.recipe.partition(":")
    path, fits = Path(os.path.expanduser(file)), _FITS[target]
    check_writable(str(path), question.force, option("recipe"))
    for name, form in question.formats:
        if not fits(form):
            have = ", ".join(one for one, row in FORMATS.items() if fits(row))
            raise FFNError(f"{option('recipe')}: {target} has no {name}", f"it has {have}")
    names = {
        (layer.stack, layer.index, name): named
        for layer in subject.layers for name, named in _named(subject, layer, target).items()
    }  # fmt: skip

    def write(budget: Budget) -> list[str]:
        text = _WRITERS[target](budget, names, dict(question.formats))
        with written_whole(path) as out:
            out.write(text.encode())
        formats = {(one.stack, one.layer, one.tensor): one.format for one in budget.choices}
        apart = sum(formats[place] != formats[*place[:2], "W1"] for place in formats if place[2] == "W3")
        if not apart or target == "llama.cpp":
            return [f"wrote {clean(file)}"]
        what = f"W1 and W3 have different formats in {counted(apart, 'layer')}; vLLM runs them as one matrix"
        return [f"wrote {clean(file)}", f"{what}, with one format"]

    return write


def _named(subject: PrecisionSubject, layer: Layer, target: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a layer's matrices in a target, with `*` for the number of an expert."""
    located, checkpoint = located_weights(subject.model, layer), subject.model.checkpoint
    if located is None or checkpoint is None:
        raise FFNError(f"{option('recipe')} names tensors, so it needs a model's files", "give a directory or a file")
    if checkpoint.gguf and target != "llama.cpp":
        raise FFNError(
            f"{option('recipe')}: a GGUF file has no names of {target}", "give the directory it was made from"
        )
    labels, out = matrices(steps(layer.spec)), dict[str, tuple[str, ...]]()
    stored = {item.parameter: _joined(item.names) for item in located if item.parameter in labels}
    for parameter, name in stored.items():
        label = labels[parameter]
        alone = all(other != name or labels[key] == label for key, other in stored.items())
        if checkpoint.gguf:
            named = name
        elif target == "llama.cpp":  # whose converter takes experts apart
            alone, named = alone or layer.spec.moe is not None, _in_gguf(subject, layer, parameter)
        else:
            alone, named = alone and name.endswith(".weight"), name.removesuffix(".weight")
        if not alone:
            what = f"{target} cannot give {label} a format of its own"
            raise FFNError(f"{option('recipe')}: {what}: the model's files have it in {clean(name)}")
        out[label] = (*out.get(label, ()), named)
    return out


def _joined(names: tuple[str, ...]) -> str:
    """Return the name that experts' tensors have in common, with `*` for the expert's number."""
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _in_gguf(subject: PrecisionSubject, layer: Layer, parameter: str) -> str:
    """Return the name that a parameter gets when llama.cpp converts the model."""
    owner, _, kind = parameter.removesuffix(".weight").rpartition(".")
    suffix = "_shexp" if owner else "_exps" if layer.spec.moe else ""
    several = len({group.stack for group in subject.model.model.groups}) > 1
    return f"{_STACKS.get(layer.stack, '') if several else ''}blk.{layer.index}.ffn_{kind}{suffix}.weight"


def _in_compressor(form: Format) -> Args | None:
    """Return compressed-tensors' arguments of weights in a format; {} for formats that leave them as they are."""
    if form.name in _UNQUANTIZED:
        return {}
    if form.pow2 or form.name == "fp8_e5m2" or "gguf" in form.rules[:1]:
        return None
    shared: Args = {"strategy": form.shared}  # channel, tensor
    if form.group:
        shared = {"strategy": "tensor_group" if form.name == "nvfp4" else "group", "group_size": form.group}
    elif form.shared.startswith("block"):
        shared = {"strategy": "block", "block_structure": [int(form.shared.removeprefix("block"))] * 2}
    scale = {"scale_dtype": "torch.uint8"} if form.scale == "e8m0" else {}
    kind = "int" if form.element == "int" else "float"
    args = {"num_bits": int(form.bits), "type": kind, "symmetric": not form.asymmetric, "dynamic": False}
    return args | shared | scale


def _compressor_inputs(form: Format) -> Args:
    """Return compressed-tensors' arguments of inputs in a format: scales are computed as the model runs."""
    args = _in_compressor(for_inputs(form)) or {}
    token = {"strategy": "token"} if form.shared == "channel" else {}
    return args | token | {"dynamic": "local" if form.name == "nvfp4" else True}


def _in_modelopt(form: Format) -> Args | None:
    """Return ModelOpt's attributes of a quantizer of weights in a format; {} if it leaves them as they are."""
    if form.name in _UNQUANTIZED:
        return {}
    if form.pow2 or form.asymmetric or "gguf" in form.rules[:1]:
        return None
    bits = int(form.bits) if form.element == "int" else form.element
    if form.fixed:
        return {"num_bits": bits, "block_sizes": {-1: form.group, "type": "dynamic", "scale_bits": form.scale}}
    if form.group or form.shared.startswith("block"):
        size = form.group or int(form.shared.removeprefix("block"))
        return {"num_bits": bits, "block_sizes": {-1: size} if form.group else {-1: size, -2: size}}
    return {"num_bits": bits, "axis": 0 if form.shared == "channel" else None}


def _modelopt_inputs(form: Format) -> Args:
    """Return ModelOpt's attributes of a quantizer of inputs in a format: scales are computed as the model runs."""
    args = _in_modelopt(for_inputs(form)) or {}
    if form.shared == "channel":
        return {"num_bits": args["num_bits"], "type": "dynamic", "block_sizes": {-1: None}}
    if "block_sizes" in args:
        return args | {"block_sizes": {**args["block_sizes"], "type": "dynamic"}}
    return args | {"type": "dynamic"}


def _compressor(budget: Budget, names: Names, formats: Mapping[str, Format]) -> str:
    targets: dict[str, list[str]] = {}
    for one in budget.choices:
        patterns = (re.escape(name).replace(r"\*", r"\d+") for name in names[one.stack, one.layer, one.tensor])
        targets.setdefault(one.format, []).extend(f"re:{pattern}$" for pattern in patterns)
    groups: Args = {}
    for name, some in targets.items():
        if args := _in_compressor(formats[name]):
            inputs = {"input_activations": _compressor_inputs(formats[name])} if budget.what == "both" else {}
            groups[f"group_{len(groups)}"] = {"targets": some, "weights": args, **inputs}
    ignored = [pattern for name, some in targets.items() if formats[name].name in _UNQUANTIZED for pattern in some]
    modifier = {"config_groups": groups, "ignore": ["lm_head", *ignored]}
    return _yaml({"default_stage": {"default_modifiers": {"QuantizationModifier": modifier}}})


def _modelopt(budget: Budget, names: Names, formats: Mapping[str, Format]) -> str:
    entries: list[Args] = [{"quantizer_name": "*", "enable": False}]
    for one in budget.choices:
        if args := _in_modelopt(formats[one.format]):
            for name in names[one.stack, one.layer, one.tensor]:
                entries.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": args})
                if budget.what == "both":
                    cfg = _modelopt_inputs(formats[one.format])
                    entries.append({"quantizer_name": f"{name}.input_quantizer", "cfg": cfg})
    about = f"ffn precision --budget {budget.limit:g}: {budget.bits:.4g} bits per weight of the FFNs"
    quantize = {"algorithm": "max", "quant_cfg": entries}
    return _yaml({"metadata": {"recipe_type": "ptq", "description": about}, "quantize": quantize})


_GGML = {"bf16": "bf16", "fp16": "f16", "mxfp4": "mxfp4"} | {
    name: name for name, row in FORMATS.items() if row.rules == ("gguf",)
}


def _llama_cpp(budget: Budget, names: Names, formats: Mapping[str, Format]) -> str:
    return "".join(
        f"^{re.escape(name)}$={_GGML[formats[one.format].name]}\n"
        for one in budget.choices for name in names[one.stack, one.layer, one.tensor]
    )  # fmt: skip


_FITS: Mapping[str, Callable[[Format], bool]] = {
    "llm-compressor": lambda form: _in_compressor(form) is not None,
    "modelopt": lambda form: _in_modelopt(form) is not None,
    "llama.cpp": lambda form: form.name in _GGML,
}
_WRITERS: Mapping[str, Callable[[Budget, Names, Mapping[str, Format]], str]] = {
    "llm-compressor": _compressor, "modelopt": _modelopt, "llama.cpp": _llama_cpp,
}  # fmt: skip


def _yaml(record: Args) -> str:
    """Return a record in YAML: JSON, which YAML contains, apart from keys that are integers."""
    return re.sub(r'"(-\d)": ', r"\1: ", json.dumps(record, indent=2)) + "\n"
