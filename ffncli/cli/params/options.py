"""The options of `ffn params`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.cli.common import values
from ffncli.cli.common.option import COMPUTE, option
from ffncli.cli.common.options import KINDS_OF_SOURCE
from ffncli.cli.common.parsers import above_zero, positive
from ffncli.errors import FFNError

if TYPE_CHECKING:
    from ffncli.system.hardware import Device

_count = partial(option, "What to count")
_Texts = list[str] | None

Sources = Annotated[
    _Texts,
    typer.Argument(
        metavar="SOURCE", autocompletion=values.models, help=f"{KINDS_OF_SOURCE} Several are shown side by side."
    ),
]
Everything = Annotated[bool, _count("--all", daily=True, help="Count every known model.")]
Asserted = Annotated[
    _Texts,
    _count("--assert", metavar="'NAME == X'", daily=True,
           help="Exit 1 unless this holds, as in 'ffn_params_total == 4328521728'; repeatable."),
]  # fmt: skip
AssertFile = Annotated[
    str | None,
    _count("--assert-file", metavar="FILE", help="Exit 1 unless every line of FILE holds; # starts a comment."),
]
Sweep = Annotated[
    _Texts,
    _count("--sweep", metavar="NAME=A,B,...", daily=True,
           help="Show one row per value, as in d_ff=1x,2x,4x or tokens=1,32; repeatable."),
]  # fmt: skip
EqualSize = Annotated[
    bool, _count("--iso-params", daily=True, help="Add the gated or plain block with the same number of parameters.")
]
MultipleOf = Annotated[
    int | None,
    _count("--multiple-of", metavar="N", parser=positive("--multiple-of"),
           help="With --iso-params: round its d_ff up to a multiple of N."),
]  # fmt: skip
Ridge = Annotated[
    _Texts,
    _count("--ridge", metavar="X|DEVICE,...", values=values.devices,
           help="Show how many tokens it takes to reach X FLOPs per byte; of an accelerator, as in h100,b200, also the"
                " least time and whether the model fits. `list` shows the accelerators."),
]  # fmt: skip
Formats = Annotated[
    _Texts,
    option(COMPUTE, "--dtype", metavar="NAME,...", daily=True, values=values.storage_formats,
           help="Format of the weights: fp32, bf16, fp8, q4_0, ... [default: as released or stored]"),
]  # fmt: skip


def ridge_of(texts: _Texts) -> tuple[float | None, tuple[Device, ...]]:
    """(the number, the devices) of `--ridge`: one is typed, or the others are named.

    Raises FFNError for a number that is not above 0, for an unknown device, and for both together.
    """
    words = [word.strip() for text in texts or () for word in text.split(",")]
    if not words:
        return None, ()
    if any(map(_is_number, words)):
        if len(words) > 1:
            raise FFNError("--ridge takes one number of FLOPs per byte, or names of devices", "ask for one at a time")
        return above_zero("--ridge")(words[0]), ()
    from ffncli.system.hardware import named

    return None, tuple({device.name: device for device in (named(word, "--ridge") for word in words)}.values())


def _is_number(word: str) -> bool:
    """Whether a word is meant as a number; an empty one is not a name either."""
    try:
        float(word)
    except ValueError:
        return not any(map(str.isalpha, word))
    return True
