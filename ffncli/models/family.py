"""What a row of `config.FAMILIES` can say: which config field holds what, and what the family's code fixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ffncli.block.recipe import NormPosition
from ffncli.models.fields import REQUIRED, Fields

Extra = Mapping[str, Any]


@dataclass(frozen=True)
class MoEFields:
    """The part of a family's row that concerns experts. `layers` makes the rule that says which layers have them."""

    experts: str
    d_ff: str
    top_k: str = "num_experts_per_tok"
    layers: Callable[[Fields], Callable[[int], bool]] = lambda config: lambda i: True
    routing: Callable[[Fields], Extra] = lambda config: {}


@dataclass(frozen=True)
class Stack:
    """A stack of layers: its name, the field that counts them, and its own d_ff field if it has one."""

    name: str = "decoder"
    layers: str = "num_hidden_layers|n_layer|n_layers|num_layers"
    d_ff: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family. Strings are field names; `multiple` is d_ff / d_model where d_ff is null or absent.

    `gated` None: the activation field says it (T5). `bias` is fixed, or the name of a flag (with its default). `adjust`
    holds what is no plain field, as keyword arguments of FFNSpec.
    """

    gated: bool | None = True
    d_model: str = "hidden_size"
    d_ff: str | None = "intermediate_size"
    multiple: int | None = None
    activation: str | None = "hidden_act"
    default_activation: str = REQUIRED
    bias: bool | tuple[str, bool] = False
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    position: NormPosition = "pre"
    norm_weight: Literal["plain", "one_plus"] = "plain"
    eps: tuple[str | None, float] = ("rms_norm_eps", 1e-6)
    stacks: Sequence[Stack] = (Stack(),)
    adjust: Callable[[Fields], Extra] = lambda config: {}
    moe: MoEFields | None = None
    aliases: tuple[str, ...] = ()
