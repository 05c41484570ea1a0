"""Count a checkpoint's parameters outside its FFNs, by names and shapes alone: attention, norms, embeddings, head.

A layer has three parts: its FFN (`recognise`), its norms, and its token mixer, which is attention or a replacement for
it. A layer with any other tensor is skipped. Norms of queries, keys and latents count as attention (`config.non_ffn`),
norms of the residual stream count as norms of the layer.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ffncli.block.cost import cost
from ffncli.models.model import LayerParams, Model, NonFFN
from ffncli.models.tensors.ffns import Item, is_norm
from ffncli.models.tensors.matching import prefixes
from ffncli.models.tensors.recognise import Layers, StoredFFN, is_parameter, of_other_tower, placed


@dataclass(frozen=True)
class MeasuredLayer(LayerParams):
    """One layer according to its tensors. `table` counts T5's relative positions, which `attention` excludes;
    `matrices` counts only the attention's matrices; `packed` means that some of the mixer's tensors are quantized.
    `tensor` names one of its tensors, a key projection if possible."""

    table: int = 0
    matrices: int = 0
    packed: bool = False
    tensor: str = ""


@dataclass(frozen=True)
class Embedding:
    """The table of token embeddings, [rows, params / rows]."""

    tensor: str
    rows: int
    params: int


@dataclass(frozen=True)
class MeasuredNonFFN:
    """The tensors outside the FFNs. `params` counts the whole text model, None if uncertain; `lookup` is defined as in
    `NonFFN`. `left_out` maps modules of other towers to their parameters."""

    layers: Mapping[str, Mapping[int, MeasuredLayer]]
    embedding: Embedding | None = None
    params: int | None = None
    lookup: int | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    def record(self, config: NonFFN | None) -> NonFFN:
        """Return the parameters as stored (a base model has no head); the config supplies the other fields."""
        base = config or NonFFN(self.layers)
        return base if self.params is None else replace(base, parts={("", "all"): self.params}, lookup=self.lookup)


# A module that mixes tokens: attention under its many names, state-space layers, recurrences, short convolutions.
_MIXER = re.compile(r"att|^(?:mixer|mamba|conv|temporal_block|mlstm_layer|short_conv|ssm)|lstm|delta", re.I)
_STREAM_NORM = re.compile(r"^(?:LayerNorm|layer_norm|layernorm\w*)$")  # inside BERT's and XLNet's attention modules
_INNER_NORM = re.compile(
    r"(?:^|[._])(?:q|k|v|kv|qk|q_a|kv_a|q_lora|query|key)_?(?:layer)?norm"
)  # also GGUF's flat names
_RELATIVE = re.compile(r"relative_attention_bias\.weight$")
_BUFFER = re.compile(
    r"inv_freq$|rope_freqs\.weight$|masked_bias$|causal_mask$|position_ids$|token_type_ids$|num_batches_tracked$"
    r"|running_(?:mean|var)$|final_logits_bias$|layer_scalar$|slope_rate$|(?:query|key|diagonal)_decay$"
    r"|LayerNorm\.shift$|relative_position_index$|lora_|_integer$|scaling_factor$|\.x_(?:min|max)$"
)
_ONE_NUMBER = re.compile(  # a quantizer's numbers, either for keys and values, or for a module's inputs and outputs
    r"(?:^|[._])(?:q|k|v|kv|prob|input|output|weight|activation)_(?:scale|zero_point)$"
)
_MASK = re.compile(r"att(?:n|ention)\.bias$")  # in GPT-2 and GPT-NeoX, with four axes
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings?|tok_embeddings|token_embd|embed_in|tokens_embed|shared)\.weight$"
)
_TABLE = re.compile(  # looked up by n-gram or in every layer: Engram, Qwen, LongCat, BLT, Gemma; includes GGUF's names
    r"n_?gram(?:(?!n_?gram)[\w.])*emb|hash_tok_embedding|embed_tokens_per_layer\.|per_layer_token_embd\."
)
_OF_TABLE = re.compile(r"proj|norm|conv|gate")  # modules that read a table
_HEAD = re.compile(
    r"(?:^|\.)(?:lm_head|embed_out|output_projection|predictions\.decoder|lm_head\.decoder|vocab_projector)\.weight$"
    r"|^output\.weight$"
)
_BRIDGE = re.compile(r"projector|connector|adapter|merger|^embed_")  # between another tower and the text model
_TEXT_ROOT = re.compile(r"^(?:.*?\.)??(?:language_model|text_model)\.")


def measure(model: Model, items: Mapping[str, Item], layers: Layers) -> MeasuredNonFFN:
    """Count the parameters outside the FFNs of a checkpoint that has no missing files.

    `layers` are the FFNs that `recognise` found among `items`; `model` comes from the config.
    """
    stored = {name: item for name, item in items.items() if not _is_buffer(name, item)}
    ours = prefixes(model, layers)
    by_layer = _by_layer(stored, set(ours.values()))
    blocks = {stack: _blocks(model, stack, layers[prefix]) for stack, prefix in ours.items()}
    rests = {
        stack: _stack(prefix, blocks[stack], by_layer.get(prefix, {}), layers[prefix]) for stack, prefix in ours.items()
    }
    counted = {(ours[stack], layer) for stack, numbers in blocks.items() for layer in numbers.values()}
    text, left_out = _text_model(stored, layers, counted)
    embedding = _embedding(text) if text is not None else None
    if text is None:
        return MeasuredNonFFN(rests, left_out=left_out)
    params = _total(model, text, layers, counted)
    return MeasuredNonFFN(rests, embedding, params, _lookup(model, embedding, text), left_out)


def _is_buffer(name: str, item: Item) -> bool:
    """Return whether a stored tensor is a constant of the code, not a parameter."""
    mask = _MASK.search(name) and item.shape is not None and len(item.shape) > 2
    if mask or _BUFFER.search(name) or (item.params == 1 and _ONE_NUMBER.search(name)):
        return True
    return not is_parameter(name) and not is_norm(name)  # older files also call a norm's bias `beta`


# --- layers -----------------------------------------------------------------------------------------------------------


def _by_layer(items: Mapping[str, Item], wanted: set[str]) -> dict[str, dict[int, dict[str, Item]]]:
    """Return a mapping from prefix and layer to the layer's tensors, by their names in the layer."""
    out: dict[str, dict[int, dict[str, Item]]] = {}
    for name, item in items.items():
        place = placed(name)
        if place and place[0] in wanted:
            out.setdefault(place[0], {}).setdefault(place[1], {})[place[2]] = item
    return out


def _blocks(model: Model, stack: str, by_layer: Mapping[int, tuple[StoredFFN, ...]]) -> dict[int, int]:
    """Return a mapping from a stack's FFN blocks to their layers, by index if the indices match, else in order."""
    blocks = sorted(i for group in model.groups if group.stack == stack for i in group.layers)
    per_layer = model.per_layer(stack)
    numbered = {block: block // per_layer for block in blocks}
    if set(numbered.values()) <= set(by_layer):
        return numbered
    one_by_one = [layer for layer, ffns in sorted(by_layer.items()) for _ in ffns]
    return dict(zip(blocks, one_by_one, strict=True)) if len(one_by_one) == len(blocks) else {}


def _stack(
    prefix: str, blocks: Mapping[int, int], items: Mapping[int, Mapping[str, Item]],
    by_layer: Mapping[int, tuple[StoredFFN, ...]],
) -> dict[int, MeasuredLayer]:  # fmt: skip
    """Return a mapping from FFN blocks to their layers, for layers that have one FFN and no unknown parts."""
    cache: dict[object, MeasuredLayer | None] = {}
    out: dict[int, MeasuredLayer] = {}
    for block, layer in blocks.items():
        inside, ffns = items.get(layer, {}), by_layer.get(layer, ())
        signature = (tuple(inside.items()), ffns)
        if signature not in cache:
            cache[signature] = _rest(inside, ffns, f"{prefix}.{layer}")
        if rest := cache[signature]:
            out[block] = rest
    everywhere = len(out) > 1 and all(rest.table for rest in out.values())  # UMT5's, one per layer
    return {i: replace(r, attention=r.attention + r.table, table=0) if everywhere else r for i, r in out.items()}


def _rest(inside: Mapping[str, Item], ffns: tuple[StoredFFN, ...], at: str) -> MeasuredLayer | None:
    """Split one layer into three parts; None if the parts do not add up, or if the layer has no attention or several
    FFNs."""
    if len(ffns) != 1:
        return None
    norms: dict[str, Item] = {}
    mixer: dict[str, Item] = {}
    table: dict[str, Item] = {}
    for name, item in inside.items():
        if _RELATIVE.search(name):
            table[name] = item
        elif _in_mixer(name):
            mixer[name] = item
        elif is_norm(name) and len(item.shape or ()) == 1:  # excludes norms computed by a small MLP
            norms[name] = item
    attention, of_norms, of_table = (_sum(part.values()) for part in (mixer, norms, table))
    if not attention or attention + of_norms + of_table + ffns[0].params != _sum(inside.values()):
        return None
    packed = any("-" in item.format for item in mixer.values())  # such as `gptq-4bit`; a plain tensor has a dtype code
    tensor = next((name for name in mixer if re.search(r"k_proj|key|kv|_k\b", name)), next(iter(mixer)))
    matrices = _sum(item for item in mixer.values() if len(item.shape or (0, 0)) > 1)
    return MeasuredLayer(attention, of_norms, table=of_table, matrices=matrices, packed=packed, tensor=f"{at}.{tensor}")


def _in_mixer(name: str) -> bool:
    """Return whether a layer's tensor belongs to the token mixer; norms of the residual stream do not belong to it."""
    *modules, _ = name.split(".")
    if not is_norm(name):
        return any(map(_MIXER.search, name.split("."))) and not name.endswith("_mlp_gate")
    if _INNER_NORM.search(name):
        return True
    return any(_MIXER.search(m) and not is_norm(m) for m in modules) and not _STREAM_NORM.match(modules[-1])


def _sum(items: Iterable[Item]) -> int:
    return sum(item.params * item.count for item in items)


# --- the whole model --------------------------------------------------------------------------------------------------


def _text_model(
    items: Mapping[str, Item], layers: Layers, counted: set[tuple[str, int]]
) -> tuple[dict[str, Item] | None, dict[str, int]]:
    """Return the text model's tensors, and the parameters of each module that is left out; None if names do not
    determine the text model.

    Other towers, and layers beyond the config's (multi-token prediction), are left out.
    """
    ours = {prefix for prefix, _ in counted}
    beyond = {(prefix, layer) for prefix in ours for layer in layers[prefix]} - counted
    apart = {prefix.rpartition(".")[0] + "." for prefix in layers if prefix not in ours}
    if not counted or any(module == "." or prefix.startswith(module) for module in apart for prefix in ours):
        return None, {}
    text = {
        name: item
        for name, item in items.items()
        if not any(map(name.startswith, apart)) and not ((place := placed(name)) and place[:2] in beyond)
    }
    roots = {match[0] if (match := _TEXT_ROOT.match(prefix + ".")) else "" for prefix in ours}
    root = roots.pop() if len(roots) == 1 else ""
    if not root:
        return (None if any(map(of_other_tower, text)) else text), {}
    tower = {name: item for name, item in text.items() if name.startswith((root, "lm_head."))}
    left: dict[str, int] = {}
    for name in text.keys() - tower.keys():
        module = name.removeprefix("model.").partition(".")[0]
        left[module] = left.get(module, 0) + _sum([text[name]])
    unclear = not all(of_other_tower(module) or _BRIDGE.search(module) for module in left)
    return (None, {}) if unclear else (tower, dict(sorted(left.items())))


def _total(model: Model, text: Mapping[str, Item], layers: Layers, counted: set[tuple[str, int]]) -> int | None:
    """Count all parameters of the text model outside its FFNs, with tied parameters counted once; None if uncertain."""
    ffn = sum(item.params for prefix, layer in counted for item in layers[prefix][layer])
    if ffn != sum(cost(group.steps).params * len(group.layers) for group in model.groups):
        return None  # parts are shared or left out in the file
    twice = _twice(model, text)
    return None if twice is None else _sum(text.values()) - sum(text[name].params for name in twice) - ffn


def _twice(model: Model, text: Mapping[str, Item]) -> set[str] | None:
    """Return the tables that are stored twice; None if the config does not specify whether they are tied."""
    tables = [name for name in text if _EMBEDDING.search(name) and not placed(name)]
    shared = next((name for name in tables if name.endswith("shared.weight")), None)
    out = {name for name in tables if shared and name != shared and text[name].shape == text[shared].shape}
    heads = [name for name in text if _HEAD.search(name) and any(text[name].shape == text[t].shape for t in tables)]
    if heads and (model.tied is None or (model.tied and any(name.endswith("decoder.weight") for name in heads))):
        return None  # some encoders (LUKE) store a separate table although the config declares it tied
    return out | set(heads if model.tied else ())


def _embedding(text: Mapping[str, Item]) -> Embedding | None:
    """Return the table of token embeddings, found by name; None unless there is exactly one."""
    tables = {name: item for name, item in text.items() if _EMBEDDING.search(name) and not placed(name)}
    shapes = {item.shape for item in tables.values()}
    shape = shapes.pop() if len(shapes) == 1 else None
    return Embedding(next(iter(tables)), shape[0], shape[0] * shape[1]) if shape and len(shape) == 2 else None


def _lookup(model: Model, embedding: Embedding | None, text: Mapping[str, Item]) -> int | None:
    """Count the parameters that are only looked up: tables, and the embedding unless it is tied to a head."""
    if embedding is None or model.tied is None:
        return None
    tables = _sum(item for name, item in text.items() if _TABLE.search(name) and not _OF_TABLE.search(name))
    if model.tied:
        return None if all(group.stack == "encoder" for group in model.groups) else tables
    return embedding.params + tables
