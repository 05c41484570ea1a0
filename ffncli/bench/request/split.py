"""What a benchmark over ranks may ask, and what each rank gets."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ffncli.bench.records import Method
from ffncli.block.dtypes import dtype
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from ffncli.models.counting import expert_parallel, tensor_parallel
from ffncli.models.model import Model


def ranks_here(ranks: Ranks) -> int:
    """How many of them share this machine: all, unless the launcher says otherwise."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(here) if here.isdigit() and 0 < int(here) < ranks.world_size else ranks.world_size


def threads_of_rank(ranks: Ranks) -> int:
    """The default for each rank: its share of a machine's cores."""
    from ffncli.system.host import default_threads

    return max(1, default_threads() // ranks_here(ranks))


def check_split(model: Model, ranks: Ranks, tokens: Sequence[int]) -> None:
    """Raises FFNError for a block that cannot be split over these ranks, with the nearest numbers that would do."""
    if ranks.tp > 1:
        tensor_parallel.check(model, ranks.tp, dtype("fp32"))
    expert_parallel.check(model, ranks.ep)
    if odd := next((number for number in tokens if number % ranks.ep), None):
        raise FFNError(f"{odd} tokens do not divide over {ranks.ep} ranks", "with --ep, every rank has its own tokens")


def require_possible(ranks: Ranks, passes: Sequence[str], devices: Sequence[str], method: Method) -> None:
    """Raises FFNError for what is not measured over ranks."""
    if ranks.world_size == 1:
        return
    if method.by_step or method.sustained or method.launch == "graphs":
        option = "--by-step" if method.by_step else "--sustained" if method.sustained else "--launch graphs"
        raise FFNError(f"{option} contradicts --tp and --ep", "measure it on one rank")
    if set(passes) - {"forward"}:
        raise FFNError("over ranks only the forward pass is timed", "leave out --pass")
    if len(set(devices)) > 1 or set(devices) - {"cpu", "cuda"}:
        raise FFNError("over ranks --device is cpu or cuda: every rank has a GPU of its own", "as in --device cuda")
