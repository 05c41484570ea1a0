"""`ffn approximate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.approximate.page import answer, plots
from ffncli.cli.common import values
from ffncli.cli.common.option import COMPUTE, option
from ffncli.cli.common.options import Count, OutputOptions
from ffncli.cli.common.parsers import from_zero, natural, positive
from ffncli.cli.common.plot_options import PlotOptions
from ffncli.cli.common.spread import spread
from ffncli.dataclass import dataclass
from ffncli.errors import Terminated
from ffncli.run.approximate.question import (
    ACTIVATIONS,
    MAX_SAMPLES,
    MAX_SEEDS,
    MAX_STEPS,
    STEPS,
    FitCase,
    FitQuestion,
    cases,
    parse_domain,
    texts,
)
from ffncli.run.approximate.targets import TARGETS
from ffncli.run.engine.threads import set_threads
from ffncli.show.progress import progress

if TYPE_CHECKING:
    from ffncli.run.approximate.approximate import Fit, FitRow, Overfitting

_fit = partial(option, "What to fit")
_train = partial(option, "Training")
_Texts = list[str] | None
_Targets = Annotated[
    _Texts,
    _fit("--target", metavar="NAME,...", daily=True, values=values.targets,
         help=f"Functions to fit: {', '.join(TARGETS)}. [default: sin]"),
]  # fmt: skip
_Activations = Annotated[
    _Texts,
    _fit("--activation", metavar="NAME,...", daily=True, values=values.activations,
         help=f"Activations to fit with. [default: {', '.join(ACTIVATIONS)}]"),
]  # fmt: skip
_Widths = Annotated[
    _Texts,
    _fit("--d-ff", metavar="N|4x,...", daily=True,
         help="Widths of plain blocks; gated ones get as many parameters. [default: 1, 2, 4, ..., 64]"),
]  # fmt: skip


@dataclass(frozen=True)
class TrainingOptions:
    """--seeds, --noise and the other options of training."""

    seeds: Annotated[
        Count,
        _train("--seeds", metavar="N", parser=positive("--seeds", MAX_SEEDS), daily=True,
               help="Training runs per row, each with its own seed. [default: 5]"),
    ] = None  # fmt: skip
    seed: Annotated[
        Count,
        option(COMPUTE, "--seed", metavar="N", parser=natural("--seed", 2**31 - 1), help="First seed. [default: 0]"),
    ] = None
    noise: Annotated[
        float,
        _train("--noise", metavar="X", parser=from_zero("--noise"), daily=True,
               help="Standard deviation of the noise added to the training targets."),
    ] = 0.0  # fmt: skip
    samples: Annotated[
        Count,
        _train("--samples", metavar="N", parser=positive("--samples", MAX_SAMPLES),
               daily=True,
               help="Training samples. [default: 256; 1024 for two inputs; 32 with --noise]"),
    ] = None  # fmt: skip
    steps: Annotated[
        Count,
        _train("--steps", metavar="N", parser=positive("--steps", MAX_STEPS), daily=True,
               help=f"Training steps. [default: {STEPS}]"),
    ] = None  # fmt: skip
    domain: Annotated[
        str | None,
        _train("--domain", metavar="A:B", help="Range of the inputs. [default: -pi:pi; 0:1 for two inputs]"),
    ] = None

    def question(self, targets: _Texts, activations: _Texts, widths: _Texts) -> FitQuestion:
        """The question, with defaults filled in. Raises FFNError for impossible values."""
        options = {
            "targets": targets and texts(targets),
            "activations": activations and texts(activations),
            "widths": widths and texts(widths),
            "domain": None if self.domain is None else parse_domain(self.domain),
            **{name: getattr(self, name) for name in ("seeds", "seed", "noise", "samples", "steps")},
        }
        return FitQuestion(**{name: value for name, value in options.items() if value is not None})


@spread
def command(
    *,
    targets: _Targets = None,
    activations: _Activations = None,
    widths: _Widths = None,
    training: TrainingOptions,
    plot: PlotOptions,
    show: OutputOptions,
) -> None:
    """Train blocks of growing width on a function: how well they fit.

    Examples:
      ffn approximate --target sin --d-ff 1,4,16            # error by width
      ffn approximate --target abs --activation relu,gelu   # error by activation
      ffn approximate --noise 0.3 --d-ff 1x,4x,8x           # when it overfits
      ffn approximate --activation swiglu --d-ff 8 --plot   # the curves
    """
    output = show.output()
    plot.check(show.force, show.out)
    question = training.question(targets, activations, widths)
    planned = cases(question)
    finished: list[Fit] = []
    stopped: BaseException | None = None
    try:
        _train_all(question, planned, finished, show)
    except (KeyboardInterrupt, Terminated) as signal:  # the finished rows are shown
        if not finished:
            raise
        stopped = signal
        output.note(f"stopped: {len(finished)} of {len(planned)} rows are finished")
    rows = [fit.row for fit in finished]
    if lost := sum(row.diverged for row in rows):
        output.note(f"{lost} of {len(rows) * question.seeds} trainings diverged and are left out")
    page = answer(question, rows, len(planned), _overfitting(question, rows))
    output.show(plot.extended(page, plots(rows), output) if plot.wanted else page)
    if stopped:
        raise stopped


def _overfitting(question: FitQuestion, rows: Sequence[FitRow]) -> list[Overfitting]:
    """The verdicts on blocks that were fitted to noisy samples."""
    from ffncli.run.approximate.approximate import overfitting  # imports torch, already loaded for fitting

    return overfitting(rows) if question.noise else []


def _train_all(question: FitQuestion, planned: tuple[FitCase, ...], finished: list[Fit], show: OutputOptions) -> None:
    """Add each fit to `finished` as it comes, so that an interruption keeps them."""
    with progress(len(planned) * question.steps, "training", show.quiet, show.color_choice()) as advance:
        set_threads()
        from ffncli.run.approximate.approximate import fits  # torch

        finished.extend(fits(question, planned, advance))
