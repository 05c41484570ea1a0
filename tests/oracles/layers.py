"""Hand-made layers: names and shapes of an FFN in any way of storing it, and what must be recognised in them."""

from collections.abc import Mapping
from math import prod

from ffncli.models.tensors.ffns import NAMINGS, Item, Naming
from ffncli.models.tensors.recognise import Layers, StoredFFN, recognise

D, F, E = 6, 10, 4  # d_model, d_ff, experts
Shapes = Mapping[str, tuple[int, ...]]


def layers_of(shapes: Shapes, d_model: int | None = None, **counts: int) -> Layers:
    """Return what is recognised; a tensor with `#` in its name exists `counts["experts"]` times, E by default."""
    items = {}
    for name, shape in shapes.items():
        count = counts.get("experts", E) if "#" in name else 1
        items[name] = Item(shape, prod(shape), 4 * prod(shape) * count, count, "F32")
    return recognise(items, d_model)[0]


def one(shapes: Shapes, d_model: int | None = None, prefix: str = "model.layers") -> StoredFFN:
    """Return the only FFN of the only layer, which has index 3."""
    layers = layers_of({f"{prefix}.3.{name}": shape for name, shape in shapes.items()}, d_model)
    assert {name: list(seen) for name, seen in layers.items()} == {prefix: [3]}
    (found,) = layers[prefix][3]
    return found


def suffix(way: Naming) -> str:
    return "" if way.down.endswith("_weight") else ".weight"


def bias(way: Naming, leaf: str) -> str:
    """Return the name of a matrix's bias: `up_proj.bias`, `mlp1_bias`."""
    return f"mlp.{leaf}.bias" if suffix(way) else f"mlp.{leaf.removesuffix('_weight')}_bias"


def dense(way: Naming, parent: str = "mlp.", fused: bool = False, d: int = D, f: int = F) -> Shapes:
    """Return the matrices of one FFN in nn.Linear's layout; `fused`: gate and up in one matrix."""
    widths = dict.fromkeys(way.names, (f, d)) | {way.up: (2 * f if fused else f, d), way.down: (d, f)}
    return {f"{parent}{leaf}{suffix(way)}": shape for leaf, shape in widths.items()}


def numbers(shapes: Shapes) -> int:
    return sum(prod(shape) * (E if "#" in name else 1) for name, shape in shapes.items())


def seen_in(found: StoredFFN, name: str) -> object:
    """Return a field of the spec as shown by the tensors, or else a field of the record."""
    return found.shows[name] if name in found.shows else getattr(found, name)


def check_ffn(found: StoredFFN, shapes: Shapes, **expected: object) -> None:
    """Check widths, counts, bytes and the other expected fields; all other fields must be absent."""
    other = {"experts": 0, "shared_d_ff": 0, "router_bias": False, "correction": False, "shared_gate": False}
    wanted = {"d_model": D, "d_ff": F, "bias": False, "loose": (), "whole": True, **other, **expected}
    assert {name: seen_in(found, name) for name in wanted} == wanted
    assert (found.params, found.bytes, found.formats) == (numbers(shapes), 4 * numbers(shapes), ("F32",))


NORM = {"post_attention_layernorm.weight": (D,)}
EITHER = [naming for naming in NAMINGS if not naming.gate_inside]  # those whose matrices alone are an FFN
IDS = ["/".join(way.names) for way in EITHER]
