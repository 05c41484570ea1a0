"""Where a family's FFN lies on disk: tensor names and layouts → the canonical weights of `block/`.

A Piece says where one canonical parameter is and how it is stored. Canonical is torch's `[out, in]`; on disk a matrix
may be transposed (GPT-2's Conv1D), hold gate and up one after the other (Phi-3) or interleaved (gpt-oss), be one tensor
per expert or one for all. What is on disk decides whether a block is gated and has biases; see `recognise.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Axis, parameters
from ffncli.errors import FFNError, shown


@dataclass(frozen=True)
class Piece:
    """`tensor` is relative to the layer; `a|b` are spellings, `{e}` stands for every expert.

    The stored matrix holds `parts` parameters along its output axis, of which this is number `part`, either one after
    the other or `interleaved`; `transposed` means stored as `[in, out]`.
    """

    tensor: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    interleaved: bool = False

    @property
    def per_expert(self) -> bool:
        """One tensor per expert, to be stacked."""
        return "{e}" in self.tensor

    @property
    def words(self) -> str:
        """How the layout reads to a person."""
        how = [] if self.parts == 1 else ["interleaved" if self.interleaved else "concatenated"]
        how = [f"{h} {self.part + 1} of {self.parts}" for h in how]
        return ", ".join(
            (["transposed"] if self.transposed else []) + how + (["per expert"] if self.per_expert else [])
        )


Pieces = Mapping[str, Piece]


@dataclass(frozen=True)
class Layout:
    """A family's row: prefixes tried in order, each stack's layer name, the ways its FFN is written, and its norms."""

    layers: Mapping[str, str]
    dense: tuple[Pieces, ...] = ()
    moe: tuple[Pieces, ...] = ()
    norms: Pieces | None = None
    prefixes: tuple[str, ...] = ("model.", "")


@dataclass(frozen=True)
class Located:
    """One canonical parameter found: `names` are the full tensor names (one, or one per expert)."""

    parameter: str
    axes: tuple[Axis, ...]
    piece: Piece
    names: tuple[str, ...]

    @property
    def output_axis(self) -> int:
        """Which axis, counted from the end, the parts of a stored tensor share: rows of a matrix, a bias's only one."""
        return -1 if len(self.axes) == 1 or self.parameter.endswith(".bias") else -2

    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each tensor on disk."""
        shape = [axis.size for axis in (self.axes[1:] if self.piece.per_expert else self.axes)]
        shape[self.output_axis] *= self.piece.parts
        if self.piece.transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        return tuple(shape)


# --- the ways an FFN is written ---------------------------------------------------------------------------------------


def _spellings(stems: str, *names: str) -> str:
    """`a|b` and weight → `a.weight|b.weight`."""
    return "|".join(f"{stem}.{name}" for stem in stems.split("|") for name in names)


def _pair(step: str, stems: str, transposed: bool = False, part: int = 0, parts: int = 1) -> dict[str, Piece]:
    """`step.weight` and `step.bias` of a module; a bias has no orientation."""
    return {
        f"{step}.weight": Piece(_spellings(stems, "weight"), transposed, part, parts),
        f"{step}.bias": Piece(_spellings(stems, "bias"), False, part, parts),
    }


def _plain(up: str, down: str, transposed: bool = False) -> Pieces:
    return _pair("up", up, transposed=transposed) | _pair("down", down, transposed=transposed)


def _gated(gate: str, up: str, down: str) -> dict[str, Piece]:
    return _pair("gate", gate) | _pair("up", up) | _pair("down", down)


def _halves(gate_up: str, down: str) -> dict[str, Piece]:
    """Gate rows, then up rows, in one matrix."""
    return _pair("gate", gate_up, part=0, parts=2) | _pair("up", gate_up, part=1, parts=2) | _pair("down", down)


def _norm(step: str, stems: str) -> dict[str, Piece]:
    """A norm by its module's name(s); older files call weight and bias gamma and beta."""
    return {
        f"{step}.weight": Piece(_spellings(stems, "weight", "gamma")),
        f"{step}.bias": Piece(_spellings(stems, "bias", "beta")),
    }


def _experts_together(prefix: str) -> dict[str, Piece]:
    """3-D tensors for all experts, as nn.Linear each: gate_up [E, 2·d_ff, d], down [E, d, d_ff]."""
    return {
        "gate.weight": Piece(f"{prefix}.gate_up_proj", part=0, parts=2),
        "up.weight": Piece(f"{prefix}.gate_up_proj", part=1, parts=2),
        "down.weight": Piece(f"{prefix}.down_proj"),
    }


def _gpt_oss() -> dict[str, Piece]:
    """3-D tensors `[E, in, out]`; gate in the even columns, up in the odd ones; biases too."""
    gate_up = "mlp.experts.gate_up_proj"
    out = _pair("router", "mlp.router")
    for part, step in enumerate(("gate", "up")):
        out[f"{step}.weight"] = Piece(gate_up, True, part, 2, True)
        out[f"{step}.bias"] = Piece(f"{gate_up}_bias", False, part, 2, True)
    return out | {
        "down.weight": Piece("mlp.experts.down_proj", True),
        "down.bias": Piece("mlp.experts.down_proj_bias"),
    }


_MLP = (  # the plain one first: where only up and down are there, it wins the tie with the gated one
    _plain("mlp.up_proj", "mlp.down_proj"),
    _gated("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    _halves("mlp.gate_up_proj", "mlp.down_proj"),
)
_EXPERT = _gated("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj")
_ROUTER = _pair("router", "mlp.gate") | {"route.correction": Piece("mlp.gate.e_score_correction_bias")}
_SHARED_STEMS = (f"mlp.shared_experts.{n}|mlp.shared_expert.{n}" for n in ("gate_proj", "up_proj", "down_proj"))
_SHARED = {f"shared.{name}": piece for name, piece in _gated(*_SHARED_STEMS).items()} | {
    "shared_gate.weight": Piece("mlp.shared_expert_gate.weight")
}
_QWEN_MOE = tuple(_ROUTER | experts | _SHARED for experts in (_EXPERT, _experts_together("mlp.experts")))
_MIXTRAL = (
    _pair("router", "block_sparse_moe.gate")
    | _gated(*(f"block_sparse_moe.experts.{{e}}.{w}" for w in ("w1", "w3", "w2"))),
    _pair("router", "mlp.gate") | _experts_together("mlp.experts"),
)
_AFTER_ATTENTION = _norm("norm", "post_attention_layernorm")
_FEED_FORWARD = _norm("norm", "pre_feedforward_layernorm") | _norm("post_norm", "post_feedforward_layernorm")
_T5 = (
    _gated("DenseReluDense.wi_0", "DenseReluDense.wi_1", "DenseReluDense.wo"),
    _plain("DenseReluDense.wi", "DenseReluDense.wo"),
)
_H_TO_4H = (_plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),)
_FC = (_plain("fc1", "fc2"),)
_DECODER = {"decoder": "layers.{i}."}
_TOWER = ("model.", "model.language_model.", "language_model.model.", "")
_LLAMA = Layout(_DECODER, _MLP, norms=_AFTER_ATTENTION, prefixes=_TOWER)

_GGUF_GATED = ("ffn_gate", "ffn_up", "ffn_down")
_GGUF = Layout(  # all architectures; norms by what they do, gpt-oss keeps its FFN's under the attention's name
    {"decoder": "blk.{i}."},
    (_plain("ffn_up", "ffn_down"), _gated(*_GGUF_GATED), _halves("ffn_up", "ffn_down")),
    (
        _pair("router", "ffn_gate_inp")
        | {"route.correction": Piece("exp_probs_b.bias"), "shared_gate.weight": Piece("ffn_gate_inp_shexp.weight")}
        | _gated(*(f"{name}_exps" for name in _GGUF_GATED))
        | {f"shared.{n}": piece for n, piece in _gated(*(f"{name}_shexp" for name in _GGUF_GATED)).items()},
    ),
    _norm("norm", "ffn_norm|post_attention_norm") | _norm("post_norm", "post_ffw_norm"),
    ("",),
)

LAYOUTS: Mapping[str, Layout] = {
    "gguf": _GGUF,
    "gpt2": Layout(
        {"decoder": "h.{i}."}, (_plain("mlp.c_fc", "mlp.c_proj", transposed=True),), norms=_norm("norm", "ln_2"),
        prefixes=("transformer.", ""),
    ),
    "bert": Layout(
        {"encoder": "encoder.layer.{i}."}, (_plain("intermediate.dense", "output.dense"),),
        norms=_norm("post_norm", "output.LayerNorm"), prefixes=("bert.", "", "roberta.", "electra."),
    ),
    "vit": Layout(
        {"encoder": "encoder.layer.{i}."}, (_plain("intermediate.dense", "output.dense"),),
        norms=_norm("norm", "layernorm_after"), prefixes=("vit.", ""),
    ),
    "t5": Layout(
        {"encoder": "encoder.block.{i}.layer.1.", "decoder": "decoder.block.{i}.layer.2."}, _T5,
        norms=_norm("norm", "layer_norm"), prefixes=("", "transformer."),
    ),
    "whisper": Layout(
        {"encoder": "encoder.layers.{i}.", "decoder": "decoder.layers.{i}."}, _FC,
        norms=_norm("norm", "final_layer_norm"),
    ),
    "opt": Layout(
        _DECODER, _FC, prefixes=("model.decoder.", "decoder."),
        norms=_norm("norm", "final_layer_norm") | _norm("post_norm", "final_layer_norm"),
    ),
    "bloom": Layout({"decoder": "h.{i}."}, _H_TO_4H, norms=_AFTER_ATTENTION, prefixes=("transformer.", "")),
    "falcon": Layout(
        {"decoder": "h.{i}."}, _H_TO_4H, prefixes=("transformer.", ""),
        norms=_norm("norm", "ln_mlp|post_attention_layernorm|input_layernorm"),
    ),
    "gpt_neox": Layout(_DECODER, _H_TO_4H, norms=_AFTER_ATTENTION, prefixes=("gpt_neox.", "")),
    "phi": Layout(_DECODER, (_plain("mlp.fc1", "mlp.fc2"),), norms=_norm("norm", "input_layernorm")),
    "olmo2": replace(_LLAMA, norms=_norm("post_norm", "post_feedforward_layernorm")),
    "gemma2": replace(_LLAMA, norms=_FEED_FORWARD),
    "gemma3_text": replace(_LLAMA, norms=_FEED_FORWARD),
    "mixtral": replace(_LLAMA, moe=_MIXTRAL),
    "gpt_oss": replace(_LLAMA, moe=(_gpt_oss(),)),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma"), _LLAMA),
    **{name: replace(_LLAMA, moe=_QWEN_MOE) for name in ("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")},
}  # fmt: skip


# --- finding them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """The tensor names of a checkpoint, packed matrices by their logical ones, and the family of one of its layers."""

    names: Collection[str]
    family: str
    stack: str
    layer: int
    where: str

    def way(self, spec: FFNSpec) -> tuple[str, Pieces]:
        """(the layer's full prefix, the way its FFN is written): the candidate with most of its tensors there."""
        candidates = self._candidates(spec)
        stem, way = max(candidates, key=lambda c: sum(_name(self.names, c[0], p) is not None for p in c[1].values()))
        if not any(_name(self.names, stem, piece) for piece in way.values()):
            raise self._nothing(spec)
        return stem, way

    def any(self, spec: FFNSpec) -> bool:
        """Whether the layer has any tensor of its FFN."""
        ways = self._candidates(spec)
        return any(_name(self.names, stem, piece) for stem, way in ways for piece in way.values())

    def _candidates(self, spec: FFNSpec) -> list[tuple[str, Pieces]]:
        """Every (prefix, way) that the family may use; a plain way only where no layer has the gated way's gate."""
        layout = LAYOUTS.get(self.family)
        if layout is None:
            raise FFNError(
                f"{self.where}: where {self.family or 'such'} checkpoints keep their FFN is not known here",
                "ffn params counts it; ffn trace runs it with random weights, from its config.json or dimensions",
            )
        ways = layout.moe if spec.moe else layout.dense
        gates = [way["gate.weight"].tensor for way in ways if "gate.weight" in way]
        if any(name.endswith(gate) for gate in gates for name in self.names):
            ways = tuple(way for way in ways if "gate.weight" in way)
        if not ways:
            kind = "MoE" if spec.moe else "dense"
            raise FFNError(
                f"{self.where}: a {self.family} checkpoint has no {kind} layers", "drop the option that asks for one"
            )
        stems = [prefix + layout.layers[self.stack].format(i=self.layer) for prefix in layout.prefixes]
        return [(stem, way) for stem in stems for way in ways]

    def _nothing(self, spec: FFNSpec) -> FFNError:
        """The error for a layer without any FFN tensor: what was looked for."""
        candidates = self._candidates(spec)
        stem, way = next((c for c in candidates if ("gate.weight" in c[1]) == spec.gated), candidates[0])
        wanted = stem + next(iter(way.values())).tensor.split("|")[0].replace("{e}", "0")
        return FFNError(f"{self.where}: no FFN tensors under {shown(stem, 120)}", f"looked for {shown(wanted, 120)}")


def locate(names: Names, spec: FFNSpec) -> tuple[Located, ...]:
    """Where every parameter of `spec` lies. Raises FFNError naming the first tensor that is not there."""
    stem, way = names.way(spec)
    pieces = {**way, **(LAYOUTS[names.family].norms or {})}
    wanted = parameters(steps(spec)).items()
    return tuple(_locate(names.names, stem, pieces, name, axes, names.where) for name, axes in wanted)


def _locate(
    names: Collection[str], stem: str, pieces: Pieces, parameter: str, axes: tuple[Axis, ...], where: str
) -> Located:
    piece = pieces.get(parameter)
    if piece is None:
        raise FFNError(f"{where}: this family's layout does not say where {parameter} is stored")
    found: list[str] = []
    for e in range(axes[0].size if piece.per_expert else 1):
        name = _name(names, stem, piece, e)
        if name is None:
            wanted = stem + piece.tensor.split("|")[0].replace("{e}", str(e))
            raise FFNError(f"{where}: tensor {shown(wanted, 120)} is missing", f"it is needed for {parameter}")
        found.append(name)
    return Located(parameter, axes, piece, tuple(found))


def _name(names: Collection[str], stem: str, piece: Piece, expert: int = 0) -> str | None:
    for spelling in piece.tensor.split("|"):
        name = stem + spelling.replace("{e}", str(expert))
        if name in names:
            return name
    return None
