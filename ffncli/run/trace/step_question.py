"""The options of one training step, `ffn trace --backward`. Does not import torch."""

from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Annotated, Literal, TypeAlias, get_args

from ffncli.options.accept import FLAG, choice, real
from ffncli.options.conflicts import Conflict
from ffncli.options.opt import Opt, Options
from ffncli.run.user.options import VALUES, Values

Loss: TypeAlias = Literal["sum", "mse", "cross-entropy"]
_step = partial(Opt, group="Training step")


Backward = Annotated[
    bool,
    _step("--backward", accepts=FLAG, help="Show the gradient of every step and weight, last to first."),
]


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """The loss of a backward pass, and the learning rate of the step that follows it."""

    backward: Backward = False
    loss: Annotated[
        Loss | None,
        _step(
            "--loss", accepts=choice(*get_args(Loss)),
            help="Loss of the output: sum, mse (mean square error) or cross-entropy. [default: sum; with a prompt, that"
            " of the next tokens]",
        ),
    ] = None  # fmt: skip
    target: Annotated[
        Values | None,
        _step(
            "--target", accepts=VALUES,
            help="The output's targets, as for --input: values for mse [default: zeros], a class per token for"
            " cross-entropy.",
        ),
    ] = None  # fmt: skip
    lr: Annotated[
        float | None,
        _step(
            "--lr", accepts=real("a number above 0", lambda x: x > 0 and isfinite(x)),
            help="Learning rate: also show the weights after one step of gradient descent, and the new loss.",
        ),
    ] = None  # fmt: skip
    kernel: Annotated[
        str | None,
        _step(
            "-k", "--kernel", metavar="NAME", completes="kernels",
            help="Take the gradients of x and the weights from this kernel: a built-in one, or your file.py:name.",
        ),
    ] = None  # fmt: skip


STEP_RULES = (
    Conflict("loss target lr kernel", needs="backward"),
    Conflict("backward", contradicts="tp ep set ablate promotes", why="it shows the unchanged block's gradients"),
    Conflict("loss target", contradicts="prompt input_ids", why="the loss of a model is that of its next tokens"),
    Conflict("backward", contradicts="position", unless="unembed", why="a gradient is a sum over all tokens"),
    Conflict(
        "kernel", contradicts="prompt input_ids vocab example train=True lr", why="a kernel computes an FFN alone"
    ),
    Conflict("lr kernel", contradicts="layer=all", why="a step is one layer's"),
    Conflict("target", needs="loss=mse loss=cross-entropy", why="a sum has no target"),
)
