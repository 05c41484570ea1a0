"""Everything that `ffn params` reports about one source: counts, costs by token count, a split over ranks, ridges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

from ffncli.block.dtypes import DType, storage
from ffncli.block.dtypes import dtype as dtype_named
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError, option, shown
from ffncli.models.config.quantized import UnknownPacking
from ffncli.models.counting.count import ModelCount, count, storage_of
from ffncli.models.counting.traffic import DeviceFloor, TokenCost, device_floors, ridge_of, ridge_tokens, token_costs
from ffncli.models.counting.training import TrainingMemory, TrainingOptions, training_memory
from ffncli.models.dimensions import token_counts
from ffncli.models.model import Model, Resolved
from ffncli.options.accept import ABOVE_ZERO, FORMATS, Accepts, comma_list, listed
from ffncli.options.opt import COMPUTE, Opt
from ffncli.options.shared import Batch, ExpertParallel, SeqLen, TensorParallel, TokenList
from ffncli.system.hardware import Device, named

if TYPE_CHECKING:
    from ffncli.models.counting.parallel import ExpertExchange, Split  # needed only if a split is requested

_WORD = Accepts("a number or a name", lambda value: str(value).strip())
_ADDED = ("model_weight_bytes", "published_as")  # new columns are appended, so that older columns keep their positions
_OF_COUNT = tuple(f.name for f in fields(ModelCount) if f.name not in ("groups", "not_counted", *_ADDED))
_OF_COST = (
    "experts_touched", "weight_bytes_read", "activation_bytes", "activation_bytes_fused", "flops_per_byte",
    "flops_per_byte_fused",
)  # fmt: skip
_OF_SPLIT = (
    "ranks", "rank_0_params_total", "other_rank_params_total", "rank_0_weight_bytes_total",
    "other_rank_weight_bytes_total", "ring_all_reduce_bytes_per_token", "all_gather_bytes_per_token",
)  # fmt: skip
_OF_EXCHANGE = {
    "expert_ranks": "ranks", "experts_per_rank": "experts", "dispatch_bytes_per_token": "dispatch_bytes_per_token",
    "combine_bytes_per_token": "combine_bytes_per_token",
}  # fmt: skip
_OF_TRAINING = (
    "weight_bytes", "gradient_bytes", "optimizer_bytes", "kept_bytes", "total_bytes", "forward_matmul_flops",
    "backward_matmul_flops", "recomputed_flops",
)  # fmt: skip
_OF_RIDGE = ("ridge_tokens", "ridge_tokens_fused")
_OF_FLOOR = tuple(f.name for f in fields(DeviceFloor) if f.name not in ("tokens", "ranks", "flops_per_byte"))
KEYS = (
    *(name for name in _OF_COUNT if name not in ("evidence", "citation")),
    *_OF_COST, *_OF_SPLIT, *_OF_EXCHANGE, *_OF_RIDGE, *_OF_FLOOR, *_ADDED[:1],
    *(f"training_{name}" for name in _OF_TRAINING),
)  # fmt: skip


@dataclass(frozen=True)
class Ridge:
    """The smallest token count at which the FFNs reach `flops_per_byte`, unfused and fused; None if no token count
    does.

    `device` is empty if the user gave the FLOPs per byte.
    """

    flops_per_byte: float
    ridge_tokens: int | None
    ridge_tokens_fused: int | None
    device: str = ""


@dataclass(frozen=True)
class CostReport:
    """The figures of one source. `counts` and `costs` have one record per token count; `costs` is empty if the number
    of active experts is unknown. `ridges` has a record for the user's FLOPs per byte, or for each device with a known
    ridge; `floors` has one record per device and token count."""

    counts: tuple[ModelCount, ...]
    costs: tuple[TokenCost, ...]
    split: Split | None
    ridges: tuple[Ridge, ...] = ()
    floors: tuple[DeviceFloor, ...] = ()
    devices: tuple[str, ...] = ()
    exchange: ExpertExchange | None = None
    training: TrainingMemory | None = None

    @property
    def count(self) -> ModelCount:
        """Return the count for the first token count."""
        return self.counts[0]

    def row(self) -> dict[str, Any]:
        """Build the JSON: counts and costs; split, ridge and floors if requested."""
        more: dict[str, Any] = {"costs": [asdict(cost) for cost in self.costs]}
        more |= {"tensor_parallel": asdict(self.split)} if self.split else {}
        more |= {"expert_parallel": asdict(self.exchange)} if self.exchange else {}
        more |= {"training": asdict(self.training)} if self.training else {}
        if self.devices:
            more["floors"] = [{**asdict(floor), **self._ridge_tokens(floor.device)} for floor in self.floors]
        elif self.ridges:
            more |= self._ridge_tokens("")
        return {**asdict(self.count), **more}

    def lines(self) -> list[dict[str, Any]]:
        """Build the CSV: one line per token count and device."""
        fixed = {name: getattr(self.split, name) for name in _OF_SPLIT} if self.split else {}
        if self.exchange:
            fixed |= {column: getattr(self.exchange, name) for column, name in _OF_EXCHANGE.items()}
        if self.training:
            fixed |= {f"training_{name}": getattr(self.training, name) for name in _OF_TRAINING}
        return [
            {name: getattr(counted, name) for name in _OF_COUNT}
            | {name: getattr(self.costs[i], name) if self.costs else None for name in _OF_COST}
            | fixed
            | (self._ridge_tokens(device) if self.ridges or device else {})
            | (self._floor(device, counted.tokens) if device else {})
            | {name: getattr(counted, name) for name in _ADDED}
            for device in self.devices or ("",)
            for i, counted in enumerate(self.counts)
        ]

    def _ridge_tokens(self, device: str) -> dict[str, Any]:
        """Return both token counts of a device's ridge, or of the user's ridge; null if there is no ridge."""
        ridge = next((one for one in self.ridges if one.device == device), None)
        return {name: getattr(ridge, name) if ridge else None for name in _OF_RIDGE}

    def _floor(self, device: str, tokens: int) -> dict[str, Any]:
        """Return a device's floor columns; all except its name are null if the number of active experts is unknown."""
        floor = next((one for one in self.floors if (one.device, one.tokens) == (device, tokens)), None)
        return {name: getattr(floor, name) if floor else None for name in _OF_FLOOR} | {"device": device}


@dataclass(frozen=True, kw_only=True)
class FigureQuestion(TrainingOptions):
    """The figures to report besides counts: ranks, ridges, formats (default: stored), token counts (default: 1)."""

    tp: TensorParallel = None
    ep: ExpertParallel = None
    ridge: Annotated[
        float | str | Sequence[str] | None,
        Opt(
            "--ridge", metavar="X|DEVICE,...", accepts=comma_list(_WORD, "FLOPs per byte, or names of devices"),
            repeat=True, group="What to count", completes="devices",
            help="Show how many tokens reach X FLOPs per byte; for accelerators such as h100,b200, also the minimum"
            " time and whether the model fits. list shows all known accelerators.",
        ),
    ] = None  # fmt: skip
    dtype: Annotated[
        str | Sequence[str] | None,
        Opt(
            "--dtype", metavar="NAME,...", accepts=FORMATS, repeat=True, group=COMPUTE, daily=True,
            completes="dtypes stored",
            help="Format of the weights: fp32, bf16, fp8, q4_0, ... [default: as released or stored]",
        ),
    ] = None  # fmt: skip
    tokens: TokenList = None
    batch: Batch = None
    seq_len: SeqLen = None

    def __post_init__(self) -> None:
        """Convert the options, and check ridge, formats and tokens before any model is loaded."""
        super().__post_init__()
        _ = self.flops_per_byte, self.devices, self.formats, self.token_counts

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Return the token counts; () if none were given."""
        return token_counts(self.tokens, self.batch, self.seq_len)

    @property
    def formats(self) -> tuple[str | None, ...]:
        """Return the names of the formats; None means the stored format."""
        return tuple(storage(name, option("dtype")).name for name in listed(self.dtype)) or (None,)

    @property
    def flops_per_byte(self) -> float | None:
        """Return the ridge if it was given as FLOPs per byte: a single number above 0."""
        words = [word for word in self._ridges if _is_number(word)]
        if words and len(self._ridges) > 1:
            what = f"{option('ridge')} accepts either a single number of FLOPs per byte or names of devices"
            raise FFNError(what, "give one number at a time")
        try:
            return ABOVE_ZERO.convert(words[0]) if words else None
        except ValueError:
            raise FFNError(f"{option('ridge')} must be {ABOVE_ZERO.words}, got {shown(words[0])}") from None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices whose ridges were requested."""
        words = [word for word in self._ridges if not _is_number(word)] if self._ridges != ("list",) else []
        return tuple({one.name: one for one in (named(word, option("ridge")) for word in words)}.values())

    @property
    def _ridges(self) -> tuple[str, ...]:
        return listed(cast("tuple[str, ...] | None", self.ridge))

    def reports(self, models: Sequence[Resolved]) -> list[CostReport]:
        """Compute the figures of every model in each format; with several models, errors name the model."""
        reports = []
        for resolved in models:
            try:
                reports += [self.report(resolved, name) for name in self.formats]
            except FFNError as error:
                raise (error.within(resolved.model.name) if len(models) > 1 else error) from None
        return reports

    def report(self, model: Resolved, format: str | None = None, tokens: int | None = None) -> CostReport:
        """Compute the figures of one model in one format; `tokens` overrides the requested token counts."""
        numbers = (tokens,) if tokens else self.token_counts or (1,)
        report = figures(model, format, numbers, self.tp, self.flops_per_byte, self.devices, self.ep)
        if self.training is None:
            return report

        weights = storage_of(model, format)
        memory = training_memory(model.model, self, weights, numbers[0], self.tp or 1, self.ep or 1)
        return replace(report, training=memory)


def _is_number(word: str) -> bool:
    """Return whether a word is meant as a number; this includes words without letters, such as an empty word."""
    try:
        float(word)
    except ValueError:
        return not any(map(str.isalpha, word))
    return True


def figures(
    resolved: Resolved, dtype: str | None = None, tokens: tuple[int, ...] = (1,), ranks: int | None = None,
    ridge: float | None = None, devices: Sequence[Device] = (), ep: int | None = None,
) -> CostReport:  # fmt: skip
    """Compute the figures of a source over ranks × `ep` ranks, with weights in `dtype` (None: as stored, or fp32 if
    unknown).

    `ridge` is a number of FLOPs per byte; ridges and time floors are also computed for `devices`. Raises FFNError if
    the dtype's blocks do not fit the weights, or if d_ff or the experts do not divide over the ranks.
    """
    model = resolved.model
    known = "top_k" not in model.unknown  # otherwise the number of active experts is unknown
    try:
        weights = storage_of(resolved, dtype)
    except UnknownPacking:
        if ranks or ep or ridge is not None or devices:
            raise
        weights, known = dtype_named("bf16"), False
    over = sent = None
    if ranks or ep:
        from ffncli.models.counting.parallel import exchange, split

        over = split(model, ranks or 1, weights, tokens[0], ep or 1)
        sent = exchange(model, ep, weights, tokens[0]) if ep else None
    counts = tuple(count(resolved, dtype, number) for number in tokens)
    costs = token_costs(model, weights, tokens, ranks or 1, ep or 1) if known else ()
    needed = counts[0].model_weight_bytes or counts[0].weight_bytes or 0
    typed = [] if ridge is None else [(ridge, "")]
    of_devices = [(flops_per_byte, one.name) for one in devices if (flops_per_byte := ridge_of(one, weights))]
    grid = Ranks(ranks or 1, ep or 1)
    ridges = tuple(_ridge(model, weights, number, grid, name) for number, name in (*typed, *of_devices))
    floors = tuple(floor for device in devices for floor in device_floors(device, costs, weights, needed))
    return CostReport(counts, costs, over, ridges, floors, tuple(device.name for device in devices), sent)


def _ridge(model: Model, weights: DType, flops_per_byte: float, grid: Ranks, device: str) -> Ridge:
    """Compute a ridge; unreached if the number of active experts is unknown."""
    if "top_k" in model.unknown:
        return Ridge(flops_per_byte, None, None, device)
    plain, fused = (ridge_tokens(model, weights, flops_per_byte, grid.tp, fused, grid.ep) for fused in (False, True))
    return Ridge(flops_per_byte, plain, fused, device)
