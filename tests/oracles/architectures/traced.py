"""Traces of tiny models that transformers saved: our steps, with weights from disk, compared with the live modules.

Every parameter is random. The live model runs once on random tokens. The inputs and outputs of each layer's FFN are
recorded at the modules that `live_ffn` returns, and so are those of its norms and the output of its layer. One layer of
each group is compared. Errors are max|a − b| / max|b| with transformers' tensor as b.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_span, ffn_steps, id_inputs, parameters, state_inputs
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Layer, Resolved
from ffncli.models.source import load
from ffncli.models.tensors import layout
from ffncli.models.tensors.layout import Located
from ffncli.run.engine.execute import run
from ffncli.run.engine.locate import LiveFFN, live_ffn, live_parameters, live_tensors
from ffncli.run.engine.prepare import Prepared, prepare
from tests.oracles.architectures import Architecture, class_of
from tests.oracles.architectures.nested import composites, kind_of
from tests.oracles.architectures.tiny import TOKENS, Tiny

COLUMNS = ("model_type", "class", "layers", "relative_error", "float64_error", "norms", "block", "result", "reason")
FP32, FP64 = 1e-6, 1e-12
VOCAB, BATCH = 60, 2
PAIRED = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5", "m2m_100",
    "marian", "mbart", "mt5", "musicgen", "musicgen_melody", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart",
    "prophetnet", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "switch_transformers", "t5", "t5gemma",
    "t5gemma2", "umt5", "whisper",
}  # fmt: skip
# Why a layer's output differs from the block's output, so that the two are not compared.
_GATED = "the layer scales its output, or adds to it, once more"
_NO_LAYER = "a layer has no module of its own"
APART: Mapping[str, str] = {
    **dict.fromkeys(("xlm", "flaubert"), _NO_LAYER),
    "albert": "a layer's module holds several blocks", "zamba": "the layer goes on after the block that it shares",
    **dict.fromkeys(("beam", "doge", "minimax"), "the residual is scaled: the block ends before it"),
    **dict.fromkeys(("inkling_text", "inkling2_text"), "a convolution over the tokens comes before the residual"),
    **dict.fromkeys(("deepseek_v4", "gemma3n", "gemma3n_text", "glm5_next_text", "hy_v4", "qwen4_exp",
                     "qwen4_exp_text"), "several residual streams"),
    **dict.fromkeys(("embedding_gemma2_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text",
                     "gemma4_unified_assistant"), _GATED),
    "longcat_flash": "a layer holds three FFNs", "xmod": "adapters of the language follow",
    "zaya": "learned scales come before the residual: the block ends before them",
    "muse_spark_text": "the residual is mixed by a learned gate: the block ends before it",
    "mobilebert": "bottlenecks around its FFNs", "reformer": "a reversible layer has two streams",
}  # fmt: skip
# Models whose tensor names suggest an order of gate and up that their code does not have: without a config they are
# read as the names suggest, with a note.
OTHER_ORDER = {
    **dict.fromkeys(("moonshine", "moonshine_streaming"), "the first half is read as the gate"),
    "openai_privacy_filter": "read as gpt-oss's",
}
# FFNs that compute in float32 even for float64 input: through norms inside them, or BLOOM's constant of eight digits.
SINGLE = {"beam", "bitnet", "bloom"}
_INPUTS = ("other branch", "token_ids", "in the previous layer")  # notes on inputs of a block in addition to x
NLLB = "transformers 5.23 encodes the choice twice: its experts are mixed here as its own router weighs them"


@dataclass(frozen=True)
class Compared:
    """The errors of one layer: of its FFN, of its norms, and of the whole block's output.

    `exact` is the FFN's error in float64 (None if the model cannot run in float64 or overflows), and `limit` the
    largest allowed. `block` is None if the layer's output is not the block's. `live` is the FFN in memory; `same` says
    whether its weights have the same bits as those read from disk, with and without a config; `strange` are parameters
    of its modules that belong neither to the FFN nor to its norms.
    """

    layer: Layer
    live: LiveFFN
    ffn: float
    exact: float | None
    limit: float
    norms: Mapping[str, float]
    block: float | None
    same: bool
    strange: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The stack and layer, such as `decoder.3`."""
        return f"{self.layer.stack}.{self.layer.index}"

    @property
    def reason(self) -> str:
        """What is wrong; empty if nothing is."""
        return "; ".join(f"{self.name}: {problem}" for problem in self._problems())

    def _problems(self) -> Iterator[str]:
        if not self.ffn <= FP32:
            yield f"the FFN departs by {self.ffn:.1e}"
        if self.exact is not None and not self.exact <= self.limit:
            yield f"the FFN departs by {self.exact:.1e} in float64"
        for step, error in self.norms.items():
            if not error <= FP32:
                yield f"{step} departs by {error:.1e}"
        if self.block is not None and not self.block <= FP32:
            yield f"the block departs by {self.block:.1e}"
        if not self.same:
            yield "its weights in memory, or by names alone, are not those on disk"
        if self.strange:
            yield f"{self.strange[0]} is none of the FFN's"
        yield from (note for note in self.notes if not any(known in note for known in _INPUTS))


@dataclass
class Caught:
    """The inputs of modules in their first call (first tensor; `state`: second tensor) and their outputs."""

    given: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def watch(self, model: nn.Module, names: Iterable[str]) -> Iterator[None]:
        """Record the inputs and outputs of these modules while inside."""
        hooks = [model.get_submodule(n).register_forward_hook(self._hook(n), with_kwargs=True) for n in {*names}]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            first, second, *_ = (*(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None, None)
            made = out[0] if isinstance(out, (tuple, list)) else out
            if isinstance(first, Tensor) and isinstance(made, Tensor):
                self.given.setdefault(name, first.clone())
                if isinstance(second, Tensor):
                    self.state.setdefault(name, second.clone())
                self.made.setdefault(name, made.clone())

        return hook


# --- the forward pass -------------------------------------------------------------------------------------------------


def _forward_arguments(name: str, model: Any) -> dict[str, Any]:
    """Return random inputs for one forward pass."""
    generator = torch.Generator().manual_seed(2)
    tokens = _ids(generator)
    given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if name in PAIRED:
        rows = BATCH * (model.decoder.num_codebooks if name.startswith("musicgen") else 1)
        given["decoder_input_ids"] = torch.randint(3, VOCAB, (rows, TOKENS - 2), generator=generator)
    if name in ("whisper", "speech_to_text"):
        del given["input_ids"]
        shape = (8, 2 * TOKENS) if name == "whisper" else (2 * TOKENS, model.config.input_feat_per_channel)
        given["input_features"] = torch.randn(BATCH, *shape, generator=generator)
    if name in ("bros", "layoutlmv2", "layoutlmv3"):
        given["bbox"] = torch.zeros(BATCH, TOKENS, 8) if name == "bros" else torch.zeros(BATCH, TOKENS, 4).long()
    if name == "layoutlmv2":
        given["image"] = torch.zeros(BATCH, 3, 8, 8)
        del given["use_cache"]
    if name == "lxmert":
        given["visual_feats"], given["visual_pos"] = torch.randn(2, BATCH, 3, 4, generator=generator)
        del given["use_cache"]
    if name == "tvp":
        given["input_ids"] = tokens[:1]  # its image positions are for a single image
        given["pixel_values"] = torch.randn(1, 2, 3, 64, 64, generator=generator)
    if name == "vilt":
        given["pixel_values"] = torch.randn(BATCH, 3, 32, 32, generator=generator)
    dtype = next(model.parameters()).dtype
    return {n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given.items()}


def _ids(generator: torch.Generator) -> Tensor:
    """Draw the token ids of the forward pass, [batch, tokens]; they are drawn before all else."""
    return torch.randint(3, VOCAB, (BATCH, TOKENS), generator=generator)


def _run(name: str, model: nn.Module, places: Mapping[Layer, LiveFFN], caught: Caught) -> None:
    """Run the forward pass; then run the module around every FFN that the pass did not reach.

    These are layers that only read an image (Mllama), and models that need speech (Voxtral) or another model's states.
    """
    with torch.no_grad():
        for module in (model, *_towers(model, places)):  # with text alone, some models cannot finish
            if any(live.enters not in caught.given for live in places.values()):
                with suppress(AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                    module(**_forward_arguments(name, module))
        for layer, live in places.items():
            if live.enters not in caught.given:
                x = torch.randn(1, TOKENS, layer.spec.d_model, generator=torch.Generator().manual_seed(4))
                x = x.to(next(model.parameters()).dtype)
                whole = live.enters in live.leaves  # experts with their router
                model.get_submodule(live.enters if whole else live.enters.rpartition(".")[0])(x)


def _towers(model: nn.Module, places: Mapping[Layer, LiveFFN]) -> Iterator[nn.Module]:
    """Yield the models inside a model that contain FFNs, the outermost first."""
    for name, module in model.named_modules():
        around = name and any(live.enters.startswith(f"{name}.") for live in places.values())
        if around and isinstance(module, PreTrainedModel):
            yield module


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(tiny: Tiny) -> list[Compared]:
    """Compare one layer of every group of blocks, read from the saved files, with the live model's layer."""
    case, model, ours = tiny.case, tiny.module, tiny.saved_model
    layers = [Layer(group.stack, group.layers[0], group.spec) for group in ours.model.groups]
    ready = [prepare(ours, layer=f"{layer.stack}.{layer.index}") for layer in layers]
    unnamed = [*_by_names_alone(tiny, layers)]
    places = {layer: live_ffn(model, ours, layer) for layer in layers}
    weights = [live_weights(model, ours, layer) for layer in layers]
    pairs = zip(ready, weights, unnamed, strict=True)
    same = [
        all(torch.equal(read.weights[n], t) for n, t in (*live.items(), *bare.items())) for read, live, bare in pairs
    ]
    caught = _caught(tiny, places)
    with torch.no_grad():
        found = [_compared(tiny, *one, caught) for one in zip(places.items(), ready, same, strict=True)]
    exact = Caught()
    model.double()
    with suppress(RuntimeError, TypeError):  # the model's code requires float32
        exact = _caught(tiny, places)
    model.float()
    doubled = [_in_double(*one, exact) for one in zip(places.values(), ready, strict=True)]
    return [
        replace(one, exact=twice, limit=_limit(tiny.name, one.layer), strange=_strange(model, case, one.live))
        for one, twice in zip(found, doubled, strict=True)
    ]


def _limit(name: str, layer: Layer) -> float:
    """Return the largest error allowed in float64: float32's if the module computes in float32, as routers do."""
    return FP32 if layer.spec.moe or name in SINGLE else FP64


def _caught(tiny: Tiny, places: Mapping[Layer, LiveFFN]) -> Caught:
    """Record the inputs and outputs of the FFNs and of the modules around them in one forward pass."""
    caught, model, at = Caught(), tiny.module, tiny.case.at
    whole: Any = model.config
    model.config = getattr(whole, at) if at else whole  # a tower that was built separately reads its own config
    watched = [(live.enters, *live.leaves, live.layer, *live.norms.values()) for live in places.values()]
    with caught.watch(model, chain(*watched)):
        _run(tiny.name, model, places, caught)
    model.config = whole
    return caught


def _in_double(live: LiveFFN, ready: Prepared, caught: Caught) -> float | None:
    """Return the FFN's error with everything in float64 and the weights from disk, or None."""
    x = caught.given.get(live.enters)
    if x is None or x.isnan().any() or not {*live.leaves} <= caught.made.keys():
        return None
    weights = {n: tensor.double() if tensor.is_floating_point() else tensor for n, tensor in ready.weights.items()}
    with torch.no_grad():
        return error(_ours(ready, weights, x, caught.state.get(live.enters)), _theirs(live, caught, x))


def _theirs(live: LiveFFN, caught: Caught, x: Tensor) -> Tensor:
    return sum((caught.made[module].reshape(x.shape) for module in live.leaves), torch.zeros(()))


def _ours(ready: Prepared, weights: Mapping[str, Tensor], x: Tensor, state: Tensor | None) -> Tensor:
    ids = _ids(torch.Generator().manual_seed(2)).reshape(-1, 1)
    tokens = {name: ids.reshape(*x.shape[:-1], 1) for name in id_inputs(ready.steps)}
    states = {name: state for name in state_inputs(ready.steps) if state is not None}
    return run(ffn_steps(ready.steps), weights, {ffn_span(ready.steps)[0]: x, **tokens, **states})


def live_weights(module: nn.Module, resolved: Resolved, layer: Layer) -> dict[str, Tensor]:
    """Return the canonical weights of a layer's FFN, from ffn_input to ffn_output, as views of the model's tensors."""
    tensors, wanted = live_tensors(module), parameters(ffn_steps(steps(layer.spec)))
    _, located = live_parameters(module, resolved, layer)
    return {
        item.parameter: _canonical([tensors[name] for name in item.names], item)
        for item in located
        if item.parameter in wanted
    }


def _canonical(stored: list[Tensor], item: Located) -> Tensor:
    parts = [layout.canonical(tensor, item) for tensor in stored]
    return torch.stack(parts) if item.slice.per_expert else parts[0]


def _by_names_alone(tiny: Tiny, layers: Iterable[Layer]) -> Iterator[dict[str, Tensor]]:
    """Yield the same layers' weights, read without a config.json; the activation, in no tensor, is an option."""
    model = tiny.saved_model
    spec = model.model.main.spec
    top_k = next((group.spec.moe.top_k for group in model.model.groups if group.spec.moe), None)
    bare = load(str(tiny.without_config), Dimensions(activation=spec.activation, top_k=top_k))
    for layer in layers:
        spot = model.spots[layer.stack, layer.index]
        stack, index = next(at for at, theirs in bare.spots.items() if theirs == spot)
        found = prepare(bare, layer=f"{stack}.{index}")
        weights, note = dict(found.weights), OTHER_ORDER.get(tiny.name)
        if note and any(note in one for one in found.notes):
            weights = {name: tensor for name, tensor in weights.items() if not name.startswith(("gate.", "up."))}
        yield weights


def _compared(tiny: Tiny, at: tuple[Layer, LiveFFN], ready: Prepared, same: bool, caught: Caught) -> Compared:
    layer, live = at
    x = caught.given[live.enters]
    theirs, ours = _theirs(live, caught, x), _ours(ready, ready.weights, x, caught.state.get(live.enters))
    start, _ = ffn_span(ready.steps)
    norms = {}
    for step in ready.steps:
        module = live.norms.get(step.output)
        if module in caught.given:
            normed = run((step,), ready.weights, {step.inputs[0]: caught.given[module]})
            norms[step.output] = error(normed, x if step.output == start else caught.made[module])
    block = None if apart(tiny.name) else _block(at, ready, caught)
    return Compared(layer, live, error(ours, theirs), None, FP64, norms, block, same, (), ready.notes)


def apart(name: str) -> str:
    """Return why a layer's output is not its block's (empty if it is); a composite has its tower's reason."""
    return APART.get(name) or APART.get(kind_of(name) if name in composites() else "", "")


def _block(at: tuple[Layer, LiveFFN], ready: Prepared, caught: Caught) -> float | None:
    """Return the error of the block's output compared with the layer's, or None if they are not comparable."""
    live = at[1]
    if {*ready.inputs} != {"x"} or live.layer not in caught.made:
        return None
    x = caught.given[live.norms.get("norm", live.enters)]
    out = run(ready.steps, ready.weights, {"x": x})
    return error(out, caught.made[live.layer])


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return max|a − b| / max|b|, or infinity if the tensors have different numbers of elements."""
    if ours.numel() != theirs.numel():
        return math.inf
    return float((ours.reshape(theirs.shape) - theirs).abs().max() / theirs.abs().max())


def _strange(model: nn.Module, case: Architecture, live: LiveFFN) -> tuple[str, ...]:
    """Return the parameters of the FFN's modules that the case's hand-written patterns do not match."""
    at = tuple(f"{name}." for name in (live.enters, *live.leaves))
    own = re.compile(f"{case.ffn}|{case.norm}|{case.second}")
    norm = re.compile(case.norm if case.norm != r"(?!)" else ".*")
    wrong = [name for name, _ in model.named_parameters() if name.startswith(at) and not own.fullmatch(name)]
    parts = [
        name for name, _ in model.named_parameters() if name.startswith(tuple(f"{n}." for n in live.norms.values()))
    ]
    return (*wrong, *(name for name in parts if not norm.fullmatch(name)))


def row(name: str, case: Architecture, found: Iterable[Compared] = ()) -> tuple[object, ...]:
    """Return a line of the table (COLUMNS) for the compared layers; if the case has a reason, it is not traced."""
    built = class_of(name, case)
    if case.reason:
        return (name, built, None, None, None, None, None, "not counted", case.reason)
    layers = [*found]
    wrong = "; ".join(one.reason for one in layers if one.reason)
    norms, exact = dict.fromkeys(step for one in layers for step in one.norms), [one.exact for one in layers]
    block = "same" if any(one.block is not None for one in layers) else apart(name) or "its other branch is not known"
    return (
        name, built, ";".join(one.name for one in layers), f"{max(one.ffn for one in layers):.1e}",
        "" if None in exact else f"{max(one for one in exact if one is not None):.1e}", ";".join(norms),
        block, "differs" if wrong else "same", wrong or (NLLB if name == "nllb-moe" else ""),
    )  # fmt: skip
