"""Finding a layer's FFN and its weights in a transformers model in memory.

Names in memory differ from names on disk (since transformers 5, experts share one parameter, and modules are renamed),
so the FFN is recognised again from the tensors in memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor, nn

from ffncli.block.recipe import steps
from ffncli.block.steps import NORM_GATE, Norm
from ffncli.errors import FFNError
from ffncli.models.files.headers import Columns
from ffncli.models.files.inventory import Inventory, collect
from ffncli.models.model import Layer, Resolved
from ffncli.models.tensors import layout
from ffncli.models.tensors.layout import Located
from ffncli.models.tensors.matching import items_of, layer_tensors, spots
from ffncli.models.tensors.recognise import recognise
from ffncli.models.tensors.slices import arrangement, norm_modules


@dataclass(frozen=True)
class LiveFFN:
    """The modules of a layer's FFN in a transformers model in memory; module names are relative to the model."""

    enters: str  # the module whose first tensor argument is ffn_input
    leaves: tuple[str, ...]  # modules whose outputs (first element of a tuple) add up to ffn_output
    layer: str  # the layer's own module
    norms: Mapping[str, str] = field(default_factory=dict)  # modules of `norm` and `post_norm`, if there are any
    located: tuple[Located, ...] = ()  # the FFN's parameters in the state_dict

    @property
    def owners(self) -> dict[str, str]:
        """The name of each parameter's module, by the parameter's canonical name."""
        return _owners(self.located)


def live_ffn(module: nn.Module, resolved: Resolved, layer: Layer) -> LiveFFN:
    """Find the modules that receive a layer's ffn_input and produce its ffn_output.

    A dense FFN starts at its first projection and ends at its down projection, with or without a surrounding module,
    because such a module may do more (BLOOM's adds the residual). Experts start and end at the module that also
    contains their router; shared experts outside that module (Granite) end separately. The input of experts may be
    flattened to [tokens, d_model].
    """
    at, located = live_parameters(module, resolved, layer)
    owners = _owners(located)
    norms = {name.partition(".")[0]: at for name, at in owners.items() if name.startswith(("norm.", "post_norm."))}
    enters, leaves = _boundary(owners, norms, at, layer)
    norms |= _without_parameters(module, resolved, layer, at)
    return LiveFFN(enters, leaves, at, norms, located)


def _owners(located: Iterable[Located]) -> dict[str, str]:
    return {item.parameter: item.names[0].rpartition(".")[0] for item in located}


def _boundary(
    owners: Mapping[str, str], norms: Mapping[str, str], at: str, layer: Layer
) -> tuple[str, tuple[str, ...]]:
    """Return (the module where the FFN starts, the modules where it ends), from the owners of its parameters."""
    if layer.spec.moe is None and not layer.spec.learned_scale:
        return owners["gate.weight" if layer.spec.gated else "up.weight"], (owners["down.weight"],)
    shared = [name for parameter, name in owners.items() if parameter.startswith("shared")]
    routed = [
        n for p, n in owners.items() if not p.startswith(("shared", NORM_GATE)) and p.partition(".")[0] not in norms
    ]
    whole, root = common_module([*routed, *shared]), common_module(routed)
    if not whole.startswith(at) or whole == at:
        return root, (root, common_module(shared))
    return whole, (whole,)


def _without_parameters(module: nn.Module, resolved: Resolved, layer: Layer, at: str) -> dict[str, str]:
    """Return the modules of norms without parameters (OLMo's), which are found by their usual names."""
    there, rules = {name for name, _ in module.named_modules()}, arrangement(resolved.model.model_type)
    out: dict[str, str] = {}
    for step in steps(layer.spec):
        if isinstance(step.op, Norm) and not step.parameters():
            names = [f"{at}.{name}" for name in norm_modules(step.output, layer.spec, rules)]
            if path := next((name for name in names if name in there), None):
                out[step.output] = path
    return out


def live_parameters(module: nn.Module, resolved: Resolved, layer: Layer) -> tuple[str, tuple[Located, ...]]:
    """Return (the name of the layer's module, the FFN's parameters located in the state_dict)."""
    tensors = live_tensors(module)
    where = f"the model in memory ({type(module).__name__})"
    kinds = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
    shapes = [tuple(t.shape) for t in tensors.values()]
    columns = Columns([*tensors], kinds, shapes, [t.nbytes for t in tensors.values()])
    items = items_of(Inventory(where, *collect([columns])), None)
    ffns, _ = recognise(items, layer.spec.d_model, where)
    under = spots(resolved, ffns)
    spot = under.get((layer.stack, layer.index))
    if spot is None:
        raise FFNError(f"no FFN of {layer.stack} layer {layer.index} was recognised in {where}")
    named = layer_tensors(items, spot, resolved.model.model_type, tensors, where)
    return named.stem.removesuffix("."), layout.locate(named, layer.spec)


def live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and stored buffers sorted by name, as in files; a shared tensor (Zamba's) appears once."""
    kept = module.state_dict()
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    return {name: tensors[name].detach() for name in sorted(tensors) if name in kept}


def live_weights(module: nn.Module, located: Iterable[Located]) -> dict[str, Tensor]:
    """Return the canonical weights [out, in] of the located parameters, as views of the model's tensors if possible."""
    with torch.no_grad():
        return {item.parameter: _canonical(module, item) for item in located}


def _canonical(module: nn.Module, item: Located) -> Tensor:
    parts = [layout.canonical(tensor_at(module, name).detach(), item) for name in item.names]
    return torch.stack(parts) if item.slice.per_expert else parts[0]


def tensor_at(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its full name."""
    owner, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), leaf)
    return tensor


def common_module(modules: Iterable[str]) -> str:
    """Return the name of the innermost module that contains all `modules`."""
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*(name.split(".") for name in modules), strict=False))
    return ".".join(parts[0] for parts in shared)
