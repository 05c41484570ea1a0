"""`ffn plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from ffncli.block import dtypes
from ffncli.cli.common.options import OutputOptions, Source, TokenListOptions
from ffncli.cli.common.parsers import flat, joined
from ffncli.cli.common.spread import spread
from ffncli.cli.plan.options import (
    AssumptionOptions,
    Devices,
    ExpertParallels,
    Formats,
    Measured,
    Simulate,
    Skew,
    TensorParallels,
    devices_of,
)
from ffncli.cli.plan.page import parts_of
from ffncli.models.counting.cluster_plan import ClusterPlan, PlanQuestion, plan_model
from ffncli.models.counting.expert_load import UNIFORM
from ffncli.models.counting.plan import PlanRow
from ffncli.models.dimensions import Dimensions
from ffncli.run.user.load import load
from ffncli.run.user.time_limit import LoadOptions
from ffncli.show.parts import Answer
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.models.counting.measured import MeasuredSpeeds
    from ffncli.models.model import Resolved
    from ffncli.run.ranks.collective_check import CollectiveCheck

CONVENTIONS: Mapping[str, str] = {
    "time_s": "a layer's kernels one after another (products, elementwise steps between them), each the longer of"
    " matmul FLOPs over the rate and traffic over the bandwidth, plus the collectives; summed over layers, forward",
    "all_reduce": "a ring: 2 (n - 1) / n × bytes over the link's share, plus a call and 2 (n - 1) steps, by the fastest"
    " of NCCL's protocols",
    "all_to_all": "dispatch and combine: (n - 1) / n × tokens × top_k × width, link and network at the same time",
    "needed_bytes": "weights of one rank, those outside the FFNs divided by tp, and all intermediates of one layer",
}


@spread
def command(
    *,
    source: Source = None,
    device: Devices = None,
    tp: TensorParallels = None,
    ep: ExpertParallels = None,
    skew: Skew = None,
    measured: Measured = None,
    simulate: Simulate = False,
    dtype: Formats = None,
    tokens: TokenListOptions,
    assumptions: AssumptionOptions,
    dimensions: Dimensions,
    load_limit: LoadOptions,
    show: OutputOptions,
) -> None:
    """Predict time, memory and communication of a model's FFNs on accelerators, and the cheapest split that fits.

    Examples:
      ffn plan llama-2-70b --device h100,mi300x        # the sentence comes first
      ffn plan mixtral-8x7b --tp 1,2 --ep 1,8 -n 4096  # experts over devices
      ffn plan 4096x11008:swiglu --dtype bf16,fp8      # one block, two formats
      ffn plan gpt2 --gemm-efficiency 0.7 --csv        # a row per combination
    """
    output = show.output()
    if device == ["list"]:
        from ffncli.cli.common.devices_page import devices_answer

        output.show(devices_answer("plan"))
        return
    load_limit.apply()
    formats = joined(dtype)
    speeds = None if measured is None else _measured(measured)
    names = device or ([*speeds] if speeds else ["h100"])
    devices, cpu = devices_of(names)
    question = PlanQuestion(
        devices,
        cpu=cpu,
        tp=flat(tp) or PlanQuestion.tp,
        ep=flat(ep) or PlanQuestion.ep,
        tokens=tokens.numbers() or PlanQuestion.tokens,
        formats=(None,) if formats is None else tuple(dtypes.storage(name).name for name in formats.split(",")),
        skew=UNIFORM if skew is None else skew,
        assumptions=assumptions.assumptions(),
    )
    model = load(source, dimensions)
    plan = plan_model(model, question, speeds)
    answer, checks = answer_of(plan, speeds), _simulated(model, question, plan) if simulate else []
    output.notes(*model.notes)
    if not simulate:
        output.show(answer)
        return
    from ffncli.cli.plan.simulated import records, require_agreement, simulated_parts

    output.show(answer.with_section("collectives", records(checks), simulated_parts(checks)))
    require_agreement(checks)


def _simulated(model: Resolved, question: PlanQuestion, plan: ClusterPlan) -> list[CollectiveCheck]:
    """Every split that has figures and several ranks; torch is imported for it."""
    from ffncli.run.ranks.collective_check import collective_checks

    possible = {(row.tp, row.ep) for row in plan.rows if row.devices > 1 and not row.refused}
    splits = [ranks for ranks in question.splits if (ranks.tp, ranks.ep) in possible]
    return [one for planner in question.planners(model) for one in collective_checks(planner, splits, question.tokens)]


def _measured(path: str) -> dict[str, MeasuredSpeeds]:
    """Of a CSV of `ffn bench`, whose reader is imported only for one."""
    from ffncli.cli.plan.measured import measured_speeds

    return measured_speeds(path)


def answer_of(plan: ClusterPlan, speeds: dict[str, MeasuredSpeeds] | None = None) -> Answer:
    """Rows for JSON and CSV, the page for people; with measured speeds what they predict of each other."""
    columns = ("name", *(field.name for field in fields(PlanRow)))
    flat = Table(columns, [(plan.name, *vars(row).values()) for row in plan.rows])
    body: dict[str, Any] = {
        "name": plan.name,
        "skew": plan.skew,
        "rows": [asdict(row) for row in plan.rows],
        "cheapest": [asdict(row) for row in plan.cheapest],
        "would_fit": [asdict(row) for row in plan.would_fit],
        "assumed": [asdict(one) for one in plan.assumed],
    }
    answer = Answer("plan", body, flat, parts_of(plan), CONVENTIONS)
    if speeds is None:
        return answer
    from ffncli.cli.plan.measured import measured_parts, predictions

    rows = list(predictions(speeds))
    return answer.with_section("measured", [asdict(row) for row in rows], measured_parts(rows))
