"""`ffncli.plan`: what `ffn plan` predicts for one source, as a call with the command line's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from ffncli.models.counting.cluster import Assumptions
from ffncli.models.counting.cluster_plan import PlanQuestion, plan_model
from ffncli.run.user.arguments import DimensionNames, Source, converted
from ffncli.run.user.load import load
from ffncli.system.hardware import named

if TYPE_CHECKING:
    from ffncli.models.counting.cluster_plan import ClusterPlan


def plan(
    source: Source = None,
    device: str | Sequence[str] = "h100",
    tp: int | Sequence[int] = (1, 2, 4, 8),
    ep: int | Sequence[int] = 1,
    tokens: int | Sequence[int] = (1, 4096),
    dtype: str | Sequence[str] | None = None,
    skew: str = "uniform",
    gemm_efficiency: float | None = None,
    memory_efficiency: float | None = None,
    link_efficiency: float | None = None,
    usable_memory: float | None = None,
    link: str | None = None,
    network: str | None = None,
    per_node: int | None = None,
    **dimensions: Unpack[DimensionNames],
) -> ClusterPlan:
    """Time, memory and communication of a model's FFNs on accelerators, and the cheapest split that fits.

    >>> import ffncli
    >>> best = ffncli.plan("llama-2-70b", device=["h100", "mi300x"], dtype="fp8").cheapest
    >>> [(row.devices, row.device, row.bound) for row in best]
    [(2, 'H100 SXM5', 'memory'), (1, 'MI300X', 'memory')]

    The arguments are the options of `ffn plan`, with its defaults; lists where it takes lists. torch is imported only
    for a source in a Python file. Raises FFNError for whatever the command line refuses, and for an argument of the
    wrong type.
    """
    options = converted(locals(), "plan")
    given = {name: options[name] for name in Assumptions.__dataclass_fields__}
    question = PlanQuestion(
        devices=tuple(named(name, "device") for name in options["device"]),
        tp=options["tp"],
        ep=options["ep"],
        tokens=options["tokens"],
        formats=options["dtype"] or (None,),
        skew=options["skew"],
        assumptions=Assumptions(**given),
    )
    return plan_model(load(options["source"], options["dimensions"]), question)
