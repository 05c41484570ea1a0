"""Where a layer's FFN lies in a transformers model in memory, and its weights there.

Names in memory are not those on disk (from transformers 5 on, experts share one parameter, and modules are renamed), so
the FFN is recognised anew, among the model's own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_steps, parameters
from ffncli.errors import FFNError
from ffncli.models import layout
from ffncli.models.evidence import items_of
from ffncli.models.headers import Columns
from ffncli.models.inventory import Inventory, collect
from ffncli.models.layout import Located
from ffncli.models.matching import spots
from ffncli.models.model import Layer, Model
from ffncli.models.recognise import recognise_all, stem_of


@dataclass(frozen=True)
class LiveFFN:
    """Where a layer's FFN lies in a transformers model in memory; module names relative to the model."""

    enters: str  # the module whose first tensor argument is ffn_input
    leaves: tuple[str, ...]  # modules whose outputs (first of a tuple) added together are ffn_output
    layer: str  # the layer's own module


def live_ffn(module: nn.Module, model: Model, layer: Layer) -> LiveFFN:
    """The modules at which a layer's ffn_input enters and its ffn_output leaves.

    A dense FFN is entered at its first projection and left at its down projection: so it is with or without a module of
    its own, and whatever that module adds (BLOOM's residual). Experts are entered and left at the module that also
    holds their router; shared experts that stand beside that module (Granite) leave apart from it. Their input may be
    flattened to [tokens, d_model]. Raises FFNError where no FFN of that layer is found.
    """
    at, located = _located(module, model, layer)
    owners = {item.parameter: item.names[0].rpartition(".")[0] for item in located}
    if layer.spec.moe is None:
        first = "gate.weight" if layer.spec.gated else "up.weight"
        return LiveFFN(owners[first], (owners["down.weight"],), at)
    norms = {owners.pop(name) for name in [*owners] if name.startswith(("norm.", "post_norm."))}
    shared = [name for parameter, name in owners.items() if parameter.startswith("shared")]
    routed = [name for parameter, name in owners.items() if not parameter.startswith("shared")]
    whole, root = _common([*routed, *shared]), _common(routed)
    if whole == at or not whole.startswith(at):
        return LiveFFN(root, (root, _common(shared)), at)
    if any(name.startswith(f"{whole}.") for name in norms):  # what the module gives went through that norm (A.X-K1)
        apart = [owners["down.weight"], *([_common(shared)] if shared else [])]
        return LiveFFN(whole, tuple(apart), at)
    return LiveFFN(whole, (whole,), at)


def live_weights(module: nn.Module, model: Model, layer: Layer) -> dict[str, Tensor]:
    """The canonical weights of a layer's FFN, from ffn_input to ffn_output, as views of the model's own tensors.

    Raises FFNError as `live_ffn`.
    """
    tensors = module.state_dict()
    wanted = parameters(ffn_steps(steps(layer.spec)))
    _, located = _located(module, model, layer)
    return {
        item.parameter: _canonical([tensors[name] for name in item.names], item)
        for item in located
        if item.parameter in wanted
    }


def _canonical(stored: list[Tensor], item: Located) -> Tensor:
    parts = [layout.canonical(tensor, item) for tensor in stored]
    return torch.stack(parts) if item.piece.per_expert else parts[0]


def _located(module: nn.Module, model: Model, layer: Layer) -> tuple[str, tuple[Located, ...]]:
    """(the layer's own module, where its parameters lie in the state_dict)."""
    tensors = module.state_dict()
    where = f"the model in memory ({type(module).__name__})"
    kinds = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
    shapes = [tuple(t.shape) for t in tensors.values()]
    columns = Columns([*tensors], kinds, shapes, [t.nbytes for t in tensors.values()])
    items = items_of(Inventory(where, *collect([columns])), None)
    found, _ = recognise_all(items, layer.spec.d_model, where)
    under = spots(model, found)
    spot = under.get((layer.stack, layer.index))
    if spot is None:
        raise FFNError(f"no FFN of {layer.stack} layer {layer.index} is recognised in {where}")
    stem = stem_of(spot.prefix, spot.layer)
    held = layout.held(items, stem, layout.beyond(model.model_type, spot))
    names = layout.Names(held, tensors, model.model_type, where, spot.number)
    return stem.removesuffix("."), layout.locate(names, layer.spec)


def _common(modules: Iterable[str]) -> str:
    """The innermost module that holds all of these."""
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*(name.split(".") for name in modules), strict=False))
    return ".".join(parts[0] for parts in shared)
