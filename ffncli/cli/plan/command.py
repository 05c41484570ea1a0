"""`ffn plan`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from ffncli.block import dtypes
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.common.summaries import devices_answer, in_json
from ffncli.cli.plan.page import check_parts, collectives_parts, difference_text, measured_parts, parts_of
from ffncli.errors import ExitCode, FFNError, option, shown
from ffncli.models.config.quantized import UnknownPacking
from ffncli.models.counting.cluster import CPU, Assumptions
from ffncli.models.counting.cluster_plan import ClusterPlan, plan_model
from ffncli.models.counting.count import require_determined
from ffncli.models.counting.plan import PlanRow
from ffncli.models.counting.speeds import FittedSpeeds, MeasuredBlock, MeasuredSpeeds, Speeds, predictions
from ffncli.options.opt import Opt
from ffncli.options.shared import Strict
from ffncli.run.user.load import ModelPlanQuestion, load
from ffncli.run.user.time_limit import LoadOptions
from ffncli.show.parts import Answer, Table
from ffncli.system import hardware

if TYPE_CHECKING:
    from ffncli.bench.results.row import ResultRow
    from ffncli.models.model import Resolved
    from ffncli.run.ranks.simulate import CollectiveCheck

_FOLDER = "aiconfigurator:"
CONVENTIONS: Mapping[str, str] = {
    "time_s": "forward pass, summed over layers: kernels (matrix products, elementwise steps) run one after another,"
    " each for launch + quantizing x + (compute^p + memory^p)^(1/p); the time of the collectives is added",
    "time_low_s": "end of the 80 % interval, from the errors on measured shapes that were not fitted; for collectives,"
    " from 16 published all-reduces",
    "all_reduce": "time of a ring: 2 (n - 1) / n × bytes / the link's usable bandwidth, plus the latencies of a call"
    " and of 2 (n - 1) steps; it uses the fastest of NCCL's protocols",
    "all_to_all": "dispatch and combine: (n - 1) / n × tokens × rows per token × width, of the larger of what the"
    " busiest device sends and receives; link and network send at the same time",
    "needed_bytes": "weights of one rank (those outside the FFNs are divided by tp), and one layer's intermediates",
}


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(Assumptions):
    """Options for a simulation that checks the plan, and for measurements that replace its assumptions; whether what is
    unknown is an error."""

    simulate: Annotated[
        bool,
        Opt(
            "--simulate", group="Accelerators", daily=True,
            help="Also count collectives by running the split block on simulated ranks; exit 1 if the counts differ.",
        ),
    ] = False  # fmt: skip
    measured: Annotated[
        str | None,
        Opt(
            "--measured", metavar="FILE,...", group="Assumptions", daily=True,
            help="Predict from CSVs of ffn bench --save, or from parquet files in aiconfigurator:DIR;"
            " --device cpu needs this.",
        ),
    ] = None  # fmt: skip
    strict: Strict = False


@spread
def command(
    *, question: ModelPlanQuestion, evidence: EvidenceOptions, load_limit: LoadOptions, show: OutputOptions
) -> None:
    """Predict time, memory and communication of a model's FFNs on accelerators, and the cheapest split that fits.

    Examples:
      ffn plan llama-2-70b --device h100,mi300x        # a summary, then tables
      ffn plan mixtral-8x7b --tp 1,2 --ep 1,8 -n 4096  # experts over devices
      ffn plan 4096x11008:swiglu --dtype bf16,fp8      # one block, two formats
      ffn plan mixtral-8x7b --ep 8 --price 2.5 --csv   # cost per million tokens
    """
    output = show.output()
    if question.device == ("list",):
        output.show(devices_answer("plan"))
        return
    load_limit.apply()
    speeds = None if evidence.measured is None else measured_speeds(evidence.measured)
    model = load(question.source, question.dimensions)
    try:
        plan = plan_model(model, question, speeds)
    except UnknownPacking:
        if evidence.strict:
            require_determined([model], question.formats)
        raise
    answer, checks = answer_of(plan, speeds), _simulated(model, question, plan) if evidence.simulate else []
    output.notes(*model.notes)
    if evidence.simulate:
        records = [{**asdict(row), "same": row.same} for row in checks]
        answer = answer.with_section("collectives", records, collectives_parts(checks))
    output.show(answer)
    if different := [row for row in checks if not row.same]:
        more = f"; and {len(different) - 1} more" if len(different) > 1 else ""
        what = f"{option('simulate')}: {difference_text(different[0])}{more}"
        raise FFNError(what, code=ExitCode.FAILED)
    if evidence.strict:
        require_determined([model], question.formats)


def _simulated(model: Resolved, question: ModelPlanQuestion, plan: ClusterPlan) -> list[CollectiveCheck]:
    """Simulate every split over several ranks that was not refused; imports torch."""
    from ffncli.run.ranks.simulate import collective_checks

    possible = {(row.tp, row.ep) for row in plan.rows if row.devices > 1 and not row.refused}
    splits = [ranks for ranks in question.splits if (ranks.tp, ranks.ep) in possible]
    return [
        one for planner in question.planners(model) for one in collective_checks(planner, splits, question.token_counts)
    ]


def answer_of(plan: ClusterPlan, speeds: Mapping[str, Speeds] | None = None) -> Answer:
    """Build the answer: rows for JSON and CSV, and the page; if speeds were measured, the answer also shows how well
    they predict each other."""
    columns = ("name", *(field.name for field in fields(PlanRow)))
    flat = Table(columns, [(plan.name, *vars(row).values()) for row in plan.rows])
    body: dict[str, Any] = {
        "name": plan.name,
        "skew": plan.skew,
        "rows": in_json(plan.rows),
        "cheapest": in_json(plan.cheapest),
        "would_fit": in_json(plan.would_fit),
        "assumed": in_json(plan.assumed),
        "crossings": in_json(plan.crossings),
    }
    answer = Answer("plan", body, flat, parts_of(plan), CONVENTIONS)
    if speeds is None:
        return answer
    if rows := list(predictions({name: one for name, one in speeds.items() if isinstance(one, MeasuredSpeeds)})):
        answer = answer.with_section("measured", in_json(rows), measured_parts(rows))
    if checks := [row for one in speeds.values() if isinstance(one, FittedSpeeds) for row in one.checks]:
        answer = answer.with_section("held_out", in_json(checks), check_parts(checks))
    return answer


# --- measured speeds --------------------------------------------------------------------------------------------------


def measured_speeds(paths: str) -> dict[str, Speeds]:
    """Read CSVs of `ffn bench` and folders `aiconfigurator:DIR`; return, for `cpu` or an accelerator's name, its times:
    of the fastest kernel for each forward case, or constants fitted to the folder.

    Raises FFNError if a file cannot be read, if the files contain no usable measurement, and for two kinds of one
    device.
    """
    names = [os.path.expanduser(path) for path in filter(None, paths.split(","))]
    folders = [name.removeprefix(_FOLDER) for name in names if name.startswith(_FOLDER)]
    files = [name for name in names if not name.startswith(_FOLDER)]
    speeds: dict[str, Speeds] = {**_blocks(files, paths)} if files or not folders else {}
    for folder in folders:
        from ffncli.models.counting.times.published import user_fits

        for name, fits in user_fits(folder).items():
            if name in speeds:
                raise FFNError(f"{option('measured')} has two kinds of times of {name}", "give one of them")
            speeds[name] = FittedSpeeds(fits.device, user=fits)
    return speeds


def _blocks(paths: Sequence[str], given: str) -> dict[str, MeasuredSpeeds]:
    from ffncli.bench.results.csv_file import read_rows

    best: dict[tuple[str, str, int, str], tuple[str, MeasuredBlock]] = {}
    for row in (row for path in paths for row in read_rows(path)):
        block = _block(row)
        if block is None:
            continue
        device = _device(row)
        key = (device, block.label, block.tokens, block.weights.name)
        if key not in best or block.time_s < best[key][1].time_s:
            best[key] = (device, block)
    if not best:
        what = f"{option('measured')} {shown(given)}: no forward time of a block on one device"
        raise FFNError(what, "use a CSV of ffn bench --save")
    names = dict.fromkeys(device for device, _ in best.values())
    return {name: MeasuredSpeeds(tuple(block for device, block in best.values() if device == name)) for name in names}


def _device(row: ResultRow) -> str:
    known = None if row.device == CPU else hardware.find(row.device_name)
    return known.name if known else row.device


def _block(row: ResultRow) -> MeasuredBlock | None:
    """Return the row's block; None for a backward pass, a row without a time, a single step of a block, a block over
    ranks, and a mixture with shared experts, whose width is not in the row."""
    if row.status != "ok" or row.passes != "forward" or not row.time_s or row.shared_experts:
        return None
    from ffncli.bench.records import STEP

    if row.kernel.startswith(STEP) or (row.world_size or 1) > 1:
        return None
    if not (row.d_model and row.d_ff and row.tokens):
        return None
    moe = MoE(row.experts, row.top_k) if row.experts and row.top_k else None
    spec = FFNSpec(row.d_model, row.d_ff, row.activation, gated=row.gated, bias=row.bias, moe=moe)
    return MeasuredBlock(row.case.partition(",")[0], spec, dtypes.dtype(row.dtype), row.tokens, row.kernel, row.time_s)
