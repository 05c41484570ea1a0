"""`ffn verify` over several ranks: which split a call asks for, and whether the block can be split so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ffncli.block.dtypes import dtype
from ffncli.block.ranks import Ranks
from ffncli.errors import FFNError, shown
from ffncli.models.counting import expert_parallel, tensor_parallel
from ffncli.models.model import Group, Resolved
from ffncli.models.source import is_user_module
from ffncli.run.ranks.environment import RANK_TIMEOUT, device_of, require_ranks, split_asked_for, torchrun

if TYPE_CHECKING:
    from ffncli.run.verify.checks.case import SplitRun


def split_of(options: Mapping[str, Any], checks: Sequence[str] | None) -> Ranks | None:
    """The split that the options ask for; None for one process. `checks`: those to run, None for all.

    Raises FFNError for options that contradict it, and RanksNeeded, before a Python file of the user is loaded.
    """
    ranks = split_asked_for(options["tp"], options["ep"])
    if ranks is None:
        if options["rank_timeout"] is not None or "ranks" in (checks or ()):
            what = "--rank-timeout" if options["rank_timeout"] is not None else "--check ranks"
            raise FFNError(f"{what} needs several processes", "add --tp N or --ep N, or start it with torchrun")
        return None
    if checks and "ranks" not in checks:
        raise FFNError(f"--check {shown(','.join(checks))} runs nothing over several ranks", "add ranks to --check")
    if options["referee"]:
        raise FFNError("--referee judges a kernel in one process", "leave out --tp and --ep, and torchrun")
    if options["input"] == "-":
        raise FFNError("--input -: several ranks cannot read one standard input", "write it to a file")
    if isinstance(options["source"], str) and is_user_module(options["source"]):
        require_ranks(ranks)
    return ranks


def require_split(resolved: Resolved, layer: str | None, ranks: Ranks | None) -> None:
    """Raises FFNError if the layer cannot be split so, with the nearest numbers that would do; RanksNeeded where it
    can, by several processes. The weights are floats here, whatever the file has.
    """
    if ranks is not None:
        chosen = resolved.model.layer(layer)
        alone = replace(resolved.model, groups=(Group(chosen.stack, (chosen.index,), chosen.spec),))
        tensor_parallel.check(alone, ranks.tp, dtype("fp32"))
        expert_parallel.check(alone, ranks.ep)
        require_ranks(ranks)


def split_run(ranks: Ranks | None, options: Mapping[str, Any]) -> tuple[SplitRun | None, str]:
    """(the run over several ranks, if this process is one of them; the device that it uses)."""
    from ffncli.run.verify.checks.case import SplitRun

    place = torchrun()
    if ranks is None or place is None:
        return None, options["device"]
    patience = options["rank_timeout"] or RANK_TIMEOUT
    return SplitRun(ranks, place.rank, patience), device_of(place, options["device"])
