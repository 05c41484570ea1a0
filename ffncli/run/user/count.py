"""`ffncli.count`: what `ffn params` counts for one source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from ffncli.models.counting.count import count as count_model
from ffncli.models.dimensions import Dimensions
from ffncli.options import shared
from ffncli.options.opt import COMPUTE, Opt, call
from ffncli.run.user.load import load
from ffncli.run.user.options import ModelSource

if TYPE_CHECKING:
    from ffncli.models.counting.count import ModelCount


@dataclass(frozen=True, kw_only=True)
class CountQuestion(Dimensions):
    """Parameters, FLOPs and bytes of a model or block, as in a row of `ffn params`.

    >>> import ffncli
    >>> ffncli.count("gpt2").ffn_params_total
    56669184

    `source` and the dimensions are those of `ffncli.trace`; `dtype` is the format that bytes count in (default: as
    released or stored), `tokens` the number that the `..._total` FLOPs are for, default 1. torch is imported only for a
    source in a Python file. Raises FFNError for whatever the command line refuses, and for an argument of the wrong
    type.
    """

    source: ModelSource = field(default=None, kw_only=False)
    dtype: Annotated[str | None, Opt("--dtype", group=COMPUTE, help="Format of the weights.")] = field(
        default=None, kw_only=False
    )
    tokens: shared.Tokens = field(default=None, kw_only=False)


def counted(question: CountQuestion) -> ModelCount:
    """The counts that a question is about."""
    return count_model(load(question.source, question.dimensions), question.dtype, question.tokens or 1)


count = call(CountQuestion, counted, "count")
