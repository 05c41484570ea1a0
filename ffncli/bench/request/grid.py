"""The grid of a benchmark, its cases, and the complete request: built, checked, and stored as JSON."""

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeAlias, get_args

from ffncli.bench.machine.devices import default_device, require_gpu
from ffncli.bench.records import BLOCK, MODEL, Above, Cache, Case, Method, model_with
from ffncli.bench.request.data import TEXT, check_input, check_routing, digest, is_file, routing_note, routing_text
from ffncli.bench.request.kernels import (
    ChosenKernels,
    NamedCertificate,
    choose_kernels,
    named_certificates,
    require_arguments,
)
from ffncli.bench.request.machines import LauncherChoice, require_any_gpu
from ffncli.bench.request.options import CONFLICTS, require_compatible
from ffncli.block.activations import unit_name
from ffncli.block.dtypes import dtype
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError, option, shown
from ffncli.kernels import AUTO
from ffncli.kernels.choice import KernelChoice, choices, parse
from ffncli.models.counting.expert_load import UNIFORM
from ffncli.models.counting.parallel import check_ranks
from ffncli.models.dimensions import Dimensions, token_counts
from ffncli.models.files.json_records import record_of
from ffncli.models.model import Model, Resolved, folder_of
from ffncli.options.accept import COUNTS, NAMES, PATH, Accepts, choice, comma_list, instance, listed, text
from ffncli.options.conflicts import check
from ffncli.options.opt import COMPUTE, Opt
from ffncli.options.shared import KINDS_OF_SOURCE, Batch, Counts, Pass, SeqLen, TokenList
from ffncli.options.shared import Path as FilePath
from ffncli.system.gpu import device_index

MOST_CASES = 10_000
NEWCOMERS = "512x2048:swiglu"  # default SOURCE: a gated block that fits every cache and is verified in a second
TOKENS = (32,)
DECODE = 16  # with at most this many tokens, reading weights dominates: `auto` keeps them uncached
CACHES = ("auto", *(name for name in get_args(Cache) if name != "shared"))
Names: TypeAlias = str | Sequence[str]
_SOURCE = Accepts("a string such as '512x2048:gelu', or a path", text)
_what = partial(Opt, group="What to measure")
_COMPUTED = ("fp64", "fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Grid(Dimensions):
    """The requested cases: every combination of the values is a case. None selects the default; for `threads`, the
    default depends on the machine.

    `source` is as in the other functions; `d_model` and `d_ff` may be comma-separated lists. `routing` is for mixtures;
    `input` is a file with x. Every block is split over the `ranks`, and each rank has `threads` threads.
    """

    source: Annotated[
        FilePath | None,
        Opt(metavar="SOURCE", accepts=_SOURCE, completes="models", help=f"{KINDS_OF_SOURCE} [default: {NEWCOMERS}]"),
    ] = field(default=None, kw_only=False)
    tokens: TokenList = None
    batch: Batch = None
    seq_len: SeqLen = None
    dtype: Annotated[
        Names | None,
        Opt(
            "--dtype", metavar="NAME,...", accepts=NAMES, repeat=True, group=COMPUTE, daily=True, completes="dtypes",
            help="Compute in fp32, bf16, fp16 or fp64; several make a grid. [default: fp32]",
        ),
    ] = None  # fmt: skip
    passes: Annotated[
        Names | None,
        _what(
            "--pass", metavar="NAME,...", accepts=comma_list(choice(*get_args(Pass)), "one or more names"),
            repeat=True, help="forward or forward+backward. [default: forward]",
        ),
    ] = None  # fmt: skip
    cache: Annotated[
        Names | None,
        _what(
            "--cache", metavar="NAME,...", accepts=comma_list(choice(*CACHES), "one or more names"),
            repeat=True,
            help="State of the caches: warm, cold-weights or flush. [default: auto, which is cold-weights up to"
            f" {DECODE} tokens, else warm]",
        ),
    ] = None  # fmt: skip
    device: Annotated[
        Names | None,
        Opt(
            "--device", metavar="NAME,...", accepts=NAMES, repeat=True, group=COMPUTE,
            help="Device: cpu, cuda or cuda:1. [default: a GPU if there is one]",
        ),
    ] = None  # fmt: skip
    threads: Annotated[
        Counts | None,
        Opt(
            "--threads", metavar="N,...", accepts=COUNTS, repeat=True, group=COMPUTE, daily=True,
            help="CPU threads; several make a grid. [default: one for each core]",
        ),
    ] = None  # fmt: skip
    routing: Annotated[
        Names | FilePath | None,
        _what(
            "--routing", metavar="NAME,...", repeat=True,
            accepts=replace(NAMES, values=(UNIFORM, "zipf:1.2", TEXT)),
            help="How tokens spread over experts: uniform, zipf:1.2 (by popularity), text (by the words of a speech),"
            " or FILE from ffn trace --save; several make a grid. [default: the router decides, for random tokens]",
        ),
    ] = None  # fmt: skip
    input: Annotated[
        FilePath | None,
        _what(
            "--input", metavar="FILE", accepts=PATH,
            help="Real input: rows of the tensor x in a .safetensors file. [default: normal random numbers]",
        ),
    ] = None  # fmt: skip
    ranks: Annotated[Ranks, instance(Ranks, "a Ranks")] = field(default_factory=Ranks)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The token counts without duplicates; () if none is given."""
        return tuple(dict.fromkeys(token_counts(self.tokens, self.batch, self.seq_len)))


@dataclass(frozen=True)
class BenchRequest:
    """Everything that a run needs; a resumed run reads it back from the journal. All `kernels` have labels; `baseline`
    is one of the labels.

    `asked` holds the options with their values, including defaults; `files` holds the sha256 of the user's files.
    `directory` is the directory of the request: workers start there, even if the run is resumed from elsewhere.
    `certificates` maps a kernel's label to its certificate. `cluster` describes the machines that measure; None means
    this machine. `suite` is the tag of the public suite that defines the cases, or empty.
    """

    cases: tuple[Case, ...]
    kernels: tuple[KernelChoice, ...]
    baseline: str
    method: Method = field(default_factory=Method)
    fail_if_slower: Above | None = None
    strict: bool = False
    asked: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    certificates: Mapping[str, NamedCertificate] = field(default_factory=dict)
    cluster: LauncherChoice | None = None
    suite: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names in results: the kernels' labels; with --by-step only the block; with --in-model the unchanged
        model, and the model with each kernel."""
        labels = tuple(kernel.label for kernel in self.kernels)
        if self.method.in_model:
            return MODEL, *map(model_with, labels)
        return (BLOCK,) if self.method.by_step else labels

    @property
    def ranks(self) -> Ranks:
        """The ranks over which the blocks of all cases are split."""
        return self.cases[0].ranks if self.cases else Ranks()

    @property
    def units(self) -> int:
        """The number of work items: every case in every process."""
        return len(self.cases) * self.method.processes

    def certificate_of(self, label: str, case: Case) -> str:
        """Return the sha256 of a kernel's certificate if it covers this case; otherwise ""."""
        certificate = self.certificates.get(label)
        return certificate.digest if certificate is not None and certificate.covers(case) else ""


def cases(grid: Grid, tell: Callable[[str], None] = lambda note: None, seed: int = 0) -> tuple[Case, ...]:
    """Return every combination of the grid's values, with blocks in the outermost loop. Weights are drawn with `seed`;
    `tell` receives each note on the models once.

    Raises FFNError for an impossible value or too many cases.
    """
    dtypes = _each(_dtype, "dtype", listed(grid.dtype) or ("fp32",))
    passes: tuple[Any, ...] = tuple(dict.fromkeys(listed(grid.passes) or ("forward",)))
    caches = tuple(dict.fromkeys(listed(grid.cache) or ("auto",)))
    devices = _each(_device, "device", listed(grid.device) or ("cpu",))
    threads = tuple(dict.fromkeys(listed(grid.threads))) or (threads_of_rank(grid.ranks),)
    tokens = grid.token_counts or TOKENS
    blocks = _blocks(grid)
    # On a GPU the CPU's threads only launch kernels, so one thread count is enough.
    places = [(d, t) for d in devices for t in (threads if d == "cpu" else threads[:1])]
    data = _data(grid)
    count = len(blocks) * len(tokens) * len(dtypes) * len(passes) * len(caches) * len(places) * len(data)
    if count > MOST_CASES:
        raise FFNError(
            f"that is a grid of {count:,} cases, more than {MOST_CASES:,}", "give fewer values, or run parts"
        )
    models = [(source, load_block(source, overrides, seed), overrides) for source, overrides in blocks]
    for note in dict.fromkeys(
        n for _, resolved, _ in models for n in (*resolved.notes, *map(str, resolved.differences))
    ):
        tell(note)
    cases = [
        Case(
            source or resolved.model.name, label(resolved, overrides), resolved.model.main.spec, n, t, p, cached(c, n),
            device, threads_, **x, ranks=grid.ranks,
        )
        for (source, resolved, overrides), n, t, p, c, (device, threads_), x in itertools.product(
            models, tokens, dtypes, passes, caches, places, data
        )
    ]  # fmt: skip
    different = tuple({case.key: case for case in cases}.values())
    for _, resolved, _ in models:
        check_split(resolved.model, grid.ranks, tokens)
    _check_data(different, tell)
    return different


def _data(grid: Grid) -> list[dict[str, str]]:
    """Return the fields of a Case that decide x: a dict per routing, with the files' sha256."""
    routings = _each(routing_text, "routing", listed(grid.routing)) or ("",)
    name = "" if grid.input is None else os.path.expanduser(grid.input)
    more = {"input": name, "input_sha256": digest(option("input"), name)} if name else {}
    files = {one: digest(option("routing"), one) for one in routings if one and is_file(one)}
    return [{"routing": one, "routing_sha256": files.get(one, ""), **more} for one in routings]


def _check_data(cases: Sequence[Case], tell: Callable[[str], None]) -> None:
    """Check each file once for each block. Raises FFNError for data that does not fit a block."""
    for routing, label, spec in dict.fromkeys((c.routing, c.label, c.spec) for c in cases if c.routing):
        check_routing(routing, label, spec)
    for note in dict.fromkeys(routing_note(c.routing, c.tokens, c.spec) for c in cases if c.routing):
        if note:
            tell(note)
    for name, d_model in dict.fromkeys((case.input, case.spec.d_model) for case in cases if case.input):
        check_input(name, d_model, tuple(dict.fromkeys(case.dtype for case in cases)))


def load_block(source: str | None, overrides: Dimensions, seed: int = 0) -> Resolved:
    """Load the model whose main block is measured. Raises FFNError for a model that cannot be run."""
    from ffncli.run.user.load import load

    resolved = load(source, overrides, seed)
    if resolved.model.refused:
        raise FFNError(
            f"{resolved.model.name} cannot be run: {resolved.model.refused}",
            "give dimensions: ffn bench 512x2048:swiglu",
        )
    if missing := " and ".join(sorted(resolved.model.unknown & {"activation", "top_k"})):
        raise FFNError(
            f"{resolved.model.name}: its {missing} is unknown",
            f"pass {option('activation', 'NAME')}, {option('top_k', 'K')}",
        )
    if (moe := resolved.model.main.spec.moe) and moe.lookup:
        what = f"{resolved.model.name}: a table of token ids chooses the experts of most of its layers"
        raise FFNError(what, "kernels get no token ids: give dimensions")
    if moe and moe.router_width:
        raise FFNError(f"{resolved.model.name}: its router is an MLP, which no kernel computes", "give dimensions")
    return resolved


def label(resolved: Resolved, overrides: Dimensions) -> str:
    """Return a block's name in results: the model's name or the block's dimensions, followed by the overrides."""
    spec, names = resolved.model.main.spec, overrides
    base = resolved.model.name
    if resolved.model.bare and not re.search(r"\.py(:|$)", resolved.source):
        unit = unit_name(spec.activation, spec.limits) if spec.gated else None
        base = f"{spec.d_model}x{spec.d_ff}:{unit or spec.activation}" + ("+gated" if spec.gated and not unit else "")
        names = replace(overrides, d_model=None, d_ff=None, activation=None, gated=None)
    given = {name: value for name, value in asdict(names).items() if value is not None}
    more = (f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items())
    return "+".join((base, *more))


def _blocks(grid: Grid) -> list[tuple[str | None, Dimensions]]:
    """Return the source with every combination of d_model and d_ff."""
    source = None if grid.source is None else os.fspath(grid.source)
    if source is None and grid.d_model is None:
        source = NEWCOMERS
    widths = [(None,) if text is None else tuple(dict.fromkeys(part.strip() for part in str(text).split(",")))
              for text in (grid.d_model, grid.d_ff)]  # fmt: skip
    if len(widths[0]) * len(widths[1]) > MOST_CASES:
        what = f"{option('d_model')} and {option('d_ff')} make more than {MOST_CASES:,} blocks"
        raise FFNError(what, "give fewer values")
    return [(source, replace(grid.dimensions, d_model=a, d_ff=b)) for a, b in itertools.product(*widths)]


def _each(parse: Callable[[str, str], str], field: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Parse the values of a field and drop duplicates."""
    return tuple(dict.fromkeys(parse(option(field), text) for text in texts))


def _dtype(option: str, text: str) -> str:
    name = dtype(text, option).name
    if name not in _COMPUTED:
        raise FFNError(f"{option}: no kernel computes in {name}", f"use one of {', '.join(_COMPUTED)}")
    return name


def _device(option: str, text: str) -> str:
    device_index(text, option)
    return text


def cached(cache: str, tokens: int) -> Any:
    """Return the cache mode, with `auto` resolved: with few tokens, weights are kept out of the caches."""
    if cache != "auto":
        return cache
    return "cold-weights" if tokens <= DECODE else "warm"


# --- the complete request, checked; used by the command line, the self-test and the library ---------------------------


IN_MODEL = (AUTO,)  # the default kernels for --in-model


def build_request(
    grid: Grid,
    kernels: Sequence[str] | None,
    baseline: str | None,
    method: Method,
    *,
    fail_if_slower: float | None = None,
    strict: bool = False,
    asked: Mapping[str, str] | None = None,
    certificates: Sequence[str] = (),
    cluster: LauncherChoice | None = None,
    frozen: tuple[Case, ...] = (),
) -> tuple[BenchRequest, tuple[str, ...]]:
    """Return (the request with defaults filled in, notes on the request). `kernels` and `baseline` are as on the
    command line.

    `asked` holds the options with their values, `certificates` the certificate files. The machines of a `cluster` may
    differ from this machine, so GPUs are checked only in the cluster's slots. `frozen` cases, all with the grid's
    devices and threads, replace the grid's cases. Raises FFNError for an impossible request, before anything is
    measured.
    """
    devices = listed(grid.device) or (() if cluster else (default_device(),))
    wanted = kernels or (IN_MODEL if method.in_model else None)
    named = {"kernel": tuple(kernels or ()), "baseline": baseline, "fail_if_slower": fail_if_slower}
    require_compatible(grid, _of(grid, devices, method), named, {"launcher": cluster is not None})
    if cluster is not None:
        require_any_gpu(devices)
    if grid.ranks.world_size > 1 and (len(set(devices)) > 1 or set(devices) - {"cpu", "cuda"}):
        what = f"over ranks, {option('device')} must be cpu or cuda: every rank has its own GPU"
        raise FFNError(what, f"as in {option('device', 'cuda')}")
    if method.in_model:
        folder_of(load_block(os.fspath(grid.source or ""), Dimensions()), option("in_model"))
        baseline, grid = None, replace(grid, cache="warm")
    about: list[str] = []
    points = frozen or cases(replace(grid, device=devices), about.append, method.seed)
    specs = [case.spec for case in points]
    chosen = ChosenKernels((), BLOCK, {}) if method.by_step else choose_kernels(wanted, baseline, grid.ranks, specs)
    check(CONFLICTS, {"calibrate": method.calibrate, "kernel": tuple(kernel.kernel for kernel in chosen.kernels)})
    if cluster is None:
        require_gpu(devices, method.sustained)
    if method.in_model:  # the requested kernels, without a baseline that was added in front of them
        kernels_of_model = chosen.kernels[len(chosen.kernels) - len(choices(wanted or ())) :]
        if slow := next((choice for choice in kernels_of_model if choice.factor is not None), None):
            raise FFNError(f"{option('in_model')}: {shown(slow.text)} can only be timed by itself", "leave it out")
        chosen = replace(chosen, kernels=kernels_of_model, baseline=MODEL, notes=())
    require_arguments(chosen, points)
    data = [pair for case in points for pair in ((case.routing, case.routing_sha256), (case.input, case.input_sha256))]
    files = {**chosen.files, **{os.path.abspath(name): sha256 for name, sha256 in data if sha256}}
    request = BenchRequest(
        points, chosen.kernels, chosen.baseline, method, fail_if_slower, strict, asked or {}, files, os.getcwd(),
        named_certificates(certificates, chosen, points), cluster,
    )  # fmt: skip
    return request, (*chosen.notes, *about)


def _of(grid: Grid, devices: Sequence[str], method: Method) -> dict[str, Any]:
    """Return a request's effective values by option name: the kinds of devices, the method, and the ranks."""
    names = ("processes", "launch", "sustained", "by_step", "in_model")
    return {
        "device": tuple(device.partition(":")[0] for device in devices),
        **{name: getattr(method, name) for name in names},
        **{name: value for name, value in vars(grid.ranks).items() if value > 1},
    }


def require_resumable(request: BenchRequest, more: Mapping[str, Any]) -> None:
    """Raise FFNError for options that contradict the resumed run: a gate that could never fail, or a plot."""
    method = request.method
    stored = {"by_step": method.by_step, "in_model": method.in_model, "processes": method.processes}
    of_model = {"source": True} if method.in_model else {}
    require_compatible(stored, of_model, {"fail_if_slower": request.fail_if_slower}, more)


# --- over ranks -------------------------------------------------------------------------------------------------------


def ranks_here(ranks: Ranks) -> int:
    """Return how many of the ranks run on this machine: all, unless the launcher says otherwise."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(here) if here.isdigit() and 0 < int(here) < ranks.world_size else ranks.world_size


def threads_of_rank(ranks: Ranks) -> int:
    """Return the default number of threads of a rank: its share of the machine's cores."""
    from ffncli.system.host import default_threads

    return max(1, default_threads() // ranks_here(ranks))


def check_split(model: Model, ranks: Ranks, tokens: Sequence[int]) -> None:
    """Raise FFNError, with the nearest possible rank counts, for a block that these ranks cannot split."""
    check_ranks(model, ranks, dtype("fp32"))
    if odd := next((number for number in tokens if number % ranks.ep), None):
        raise FFNError(
            f"{odd} tokens cannot be divided among {ranks.ep} ranks",
            f"with {option('ep')}, every rank has its own tokens",
        )


# --- as JSON ----------------------------------------------------------------------------------------------------------


def to_json(request: BenchRequest) -> dict[str, Any]:
    """Return the request for JSON. Its kernels are stored as strings of --kernel, with their labels as `names`."""
    return {**asdict(request), "kernels": [kernel.text for kernel in request.kernels], "names": list(request.names)}


def from_json(stored: Any, where: str = "the request") -> BenchRequest:
    """Rebuild a request from the result of `to_json`. Raises FFNError, naming the field, for anything else."""
    entry = record_of(Mapping[str, Any], stored, where)
    texts, labels = (record_of(tuple[str, ...], entry.get(name), f"{where}: {name}") for name in ("kernels", "names"))
    rest = {name: value for name, value in entry.items() if name not in ("kernels", "names")}
    request: BenchRequest = record_of(BenchRequest, {**rest, "kernels": []}, where)
    if request.method.in_model:
        labels = tuple(label.removeprefix(model_with("")) for label in labels[1:])
    if not request.method.by_step:
        if len(texts) != len(labels):
            raise FFNError(f"{where}: {len(texts)} kernels have {len(labels)} names")
        try:
            request = replace(request, kernels=tuple(itertools.starmap(_choice, zip(texts, labels, strict=True))))
        except FFNError as error:
            raise FFNError(f"{where}: {error.message}") from None
    _check(request, where)
    return request


def _check(request: BenchRequest, where: str) -> None:
    """Raise FFNError if the parts of a request do not belong together."""
    for case in request.cases:
        _device(f"{where}: device", case.device)
        _dtype(f"{where}: dtype", case.dtype)
        if case.routing:
            routing_text(f"{where}: routing", case.routing)
            if case.spec.moe is None:
                raise FFNError(f"{where}: {case.label} has a routing but no experts")
    if not 1 <= len({case.key for case in request.cases}) == len(request.cases) <= MOST_CASES:
        raise FFNError(f"{where}: its {len(request.cases)} cases must be 1 to {MOST_CASES:,} different cases")
    if len({*request.names}) != len(request.names) or request.baseline not in request.names:
        raise FFNError(f"{where}: its kernels must be different and include the baseline")


def _choice(text: str, label: str) -> KernelChoice:
    """Rebuild a kernel's choice. Earlier versions stored the string as typed, without the name of the kernel if the
    file has only one; in that case, the label provides the name."""
    choice = parse(text)
    choice = choice if choice.label else choice.with_attribute(label.rpartition(":")[2])
    return replace(choice, label=label)  # the label still has `main` where the choice has a commit's hash
