"""--tp and --ep: over how many ranks a block is split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from ffncli.cli.common.option import option
from ffncli.cli.common.parsers import duration, positive

_split = partial(option, "Ranks")

TensorParallel = Annotated[
    int | None,
    _split("--tp", "--tensor-parallel", metavar="N", parser=positive("--tp", 65536),
           help="Split every d_ff over N ranks (tensor parallelism)."),
]  # fmt: skip
ExpertParallel = Annotated[
    int | None,
    _split("--ep", "--expert-parallel", metavar="N", parser=positive("--ep", 65536),
           help="Split the experts of a mixture over N ranks (expert parallelism)."),
]  # fmt: skip


@dataclass(frozen=True)
class SplitOptions:
    """--tp and --ep."""

    tp: TensorParallel = None
    ep: ExpertParallel = None


@dataclass(frozen=True)
class RankOptions(SplitOptions):
    """--tp and --ep over real processes, and how long each waits for the others."""

    rank_timeout: Annotated[
        float | None,
        _split("--rank-timeout", metavar="TIME", parser=duration("--rank-timeout"),
               help="Limit on waiting for another rank, to join and in every collective. [default: 2m]"),
    ] = None  # fmt: skip
