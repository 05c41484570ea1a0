"""A transformers model in memory, or one layer of one, as a source: its blocks by its config, its own tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.locate import live_parameters, live_tensors, live_weights


def described(model: nn.Module) -> Resolved:
    """The blocks of a transformers model, by its config. Raises FFNError for another module, or an unknown family."""
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or not hasattr(config, "to_dict"):
        raise FFNError(f"{type(model).__name__} is not a transformers model", "a single block is ffncli.kernel's")
    return _by_config(config, model)


def in_memory(module: nn.Module) -> Resolved | None:
    """What a transformers model is, or a layer of one (`model.encoder.layer[3]`), with views of its weights.

    None for every other module: one without a config, one whose family or whose FFN is not known, one that is an FFN.
    Raises FFNError for a layer of transformers that does not carry its config: its outputs are those of no block.
    """
    parts = [part for part in module.modules() if hasattr(getattr(part, "config", None), "to_dict")]
    if not parts:
        _refuse_layer(module)
        return None
    try:
        resolved = _by_config(parts[0].config, module)
        layers = [Layer(group.stack, index, group.spec) for group in resolved.model.groups for index in group.layers]
        with suppress(FFNError):
            if live_parameters(module, resolved, layers[0])[0]:  # empty if the names are those inside a layer
                return replace(resolved, weights=_LiveWeights(module, resolved, layers))
        return _single(module, resolved, layers)
    except FFNError:
        return None


def _refuse_layer(module: nn.Module) -> None:
    kind = type(module)
    if kind.__module__.startswith("transformers.") and any("Attention" in type(m).__name__ for m in module.modules()):
        what = f"a {kind.__name__} does not carry the config that describes its FFN"
        raise FFNError(what, "give the model that it is a layer of: ffncli.trace(model, layer=0)")


def _single(module: nn.Module, resolved: Resolved, layers: Sequence[Layer]) -> Resolved | None:
    """One layer, under the number that its parts have."""
    numbers: list[int] = [n for n in (vars(part).get("layer_idx") for part in module.modules()) if isinstance(n, int)]
    layer = next((layer for layer in layers if layer.index == (numbers or [0])[0]), None)
    if layer is None:
        return None
    place = nn.Module()
    place.layers = nn.ModuleDict({str(layer.index): module})
    _, located = live_parameters(place, resolved, layer)
    if len([name for item in located for name in item.names]) == len(live_tensors(module)):
        return None  # nothing but an FFN, whose outputs show more: whether norms without parameters are in it
    group = next(g for g in resolved.model.groups if g.stack == layer.stack and layer.index in g.layers)
    model = replace(resolved.model, groups=(replace(group, layers=(layer.index,)),))
    doubt = [] if numbers else [f"{type(module).__name__} has no layer_idx: taken as {layer.stack} layer {layer.index}"]
    return replace(
        resolved, model=model, weights=_LiveWeights(place, resolved, [layer]), notes=(*resolved.notes, *doubt)
    )


def _by_config(config: Any, module: nn.Module) -> Resolved:
    values = json.loads(json.dumps(config.to_dict(), default=str))
    return from_config(values, type(module).__name__, f"the config of {type(module).__name__}")


class _LiveWeights(Mapping[tuple[str, int], Mapping[str, Tensor]]):
    """The canonical weights of each layer, located when they are read."""

    def __init__(self, module: nn.Module, resolved: Resolved, layers: Sequence[Layer]) -> None:
        self._module, self._resolved = module, resolved
        self._layers = {(layer.stack, layer.index): layer for layer in layers}

    def __getitem__(self, key: tuple[str, int]) -> Mapping[str, Tensor]:
        _, located = live_parameters(self._module, self._resolved, self._layers[key])
        return live_weights(self._module, located)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
