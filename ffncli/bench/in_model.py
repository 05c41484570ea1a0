"""`ffncli.kernel` and `ffncli.replace`: run a named kernel, or the fastest one, in the caller's own program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ffncli.block.cost import STEPS
from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import Step
from ffncli.errors import FFNError
from ffncli.kernels import AUTO
from ffncli.kernels.choice import KernelChoice, parse
from ffncli.options.accept import COUNT, COUNTS, Accepts, instance, listed, number_or_text, several, text
from ffncli.options.arguments import checked
from ffncli.run.user.options import is_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ffncli.run.in_model.kernel_call import KernelFunction
    from ffncli.run.in_model.replace import Replaced


def _module(value: Any) -> Any:
    if not is_module(value):
        raise TypeError
    return value


_KERNEL = Accepts("a string such as 'packed' or 'mine.py:mlp'", text)
_BLOCK = Accepts[Any](
    "an ffncli.FFNSpec, or steps", lambda value: value if isinstance(value, FFNSpec) else STEPS.convert(value)
)
_WEIGHTS = instance(Mapping, "a mapping of names to tensors")  # type: ignore[type-abstract]
_MODULE = Accepts[Any]("a transformers model", _module)
_LAYERS = several(number_or_text("a layer"), "whole numbers, or strings such as 'decoder.3'")


@checked(name=_KERNEL, block=_BLOCK, weights=_WEIGHTS, tokens=COUNT)
def kernel(
    name: str, block: FFNSpec | Sequence[Step], weights: Mapping[str, Tensor], *, tokens: int = 1
) -> KernelFunction:
    """Return f(x), which computes an FFN with a kernel: x [..., d_model] → the FFN's output, a new tensor of the same
    shape and dtype.

    `name` is one of `kernel_names()`, a user's `file.py:name` (which is executed), or `auto`, which selects the fastest
    kernel on this machine for that number of `tokens`. `weights` has canonical names (`up.weight` [d_ff, d_model],
    `down.weight`, `gate.weight`, `up.bias`, ...); all weights share one dtype and one device, and must not change while
    f is used. f computes from ffn_input to ffn_output, without the surrounding norms and residual, as in eval mode.
    Gradients flow to x if the kernel supports them. Raises FFNError for weights that do not fit the block, and, with
    the reason, for a block that the kernel cannot compute.
    """
    from torch import Tensor

    from ffncli.run.in_model.kernel_call import kernel_function

    if name != AUTO:
        return kernel_function(parse(name), block, weights)
    if not isinstance(block, FFNSpec):
        raise FFNError("auto needs the block as an ffncli.FFNSpec", "name a kernel, as in ffncli.kernel_names()")
    like = weights.get("down.weight")
    if not isinstance(like, Tensor):
        raise FFNError("weights: down.weight is not a tensor", "names are canonical: up.weight, down.weight, ...")
    choice, _ = _fastest(block, tokens, like.dtype, str(like.device))
    return kernel_function(choice, block, weights)


@checked(model=_MODULE, kernel=_KERNEL, tokens=COUNTS, layers=_LAYERS)
def replace(
    model: nn.Module,
    kernel: str = AUTO,
    *,
    tokens: int | Iterable[int] | None = None,
    layers: int | str | Iterable[int | str] | None = None,
) -> Replaced:
    """Replace the FFNs of a loaded transformers model with a kernel, in place, verifying each replacement first;
    `restore` undoes it.

    Parameters stay where they are: state_dict, parameters(), to(), train() and saving work as before. The kernel
    computes only in eval mode and without gradients. In train mode, under autograd or autocast, with hooks inside the
    FFN, or after a move to another dtype or device the model uses its original code. If the kernel keeps a prepared
    copy of the weights, the copy is rebuilt when the model's weights change.

    `kernel` is as in `ffncli.kernel`; `auto` chooses the fastest kernel for the largest of `tokens`. Each replacement
    is verified against float64 on random inputs with each of these token counts (default 1 and 16); a kernel that
    compiles is used only for these counts. `layers` are indices, or names such as `decoder.3`; None means all layers.
    An FFN that cannot be replaced is listed in `kept`, with the reason. Raises FFNError if no FFN can be replaced, and
    (exit 1) if a kernel is wrong, in which case nothing is replaced.
    """
    from ffncli.run.in_model.replace import TOKENS, replace_ffns

    counts = listed(tokens) or TOKENS
    chosen = None if kernel == AUTO else parse(kernel)

    def choose(spec: FFNSpec, dtype: torch.dtype, device: str) -> tuple[KernelChoice, str]:
        return _fastest(spec, max(counts), dtype, device) if chosen is None else (chosen, "")

    return replace_ffns(model, choose, counts, listed(layers) if layers else None)


def _fastest(spec: FFNSpec, tokens: int, dtype: torch.dtype, device: str) -> tuple[KernelChoice, str]:
    """Return (the fastest kernel for a block on this machine, a note with the reason for the choice)."""
    from ffncli.bench.timing.modes.auto import fastest

    return fastest(spec, tokens, dtype, device)
