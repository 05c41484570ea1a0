"""The options of `ffn bench` for other machines: --launcher, --slots, --launcher-option."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ffncli.bench.request.cluster import MOST_SLOTS, LauncherChoice, cluster_of
from ffncli.cli.common import values
from ffncli.cli.common.option import option
from ffncli.cli.common.options import Count, Text
from ffncli.cli.common.parsers import positive
from ffncli.dataclass import dataclass

_machines = partial(option, "Other machines")


@dataclass(frozen=True)
class LauncherOptions:
    """Which machines measure the cases; by default this one."""

    launcher: Annotated[
        Text, _machines("--launcher", metavar="NAME", values=values.launchers,
                        help="Measure on other machines, a case at a time on each: slurm submits jobs (extra slurm),"
                             " ray uses a running cluster (extra ray). Needs --device and --threads."),
    ] = None  # fmt: skip
    slots: Annotated[
        Count, _machines("--slots", metavar="N", parser=positive("--slots", MOST_SLOTS),
                         help="How many cases to measure at once. [default: with ray one for each GPU, or for each"
                              " machine if --device is cpu; with slurm 16 jobs]"),
    ] = None  # fmt: skip
    launcher_option: Annotated[
        list[str] | None,
        _machines("--launcher-option", metavar="K=V",
                  help="An option of the launcher; can be repeated. With slurm any of sbatch's, as in partition=gpu or"
                       " time=60 (minutes), or cluster=local to try it on this machine; with ray"
                       " address=HOST:6379."),
    ] = None  # fmt: skip

    def cluster(self) -> LauncherChoice | None:
        """The requested machines; None for this one."""
        return cluster_of(self.launcher, self.slots, self.launcher_option or ())
