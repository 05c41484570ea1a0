"""A user's module as a model: one block, or a model of several layers, `my.py:GPT --layer 1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError, shown_path
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Model, Resolved, grouped, ranges
from ffncli.run.user.identify import Match, confirmed
from ffncli.run.user.module import BuiltModule, evidence_of, one_block, recognised
from ffncli.run.user.probe import probes, runner_for


def model_of(built: BuiltModule, dimensions: Dimensions) -> Resolved:
    """The block that a module computes; of a whole model the FFN of every layer, each recognised by its outputs.

    Attention, norms and embeddings of a whole model are set aside: they are not the FFN's. Raises FFNError if a layer's
    FFN matches no block.
    """
    if built.runner is not None:
        return one_block(built, dimensions).model
    specs: dict[int, FFNSpec] = {}
    weights: dict[tuple[str, int], Mapping[str, Tensor]] = {}
    match: Match | None = None
    evidence: tuple[str, ...] = ()
    for layer, name in sorted(built.layers.items()):
        ffn = _part(built, name)
        match = _same(ffn, match, built) or _matched(ffn, name, built)
        parameters = {n: p.detach() for n, p in ffn.named_parameters()}
        specs[layer], weights["decoder", layer] = match.spec(parameters), match.weights(parameters)
        if layer == min(built.layers):
            names = ", ".join(dict.fromkeys((name, built.layers[max(built.layers)])))
            evidence = (f"FFNs, first and last: {names}", *evidence_of(match, parameters, specs[layer].d_ff))
    notes = [f"assuming {', '.join(built.taken)}"] if built.taken else []
    notes.append(f"the FFNs of {ranges(tuple(sorted(specs)))} alone: attention, norms and embeddings are set aside")
    model = Model(built.name, tuple(grouped("decoder", specs)))
    return Resolved(model, built.text, evidence=evidence, notes=tuple(notes), weights=weights)


def _part(built: BuiltModule, name: str) -> nn.Module:
    """A layer's FFN as a module. Raises FFNError if its matrices are not in a module of their own."""
    if not name or name.rpartition(".")[2].isdigit():
        what = f"{shown_path(built.path)}: {built.name} has the matrices of its FFN in the layer itself"
        raise FFNError(f"{what} {name}".rstrip(), "put them in a module of their own, or give its weights in a file")
    return built.module.get_submodule(name)


def _matched(ffn: nn.Module, name: str, built: BuiltModule) -> Match:
    """The block that an FFN computes."""
    try:
        return recognised(ffn, runner_for(ffn, Dimensions(), built.path), built.path)[0]
    except FFNError as error:
        raise FFNError(f"{error.message} ({name})", error.hint) from None


def _same(ffn: nn.Module, match: Match | None, built: BuiltModule) -> Match | None:
    """The match of the layer before, if this FFN computes the same block."""
    if match is None or {view.parameter for view in match.views.values()} != {n for n, _ in ffn.named_parameters()}:
        return None
    import copy

    runner = runner_for(ffn, Dimensions(), built.path)
    with torch.no_grad():
        original, drawn, _ = probes(copy.deepcopy(ffn), runner)
    fits = all(confirmed(match, probe) <= probe.tolerance for probe in (original, drawn))
    return replace(match, error=confirmed(match, drawn)) if fits else None
