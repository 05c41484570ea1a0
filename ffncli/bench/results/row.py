"""ResultRow: one case and kernel of a result, a field for every column of the CSV, in their order; BenchWarning: one of
its warnings."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BenchWarning:
    """A reason to trust a row's ratio less. `code` is a `warnings.Code`, or one that this version does not know.

    As text it is `code: figures`. Results join texts with `;`, so none has one inside.
    """

    code: str
    figures: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.code, self.figures))).replace(";", ",")

    @classmethod
    def parse(cls, text: str) -> BenchWarning:
        """The warning of that text; one without figures is a code alone."""
        code, _, figures = text.partition(":")
        return cls(code, figures.removeprefix(" "))


@dataclass(frozen=True)
class ResultRow:
    """One case and one kernel, with the environment it was measured in. None is unknown, an empty cell.

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
    threads: int | None = None
    math_mode: str = ""
    source: str = ""
    d_model: int | None = None
    d_ff: int | None = None
    activation: str = ""
    gated: bool | None = None
    bias: bool | None = None
    experts: int | None = None
    top_k: int | None = None
    shared_experts: int | None = None
    tokens: int | None = None
    dtype: str = ""
    passes: str = ""  # the column `pass`, a keyword of Python
    cache: str = ""
    kernel: str = ""
    baseline: str = ""
    status: str = ""
    processes: int | None = None
    placements: int | None = None
    rounds: int | None = None
    inner: int | None = None
    time_s: float | None = None
    time_low_s: float | None = None
    time_high_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    verdict: str = ""
    aa_ratio: float | None = None
    aa_low: float | None = None
    aa_high: float | None = None
    gemm_ratio: float | None = None
    flops: int | None = None
    bytes: int | None = None
    tflops: float | None = None
    gbytes_per_s: float | None = None
    roof_fraction: float | None = None
    datasheet_fraction: float | None = None
    fusion_saving_max: float | None = None
    peak_memory_bytes: int | None = None
    page_faults_per_call: float | None = None
    compile_s: float | None = None
    error_max: float | None = None
    error_rel: float | None = None
    baseline_error_rel: float | None = None
    seed: int | None = None
    warnings: tuple[BenchWarning, ...] = ()
    note: str = ""
    # Added after the first fixed list. `ffn compare` needs these of each process, so that this file alone is enough.
    process_times_s: tuple[float, ...] = ()  # one value per process (statistics.centre), of the kernel
    process_anchors_s: tuple[float, ...] = ()  # and of the machine anchor, among the same rounds
    process_ratios: tuple[float, ...] = ()  # exp of the value of each process of the paired log ratio
    openmp: str = ""  # OMP_PROC_BIND, OMP_PLACES, OMP_WAIT_POLICY as the workers had them
    allocator: str = ""
    case: str = ""  # Case.key
    precision: float | None = None  # the requested half-width
    numpy: str = ""
    isa: str = ""
    computes: str = ""  # what a kernel declares that computes in fewer bits than the dtype has; empty: the dtype

    @property
    def fusion_share_max(self) -> float | None:
        """The most that fusing can save, as a share of the time that includes that traffic."""
        saving = self.fusion_saving_max
        return None if saving is None else saving / (1 + saving)


def name_of(field: str) -> str:
    """The column of a field."""
    return "pass" if field == "passes" else field
