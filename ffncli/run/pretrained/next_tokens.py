"""The loss of a model's next tokens on a prompt, the gradients that reach its FFNs, and the loss with other weights.

Each FFN's output is a leaf of autograd's graph or depends on one, so that no gradient of a weight is computed here.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffncli.block.recipe import steps
from ffncli.block.steps import Step, ffn_span, ffn_steps, id_inputs
from ffncli.errors import ExitCode, FFNError, option
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import run
from ffncli.run.engine.locate import LiveFFN, live_ffn
from ffncli.run.engine.prepare import device_of, dtype_of
from ffncli.run.pretrained.capture import first_tensor, forward_arguments, model_files
from ffncli.run.pretrained.loading import Pretrained, cannot, demanding, load, offline, read_config
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import tokenizer_of, tokens_of
from ffncli.run.pretrained.what_if import replaced_ffn


@dataclass(frozen=True)
class NextTokens:
    """A model that has run on a prompt: `loss` is the mean cross-entropy of its `count` next tokens, in nats.

    `entering` and `upstream` map each requested layer to the input of its FFN and to the gradient of the loss with
    respect to its FFN's output, both [tokens, d_model].
    """

    loss: float
    count: int
    entering: Mapping[Layer, Tensor]
    upstream: Mapping[Layer, Tensor]
    loaded: Pretrained
    arguments: Mapping[str, Any]
    live: Mapping[Layer, LiveFFN]

    def loss_with(self, layer: Layer, weights: Mapping[str, Tensor]) -> float:
        """Return the loss if a layer's FFN computes our steps with these weights."""
        block = ffn_steps(steps(layer.spec))
        ids = self.arguments["input_ids"].reshape(-1, 1)

        def compute(x: Tensor) -> Tensor:
            return run(block, weights, {ffn_span(block)[0]: x, **dict.fromkeys(id_inputs(block), ids)})

        with torch.no_grad(), replaced_ffn(self.loaded.module, self.live[layer], compute):
            return float(_loss(self.loaded, self.arguments))


@contextmanager
def next_tokens(
    resolved: Resolved, layers: Sequence[Layer], prompt: Prompt, dtype: str | None = None, device: str = "cpu"
) -> Iterator[NextTokens]:
    """Run the whole model on the prompt, forward and back to the FFNs of `layers`, and keep it for more runs.

    Raises FFNError for a model without next tokens (an encoder, or an encoder and a decoder), for a prompt of one
    token, and if an FFN runs several times in one pass, because each run has an input of its own.
    """
    path, where = model_files(resolved, layers, prompt.option), resolved.model.name
    if all(group.stack == "encoder" for group in resolved.model.groups):
        raise FFNError(f"{option('backward')}: {where} reads its tokens both ways, so it has no next tokens",
                       "trace the layer without a prompt")  # fmt: skip
    computed, device = dtype_of(dtype), device_of(device)
    with offline() as transformers:
        config, tokenizer = read_config(transformers, path), tokenizer_of(transformers, path)
        if config.is_encoder_decoder:
            what = f"{option('backward')}: {where} has an encoder and a decoder, so a prompt has no next tokens"
            raise FFNError(what, "trace the layer without a prompt")
        tokens = tokens_of(prompt, tokenizer, path)
        if len(tokens) < 2:
            raise FFNError(f"{prompt.option}: one token has no next token", "give two tokens or more")
        loaded = load(transformers, path, config, computed, device, with_head=True)
        arguments = forward_arguments(loaded, tokens, tokenizer, layers).arguments
        live = {layer: live_ffn(loaded.module, resolved, layer) for layer in layers}
        loaded.module.requires_grad_(False)
        entered: dict[Layer, list[Tensor]] = {layer: [] for layer in layers}
        left: dict[Layer, list[Tensor]] = {layer: [] for layer in layers}
        with ExitStack() as stack, torch.enable_grad():
            for layer, one in live.items():
                stack.enter_context(_watch(loaded.module, one, entered[layer], left[layer]))
            loss = _loss(loaded, arguments)
        for layer in layers:
            if len(left[layer]) != 1:
                times = f"runs {len(left[layer])} times" if left[layer] else "does not run"
                raise FFNError(f"{layer.stack} layer {layer.index}: its FFN {times} on this prompt")
        outputs = [left[layer][0] for layer in layers]
        gradients = torch.autograd.grad(loss, outputs, allow_unused=True)
        upstream = {
            layer: _rows(torch.zeros_like(output) if gradient is None else gradient, len(tokens))
            for layer, output, gradient in zip(layers, outputs, gradients, strict=True)
        }
        entering = {layer: _rows(entered[layer][0].detach(), len(tokens)) for layer in layers}
        yield NextTokens(float(loss.detach()), len(tokens) - 1, entering, upstream, loaded, arguments, live)


def _rows(tensor: Tensor, tokens: int) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])[:tokens]


def _loss(loaded: Pretrained, arguments: Mapping[str, Any]) -> Tensor:
    """Return the mean cross-entropy of the next tokens, computed in at least float32."""
    with demanding(loaded):
        try:
            logits = loaded.module(**arguments).logits
        except (FFNError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"transformers cannot run {loaded.config.model_type} on this prompt"
            raise cannot(what, error, ExitCode.ENVIRONMENT) from None
    logits = logits.reshape(-1, logits.shape[-1])
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide[:-1], arguments["input_ids"].flatten()[1:])


@contextmanager
def _watch(module: nn.Module, live: LiveFFN, entered: list[Tensor], left: list[Tensor]) -> Iterator[None]:
    """Record the FFN's inputs and outputs. An output that needs no gradient yet becomes a leaf that does."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(first_tensor(args, kwargs))

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        tensor: Tensor = output[0] if isinstance(output, tuple) else output
        tensor = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        left.append(tensor)
        copy = tensor.clone()  # Falcon adds to it in place
        return (copy, *output[1:]) if isinstance(output, tuple) else copy

    # The outputs of all leaves are added, so one of them has the gradient of the sum.
    handles = [
        module.get_submodule(live.enters).register_forward_pre_hook(enter, with_kwargs=True),
        module.get_submodule(live.leaves[0]).register_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradient_of_output(block: Sequence[Step], gradient: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Return the upstream of a backward pass: the gradient that reaches the FFN's output from the layers above."""
    return {block[-1].output: ("∂loss/∂" + block[-1].output + " of the model", gradient)}
