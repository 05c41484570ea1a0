"""The form of a row of `families/`: which config field holds what, and what the family's code fixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ffncli.block.recipe import NormPosition
from ffncli.models.files.fields import REQUIRED, Fields

Extra: TypeAlias = Mapping[str, Any]  # keyword arguments of FFNSpec (or of MoE, for a routing)
EXPERTS = "num_experts|n_routed_experts|num_local_experts|moe_num_experts"
TOP_K = "num_experts_per_tok|moe_topk|moe_k|moe_top_k|top_k_experts|num_experts_per_token"


@dataclass(frozen=True)
class Stack:
    """A stack of layers: its name, the field that counts them, and its d_ff field if it has a separate one.

    `layers` may compute the count if no field holds it (Funnel: the sum of its blocks). `at` names a nested config
    that holds the stack's fields. `kind` keeps only the dense or only the MoE layers of the count, for a model whose
    layers have both (LongCat-Flash); `times` is then how many FFNs of that kind one layer has: a number, or the field
    that holds it. `runs` overrides the family's `runs` for this stack; it may be one number per layer.
    """

    name: str = "decoder"
    layers: str | Callable[[Fields], int] = "num_hidden_layers|n_layer|n_layers|num_layers"
    d_ff: str | None = None
    at: str = ""
    kind: Literal["any", "dense", "moe"] = "any"
    times: int | str = 1
    runs: Callable[[Fields], int | tuple[int, ...]] | None = None


LayerRule: TypeAlias = Callable[[Fields, Stack], Callable[[int], bool]]
LayerExtra: TypeAlias = Callable[[Fields, Stack], Callable[[int], Extra | None]]


def every_layer(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """The rule for a model whose layers are all the same."""
    return lambda i: True


@dataclass(frozen=True)
class MoEFields:
    """The part of a family's row that concerns experts. `layers` makes the rule for which layers have experts."""

    experts: str = EXPERTS
    d_ff: str = "moe_intermediate_size"
    top_k: str = TOP_K
    layers: LayerRule = every_layer
    routing: Callable[[Fields], Extra] = lambda config: {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family. Strings are field names; `multiple` is d_ff / d_model if d_ff is null or absent.

    `gated` None: the activation field decides (T5). `bias` is fixed, or the name of a flag (with its default). `adjust`
    computes other choices, as keyword arguments of FFNSpec; `layer` does the same for single layers (`moe.lookup` is
    one of MoE's), with None for a layer without an FFN (hybrids). A `d_ff` field may hold one width per layer. `runs`
    is how often the stored layers run in one forward pass (ALBERT shares its one layer). `text` names the nested
    configs that may hold the numbers; `parts` the configs that are whole models with separate rows (encoder-decoder),
    which `stacks` then leaves out.
    """

    gated: bool | None = True
    d_model: str = "hidden_size"
    d_ff: str | None = "intermediate_size"
    multiple: int | None = None
    activation: str | None = "hidden_act"
    default_activation: str = REQUIRED
    bias: bool | tuple[str, bool] = False
    norm: Literal["none", "layernorm", "rmsnorm"] = "rmsnorm"
    position: NormPosition = "pre"
    norm_weight: Literal["none", "plain", "one_plus"] = "plain"
    eps: tuple[str | None, float] = ("rms_norm_eps", 1e-6)
    stacks: Sequence[Stack] = (Stack(),)
    adjust: Callable[[Fields], Extra] = lambda config: {}
    layer: LayerExtra = lambda config, stack: lambda i: {}
    runs: Callable[[Fields], int] = lambda config: 1
    moe: MoEFields | None = None
    text: tuple[str, ...] = ("text_config",)
    parts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
