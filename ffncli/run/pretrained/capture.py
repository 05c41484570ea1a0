"""Capturing the actual input and output of an FFN: transformers runs the model, with hooks on its FFNs.

The run ends right after the last requested FFN. Later layers are neither loaded nor computed.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_span, ffn_steps, id_inputs, state_inputs
from ffncli.errors import ExitCode, FFNError
from ffncli.models.files.dequantize import stored
from ffncli.models.model import Layer, Resolved, folder_of, require_runnable
from ffncli.run.engine.execute import Mode
from ffncli.run.engine.locate import LiveFFN, live_ffn
from ffncli.run.engine.prepare import Prepared, Token, device_of, dtype_of
from ffncli.run.engine.weights import located_weights, stored_layer
from ffncli.run.pretrained.loading import (
    Pretrained,
    cannot,
    context_length,
    demanding,
    known_tokens,
    load,
    offline,
    read_config,
)
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import positions, tokenizer_of, tokens_of, with_texts

# Bugs of transformers in MoE layers, by model_type.
FAULTS: Mapping[str, str] = {
    "nllb-moe": "transformers (at least 5.23) encodes this router's choice twice, so its output differs"
}
Receiver = Callable[[Layer, tuple[Token, ...], Tensor, Tensor], None]


@dataclass(frozen=True)
class ForwardInput:
    """The input of a model: the arguments of its forward, and the tokens of each stack."""

    arguments: Mapping[str, Any]
    tokens: Mapping[str, tuple[Token, ...]]
    notes: tuple[str, ...] = ()

    def of(self, stack: str) -> tuple[Token, ...]:
        """Return the tokens that pass through `stack`."""
        return self.tokens.get(stack) or self.tokens[""]


def capture(
    resolved: Resolved, prompt: Prompt, layer: Layer | int | str | None = None, dtype: str | None = None,
    device: str = "cpu",
) -> Prepared:  # fmt: skip
    """Prepare one layer's FFN to run on its actual input in the model, with the output of the model's own FFN as
    reference.

    The weights are read from the files, not taken from the loaded model.
    """
    layer = layer if isinstance(layer, Layer) else resolved.model.layer(layer)
    passes: list[tuple[tuple[Token, ...], Tensor, Tensor]] = []
    streams: dict[Layer, Tensor] = {}
    notes = run_model(resolved, [layer], prompt, lambda _, *tensors: passes.append(tensors), streams, dtype, device)
    ((tokens, entering, leaving),) = passes
    ready = prepared(resolved, layer, tokens, entering, leaving, notes, dtype, device)
    return replace(ready, stream=streams.get(layer))


def prepared(
    resolved: Resolved, layer: Layer, tokens: tuple[Token, ...], entering: Tensor, leaving: Tensor,
    notes: tuple[str, ...] = (), dtype: str | None = None, device: str = "cpu",
) -> Prepared:  # fmt: skip
    """Return the layer's steps from ffn_input to ffn_output, its weights, and the input [tokens, d_model]."""
    block = steps(layer.spec)
    start, _ = ffn_span(block)
    stored_weights = stored_layer(resolved, layer, dtype_of(dtype), device)
    assert stored_weights is not None  # folder_of ensures that there is a checkpoint
    weights, origin, doubts = stored_weights
    ids = torch.tensor([[token.id] for token in tokens], device=entering.device)
    inputs = {start: entering, **dict.fromkeys(id_inputs(block), ids)}
    return Prepared(
        layer, ffn_steps(block), weights, inputs, Mode(), origin, (*notes, *doubts), tokens, leaving,
    )  # fmt: skip


def run_model(
    resolved: Resolved, layers: Sequence[Layer], prompt: Prompt, receive: Receiver,
    streams: dict[Layer, Tensor] | None = None, dtype: str | None = None, device: str = "cpu",
) -> tuple[str, ...]:  # fmt: skip
    """Run the model once up to the last of `layers`; call `receive` for each layer as soon as its FFN has run.

    The arguments of `receive` are the layer, the selected tokens, ffn_input and ffn_output [tokens, d_model]. `streams`
    is filled with the residual stream [tokens, d_model] after each layer. Returns notes on the run.
    """
    path = model_files(resolved, layers, prompt.option)
    computed, device = dtype_of(dtype), device_of(device)
    with offline() as transformers:
        config = read_config(transformers, path)
        tokenizer = tokenizer_of(transformers, path)
        tokens = tokens_of(prompt, tokenizer, path)
        if not config.is_encoder_decoder:  # checks the positions before anything large is loaded
            positions(prompt.positions, len(tokens))
        loaded, live = load_up_to(transformers, resolved, layers, path, config, computed, device)
        inputs = forward_arguments(loaded, tokens, tokenizer, layers)
        idle = _listen(loaded, live, inputs, prompt, receive, streams)
    fault = FAULTS.get(resolved.model.model_type or "") if any(layer.spec.moe for layer in layers) else None
    return (*inputs.notes, *idle, *([fault] if fault else []))


def model_files(resolved: Resolved, layers: Sequence[Layer], option: str, states: bool = False) -> Path:
    """Return the path for transformers to load; raise FFNError if the model cannot run on text, or if a layer needs the
    state of the router before it, unless the caller records `states`."""
    require_runnable(resolved)
    if not states and (carried := next((one for one in layers if state_inputs(steps(one.spec))), None)):
        what = (
            f"{carried.stack} layer {carried.index}: its router receives a state from the router in the previous layer"
        )
        raise FFNError(
            f"{what}, which a run on a prompt does not record", "trace it without a prompt, or its first layer"
        )
    path = folder_of(resolved, option)
    _require_readable(resolved, layers[0])
    return path


def _require_readable(resolved: Resolved, layer: Layer) -> None:
    """Raise FFNError for weights in an unsupported format (GPTQ), from headers only, before the model is loaded."""
    assert resolved.checkpoint is not None  # ensured by folder_of
    for item in located_weights(resolved, layer) or ():
        if item.is_table:
            continue
        stored(resolved.checkpoint, item.names[0], resolved.quantization)


# --- loading the needed layers
# ---------------------------------------------------------------------------------------------------


def load_up_to(
    transformers: Any, resolved: Resolved, layers: Sequence[Layer], path: Path, config: Any, dtype: torch.dtype,
    device: str,
) -> tuple[Pretrained, dict[Layer, LiveFFN]]:  # fmt: skip
    """Load the model up to the last of `layers`; return (the model, where each layer's FFN is in it)."""
    live: dict[Layer, LiveFFN] = {}

    def shrink(module: Any, lean: bool) -> None:
        with suppress(FFNError):  # layers that share weights (Zamba) are only recognised after loading
            live.update({layer: live_ffn(module, resolved, layer) for layer in layers})
        if lean and len(live) == len(layers):
            _cut_behind(module, resolved, live)

    if resolved.kept is not None:  # whole, for questions about other layers
        loaded = kept(resolved, transformers, path, config, dtype, device)
        return loaded, {layer: live_ffn(loaded.module, resolved, layer) for layer in layers}
    loaded = load(transformers, path, config, dtype, device, shrink)
    return loaded, live or {layer: live_ffn(loaded.module, resolved, layer) for layer in layers}


def kept(
    resolved: Resolved, transformers: Any, path: Path, config: Any, dtype: torch.dtype, device: str,
    with_head: bool = False,
) -> Pretrained:  # fmt: skip
    """Return the whole model, loaded unless an earlier question to the same `resolved` has kept it."""
    if resolved.kept is None:
        return load(transformers, path, config, dtype, device, with_head=with_head)
    key = (dtype, device, with_head)
    if key not in resolved.kept:
        resolved.kept[key] = load(transformers, path, config, dtype, device, with_head=with_head)
    loaded: Pretrained = resolved.kept[key]
    return loaded


def _cut_behind(module: Any, resolved: Resolved, live: Mapping[Layer, LiveFFN]) -> None:
    """Remove the layers after the requested layers from a complete model, before its weights are loaded.

    Each stack that runs ends with its last requested layer; a decoder without requested layers does not run at all.
    """
    last = {layer.stack: layer for layer in sorted(live, key=lambda layer: layer.index)}
    ends = [(live[layer].layer, 1) for layer in last.values() if layer.stack == "decoder" or "decoder" not in last]
    decoder = next((g for g in resolved.model.groups if g.stack == "decoder"), None)
    if module.config.is_encoder_decoder and decoder and "decoder" not in last:
        first = Layer("decoder", min(decoder.layers), decoder.spec)
        ends.append((live_ffn(module, resolved, first).layer, 0))
    for name, kept in ends:
        cut(module, name, kept)


def cut(module: Any, layer: str, kept: int) -> None:
    """Delete the layers after `layer` (for `kept` 0, `layer` too), unless they share weights with other parameters."""
    path = layer.split(".")
    for at, part in enumerate(path):
        name = ".".join(path[:at])
        several = module.get_submodule(name)
        if part.isdigit() and isinstance(several, nn.ModuleList):
            end = int(part) + kept
            gone = tuple(f"{name}.{i}." for i in range(end, len(several)))
            tied = {n for pair in (getattr(module, "all_tied_weights_keys", None) or {}).items() for n in pair}
            if not any(key.startswith(gone) for key in tied):
                del several[end:]
            return


# --- the model's input ------------------------------------------------------------------------------------------------


def forward_arguments(
    loaded: Pretrained, tokens: tuple[Token, ...], tokenizer: Any, layers: Sequence[Layer]
) -> ForwardInput:
    """Return the input of the model's forward; raise FFNError for tokens without an embedding or position."""
    module, config = loaded.module, loaded.config
    ids = torch.tensor([[token.id for token in tokens]], device=module.device)
    known = known_tokens(module)
    if wrong := next((token for token in tokens if not 0 <= token.id < known), None):
        what = f"token {wrong.id} (position {wrong.position}) is out of range"
        raise FFNError(what, f"the model has {known:,} tokens")
    most = context_length(module, config)
    if most is not None and len(tokens) > most:
        what = f"the prompt has {len(tokens):,} tokens, but {config.model_type} has {most:,} positions"
        raise FFNError(what, "shorten it")
    takes = inspect.signature(module.forward).parameters
    if "input_ids" in takes and not config.is_encoder_decoder:
        return ForwardInput({"input_ids": ids}, {"": tokens})
    start = _decoder_start(module)
    if "input_ids" in takes:
        decoder = with_texts([start], tokenizer)
        starts = torch.full((_codebooks(module), 1), start, device=module.device)
        arguments = {"input_ids": ids, "decoder_input_ids": starts}
        decoded = any(layer.stack == "decoder" for layer in layers)
        note = ("the prompt goes to the encoder; the decoder gets only its start token",) if decoded else ()
        return ForwardInput(arguments, {"": tokens, "decoder": decoder}, note)
    if config.model_type == "whisper" and all(layer.stack == "decoder" for layer in layers):
        arguments = {"input_features": _silence(module, config, 1), "decoder_input_ids": ids}
        return ForwardInput(
            arguments, {"": tokens}, ("the prompt goes to the decoder; the encoder gets zeros as audio",)
        )
    also = "; its decoder layers accept text" if config.model_type == "whisper" else ""
    raise FFNError(f"{config.model_type} takes {module.main_input_name}, not text{also}")


def stand_in(loaded: Pretrained, count: int) -> dict[str, Tensor]:
    """Return placeholder arguments for a forward pass: a batch of `count` texts with one token each."""
    module, config = loaded.module, loaded.config
    ids = torch.zeros(count, 1, dtype=torch.long, device=module.device)
    takes = inspect.signature(module.forward).parameters
    out = {"input_ids": ids} if "input_ids" in takes else {"input_features": _silence(module, config, count)}
    return out | ({"decoder_input_ids": ids.repeat(_codebooks(module), 1)} if config.is_encoder_decoder else {})


def batch_arguments(loaded: Pretrained, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the arguments of the model's forward for texts padded at the right: `ids` and `mask` [texts, length]. A
    decoder in an encoder-decoder model gets only its start token."""
    module, takes = loaded.module, inspect.signature(loaded.module.forward).parameters
    out = {"input_ids": ids} | ({"attention_mask": mask} if "attention_mask" in takes else {})
    if loaded.config.is_encoder_decoder:
        starts = torch.full((len(ids) * _codebooks(module), 1), _decoder_start(module), device=ids.device)
        out["decoder_input_ids"] = starts
    return out


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the first tensor among a module's arguments."""
    tensor: Tensor = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
    return tensor


def _codebooks(module: Any) -> int:
    """Return the decoder's number of tokens per position: Musicgen has several audio tokens."""
    return int(getattr(getattr(module, "decoder", None), "num_codebooks", 1))


def _silence(module: Any, config: Any, count: int) -> Tensor:
    """Return zeros as input of Whisper's encoder, [count, mel bins, frames]; raise FFNError for other models."""
    if config.model_type != "whisper":
        raise FFNError(f"{config.model_type} takes {module.main_input_name}, not text")
    shape = (count, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.zeros(shape, dtype=module.dtype, device=module.device)


def _decoder_start(module: Any) -> int:
    """Return decoder_start_token_id from either config, else bos_token_id, else pad_token_id."""
    places = (getattr(module, "generation_config", None), module.config)
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    numbers = [getattr(place, name, None) for name in names for place in places]
    return next((number for number in numbers if isinstance(number, int)), 0)


# --- the run ----------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Raised to stop the forward pass after all requested layers have run."""


def _listen(
    loaded: Pretrained, live: Mapping[Layer, LiveFFN], inputs: ForwardInput, prompt: Prompt, receive: Receiver,
    streams: dict[Layer, Tensor] | None,
) -> tuple[str, ...]:  # fmt: skip
    """Run the forward pass until the last requested layer has run; return notes on layers that did not run."""
    waiting, kind, ours = dict(live), loaded.config.model_type, False
    inside = {} if streams is None else dict(live)  # layers whose output is still to come

    def done(layer: Layer, entering: Tensor, leaving: Tensor) -> None:
        nonlocal ours
        tokens = inputs.of(layer.stack)
        chosen = positions(prompt.positions, len(tokens))
        rows = torch.tensor(chosen, device=entering.device)
        flat = (_rows(t, len(tokens), kind)[rows] for t in (entering, leaving))
        ours = True  # an error in `receive` is not an error of transformers
        receive(layer, tuple(tokens[i] for i in chosen), *flat)
        ours = False
        del waiting[layer]
        if not (waiting or inside):
            raise _Stop

    def leave(layer: Layer, output: Any) -> None:
        tensor = output[0] if isinstance(output, (tuple, list)) else output
        tokens = inputs.of(layer.stack)
        if layer in waiting or inside.pop(layer, None) is None:  # a further pass of a layer that runs several times
            return
        if streams is not None and isinstance(tensor, Tensor) and _flat(tensor).shape[0] >= len(tokens):
            chosen = torch.tensor(positions(prompt.positions, len(tokens)), device=tensor.device)
            streams[layer] = _flat(tensor)[: len(tokens)][chosen].detach().clone()
        if not (waiting or inside):
            raise _Stop

    with ExitStack() as stack:
        stack.enter_context(demanding(loaded))
        stack.enter_context(torch.no_grad())
        for layer, ffn in live.items():
            stack.callback(_hook(loaded.module, ffn, layer, done))
            if layer in inside:
                module = loaded.module.get_submodule(ffn.layer)
                stack.callback(module.register_forward_hook(lambda _, args, out, at=layer: leave(at, out)).remove)
        try:
            loaded.module(**inputs.arguments)
        except _Stop:
            return ()
        except FFNError:
            raise
        except Exception as error:
            if ours or "memory" in str(error):
                raise
            raise cannot(f"transformers cannot run {kind} on this prompt", error, ExitCode.ENVIRONMENT) from None
    left = ", ".join(f"{layer.stack} layer {layer.index}" for layer in waiting)
    if len(waiting) < len(live):  # such as Mllama's layers that attend to an image
        return (f"{left} did not run on this prompt",)
    raise FFNError(f"{kind}: {left} did not run on this prompt", code=ExitCode.ENVIRONMENT)


def _flat(tensor: Tensor) -> Tensor:
    """Reshape [batch 1, tokens, d_model] to [tokens, d_model], the shape that some models already use."""
    return tensor.reshape(-1, tensor.shape[-1])


def _rows(tensor: Tensor, tokens: int, kind: str) -> Tensor:
    """Return a row per token, without padding at the end (Longformer); raise FFNError if tokens are pooled (Funnel)."""
    if tensor.shape[0] < tokens:
        count = f"{tensor.shape[0]} rows enter this FFN for {tokens} tokens"
        raise FFNError(f"{kind}: {count}, so rows cannot be matched to tokens", "trace it without a prompt")
    return tensor[:tokens]


def _hook(
    module: Any, live: LiveFFN, layer: Layer, done: Callable[[Layer, Tensor, Tensor], None]
) -> Callable[[], None]:
    """Add hooks that capture one layer's first run; return a function that removes them."""
    entered: list[Tensor] = []
    left: dict[str, Tensor] = {}

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not entered:  # cloned, because later code may write into the tensor
            entered.append(first_tensor(args, kwargs).detach().clone())

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            left.setdefault(name, tensor.detach().clone())
            if entered and len(left) == len(live.leaves):
                remove()
                done(layer, _flat(entered[0]), reduce(torch.add, (_flat(left[leaf]) for leaf in live.leaves)))

        return note

    handles = [
        module.get_submodule(live.enters).register_forward_pre_hook(before, with_kwargs=True),
        *(module.get_submodule(name).register_forward_hook(after(name)) for name in live.leaves),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
