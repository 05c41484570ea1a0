"""The FFNs inside a user's model: their modules, found by the names of their parameters or by their outputs, and how
often each runs in a forward pass."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from ffncli.errors import FFNError
from ffncli.models.tensors.ffns import Item
from ffncli.models.tensors.recognise import BARE, recognise, stem_of
from ffncli.run.user.identify import MOST_MATRICES
from ffncli.run.user.python_file import user_code

_TOKENS = 8  # of the input on which calls are counted
_TORCHS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Part:
    """An FFN of a model: its stack and layer, the name of its module, and how often it runs in a forward pass."""

    stack: str
    index: int
    name: str
    runs: int = 1


def parts_by_name(module: nn.Module, path: Path) -> tuple[Part, ...]:
    """Return the FFNs that the names of their parameters show: those of the largest encoder and of the largest other
    stack; none for a single block.

    Experts are not layers, nor are the numbered parts of an nn.Sequential. A single layer with torch's attention counts
    as a whole model with layer 0, because the layer's outputs cannot match a block.
    """
    items = {
        name: Item(tuple(p.shape), prod(p.shape), 0, 1)
        for name, p in module.named_parameters(remove_duplicate=False)
        if not nn.parameter.is_lazy(p)
    }
    ffns = recognise(items)[0]
    if BARE in ffns and any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
        return _counted(module, [Part("decoder", 0, _owner(ffns[BARE][0][0].tensor))], path)
    stacks: dict[str, list[Part]] = {}
    for prefix, layers in ffns.items():
        if prefix == BARE or "expert" in prefix:
            continue
        stack = "encoder" if "encoder" in prefix.lower() else "decoder"
        numbered = [
            Part(stack, layer, (stem_of(prefix, layer) + _owner(of_layer[0].tensor)).rstrip("."))
            for layer, of_layer in sorted(layers.items())
        ]
        stacks[stack] = max(stacks.get(stack, []), numbered, key=len)
    return _counted(module, [part for stack in sorted(stacks, reverse=True) for part in stacks[stack]], path)


def parts_by_output(module: nn.Module, path: Path, is_ffn: Callable[[nn.Module], bool]) -> tuple[Part, ...]:
    """Return the modules inside `module`, in order, whose outputs are those of an FFN. Modules of one class and shape
    are tried once."""
    known: dict[object, bool] = {}

    def matching(owner: nn.Module, prefix: str) -> Iterator[str]:
        for name, part in owner._modules.items():
            if part is None or "expert" in name.lower():
                continue
            shapes = tuple(tuple(p.shape) for p in part.parameters())
            key = (type(part), shapes)
            if key not in known:
                known[key] = _may_be_ffn(part) and is_ffn(part)
            if known[key]:
                yield prefix + name
            else:
                yield from matching(part, f"{prefix}{name}.")

    return _counted(module, [Part("decoder", at, name) for at, name in enumerate(matching(module, ""))], path)


def _may_be_ffn(part: nn.Module) -> bool:
    several = 1 < sum(p.dim() > 1 for p in part.parameters()) <= MOST_MATRICES
    return several and not any("attention" in type(inner).__name__.lower() for inner in part.modules())


def ffn_of(module: nn.Module, name: str) -> nn.Module:
    """Return the FFN whose module has this name; it has the FFN's parameters alone, and computes it in eval mode."""
    layer = module.get_submodule(name)
    return _OfTorchsLayer(layer) if isinstance(layer, _TORCHS) else layer


class _OfTorchsLayer(nn.Module):
    """The FFN of torch's own transformer layer, in eval mode."""

    def __init__(self, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> None:
        super().__init__()
        self.linear1, self.activation, self.linear2 = layer.linear1, layer.activation, layer.linear2

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear2(self.activation(self.linear1(x)))
        return y


def _owner(tensor: str) -> str:
    """Return the name of the module that contains a tensor's projection: `mlp` for `mlp.up_proj.weight`."""
    return tensor.removesuffix(".weight").rpartition(".")[0]


# --- an FFN that runs several times -----------------------------------------------------------------------------------


def _counted(module: nn.Module, parts: list[Part], path: Path) -> tuple[Part, ...]:
    """Return each FFN once, where its parameters are used first, with the number of its runs: its calls in a forward
    pass or, if the model does not run on simple inputs, the places that it has in the model."""
    places = Counter(_identity(module, part) for part in parts)
    first = {_identity(module, part): part for part in reversed(parts)}
    calls = _calls(module, {module.get_submodule(p.name): _identity(module, p) for p in parts}, path) if parts else {}
    keys = sorted(first, key=lambda key: parts.index(first[key]))
    return tuple(replace(first[key], runs=calls.get(key) or places[key]) for key in keys)


_Identity = tuple[int, ...]


def _identity(module: nn.Module, part: Part) -> _Identity:
    """Return what two places of one FFN have in common: the identities of its parameters."""
    return tuple(map(id, ffn_of(module, part.name).parameters()))


def _count(counts: Counter[_Identity], key: _Identity, *_: object) -> None:
    counts[key] += 1


def _calls(module: nn.Module, parts: Mapping[nn.Module, _Identity], path: Path) -> Mapping[_Identity, int]:
    """Return how often a forward pass calls each FFN; empty if the model runs neither on token ids nor on tokens."""
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    widths = {size for p in next(iter(parts)).parameters() for size in p.shape}
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    tokens = [torch.zeros(1, _TOKENS, width, dtype=dtype) for width in sorted(widths)]
    counts: Counter[_Identity] = Counter()
    handles = [part.register_forward_pre_hook(partial(_count, counts, key)) for part, key in parts.items()]
    try:
        for x in (ids, *tokens):
            for inputs in ((x,), (x, x)):  # an encoder and a decoder take one each
                counts.clear()
                with suppress(FFNError), torch.no_grad(), user_code(path, "raised by its forward"):
                    module(*inputs)
                    return dict(counts)
        return {}
    finally:
        for handle in handles:
            handle.remove()
