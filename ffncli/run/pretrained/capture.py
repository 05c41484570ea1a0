"""What truly enters and leaves an FFN: a model is run by transformers, its FFNs are listened to.

The run ends right after the last FFN that was asked for. What lies behind is neither loaded nor computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_span, ffn_steps
from ffncli.errors import ExitCode, FFNError
from ffncli.models.files.dequantize import stored
from ffncli.models.model import Layer, Resolved
from ffncli.models.runnable import folder_of
from ffncli.run.engine.execute import Mode
from ffncli.run.engine.prepare import LayerRequest, Prepared, Token, device_of, dtype_of, require_known, stored_layer
from ffncli.run.engine.weights import located_weights
from ffncli.run.pretrained.loading import Pretrained, cannot, demanding, load, offline, read_config
from ffncli.run.pretrained.locate import LiveFFN, live_ffn
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import positions, tokenizer_of, tokens_of, with_texts

# What is known to be wrong in transformers itself, in the MoE layers of a model_type.
FAULTS: Mapping[str, str] = {
    "nllb-moe": "transformers (5.23 at least) encodes this router's choice twice, so its own output is another"
}
Seen = Callable[[Layer, tuple[Token, ...], Tensor, Tensor], None]


@dataclass(frozen=True)
class Given:
    """What the model is run on: the arguments of its forward, and each stack's tokens."""

    arguments: Mapping[str, Any]
    tokens: Mapping[str, tuple[Token, ...]]
    notes: tuple[str, ...] = ()

    def of(self, stack: str) -> tuple[Token, ...]:
        """The tokens that pass through a stack."""
        return self.tokens.get(stack) or self.tokens[""]


def capture(model: Resolved, prompt: Prompt, request: LayerRequest) -> Prepared:
    """One layer's FFN, prepared to run on what enters it in the model, beside what the model makes of that.

    The weights of ours are read from the files on their own. Raises FFNError where the model cannot be run.
    """
    layer = model.layer(request.layer)
    found: list[tuple[tuple[Token, ...], Tensor, Tensor]] = []
    notes = run_model(model, [layer], prompt, request, lambda _, *seen: found.append(seen))
    ((tokens, entering, leaving),) = found
    return prepared(model, layer, request, tokens, entering, leaving, notes)


def prepared(
    model: Resolved, layer: Layer, request: LayerRequest, tokens: tuple[Token, ...], entering: Tensor, leaving: Tensor,
    notes: tuple[str, ...] = (),
) -> Prepared:  # fmt: skip
    """Our steps from ffn_input to ffn_output with the layer's own weights, on a captured input [tokens, d_model]."""
    block = steps(layer.spec)
    start, _ = ffn_span(block)
    found = stored_layer(model, layer, dtype_of(request.dtype), request.device)
    assert found is not None  # folder_of has seen the checkpoint
    weights, origin, doubts = found
    return Prepared(
        layer, ffn_steps(block), weights, {start: entering}, Mode(), origin, (*notes, *doubts), tokens, leaving,
    )  # fmt: skip


def run_model(
    model: Resolved, layers: Sequence[Layer], prompt: Prompt, request: LayerRequest, seen: Seen
) -> tuple[str, ...]:
    """Run the model once up to the last of `layers`; `seen` gets each layer's FFN as soon as it has run.

    It is given the layer, the tokens asked for, ffn_input and ffn_output [tokens, d_model]. The answer is what there is
    to say of the run. Raises FFNError for all that keeps a model from running.
    """
    require_known(model)
    folder = folder_of(model, prompt.option)
    _require_readable(model, layers[0])
    device, dtype = device_of(request.device), dtype_of(request.dtype)
    with offline() as transformers:
        config = read_config(transformers, folder)
        tokenizer = tokenizer_of(transformers, folder)
        tokens = tokens_of(prompt, tokenizer, folder)
        if not config.is_encoder_decoder:  # said before anything large is loaded
            positions(prompt.positions, len(tokens))
        found: dict[Layer, LiveFFN] = {}

        def shrink(module: Any, lean: bool) -> None:
            with suppress(FFNError):  # what shares weights is recognised when it has them (Zamba)
                found.update({layer: live_ffn(module, model, layer) for layer in layers})
            if lean and len(found) == len(layers):
                _cut_behind(module, model, found)

        loaded = load(transformers, folder, config, dtype, device, shrink)
        found = found or {layer: live_ffn(loaded.module, model, layer) for layer in layers}
        given = _forward_arguments(loaded, tokens, tokenizer, layers)
        idle = _listen(loaded, found, given, prompt, seen)
    fault = FAULTS.get(model.model_type or "") if any(layer.spec.moe for layer in layers) else None
    return (*given.notes, *idle, *([fault] if fault else []))


def _require_readable(model: Resolved, layer: Layer) -> None:
    """FFNError for weights that are not read here (GPTQ), by headers alone, before the model is loaded for nothing."""
    assert model.checkpoint is not None  # folder_of has seen it
    for item in located_weights(model, layer) or ():
        stored(model.checkpoint, item.names[0], model.quantization)


# --- what is loaded ---------------------------------------------------------------------------------------------------


def _cut_behind(module: Any, model: Resolved, found: Mapping[Layer, LiveFFN]) -> None:
    """Take out of a model that is still whole and empty the layers that lie behind the asked ones.

    Each stack that runs ends with its last asked layer; a decoder that nobody asked for does not run at all.
    """
    last = {layer.stack: layer for layer in sorted(found, key=lambda layer: layer.index)}
    ends = [(found[layer].layer, 1) for layer in last.values() if layer.stack == "decoder" or "decoder" not in last]
    decoder = next((g for g in model.groups if g.stack == "decoder"), None)
    if module.config.is_encoder_decoder and decoder and "decoder" not in last:
        first = Layer("decoder", min(decoder.layers), decoder.spec)
        ends.append((live_ffn(module, model, first).layer, 0))
    for name, kept in ends:
        cut(module, name, kept)


def cut(module: Any, layer: str, kept: int) -> None:
    """Delete what follows a layer in its list (with `kept` 0 the layer too), unless anything shares its weights."""
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


# --- what is given ----------------------------------------------------------------------------------------------------


def _forward_arguments(loaded: Pretrained, tokens: tuple[Token, ...], tokenizer: Any, layers: Sequence[Layer]) -> Given:
    """The arguments of the model's forward. Raises FFNError for tokens that it has no embedding or position for."""
    module, config = loaded.module, loaded.config
    ids = torch.tensor([[token.id for token in tokens]], device=module.device)
    _check_ids(module, tokens)
    _check_length(module, config, len(tokens))
    takes = inspect.signature(module.forward).parameters
    if "input_ids" in takes and not config.is_encoder_decoder:
        return Given({"input_ids": ids}, {"": tokens})
    start = _decoder_start(module)
    if "input_ids" in takes:
        decoder = with_texts([start], tokenizer)
        starts = torch.full((_codebooks(module), 1), start, device=module.device)
        arguments = {"input_ids": ids, "decoder_input_ids": starts}
        decoded = any(layer.stack == "decoder" for layer in layers)
        note = ("the prompt goes to the encoder; the decoder gets its start token alone",) if decoded else ()
        return Given(arguments, {"": tokens, "decoder": decoder}, note)
    if config.model_type == "whisper" and all(layer.stack == "decoder" for layer in layers):
        arguments = {"input_features": _silence(module, config, 1), "decoder_input_ids": ids}
        return Given(arguments, {"": tokens}, ("the prompt goes to the decoder; the encoder gets zeros for sound",))
    also = "; its decoder layers do" if config.model_type == "whisper" else ""
    raise FFNError(f"{config.model_type} takes {module.main_input_name}, not text{also}")


def stand_in(loaded: Pretrained, count: int) -> dict[str, Tensor]:
    """Arguments for a forward pass of one token each in a batch of `count`, of which nothing is kept."""
    module, config = loaded.module, loaded.config
    ids = torch.zeros(count, 1, dtype=torch.long, device=module.device)
    takes = inspect.signature(module.forward).parameters
    out = {"input_ids": ids} if "input_ids" in takes else {"input_features": _silence(module, config, count)}
    return out | ({"decoder_input_ids": ids.repeat(_codebooks(module), 1)} if config.is_encoder_decoder else {})


def _codebooks(module: Any) -> int:
    """How many tokens stand side by side at one position of the decoder: Musicgen has several of sound."""
    return int(getattr(getattr(module, "decoder", None), "num_codebooks", 1))


def _silence(module: Any, config: Any, count: int) -> Tensor:
    """What Whisper's encoder takes, [count, mel bins, frames], as zeros. FFNError for models that take other things."""
    if config.model_type != "whisper":
        raise FFNError(f"{config.model_type} takes {module.main_input_name}, not text")
    shape = (count, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.zeros(shape, dtype=module.dtype, device=module.device)


def _decoder_start(module: Any) -> int:
    """The token that a decoder begins with: what generation or config says, else begin of sequence, else padding."""
    places = (getattr(module, "generation_config", None), module.config)
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    found = [getattr(place, name, None) for name in names for place in places]
    return next((number for number in found if isinstance(number, int)), 0)


def _check_ids(module: Any, tokens: Sequence[Token]) -> None:
    try:
        rows = int(module.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        return
    if wrong := next((token for token in tokens if not 0 <= token.id < rows), None):
        what = f"token {wrong.id} (position {wrong.position}) is out of range"
        raise FFNError(what, f"the model has {rows:,} tokens")


def _check_length(module: Any, config: Any, count: int) -> None:
    """FFNError for more tokens than the config has positions, or a table of learned positions has rows."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # it has several
        text = config
    limits = [limit for limit in (getattr(text, "max_position_embeddings", None),) if type(limit) is int and limit > 0]
    for name, found in module.named_modules():
        if isinstance(found, nn.Embedding) and name.endswith("embeddings.position_embeddings") and found.padding_idx:
            limits.append(found.num_embeddings - found.padding_idx - 1)  # RoBERTa counts from behind the padding
    if limits and count > min(limits):
        what = f"the prompt has {count:,} tokens, {config.model_type} has {min(limits):,} positions"
        raise FFNError(what, "shorten it")


# --- the run ----------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """All that was asked for has been seen."""


def _listen(
    loaded: Pretrained, found: Mapping[Layer, LiveFFN], given: Given, prompt: Prompt, seen: Seen
) -> tuple[str, ...]:
    """Run the forward pass with every asked layer listened to, until the last of them has run; notes of those that did
    not. FFNError where none did.
    """
    waiting, kind, ours = dict(found), loaded.config.model_type, False

    def done(layer: Layer, entering: Tensor, leaving: Tensor) -> None:
        nonlocal ours
        tokens = given.of(layer.stack)
        chosen = positions(prompt.positions, len(tokens))
        rows = torch.tensor(chosen, device=entering.device)
        flat = (_rows(t, len(tokens), kind)[rows] for t in (entering, leaving))
        ours = True  # what goes wrong in there is not transformers'
        seen(layer, tuple(tokens[i] for i in chosen), *flat)
        ours = False
        del waiting[layer]
        if not waiting:
            raise _Stop

    with ExitStack() as stack:
        stack.enter_context(demanding(loaded))
        stack.enter_context(torch.no_grad())
        for layer, live in found.items():
            stack.callback(_hook(loaded.module, live, layer, done))
        try:
            loaded.module(**given.arguments)
        except _Stop:
            return ()
        except FFNError:
            raise
        except Exception as error:
            if ours or "memory" in str(error):
                raise
            raise cannot(f"transformers cannot run {kind} on this prompt", error, ExitCode.ENVIRONMENT) from None
    left = ", ".join(f"{layer.stack} layer {layer.index}" for layer in waiting)
    if len(waiting) < len(found):  # Mllama's layers that look at a picture
        return (f"{left} did not run on this prompt",)
    raise FFNError(f"{kind}: {left} did not run on this prompt", code=ExitCode.ENVIRONMENT)


def _flat(tensor: Tensor) -> Tensor:
    """[batch 1, tokens, d_model] as [tokens, d_model]; some models have it flat already."""
    return tensor.reshape(-1, tensor.shape[-1])


def _rows(tensor: Tensor, tokens: int, kind: str) -> Tensor:
    """One row per token: a model may pad at the end (Longformer). FFNError where it pools them (Funnel)."""
    if tensor.shape[0] < tokens:
        count = f"{tensor.shape[0]} rows enter this FFN for {tokens} tokens"
        raise FFNError(f"{kind}: {count}, so they cannot be told apart", "trace it without a prompt")
    return tensor[:tokens]


def _hook(
    module: Any, live: LiveFFN, layer: Layer, done: Callable[[Layer, Tensor, Tensor], None]
) -> Callable[[], None]:
    """Listen to one layer's first run; returns what ends the listening."""
    entered: list[Tensor] = []
    left: dict[str, Tensor] = {}

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not entered:  # a copy: what follows may write into it
            entered.append(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)).detach().clone())

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
