"""Configs of every family with fields changed: a right count, a note, or one line, never a wrong number without a word.

The right count is that of the model that transformers builds from the same changed config, on the meta device; so are
the right bytes, in bf16 and in fp8 with a scale for each tensor, by the tensors' names and shapes. Where
transformers refuses the config, or reads it as before, there is nothing to hold an answer to but that it is one.
"""

import copy
import json
import re
import time
from collections.abc import Mapping
from functools import cache
from math import prod
from operator import attrgetter
from random import Random
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.errors import FFNError
from ffncli.models.config.families import FAMILIES
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from tests.fuzz.answers import FuzzAnswer
from tests.oracles.architectures import Architecture, cases, matching, text_architectures
from tests.oracles.architectures import config as tiny_config
from tests.oracles.architectures.multimodal import TOWERS
from tests.oracles.checkpoints import harmful

Values = dict[str, Any]
# What a later release may add to any family, or another tool may write: no family has these.
LATER: Mapping[str, Any] = {
    "routed_expert_hidden_size": 8, "moe_latent_width": 8, "swiglu_limits": [7.0], "gate_clamp": 3.0,
    "ffn_hidden_multiplier": 1.5, "engram_rows": 384, "expert_out_norm": True, "router_soft_cap": 30.0,
    "intermediate_size_late": 80, "mlp_clip": 2.0, "num_null_experts": 4, "moe_config": {"experts": 3},
}  # fmt: skip
# Where the class of transformers is no measure: it does not narrow Kimi-K3's experts, and stores weights for those of
# LongCat that have none.
UNLIKE = {"kimi_linear": "routed_expert_hidden_size", "longcat_flash": "zero_expert_num"}
OTHER_VALUES = (None, False, 0, 1, -1, 3, 2.5, "16", True, [], [12], {}, float("nan"), 1 << 40)


@cache
def specimens() -> Mapping[str, tuple[Architecture, Values]]:
    """model_type → its case and its tiny config, for every architecture that ffn reads."""
    found = {}
    for name, case in {**cases(), **TOWERS}.items():
        if case.reason:
            continue
        values = json.loads(json.dumps(tiny_config(name, case).to_dict(), default=str))
        found[name] = (case, values)
    return found


def places(values: Values, at: str = "") -> list[tuple[Values, str]]:
    """(object, key) of every field, those of nested configs of the text model too."""
    out = []
    for key in values:
        out.append((values, key))
        if isinstance(values[key], dict) and key.endswith("_config") and "vision" not in key and "audio" not in key:
            out += places(values[key])
    return out


_SIZE = re.compile(r"expert|moe|latent|hidden|intermediate|ngram|limit|clamp|mlp|ffn|top_?k|d_ff|dff|dim|inner|n_embd"
                   r"|d_model|layer|group|shared|dense|sparse|act|rout|scal|norm|bias|multipl|step|freq")  # fmt: skip


def mutated(name: str, draw: Random) -> tuple[Values, str]:
    """A changed copy of a tiny config, and what was changed."""
    values = copy.deepcopy(specimens()[name][1])
    changes = [_change(values, draw) for _ in range(draw.choice((1, 1, 1, 1, 2, 3)))]
    if draw.random() < 0.03:
        values = {"model_type": draw.choice(("llava", "kimi_vl", "mllama")), "text_config": values}
        changes.append("nested")
    return values, "; ".join(changes)


def _change(values: Values, draw: Random) -> str:
    all_places = places(values)
    concerned = [(at, key) for at, key in all_places if _SIZE.search(key) and key != "model_type"]
    sizes = [(at, key) for at, key in concerned if type(at[key]) is int and at[key] > 0]
    at, key = draw.choice(sizes if draw.random() < 0.5 and sizes else concerned or all_places)
    old = at[key]
    match draw.randrange(9):
        case 0:
            del at[key]
            return f"no {key}"
        case 1:
            other = draw.choice(_spellings(key) or [key + "s"])
            at[other] = at.pop(key)
            return f"{key} called {other}"
        case 2:
            new = draw.choice([*LATER])
            at[new] = LATER[new]
            return f"{new} added"
        case 3:
            at[key] = copy.deepcopy(draw.choice(OTHER_VALUES))
        case 4:
            at[key] = [old] * draw.choice((1, 2, 3, 4, 5))
            if type(old) is int:
                at[key][draw.randrange(len(at[key]))] += draw.choice((0, 1, 4))
        case 5 if sizes:
            where, other = draw.choice(sizes)
            at[key], where[other] = where[other], at[key]
            return f"{key} and {other} swapped"
        case 6:
            other_name = draw.choice([*specimens()])
            foreign = [(k, v) for k, v in specimens()[other_name][1].items() if _SIZE.search(k) and k not in at]
            if not foreign:
                return "nothing"
            new, value = draw.choice(foreign)
            at[new] = copy.deepcopy(value)
            return f"{new} = {value!r} of {other_name} added"
        case _:
            at[key] = _like(old, draw)
    return f"{key}: {old!r} is {at[key]!r}"


def _like(old: Any, draw: Random) -> Any:
    """Another value of the same kind."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return draw.choice((old * 2, old + 1, max(old - 1, 0), old // 2, 1, 3, 8, 24))
    if isinstance(old, float):
        return draw.choice((old * 2, 1.0, 0.5, old + 1))
    if isinstance(old, list):
        return draw.choice((old[::-1], old[:-1], old + old[:1], [], old[1:] + old[:1]))
    if isinstance(old, str):
        return draw.choice(("relu", "gelu", "silu", "swiglu", "softmax", "sigmoid", "greedy", "noaux_tc", "x"))
    return draw.choice((4, 2.5, True, "relu", [3], 12))


@cache
def _groups() -> tuple[frozenset[str], ...]:
    """Names that some row takes for the same thing."""
    found = set()
    for family in FAMILIES.values():
        fields = [family.d_model, family.d_ff, family.activation, *(s.d_ff for s in family.stacks)]
        fields += [s.layers for s in family.stacks]
        fields += [family.moe.experts, family.moe.d_ff, family.moe.top_k] if family.moe else []
        found |= {frozenset(f.split("|")) for f in fields if isinstance(f, str) and "|" in f}
    return tuple(found)


def _spellings(key: str) -> list[str]:
    return sorted({other for group in _groups() if key in group for other in group} - {key})


def changed_case(draw: Random) -> tuple[list[str], FuzzAnswer]:
    """(the family and what was changed in its config, what ffn made of that)."""
    name, start = draw.choice([*specimens()]), time.monotonic()
    values, change = mutated(name, draw)
    result, wrong = judge(name, values)
    return [name, change], FuzzAnswer(2 if result == "refused" else 0, time.monotonic() - start, wrong, result)


def judge(name: str, values: Values) -> tuple[str, str]:
    """(what came of a config: counted, noted, refused, unbuilt where only ffn reads it; what is wrong with that)."""
    case, _ = specimens()[name]
    try:
        ours = from_config(values, name, f"{name}/config.json")
        counted = count(ours)
    except FFNError as error:
        whole = f"{error.message}{error.hint}"
        return "refused", "more than a line" if "\n" in whole or harmful(whole) else ""
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    if set(ours.notes) - set(_notes(name)):
        return "noted", ""
    field = UNLIKE.get(name, "")
    theirs = None if values.get(field) != specimens()[name][1].get(field) else _built(name, case, values)
    if theirs is None:
        return "unbuilt", ""
    params = sum(map(prod, theirs.values()))
    if counted.ffn_params_total != params:
        return "counted", f"counted {counted.ffn_params_total:,}, the module has {params:,}"
    packed = sum(prod(shape) for tensor, shape in theirs.items() if len(shape) > 1 and not _PLAIN.search(tensor))
    for more, expected in (({}, 2 * params), ({"quantization_config": {"quant_method": "fp8"}}, 2 * params - packed)):
        found = count(from_config({**values, "dtype": "bfloat16", **more}, name, f"{name}/config.json")).weight_bytes
        if found != expected:
            return "counted", f"{found:,} bytes, the module has {expected:,} with {more or 'bfloat16'}"
    return "counted", ""


@cache
def _notes(name: str) -> tuple[str, ...]:
    return from_config(specimens()[name][1], name, f"{name}/config.json").notes


# What a format with a scale for each tensor leaves in bf16: routers, biases of experts, projections to a latent width.
_PLAIN = re.compile(
    r"router|(?:^|\.)gate\.down_proj|(?:^|\.)(?:gate|wg)(?:\.weight)?$|shared_expert_gate|classifier|latent_proj|(?:pre|post)_expert_proj|bias$"
)


def _built(name: str, case: Architecture, values: Values) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the FFNs' parameters in the changed config's model; None if there is no such model."""
    transformers.logging.set_verbosity_error()
    kind = attrgetter(case.model or text_architectures()[name])(transformers)
    given = {k: copy.deepcopy(v) for k, v in values.items() if k != "model_type"}
    try:
        whole = CONFIG_MAPPING[values["model_type"]].from_dict(given)
        with torch.device("meta"):
            model = kind(getattr(whole, case.at) if case.at else whole)
    except Exception:
        return None
    return {tensor_name: tuple(tensor.shape) for tensor_name, tensor in matching(model, case.ffn)}
