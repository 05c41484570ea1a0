"""`ffn verify` over several ranks: which split a call asks for, and whether the block can be split so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ffncli.block.ranks import Ranks
from ffncli.block.recipe import steps
from ffncli.block.shard import rank_steps
from ffncli.errors import FFNError
from ffncli.models.model import Resolved
from ffncli.models.source import is_user_module
from ffncli.run.ranks.environment import device_of, require_ranks, split_asked_for, torchrun

if TYPE_CHECKING:
    from ffncli.run.verify.checks.case import SplitRun

RANK_TIMEOUT = 120.0  # s


def split_of(options: Mapping[str, Any]) -> Ranks | None:
    """The split that the options ask for; None for one process.

    Raises FFNError for options that contradict it, and RanksNeeded, before a Python file of the user is loaded.
    """
    ranks = split_asked_for(options["tp"], options["ep"])
    if ranks is None:
        if options["rank_timeout"] is not None:
            raise FFNError("--rank-timeout needs --tp or --ep", "without them there is one process")
        return None
    if options["referee"]:
        raise FFNError("--referee judges a kernel in one process", "leave out --tp and --ep, and torchrun")
    if options["input"] == "-":
        raise FFNError("--input -: several ranks cannot read one standard input", "write it to a file")
    if isinstance(options["source"], str) and is_user_module(options["source"]):
        require_ranks(ranks)
    return ranks


def require_split(model: Resolved, layer: str | None, ranks: Ranks | None) -> None:
    """Raises FFNError where the layer cannot be split so, and RanksNeeded where it can, by several processes."""
    if ranks is not None:
        rank_steps(steps(model.model.layer(layer).spec), 0, ranks)
        require_ranks(ranks)


def split_run(ranks: Ranks | None, options: Mapping[str, Any]) -> tuple[SplitRun | None, str]:
    """(the run over several ranks, if this process is one of them; the device that it uses)."""
    from ffncli.run.verify.checks.case import SplitRun

    place = torchrun()
    if ranks is None or place is None:
        return None, options["device"]
    patience = options["rank_timeout"] or RANK_TIMEOUT
    return SplitRun(ranks, place.rank, patience), device_of(place, options["device"])
