"""FLOPs of every text architecture: dense ones as torch counts their modules, mixtures of experts by hand.

FlopCounterMode counts what torch dispatches when the real modules run, at 2 FLOPs per multiply-add.
It cannot count a mixture of experts (which experts run depends on values), so these have closed forms, written from
each family's own config fields and not from what ffn reads of them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ffncli.models.counting.count import count
from tests.architectures.test_table import BUILT, CASES
from tests.oracles.architectures import matching
from tests.oracles.architectures.tiny import statement, tiny

# Their FFN is no module: its projections lie among those of the attention, and each is run alone.
_IN_THE_LAYER = (  # fc1 and fc2
    "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "fsmt", "led", "m2m_100", "marian", "mbart",
    "musicgen", "musicgen_melody", "mvp", "opt", "pegasus", "pegasus_x", "plbart", "trocr", "whisper", "xglm",
)  # fmt: skip
_IN_TWO_MODULES = (  # intermediate and output, which also adds the residual and norms it; ALBERT's two projections
    "albert", "bert", "bert-generation", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2",
    "electra", "encoder-decoder", "ernie", "esm", "fnet", "git", "ibert", "layoutlm", "longformer", "luke",
    "megatron-bert", "mobilebert", "mpnet", "mra", "nystromformer", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "tapas", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
)  # fmt: skip
ONLY_PROJECTIONS = {*_IN_THE_LAYER, *_IN_TWO_MODULES}
TAKES_THE_RESIDUAL = {"bloom", "mpt"}  # as a second argument
TOKENS = 3


# --- mixtures of experts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Closed:
    """A family's FLOPs by hand: the config's own fields, by name.

    `shared` are factors of the shared experts' width, `gate` says that they have a sigmoid gate. `layers` are how many
    of the tiny model's FFNs have experts and how many are dense. `factor`: 2 FLOPs for each of 3 matrices, or of 2.
    `latent` is the width that the experts read and write where one projection leads there and one back, `norm_rank`
    that of the gate on the norm before them, `router` that of a router which is an MLP.
    """

    experts: str | int = "num_experts"
    top_k: str | int = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared: tuple[str | int, ...] = ()
    gate: bool = False
    dense: str = "intermediate_size"
    layers: tuple[int, int] = (4, 0)
    factor: int = 6
    d_model: str = "hidden_size"
    latent: str = ""
    norm_rank: str = ""
    router: str = ""

    def flops(self, config: Any) -> list[int]:
        """Of every layer's FFN, per token, in order of size."""
        d, top_k = _value(config, self.d_model), _value(config, self.top_k)
        shared = prod(_value(config, field) for field in self.shared) if self.shared else 0
        inner = _value(config, self.latent) if self.latent else d
        projections = self.factor * (inner * top_k * _value(config, self.width) + d * shared)
        around = 2 * d * _value(config, self.experts) + (2 * d if self.gate else 0)
        if self.router:  # in, two layers, and one row more than there are experts
            width = _value(config, self.router)
            around = 2 * (d * width + 2 * width**2 + width * (_value(config, self.experts) + 1))
        routed = projections + around + (4 * d * inner if self.latent else 0)
        routed += 4 * d * _value(config, self.norm_rank) if self.norm_rank else 0
        dense = self.factor * d * _value(config, self.dense) if self.layers[1] else 0
        return sorted([routed] * self.layers[0] + [dense] * self.layers[1])


def _value(config: Any, field: str | int) -> int:
    """A field, maybe of a nested config; a number that no field holds stands for itself."""
    if isinstance(field, int):
        return field
    for name in field.split("."):
        config = getattr(config, name)
    return int(config)


_AFTER_ONE = partial(Closed, layers=(3, 1))
_ROUTED = "n_routed_experts"
_LOCAL = Closed("num_local_experts", width="intermediate_size")
_MIXTRAL = Closed(width="intermediate_size")
_QWEN = Closed(shared=("shared_expert_intermediate_size",), gate=True)
_DEEPSEEK = _AFTER_ONE(_ROUTED, shared=("n_shared_experts", "moe_intermediate_size"))
_SHARED = _AFTER_ONE(shared=("num_shared_experts", "moe_intermediate_size"))
_KIMI = replace(_SHARED, top_k="num_experts_per_token")
_DOTS3 = replace(_DEEPSEEK, shared=("n_shared_experts", "shared_experts_intermediate_size"))
_LLAMA4 = replace(_LOCAL, shared=("intermediate_size",), dense="intermediate_size_mlp", layers=(2, 2))
_GRANITE = replace(_LOCAL, shared=("shared_intermediate_size",))
_NEMOTRON = Closed(_ROUTED, shared=("moe_shared_expert_intermediate_size",), factor=4)
_SWITCH = Closed(top_k=1, width="d_ff", dense="d_ff", factor=4, d_model="d_model")
_NLLB = replace(_SWITCH, top_k=2, width="encoder_ffn_dim", dense="encoder_ffn_dim", layers=(2, 2))

CLOSED: Mapping[str, tuple[Closed, ...]] = {
    "axk2": (replace(_DEEPSEEK, norm_rank="gated_norm_rank"),),
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2", "gpt_oss", "granitemoe", "jetmoe"), (_LOCAL,)),
    **dict.fromkeys(("olmoe", "flex_olmo"), (_MIXTRAL,)),
    **dict.fromkeys(("granitemoeshared", "granitemoe_swa", "granitemoehybrid", "minimax_m3_vl_text"), (_GRANITE,)),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"),
                    (_QWEN,)),
    **dict.fromkeys(("qwen3_moe", "mellum"), (Closed("num_local_experts"),)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk1", "dots1", "glm4_moe", "glm4_moe_lite",
                     "glm_moe_dsa", "hy_v4"), (_DEEPSEEK,)),
    **dict.fromkeys(("afmoe", "exaone_moe", "hy_v3"), (_SHARED,)),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), (_KIMI,)),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), (_DOTS3,)),
    **dict.fromkeys(("llama4", "llama4_text"), (_LLAMA4,)),
    "deepseek_v4": (Closed(_ROUTED, shared=(1, "moe_intermediate_size")),),
    "phimoe": (_LOCAL,),
    "zaya": (Closed(router="router_hidden_size"),),
    "inkling2_text": (Closed(_ROUTED),),
    "inkling_text": (_AFTER_ONE(10, shared=("n_shared_experts", "moe_intermediate_size")),),  # 8 rows and 2 shared
    "mimo_v2_flash": (_AFTER_ONE(_ROUTED),),
    "solar_open": (replace(_DEEPSEEK, layers=(4, 0)),),
    "beam": (Closed(layers=(1, 3)),),
    "flint": (Closed(shared=("shared_expert_intermediate_size",), layers=(2, 2)),),
    "laguna": (_AFTER_ONE(shared=("shared_expert_intermediate_size",)),),
    "kolibri1": (Closed("num_local_experts", shared=("shared_expert_intermediate_size",)),),
    "lfm2_moe": (Closed(layers=(2, 2)),),
    "jamba": (replace(_MIXTRAL, layers=(2, 2)),),
    "ernie4_5_moe": (
        _AFTER_ONE("moe_num_experts", "moe_k", shared=("moe_num_shared_experts", "moe_intermediate_size")),
    ),
    "aria_text": (
        Closed("moe_num_experts", "moe_topk", "intermediate_size", ("moe_num_shared_experts", "intermediate_size")),
    ),
    "hunyuan_v1_moe": (Closed(top_k="moe_topk", width="intermediate_size", shared=("intermediate_size",)),),
    "cohere2_moe": (
        _AFTER_ONE(width="intermediate_size", shared=("num_shared_experts", "intermediate_size"),
                   dense="prefix_dense_intermediate_size"),
    ),
    "dbrx": (
        Closed("ffn_config.moe_num_experts", "ffn_config.moe_top_k", "ffn_config.ffn_hidden_size", d_model="d_model"),
    ),
    # Two attentions in each of its layers, each with a dense FFN, and experts beside them.
    "longcat_flash": (
        Closed(_ROUTED, "moe_topk", "expert_ffn_hidden_size", dense="ffn_hidden_size", layers=(2, 4)),
    ),
    "nemotron_h": (replace(_NEMOTRON, layers=(2, 1), latent="moe_latent_size"),),
    "nemo_speechlm": (replace(_NEMOTRON, layers=(1, 1)),),
    "switch_transformers": (replace(_SWITCH, layers=(2, 2)), replace(_SWITCH, layers=(1, 2))),
    "nllb-moe": (_NLLB, replace(_NLLB, width="decoder_ffn_dim", dense="decoder_ffn_dim", layers=(1, 2))),
}  # fmt: skip


@statement
@pytest.mark.parametrize("name", CLOSED)
def test_closed_form_of_a_mixture_of_experts(name: str) -> None:
    config: Any = tiny(name).module.config
    text = config.get_text_config()
    assert _has_experts(name)
    assert _ours(name) == sorted(flops for stack in CLOSED[name] for flops in stack.flops(text))


# --- dense ------------------------------------------------------------------------------------------------------------


DENSE = [name for name in BUILT if name not in CLOSED]


@statement
@pytest.mark.parametrize("name", DENSE)
def test_projections_of_a_dense_layer(name: str) -> None:
    counted = [sum(_flops(p, torch.zeros(1, _into(p))) for p in ffn.values()) for ffn in _ffns(name)]
    assert sorted(counted) == _ours(name)
    assert not _has_experts(name)


@statement
@pytest.mark.parametrize("name", [name for name in DENSE if name not in ONLY_PROJECTIONS])
def test_module_of_a_dense_layer(name: str) -> None:
    counted = []
    for ffn in _ffns(name):
        x = torch.zeros(1, TOKENS, _into(next(iter(ffn.values()))))
        counted.append(_flops(_module_of(name, ffn), *(x, x) if name in TAKES_THE_RESIDUAL else (x,)))
    assert sorted(counted) == [TOKENS * flops for flops in _ours(name)]


@statement
@pytest.mark.parametrize("name", sorted(ONLY_PROJECTIONS - {"fnet"}))  # FNet's layer has no other matrices
def test_those_without_an_ffn_module_have_none(name: str) -> None:
    assert any(_holds_more(name, ffn) for ffn in _ffns(name))  # MobileBERT's additional FFNs are modules


def _ours(name: str) -> list[int | None]:
    """What ffn says of every stored layer, in order of size."""
    return sorted(group.matmul_flops_per_token for group in count(tiny(name).model).groups for _ in group.layers)  # type: ignore[type-var]


def _has_experts(name: str) -> bool:
    return any(group.spec.moe for group in tiny(name).model.model.groups)


def _ffns(name: str) -> Iterator[Mapping[str, nn.Module]]:
    """The projections of every FFN, by name: those whose names agree up to the last number before a word."""
    module, found = tiny(name).module, dict[str, dict[str, nn.Module]]()
    for parameter, tensor in matching(module, CASES[name].ffn):
        owner = parameter.rpartition(".")[0]
        numbered = re.match(r".*\.\d+(?=\.[a-zA-Z])", owner)
        layer = numbered[0] if numbered else owner.rpartition(".")[0]
        if tensor.dim() > 1:  # a matrix
            found.setdefault(layer, {})[owner] = module.get_submodule(owner)
    return iter(found.values())


def _module_of(name: str, ffn: Mapping[str, nn.Module]) -> nn.Module:
    """The smallest module that holds all of these."""
    levels = zip(*(path.split(".") for path in ffn), strict=False)
    shared = takewhile(lambda names: len(set(names)) == 1, levels)
    return tiny(name).module.get_submodule(".".join(names[0] for names in shared))


def _holds_more(name: str, ffn: Mapping[str, nn.Module]) -> bool:
    """Whether the smallest module around an FFN holds other matrices too: it is a whole layer."""
    matrices = sum(p.numel() for p in _module_of(name, ffn).parameters() if p.dim() > 1)
    return matrices > sum(p.numel() for one in ffn.values() for p in one.parameters() if p.dim() > 1)


def _into(projection: nn.Module) -> int:
    """The width that it reads: of a Linear, or of GPT-2's Conv1D."""
    return int(getattr(projection, "in_features", None) or projection.nx)  # type: ignore[arg-type]


def _flops(module: nn.Module, *inputs: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs)
    return counter.get_total_flops()
