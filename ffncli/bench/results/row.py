"""ResultRow: one case and kernel of a result, with a field for every column of the CSV, in the order of the CSV.

Each field declares the role of its column: it belongs to the run, the case or the environment, or is a figure. Code
that compares, merges, admits or shows results gets the columns of a role from `columns`, so that a new column reaches
all of it.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

from ffncli.bench.records import Above, Case, Share, Status, Verdict
from ffncli.models.files.json_records import Count, OneOf

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BenchWarning:
    """A reason to trust a row's ratio less. `code` is a `warnings.Code`, or a code of another version.

    As a string, a warning is `code: figures`. It never contains a `;`, which separates warnings in results.
    """

    code: str
    figures: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.code, self.figures))).replace(";", ",")

    @classmethod
    def parse(cls, text: str) -> "BenchWarning":
        """Parse a warning from a string, `code: figures` or just `code`."""
        code, _, figures = text.partition(":")
        return cls(code, figures.removeprefix(" "))


def of_run(default: Any) -> Any:
    """A column that identifies the run or records the requested method of measuring."""
    return field(default=default, metadata={"role": "run"})


def of_case(default: Any, part: Literal["block", "work", "place", "name", "kernel"]) -> Any:
    """A column that says what was measured: the block, the work, the place (a device), or only a name for one of these.

    Two rows measure the same case if their `block`, `work` and `place` columns agree.
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
    """A column that describes the machine or the software.

    `compared`: times are comparable only if this column is the same. `individual`: the column distinguishes machines or
    cards of the same model. `per_case`: the value depends on the case, not only on the machine. `one_per_grid`: parts
    of a grid that differ in this column cannot be merged.
    """
    marks = {"compared": compared, "individual": individual, "per_case": per_case, "one_per_grid": one_per_grid}
    return field(default=default, metadata={"role": "environment", **marks})


def figure(default: Any = None, shown: Literal["", "always", "page"] = "", *, recomputed: bool = False) -> Any:
    """A column with a result: a status, or a measured figure.

    `shown` says whether the column appears in every table of rows, or only in the table of a page. `recomputed`: the
    value follows from the blocks and the case alone, and the public suite checks that it does. Do not set it for a new
    column: the published files lack it and would no longer be admitted.
    """
    return field(default=default, metadata={"role": "figure", "shown": shown, "recomputed": recomputed})


@dataclass(frozen=True)
class ResultRow:
    """One case and one kernel, with the environment of the measurement. None means unknown and is an empty cell.

    `ratio` is the time divided by the baseline's time in the same rounds; it need not equal the quotient of the two
    `time_s`. Columns are only ever added at the end; read them by name.
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
    passes: str = of_case("", "work")  # the column `pass`, which is a Python keyword
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
    # The columns from here on were added after the first fixed list. The per-process values let `ffn compare` work with
    # this file alone. Below: the kernel's time in each process (statistics.centre).
    process_times_s: tuple[Share, ...] = figure((), recomputed=True)
    process_anchors_s: tuple[Share, ...] = figure((), recomputed=True)  # times of the machine anchor in the same rounds
    # exp of the paired log ratio of each process
    process_ratios: tuple[Share, ...] = figure((), recomputed=True)
    openmp: str = of_environment()  # OMP_PROC_BIND, OMP_PLACES and OMP_WAIT_POLICY, as set in the workers
    allocator: str = of_environment()
    case: str = of_case("", "name")  # Case.key
    precision: Above | None = of_run(None)  # the requested half-width of the interval
    numpy: str = of_environment()
    isa: str = of_environment()
    bound: str = figure("", "page")  # memory or compute
    flops_per_byte: Share | None = figure()  # counts only bytes that no cache holds
    ridge_flops_per_byte: Share | None = figure()  # the machine balance
    certificate: str = of_run("")  # sha256 of the kernel's certificate, if one was given and covers this case
    computes: str = figure("")  # the format that a kernel declares if it has fewer bits than the dtype; else empty
    launch_s: Share | None = figure(recomputed=True)  # the host's time to launch one call on a GPU
    launch_queues: str = of_environment()  # CUDA_SCALE_LAUNCH_QUEUES as set in the workers
    gpu_uuid: str = of_environment(individual=True)  # hashed
    power_limit_w: Above | None = of_environment(None)
    cublas: str = of_environment()
    cudnn: str = of_environment()
    triton: str = of_environment()
    mig: str = of_environment()  # profile of a MIG slice: 1g.10gb
    persistence: str = of_environment(compared=False)  # on or off: whether the driver stays loaded between processes
    launch: str = of_environment(per_case=True)  # how a GPU's calls are launched: graphs or plain; empty on a CPU
    routing: str = of_case("", "work")  # uniform, zipf:1.2, text, or a trace's sha256; empty: chosen by the router
    tokens_per_expert: tuple[Share, ...] = figure(())  # with prescribed routing: the mean per call
    input: str = of_case("", "work")  # sha256 of the file that x was drawn from; empty: random numbers
    world_size: Count | None = of_case(None, "name")  # number of ranks that the block is split over
    layout: str = of_case("", "work")  # how the block is split: tp2, ep4, tp2-ep4; empty on one rank
    compute_s: Share | None = figure(recomputed=True)  # time of a call without its collectives, on the slowest rank
    communication_s: Share | None = figure(recomputed=True)  # time of only a call's collectives, on the slowest rank
    communication_bytes: Share | None = figure(recomputed=True)  # sent by a rank in a call, by the ring formula
    overlap: float | None = figure(recomputed=True)  # share of communication_s hidden behind compute_s
    gemm_low: Share | None = figure(recomputed=True)  # the interval of gemm_ratio
    gemm_high: Share | None = figure(recomputed=True)
    logits_error: Share | None = figure()  # error of a model with the kernel, relative to the unchanged model
    logits_limit: Share | None = figure()  # the error that rounding may cause
    tokens_per_s: Share | None = figure()  # throughput of a whole model
    suite: str = of_run("")  # public suite: its name and the sha256 of its definition, ffn-1@...; empty: no suite
    referee: str = of_run("")  # who checks answers: a separate process, or the worker that runs the kernels
    isolated: str = of_run("")  # what isolated the processes that ran kernels: user nobody, landlock; empty: nothing
    commit: str = of_run("")  # of the repository in which the run was started; empty outside of one

    @property
    def hardware(self) -> str:
        """The name of the GPU or, without a GPU, of the CPU."""
        return self.device_name or self.cpu

    @property
    def fusion_share_max(self) -> float | None:
        """The most time that fusing can save, as a share of the unfused time (the least time plus the saved time)."""
        saving = self.fusion_saving_max
        return None if saving is None else saving / (1 + saving)


def case_columns(case: Case) -> dict[str, Any]:
    """Return the columns that say what was measured, with the requested cache mode."""
    spec, moe = case.spec, case.spec.moe
    return {
        "source": case.source,
        "case": case.key,
        "d_model": spec.d_model,
        "d_ff": spec.d_ff,
        "activation": spec.activation,
        "gated": spec.gated,
        "bias": spec.bias,
        "experts": moe.experts if moe else 0,
        "top_k": moe.top_k if moe else 0,
        "shared_experts": moe.shared_experts if moe else 0,
        "tokens": case.tokens,
        "dtype": case.dtype,
        "passes": case.passes,
        "cache": case.cache,
        "routing": case.routing_sha256 or case.routing,
        "input": case.input_sha256,
        "device": case.device,
        "threads": case.threads,
        "world_size": case.ranks.world_size if case.layout else None,
        "layout": case.layout,
    }


def name_of(field: str) -> str:
    """Return the column name of a field."""
    return "pass" if field == "passes" else field


def columns(role: str, **marks: object) -> tuple[str, ...]:
    """Return the names of the fields with this role and these marks, in the order of the CSV."""
    of_role = [column for column in fields(ResultRow) if column.metadata["role"] == role]
    return tuple(f.name for f in of_role if all(f.metadata[mark] == value for mark, value in marks.items()))


BLOCK_COLUMNS = columns("case", part="block")
# The fields that describe the requested case, in the order in which they are shown.
ASKED = (*columns("case", part="work"), *columns("case", part="place"))
MACHINE = columns("environment", per_case=False)  # filled by `machine.environment`
COMPARED = columns("environment", compared=True)
