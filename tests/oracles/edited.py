"""Checkpoints with planted edits: three families, what can be done to them, and the containers that they are written
in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS, D_MODEL, D_FF, EXPERTS = 4, 64, 128, 4
Tensors = dict[str, Tensor]
_SIZES = {"hidden_size": D_MODEL, "intermediate_size": D_FF, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gated": {"model_type": "llama", "hidden_act": "silu", "vocab_size": 32, **_SIZES},
    "plain": {"model_type": "gpt_neox", "hidden_act": "gelu", "vocab_size": 32, **_SIZES},
    "mixture": {
        "model_type": "mixtral", "hidden_act": "silu", "vocab_size": 32, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, **_SIZES,
    },
}  # fmt: skip
GATE, UP, DOWN = "gate", "up", "down"
CONTAINERS = ("safetensors", "sharded", "pt")


def stem(family: str, layer: int) -> str:
    return f"gpt_neox.layers.{layer}." if family == "plain" else f"model.layers.{layer}."


def matrix(family: str, layer: int, which: str, expert: int = 0) -> str:
    """Return the name of a matrix in the family's files."""
    if family == "plain":
        return stem(family, layer) + {UP: "mlp.dense_h_to_4h", DOWN: "mlp.dense_4h_to_h"}[which] + ".weight"
    if family == "mixture":
        number = {GATE: 1, UP: 3, DOWN: 2}[which]
        return f"{stem(family, layer)}block_sparse_moe.experts.{expert}.w{number}.weight"
    return f"{stem(family, layer)}mlp.{which}_proj.weight"


def matrices(family: str, layer: int, *which: str) -> list[str]:
    """Return the names of all the matrices of a layer, or of those called `which`."""
    names = which or ((UP, DOWN) if family == "plain" else (GATE, UP, DOWN))
    return [matrix(family, layer, name, e) for name in names for e in range(EXPERTS if family == "mixture" else 1)]


def tensors(family: str, seed: int = 0, layers: int = LAYERS, d: int = D_MODEL, f: int = D_FF) -> Tensors:
    """Return random tensors of a model: its FFNs, its norms, an embedding and a matrix of attention in each layer."""
    g = torch.Generator().manual_seed(seed)
    out: Tensors = {}
    for i in range(layers):
        s = stem(family, i)
        for name in matrices(family, i):
            down = name in matrices(family, i, DOWN)
            out[name] = torch.randn((d, f) if down else (f, d), generator=g) * 0.05
            if family == "plain":
                out[name.replace("weight", "bias")] = torch.randn(d if down else f, generator=g) * 0.1
        if family == "plain":
            for norm in ("input_layernorm", "post_attention_layernorm"):
                out |= {f"{s}{norm}.{end}": 1 + 0.1 * torch.randn(d, generator=g) for end in ("weight", "bias")}
            out[f"{s}attention.dense.weight"] = torch.randn(d, d, generator=g)
        else:
            out[f"{s}post_attention_layernorm.weight"] = 1 + 0.1 * torch.randn(d, generator=g)
            out[f"{s}self_attn.q_proj.weight"] = torch.randn(d, d, generator=g)
        if family == "mixture":
            out[f"{s}block_sparse_moe.gate.weight"] = torch.randn(EXPERTS, d, generator=g) * 0.05
    root = "gpt_neox.embed_in" if family == "plain" else "model.embed_tokens"
    out[f"{root}.weight"] = torch.randn(32, d, generator=g)
    return out


def write(path: Path, family: str, stored: Mapping[str, Tensor], container: str = "safetensors", **config: Any) -> Path:
    """Write a model's directory in a container; return its path."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIGS[family], **config}))
    whole = {name: tensor.contiguous().clone() for name, tensor in stored.items()}
    if container == "sharded":
        index = {}
        for at in range(3):
            part = {name: t for n, (name, t) in enumerate(sorted(whole.items())) if n % 3 == at}
            file = f"model-{at + 1:05}-of-00003.safetensors"
            save_file(part, path / file)
            index |= dict.fromkeys(part, file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    elif container == "pt":
        torch.save(whole, path / "pytorch_model.pt")
        (path / "config.json").unlink()
        return path / "pytorch_model.pt"
    else:
        save_file(whole, path / "model.safetensors")
    return path


# --- edits ------------------------------------------------------------------------------------------------------------


def every(family: str, stored: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    """Return the tensors with all matrices of the FFNs changed."""
    names = {name for i in range(LAYERS) for name in matrices(family, i)}
    return {name: change(tensor) if name in names else tensor for name, tensor in stored.items()}


def noisy(stored: Tensors, size: float, seed: int = 4) -> Tensors:
    """Return the tensors with noise of a relative size."""
    g = torch.Generator().manual_seed(seed)
    return {name: t + size * t.std() * torch.randn(t.shape, generator=g) for name, t in stored.items()}


def lora(family: str, stored: Tensors, rank: int, size: float = 0.1, seed: int = 9) -> Tensors:
    g = torch.Generator().manual_seed(seed)

    def change(w: Tensor) -> Tensor:
        delta = torch.randn(w.shape[0], rank, generator=g) @ torch.randn(rank, w.shape[1], generator=g)
        return w + delta * (size * w.norm() / delta.norm())

    return every(family, stored, change)


def exchanged(stored: Tensors, pairs: Mapping[str, str]) -> Tensors:
    """Return the tensors with some names exchanged."""
    other = {**pairs, **{b: a for a, b in pairs.items()}}
    return {name: stored[other.get(name, name)] for name in stored}


def unit_names(family: str, layer: int, expert: int = 0) -> dict[str, str]:
    return {w: matrix(family, layer, w, expert) for w in ((UP, DOWN) if family == "plain" else (GATE, UP, DOWN))}


def units_permuted(family: str, stored: Tensors, layer: int = 1, seed: int = 3) -> Tensors:
    order = torch.randperm(D_FF, generator=torch.Generator().manual_seed(seed))
    out = dict(stored)
    for which, name in unit_names(family, layer).items():
        out[name] = stored[name][:, order] if which == DOWN else stored[name][order]
    if family == "plain":
        bias = matrix(family, layer, UP).replace("weight", "bias")
        out[bias] = stored[bias][order]
    return out


def experts_moved(stored: Tensors, order: tuple[int, ...] = (2, 0, 3, 1), layer: int = 1) -> Tensors:
    out = dict(stored)
    for which in (GATE, UP, DOWN):
        for e, of in enumerate(order):
            out[matrix("mixture", layer, which, e)] = stored[matrix("mixture", layer, which, of)]
    gate = f"{stem('mixture', layer)}block_sparse_moe.gate.weight"
    out[gate] = stored[gate][list(order)]
    return out


def interleaved(family: str, stored: Tensors) -> Tensors:
    out = dict(stored)
    for i in range(LAYERS):
        for e in range(EXPERTS if family == "mixture" else 1):
            gate, up = (matrix(family, i, which, e) for which in (GATE, UP))
            both = torch.stack([stored[gate], stored[up]], 1).flatten(0, 1)
            out[gate], out[up] = both[:D_FF], both[D_FF:]
    return out


def moved(family: str, stored: Tensors, origin: Callable[[int], int | None], layers: int = LAYERS) -> Tensors:
    """Return the tensors with each of `layers` layers taken from another one; None keeps the layer."""
    outside = {name: t for name, t in stored.items() if ".layers." not in name}
    for i in range(layers):
        of = origin(i)
        of = i if of is None else of
        outside |= {name.replace(stem(family, of), stem(family, i)): t for name, t in stored.items()
                    if name.startswith(stem(family, of))}  # fmt: skip
    return outside


def slerp(a: Tensor, c: Tensor, t: float) -> Tensor:
    """Return mergekit's spherical interpolation of two tensors."""
    dot = (a.double() / a.double().norm() * (c.double() / c.double().norm())).sum()
    theta = torch.acos(dot)
    out = (
        torch.sin((1 - t) * theta) / torch.sin(theta) * a.double()
        + torch.sin(t * theta) / torch.sin(theta) * c.double()
    )
    return out.to(a.dtype)
