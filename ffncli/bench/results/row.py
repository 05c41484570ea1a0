"""ResultRow: one case and kernel of a result, a field for every column of the CSV, in their order; BenchWarning: one of
its warnings."""

from __future__ import annotations

from typing import Annotated, get_args

from ffncli.bench.records import Above, Share, Status, Verdict
from ffncli.dataclass import dataclass
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


@dataclass(frozen=True)
class ResultRow:
    """One case and one kernel, with the environment of the measurement. None is unknown, an empty cell.

    `ratio` is the time over the baseline's in the same rounds; the quotient of two `time_s` need not equal it.
    Columns are only ever added at the end; a reader finds them by name.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str = ""
    started_utc: str = ""
    ffncli: str = ""
    torch: str = ""
    python: str = ""
    host: str = ""
    cpu: str = ""
    device: str = ""
    device_name: str = ""
    driver: str = ""
    blas: str = ""
    threads: Count | None = None
    math_mode: str = ""
    source: str = ""
    d_model: Count | None = None
    d_ff: Count | None = None
    activation: str = ""
    gated: bool | None = None
    bias: bool | None = None
    experts: Count | None = None
    top_k: Count | None = None
    shared_experts: Count | None = None
    tokens: Count | None = None
    dtype: str = ""
    passes: str = ""  # the column `pass`, a keyword of Python
    cache: str = ""
    kernel: str = ""
    baseline: str = ""
    status: Annotated[str, OneOf(get_args(Status))] = ""
    processes: Count | None = None
    placements: Count | None = None
    rounds: Count | None = None
    inner: Count | None = None
    time_s: Share | None = None
    time_low_s: Share | None = None
    time_high_s: Share | None = None
    ratio: Share | None = None
    ratio_low: Share | None = None
    ratio_high: Share | None = None
    verdict: Annotated[str, OneOf(("", *get_args(Verdict)))] = ""
    aa_ratio: Share | None = None
    aa_low: Share | None = None
    aa_high: Share | None = None
    gemm_ratio: Share | None = None
    flops: Count | None = None
    bytes: Count | None = None
    tflops: Share | None = None
    gbytes_per_s: Share | None = None
    roof_fraction: Share | None = None
    datasheet_fraction: Share | None = None
    fusion_saving_max: Share | None = None
    peak_memory_bytes: Count | None = None
    page_faults_per_call: Share | None = None
    compile_s: Share | None = None
    error_max: Share | None = None
    error_rel: Share | None = None
    baseline_error_rel: Share | None = None
    seed: Count | None = None
    warnings: tuple[BenchWarning, ...] = ()
    note: str = ""
    # Added after the first fixed list. `ffn compare` needs these for each process, so that this file is enough.
    process_times_s: tuple[Share, ...] = ()  # one value per process (statistics.centre), of the kernel
    process_anchors_s: tuple[Share, ...] = ()  # and of the machine anchor, among the same rounds
    process_ratios: tuple[Share, ...] = ()  # exp of the value of each process of the paired log ratio
    openmp: str = ""  # OMP_PROC_BIND, OMP_PLACES, OMP_WAIT_POLICY as set in the workers
    allocator: str = ""
    case: str = ""  # Case.key
    precision: Above | None = None  # the requested half-width
    numpy: str = ""
    isa: str = ""
    bound: str = ""  # memory or compute
    flops_per_byte: Share | None = None  # of the bytes that no cache holds
    ridge_flops_per_byte: Share | None = None  # the machine balance
    certificate: str = ""  # the sha256 of the kernel's certificate, where one was named and is of this case
    computes: str = ""  # what a kernel declares that computes in fewer bits than the dtype has; empty: the dtype
    launch_s: Share | None = None  # the host's seconds of launching one call on a GPU
    launch_queues: str = ""  # CUDA_SCALE_LAUNCH_QUEUES as set in the workers
    gpu_uuid: str = ""  # hashed
    power_limit_w: Above | None = None
    cublas: str = ""
    cudnn: str = ""
    triton: str = ""
    mig: str = ""  # the profile of a GPU's part: 1g.10gb
    persistence: str = ""  # on or off: whether the driver stays loaded between processes
    launch: str = ""  # how calls reached a GPU: graphs or plain; empty on a CPU
    routing: str = ""  # uniform, zipf:1.2, text, or the sha256 of a saved trace; empty: the router's choice
    tokens_per_expert: tuple[Share, ...] = ()  # with a prescribed routing: of one call, the mean over calls
    input: str = ""  # the sha256 of the file that x was drawn from; empty: random numbers
    world_size: Count | None = None  # ranks that the block is split over
    layout: str = ""  # how: tp2, ep4, tp2-ep4; empty on one rank
    compute_s: Share | None = None  # of a call on the slowest rank, its collectives left out
    communication_s: Share | None = None  # of a call's collectives alone, on the slowest rank
    communication_bytes: Share | None = None  # that each rank sends for a call, by the ring's closed form
    overlap: float | None = None  # the share of communication_s that time_s hides behind compute_s
    gemm_low: Share | None = None  # the interval of gemm_ratio
    gemm_high: Share | None = None
    logits_error: Share | None = None  # of a model with kernels, against the model alone
    logits_limit: Share | None = None  # what rounding may cause
    tokens_per_s: Share | None = None  # of a whole model
    suite: str = ""  # of a public suite: its name and the sha256 of its definition, ffn-1@...; empty: of none
    referee: str = ""  # who had the right answers: a process apart, or the worker that runs the kernels

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
