"""ResultRow: one case and kernel of a result, a field for every column of the CSV, in their order.

A field declares once what its column is: of the run, the case, the environment, or a figure. Whoever compares, merges,
admits or shows results asks `columns` for those of a role, so that a new column reaches all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

from ffncli.bench.records import Above, Share, Status, Verdict
from ffncli.models.files.json_records import Count, OneOf

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BenchWarning:
    """A reason to trust a row's ratio less. `code` is a `warnings.Code`, or one that this version does not know.

    As text it is `code: figures`. Results join texts with `;`, so no text contains one.
    """

    code: str
    figures: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.code, self.figures))).replace(";", ",")

    @classmethod
    def parse(cls, text: str) -> BenchWarning:
        """The warning of that text; one without figures is only a code."""
        code, _, figures = text.partition(":")
        return cls(code, figures.removeprefix(" "))


def of_run(default: Any) -> Any:
    """A column on the run: which it is, and how it was asked to measure."""
    return field(default=default, metadata={"role": "run"})


def of_case(default: Any, part: Literal["block", "work", "place", "name", "kernel"]) -> Any:
    """A column on what was measured: the block, the work it is given, the place (a device), or a mere name of these.

    Rows of two results are of one case where `block`, `work` and `place` agree.
    """
    return field(default=default, metadata={"role": "case", "part": part})


def of_environment(
    default: str | None = "",
    *,
    compared: bool = True,
    individual: bool = False,
    per_case: bool = False,
    one_per_grid: bool = False,
) -> Any:
    """A column on machine and software.

    `compared`: times are comparable only where it is the same. `individual`: it tells a machine or a card from another
    of the same model. `per_case`: a case says it, not the machine. `one_per_grid`: parts of a grid that differ in it
    are not one result.
    """
    marks = {"compared": compared, "individual": individual, "per_case": per_case, "one_per_grid": one_per_grid}
    return field(default=default, metadata={"role": "environment", **marks})


def figure(default: Any = None, shown: Literal["", "always", "page"] = "", *, recomputed: bool = False) -> Any:
    """A column on what came out.

    `shown`: in every table of rows, or in that of a page alone. `recomputed`: it follows from the blocks and the case
    alone, so that whoever doubts it can compute it again.
    """
    return field(default=default, metadata={"role": "figure", "shown": shown, "recomputed": recomputed})


@dataclass(frozen=True)
class ResultRow:
    """One case and one kernel, with the environment of the measurement. None is unknown, an empty cell.

    `ratio` is the time over the baseline's in the same rounds; the quotient of two `time_s` need not equal it.
    Columns are only ever added at the end; a reader finds them by name.
    """

    schema_version: int = of_run(SCHEMA_VERSION)
    run_id: str = of_run("")
    started_utc: str = of_run("")
    ffncli: str = of_environment(compared=False, one_per_grid=True)
    torch: str = of_environment(one_per_grid=True)
    python: str = of_environment()
    host: str = of_environment(compared=False, individual=True)
    cpu: str = of_environment()
    device: str = of_case("", "place")
    device_name: str = of_environment()
    driver: str = of_environment()
    blas: str = of_environment()
    threads: Count | None = of_case(None, "place")
    math_mode: str = of_environment()
    source: str = of_case("", "name")
    d_model: Count | None = of_case(None, "block")
    d_ff: Count | None = of_case(None, "block")
    activation: str = of_case("", "block")
    gated: bool | None = of_case(None, "block")
    bias: bool | None = of_case(None, "block")
    experts: Count | None = of_case(None, "block")
    top_k: Count | None = of_case(None, "block")
    shared_experts: Count | None = of_case(None, "block")
    tokens: Count | None = of_case(None, "work")
    dtype: str = of_case("", "work")
    passes: str = of_case("", "work")  # the column `pass`, a keyword of Python
    cache: str = of_case("", "work")
    kernel: str = of_case("", "kernel")
    baseline: str = of_run("")
    status: Annotated[str, OneOf(get_args(Status))] = figure("", "always")
    processes: Count | None = figure(recomputed=True)
    placements: Count | None = figure(recomputed=True)
    rounds: Count | None = figure(recomputed=True)
    inner: Count | None = figure(recomputed=True)
    time_s: Share | None = figure(None, "always", recomputed=True)
    time_low_s: Share | None = figure(recomputed=True)
    time_high_s: Share | None = figure(recomputed=True)
    ratio: Share | None = figure(None, "always", recomputed=True)
    ratio_low: Share | None = figure(None, "always", recomputed=True)
    ratio_high: Share | None = figure(None, "always", recomputed=True)
    verdict: Annotated[str, OneOf(("", *get_args(Verdict)))] = figure("", "always", recomputed=True)
    aa_ratio: Share | None = figure(recomputed=True)
    aa_low: Share | None = figure(recomputed=True)
    aa_high: Share | None = figure(recomputed=True)
    gemm_ratio: Share | None = figure(None, "page", recomputed=True)
    flops: Count | None = figure(recomputed=True)
    bytes: Count | None = figure()
    tflops: Share | None = figure(None, "page", recomputed=True)
    gbytes_per_s: Share | None = figure(None, "page")
    roof_fraction: Share | None = figure(None, "page")
    datasheet_fraction: Share | None = figure()
    fusion_saving_max: Share | None = figure()
    peak_memory_bytes: Count | None = figure()
    page_faults_per_call: Share | None = figure(recomputed=True)
    compile_s: Share | None = figure()
    error_max: Share | None = figure()
    error_rel: Share | None = figure(None, "page")
    baseline_error_rel: Share | None = figure()
    seed: Count | None = of_run(None)
    warnings: tuple[BenchWarning, ...] = figure(())
    note: str = figure("")
    # Added after the first fixed list. `ffn compare` needs these for each process, so that this file is enough.
    # One per process (statistics.centre), of the kernel.
    process_times_s: tuple[Share, ...] = figure((), recomputed=True)
    process_anchors_s: tuple[Share, ...] = figure((), recomputed=True)  # of the machine anchor, among the same rounds
    # The exp of each process's value of the paired log ratio.
    process_ratios: tuple[Share, ...] = figure((), recomputed=True)
    openmp: str = of_environment()  # OMP_PROC_BIND, OMP_PLACES, OMP_WAIT_POLICY as set in the workers
    allocator: str = of_environment()
    case: str = of_case("", "name")  # Case.key
    precision: Above | None = of_run(None)  # the requested half-width
    numpy: str = of_environment()
    isa: str = of_environment()
    bound: str = figure("", "page")  # memory or compute
    flops_per_byte: Share | None = figure()  # of the bytes that no cache holds
    ridge_flops_per_byte: Share | None = figure()  # the machine balance
    certificate: str = of_run("")  # the sha256 of the kernel's certificate, where one was named and is of this case
    computes: str = figure("")  # what a kernel declares that computes in fewer bits than the dtype; empty: the dtype
    launch_s: Share | None = figure(recomputed=True)  # the host's seconds of launching one call on a GPU
    launch_queues: str = of_environment()  # CUDA_SCALE_LAUNCH_QUEUES as set in the workers
    gpu_uuid: str = of_environment(individual=True)  # hashed
    power_limit_w: Above | None = of_environment(None)
    cublas: str = of_environment()
    cudnn: str = of_environment()
    triton: str = of_environment()
    mig: str = of_environment()  # the profile of a GPU's part: 1g.10gb
    persistence: str = of_environment(compared=False)  # on or off: whether the driver stays loaded between processes
    launch: str = of_environment(per_case=True)  # how calls reached a GPU: graphs or plain; empty on a CPU
    routing: str = of_case("", "work")  # uniform, zipf:1.2, text, sha256 of a saved trace; empty: the router's choice
    tokens_per_expert: tuple[Share, ...] = figure(())  # with a prescribed routing: of one call, the mean over calls
    input: str = of_case("", "work")  # the sha256 of the file that x was drawn from; empty: random numbers
    world_size: Count | None = of_case(None, "name")  # ranks that the block is split over
    layout: str = of_case("", "work")  # how: tp2, ep4, tp2-ep4; empty on one rank
    compute_s: Share | None = figure(recomputed=True)  # of a call on the slowest rank, its collectives left out
    communication_s: Share | None = figure(recomputed=True)  # of a call's collectives alone, on the slowest rank
    communication_bytes: Share | None = figure(recomputed=True)  # a rank sends for a call, by the ring's closed form
    overlap: float | None = figure(recomputed=True)  # the share of communication_s that time_s hides behind compute_s
    gemm_low: Share | None = figure(recomputed=True)  # the interval of gemm_ratio
    gemm_high: Share | None = figure(recomputed=True)
    logits_error: Share | None = figure()  # of a model with kernels, against the model alone
    logits_limit: Share | None = figure()  # what rounding may cause
    tokens_per_s: Share | None = figure()  # of a whole model
    suite: str = of_run("")  # of a public suite: its name and the sha256 of its definition, ffn-1@...; empty: of none
    referee: str = of_run("")  # who had the right answers: a process apart, or the worker that runs the kernels

    @property
    def hardware(self) -> str:
        """What was measured: the GPU, else the CPU."""
        return self.device_name or self.cpu

    @property
    def fusion_share_max(self) -> float | None:
        """The most that fusing can save, as a share of the time that includes that traffic."""
        saving = self.fusion_saving_max
        return None if saving is None else saving / (1 + saving)


def name_of(field: str) -> str:
    """The column of a field."""
    return "pass" if field == "passes" else field


def columns(role: str, **marks: object) -> tuple[str, ...]:
    """The fields of that role and with these marks, in the order of the CSV."""
    of_role = [column for column in fields(ResultRow) if column.metadata["role"] == role]
    return tuple(f.name for f in of_role if all(f.metadata[mark] == value for mark, value in marks.items()))


BLOCK_COLUMNS = columns("case", part="block")
ASKED = (*columns("case", part="work"), *columns("case", part="place"))  # of a block, in the order of reading
MACHINE = columns("environment", per_case=False)  # what `machine.environment` fills
COMPARED = columns("environment", compared=True)
