"""Load a whole transformers model, and find the modules and the weights of its FFNs."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block.recipe import steps
from ffncli.block.steps import Activation, Step, parameters, tables
from ffncli.errors import FFNError, shown
from ffncli.kernels.dense import activation, dense
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.model import Layer, Resolved, folder_of
from ffncli.models.tensors.layout import Located
from ffncli.run.engine.locate import common_module, live_parameters, live_weights, tensor_at
from ffncli.run.pretrained.capture import ForwardInput, forward_arguments
from ffncli.run.pretrained.loading import Pretrained, load, offline, read_config
from ffncli.run.pretrained.prompt import layers_of
from ffncli.run.pretrained.tokens import with_texts

# relative distance allowed between implementations of an activation, in any dtype: some round √(2/π) to four digits
_LEAST = 1e-3


class NotReplaced(Exception):
    """Raised for an FFN that stays as it is; the message is the reason."""


@dataclass(frozen=True)
class FoundFFN:
    """One FFN of a model in memory. `block` are its kernel steps, `located` tells where their weights are.

    `modules` compute the FFN: either a single module, or, if the layer calls the parts one by one, the modules of up,
    of the activation (every candidate) and of down.
    """

    layer: Layer
    block: tuple[Step, ...]
    located: tuple[Located, ...]
    modules: tuple[str, ...]

    @property
    def label(self) -> str:
        """The FFN's path in the model: `model.layers.0.mlp`, or `model.layers.0.fc1 to model.layers.0.fc2`."""
        return self.modules[0] if len(self.modules) == 1 else f"{self.modules[0]} to {self.modules[-1]}"

    @property
    def width(self) -> int:
        """The width of the FFN's input."""
        return self.layer.spec.d_model


def chosen_layers(resolved: Resolved, wanted: int | str | Sequence[int | str] | None) -> list[Layer]:
    """Return the layers that the argument `layers` selects; None selects all layers that have an FFN."""
    if wanted is None:
        return layers_of(resolved)
    several = [wanted] if isinstance(wanted, (int, str)) else [*wanted]
    return list(dict.fromkeys(resolved.model.layer(str(one)) for one in several))


def find_ffn(model: nn.Module, resolved: Resolved, layer: Layer) -> FoundFFN:
    """Locate a layer's FFN. Raise NotReplaced if neither one module nor a sequence of modules computes it."""
    block = kernel_steps(steps(layer.spec))
    wanted = {**parameters(block), **tables(block)}
    try:
        at, everything = live_parameters(model, resolved, layer)
    except FFNError as error:
        raise NotReplaced(error.message) from None
    located = tuple(item for item in everything if item.parameter in wanted)
    if missing := wanted.keys() - {item.parameter for item in located}:
        raise NotReplaced(f"no tensor is known to contain {min(missing)}")
    owners = {item.parameter: item.names[0].rpartition(".")[0] for item in located}
    whole = common_module([*owners.values()])
    if whole not in ("", at) and whole.startswith(at):
        return FoundFFN(layer, block, located, (whole,))
    return FoundFFN(layer, block, located, _row(model, block, owners, at))


def row_of(model: nn.Module, ffn: FoundFFN) -> FoundFFN:
    """Split an FFN whose module computes more than the FFN into the modules of up, activation and down."""
    owners = {item.parameter: item.names[0].rpartition(".")[0] for item in ffn.located}
    row = _row(model, ffn.block, owners, ffn.modules[0])
    return FoundFFN(ffn.layer, ffn.block, ffn.located, row)


def kernel_weights(model: nn.Module, ffn: FoundFFN) -> dict[str, Tensor]:
    """Return the canonical weights [out, in], contiguous: the model's own tensors if stored that way, else copies."""
    return {name: tensor.contiguous() for name, tensor in live_weights(model, ffn.located).items()}


def _row(model: nn.Module, block: Sequence[Step], owners: Mapping[str, str], at: str) -> tuple[str, ...]:
    """Return the modules of a plain FFN in the order of their calls: up, the activation, a norm, down."""
    shape = dense(block)
    if shape is None or shape.gated or shape.prefix:
        raise NotReplaced(f"no module of {at} computes its FFN and nothing else")
    learned_ones = {
        name: tensor_at(model, f"{owner}.{name.rpartition('.')[2]}").detach()
        for name, owner in owners.items()
        if name.startswith("act.")
    }
    parts = model.get_submodule(at).named_modules()
    acts = [f"{at}.{name}" for name, part in parts if name and computes(part, shape.act, learned_ones)]
    if not acts and shape.act.function != "identity":
        ends = f"{owners['up.weight']} and {owners['down.weight']}"
        raise NotReplaced(f"the activation {shape.act.function} between {ends} is not a separate module")
    norms = [owner for name, owner in owners.items() if name.startswith("sub_norm.")]
    return tuple(dict.fromkeys([owners["up.weight"], *acts, *norms, owners["down.weight"]]))


def computes(part: nn.Module, act: Activation, weights: Mapping[str, Tensor]) -> bool:
    """Return whether a module has no submodules and computes the activation `act`."""
    if next(part.children(), None) is not None or any(p.dim() > 1 for p in part.parameters()):
        return False
    ours = [weights[f"act.{name}"] for name in act.parameters()]
    like = next(iter(ours), torch.zeros(()))
    x = torch.linspace(-4, 4, 33, dtype=like.dtype, device=like.device)[None]
    expected = activation(act)(x, *ours)
    try:
        with torch.no_grad():
            out: Any = part(x.clone())
    except Exception:  # the module may be anything that a layer contains
        return False
    if not isinstance(out, Tensor) or out.shape != x.shape or torch.equal(out, x):
        return False
    return bool((out - expected).abs().max() <= _LEAST * expected.abs().max())


def forward_replaced(part: nn.Module) -> bool:
    """Return whether a module's `forward` has been replaced by something other than its class's method.

    A module of a copied model may have its class's method as an attribute, bound to the module; this does not count.
    """
    forward = vars(part).get("forward")
    bound = getattr(forward, "__self__", None) is part and getattr(forward, "__func__", None) is type(part).forward
    return forward is not None and not bound


def require_plain_forward(model: nn.Module, ffn: FoundFFN) -> None:
    """Raise NotReplaced if a module's `forward` has already been replaced, or if its weights are not loaded."""
    for path in ffn.modules:
        for part in model.get_submodule(path).modules():
            if forward_replaced(part):
                raise NotReplaced(f"the forward of {type(part).__name__} in {path} has been replaced before")
    for item in ffn.located:
        if tensor_at(model, item.names[0]).is_meta:
            raise NotReplaced(f"{shown(item.names[0])} is on the meta device: it has no values")


def load_whole(resolved: Resolved, dtype: torch.dtype, device: str) -> Pretrained:
    """Load the model with all layers, and with a language-model head if transformers has a head for it.

    Experts use transformers' default implementation. Raise FFNError if a parameter is missing from the model's files.
    """
    path = folder_of(resolved, "--in-model")
    with offline() as transformers:
        config = read_config(transformers, path)
        try:
            loaded = load(transformers, path, config, dtype, device, with_head=True)
        except FFNError as error:
            if "no language-model head" not in error.message:
                raise
            loaded = load(transformers, path, config, dtype, device)
    module: Any = loaded.module
    if dtype != torch.float64:  # float64 is refused by the default implementation of experts
        with suppress(Exception):  # some models have only one implementation of experts
            module.set_experts_implementation(module.get_correct_experts_implementation(None))
    return loaded


def random_tokens(loaded: Pretrained, resolved: Resolved, count: int, seed: int) -> ForwardInput:
    """Return the arguments of a forward pass on `count` random tokens; refuse more tokens than the model's maximum."""
    try:
        vocab = int(loaded.module.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        raise FFNError(f"{loaded.config.model_type}: its token embedding is not known") from None
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (count,), generator=generator).tolist()
    return forward_arguments(loaded, with_texts(ids, None), None, layers_of(resolved))


def answer_of(output: Any) -> Tensor:
    """Return the output to compare: the logits, or the last hidden state of a model without a head."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    first = output[0] if isinstance(output, (tuple, list)) else output
    if isinstance(first, Tensor):
        return first
    raise FFNError(f"a {type(output).__name__} has no logits")
