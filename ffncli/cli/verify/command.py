"""`ffn verify`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ffncli.cli.common import values
from ffncli.cli.common.load_options import LoadOptions
from ffncli.cli.common.option import OUTPUT, SOURCE, option
from ffncli.cli.common.options import OutputOptions, PlaceOptions, Source, TokenOptions
from ffncli.cli.common.parsers import duration, from_zero
from ffncli.cli.common.rank_options import RankOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.verify.page import answer, failure
from ffncli.cli.verify.referee_page import referee_answer, refusal
from ffncli.dataclass import dataclass
from ffncli.models.dimensions import Dimensions
from ffncli.run.verify.call import verify
from ffncli.run.verify.names import CHECK_STATEMENTS

_verify = partial(option, "What to verify")
_Texts = list[str] | None
Checks = Annotated[
    _Texts,
    _verify(
        "--check",
        metavar="NAME,...",
        daily=True,
        values=values.checks,
        help=f"Run only these checks: {', '.join(CHECK_STATEMENTS)}. [default: all]",
    ),
]
Kernels = Annotated[
    _Texts,
    _verify(
        "-k",
        "--kernel",
        metavar="NAME,...",
        daily=True,
        values=values.kernels,
        help="Kernels to check: eager, packed, ..., all, or your [label=]file.py:name (runs that file);"
        " main:file.py:name is the file at a git commit.",
    ),
]
Tolerance = Annotated[
    float | None,
    _verify(
        "--tolerance",
        metavar="X",
        parser=from_zero("--tolerance"),
        daily=True,
        help="Largest relative error that passes. [default: by dtype]",
    ),
]
Verbose = Annotated[
    bool, option(OUTPUT, "-v", "--verbose", daily=True, help="Show every row of every check, and its figures.")
]
Against = Annotated[
    str | None,
    option(
        SOURCE,
        "--against",
        metavar="SOURCE",
        daily=True,
        values=values.models,
        help="Compare with the same layer of this model.",
    ),
]
_referee = partial(option, "Referee")


@dataclass(frozen=True)
class RefereeOptions:
    """--referee, and what it demands and allows."""

    referee: Annotated[
        bool,
        _referee(
            "--referee", daily=True, help="Judge one kernel, in a process of its own; -o FILE.json is its certificate."
        ),
    ] = False
    batch_invariant: Annotated[
        bool, _referee("--batch-invariant", help="Demand that a token's bits are the same alone and in every batch.")
    ] = False
    call_time: Annotated[
        float | None,
        _referee("--call-time", metavar="TIME", parser=duration("--call-time"),
                 help="Time limit for one call of the kernel, compiling included. [default: 1m]"),
    ] = None  # fmt: skip


@spread
def command(
    *,
    source: Source = None,
    checks: Checks = None,
    kernels: Kernels = None,
    against: Against = None,
    tolerance: Tolerance = None,
    verbose: Verbose = False,
    place: PlaceOptions,
    tokens: TokenOptions,
    referee: RefereeOptions,
    ranks: RankOptions,
    dimensions: Dimensions,
    load_limit: LoadOptions,
    show: OutputOptions,
) -> None:
    """Prove that ways of computing a block agree, and that a file was read correctly; exit 1 if not.

    Examples:
      ffn verify 512x2048:swiglu               # every check
      ffn verify ./my-model -l 1               # a checkpoint, and how it was read
      ffn verify 64x256:swiglu -k mine.py:mlp  # your kernel
      ffn verify 64x256:swiglu -k mine.py:mlp --referee
    """
    output = show.output()
    load_limit.apply()
    load_time = load_limit.load_time if referee.referee else None
    verdict = verify(
        source, **vars(place), **vars(tokens), check=checks or (), kernel=kernels or (), against=against,
        tolerance=tolerance, load_time=load_time, **vars(referee), **vars(ranks), **vars(dimensions),
    )  # fmt: skip
    output.notes(*verdict.notes)
    if verdict.certificate is not None:
        output.show(referee_answer(verdict, verdict.certificate, verbose))
        if verdict.certificate.reason:
            raise refusal(verdict.certificate)
        return
    output.show(answer(verdict, verbose))
    if verdict.failed:
        raise failure(verdict)
