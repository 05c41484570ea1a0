"""Routings and inputs, which determine a case's input x. Files are read and checked here, before anything is measured.

The workers read the files again with the same functions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError, did_you_mean, option, shown, shown_path
from ffncli.models.counting.expert_load import UNIFORM, skew_text, zipf_exponent
from ffncli.models.files.checkpoint import PLAIN
from ffncli.models.files.headers import read_header
from ffncli.show.text import plural
from ffncli.system.files import TENSOR_SUFFIXES, sha256_of

if TYPE_CHECKING:
    from torch import Tensor


SCALED = 0.02  # rows of a file are scaled by up to this share, so that few rows are identical
TEXT = "text"  # routing by the words of a text (referee/prescribed_routing.py)
_HOW = "use uniform, zipf:1.2, text, or a file of ffn trace --save FILE.safetensors"


def routing_text(field: str, text: str) -> str:
    """Return a valid routing; in a file name, ~ is expanded. Raises FFNError for anything else."""
    if text == TEXT:
        return text
    if text == UNIFORM or text.partition(":")[0] == "zipf":
        return skew_text(field, text)
    if "/" in text and not text.endswith(TENSOR_SUFFIXES):
        raise FFNError(f"{field}: {shown_path(Path(text))} is not a file of tensors", _HOW)
    if not text.endswith(TENSOR_SUFFIXES):
        raise FFNError(f"{field}: unknown value {shown(text)}", did_you_mean(text, [UNIFORM, TEXT], _HOW))
    return os.path.expanduser(text)


def is_file(routing: str) -> bool:
    """Return whether this value of --routing is a file."""
    return routing not in (UNIFORM, TEXT) and zipf_exponent(routing) is None


def digest(field: str, name: str) -> str:
    """Return the sha256 of a file. Raises FFNError if it cannot be read."""
    try:
        return sha256_of(Path(name))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a file name"
        raise FFNError(f"{field}: cannot read {shown_path(Path(name))}: {why}") from None


# --- routing ----------------------------------------------------------------------------------------------------------


def check_routing(routing: str, label: str, spec: FFNSpec) -> None:
    """Raise FFNError if this routing cannot be prescribed for the block."""
    if spec.moe is None:
        why = f"{option('routing')} needs a mixture of experts, and {label} is not one"
        raise FFNError(why, f"leave it out, or add experts: {option('experts', 8)} {option('top_k', 2)}")
    experts = spec.moe.experts + spec.moe.identity_experts
    if spec.moe.top_k == experts:
        raise FFNError(f"{option('routing')}: in {label} every token goes to all {experts} experts", "leave it out")
    if is_file(routing):
        traced_routes(routing, experts, spec.moe.top_k)


def routing_note(routing: str, tokens: int, spec: FFNSpec) -> str:
    """Return a note if `routing` is a file whose number of tokens differs; otherwise ""."""
    if not is_file(routing) or spec.moe is None:
        return ""
    there = len(traced_routes(routing, spec.moe.experts + spec.moe.identity_experts, spec.moe.top_k))
    if there == tokens:
        return ""
    many = f"{there} {plural('token', there)}"
    return f"{shown_path(Path(routing))} has the routes of {many}: the routes of {tokens} tokens are drawn from these"


def traced_routes(name: str, experts: int, top_k: int) -> Tensor:
    """Return the experts that each token of a saved trace chose, as booleans [tokens, experts].

    Raises FFNError for a file that is not a trace of a mixture, and for a trace of a different mixture.
    """
    import torch

    from ffncli.run.corpus.routes import read_routes

    layers, where = read_routes(Path(name)).layers, shown_path(Path(name))
    if len(layers) > 1:
        raise FFNError(f"{where} has the routes of {len(layers)} layers", f"save them with one {option('layer')}")
    (layer,) = layers
    if layer.columns != experts:
        raise FFNError(f"{where} has routes to {layer.columns} experts, but the block has {experts}", _HOW)
    some = layer.ids >= 0
    chosen = torch.zeros(len(some), experts).scatter_add(1, layer.ids.clamp_min(0), some.float()) != 0
    counts = chosen.sum(1)
    unlike = (counts != top_k).nonzero().flatten().tolist()
    if unlike:
        many = int(counts[unlike[0]])
        why = f"token {unlike[0]} goes to {many} {plural('expert', many)}, but the block chooses {top_k}"
        raise FFNError(f"{where}: {why}", _HOW)
    return chosen


# --- input ------------------------------------------------------------------------------------------------------------


def input_rows(name: str, d_model: int) -> Tensor:
    """Return the tensor x of a file as [rows, d_model], in its dtype.

    Raises FFNError if the file has no x, or if x has another width or contains values that are not finite.
    """
    from ffncli.models.files.rows import named_tensor

    path, where = Path(name), shown_path(Path(name))
    if path.suffix != ".safetensors":
        raise FFNError(
            f"{option('input')}: {shown(name)} is not a .safetensors file", "the input is its tensor x [rows, d_model]"
        )
    info = read_header(path).get("x")
    if info is None:
        raise FFNError(f"{where} has no tensor x", "the input is the tensor x [rows, d_model]")
    if info.dtype not in PLAIN:
        raise FFNError(f"{where}: x holds {info.dtype}", f"the dtype must be one of {', '.join(sorted(PLAIN))}")
    if len(info.shape) < 2 or 0 in info.shape or info.shape[-1] != d_model:
        raise FFNError(f"{where}: x has shape {list(info.shape)}, expected [rows, {d_model}]")
    rows = named_tensor(path, "x").flatten(0, -2)
    if not bool(rows.isfinite().all()):
        raise FFNError(f"{where}: x holds NaN or Inf")
    if not bool(rows.any()):
        raise FFNError(f"{where}: x is zero throughout", "no kernel can be checked on zeros")
    return rows


def check_input(name: str, d_model: int, dtypes: tuple[str, ...]) -> None:
    """Raise FFNError for a file whose rows cannot be the input of a block of this width in all of these dtypes."""
    import torch

    from ffncli.block.dtypes import dtype

    largest = float(input_rows(name, d_model).abs().max().double())
    for one in dtypes:
        if largest * (1 + SCALED) > torch.finfo(getattr(torch, dtype(one).torch)).max:
            raise FFNError(f"{shown_path(Path(name))}: x holds {largest:.3g}, which is too large for {one}")
