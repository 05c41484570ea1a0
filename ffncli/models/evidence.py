"""What a checkpoint's tensors say of a model that its config described: they overrule it, or contradict it."""

from __future__ import annotations

import os
from dataclasses import replace

from ffncli.block import dtypes
from ffncli.block.recipe import FFNSpec
from ffncli.models import layout
from ffncli.models.checkpoint import Checkpoint, check_shapes, open_checkpoint
from ffncli.models.layout import Located
from ffncli.models.model import Model
from ffncli.models.strict_json import shown_path


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
        return model.noted(f"no safetensors in {shown_path(model.location)}{also}: taken from the config alone")
    model = _present(replace(model, checkpoint=checkpoint), checkpoint)
    specs: list[FFNSpec] = []
    seen: list[str] = []
    dtype: str | None = None
    for group in model.groups:
        names = layer_names(model, checkpoint, group.stack, group.layers[0])
        if packed := names.packed(group.spec):
            return model.noted(f"{packed} is packed (quantized): taken from the config alone")
        found = layout.inspect(names, group.spec)
        last = layer_names(model, checkpoint, group.stack, group.layers[-1])
        last.way(found.spec)  # raises where the config has more layers than the file
        check_shapes(checkpoint, found.located)
        dtype = dtype or _stored_dtype(checkpoint, found.located)
        specs.append(found.spec)
        seen += [line for line in found.evidence if line not in seen]
    evidence = (*seen, *model.evidence)  # tensor names decide before the config
    return replace(model.with_specs(specs), evidence=evidence, dtype=dtype or model.dtype)


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
    return replace(model, groups=kept).noted(*(f"no {s} tensors in {checkpoint.where}: left out" for s in absent))


def _stored_dtype(checkpoint: Checkpoint, located: tuple[Located, ...]) -> str | None:
    """The dtype of a layer's up projection by its header (our name, else the file's code); None without that shard."""
    name = next(item.names[0] for item in located if item.parameter == "up.weight")
    if not os.path.exists(checkpoint.files[name]):
        return None
    code = checkpoint.info(name).dtype
    row = dtypes.find(code)
    return row.name if row else code
