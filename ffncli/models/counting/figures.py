"""All that `ffn params` reports about one source: counts, costs against tokens, a split over ranks, a ridge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, cast

from ffncli.block.dtypes import DType, storage
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError, option, shown
from ffncli.models.counting.count import ModelCount, count, storage_of
from ffncli.models.counting.traffic import DeviceFloor, TokenCost, device_floors, ridge_of, ridge_tokens, token_costs
from ffncli.models.dimensions import token_counts
from ffncli.models.model import Model, Resolved
from ffncli.options.accept import ABOVE_ZERO, FORMATS, Accepts, comma_list, listed
from ffncli.options.opt import COMPUTE, Opt, Options
from ffncli.options.shared import Batch, ExpertParallel, SeqLen, TensorParallel, TokenList
from ffncli.system.hardware import Device, named

if TYPE_CHECKING:
    from ffncli.models.counting.parallel import ExpertExchange, Split  # imported only for a requested split

_WORD = Accepts("a number or a name", lambda value: str(value).strip())
_ADDED = ("model_weight_bytes",)  # new columns go at the end, where readers of older files do not expect others
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
_OF_RIDGE = ("ridge_tokens", "ridge_tokens_fused")
_OF_FLOOR = tuple(f.name for f in fields(DeviceFloor) if f.name not in ("tokens", "ranks", "flops_per_byte"))
KEYS = (
    *(name for name in _OF_COUNT if name not in ("evidence", "citation")), *_OF_COST, *_OF_SPLIT, *_OF_EXCHANGE,
    *_OF_RIDGE, *_OF_FLOOR, *_ADDED,
)  # fmt: skip


@dataclass(frozen=True)
class Ridge:
    """The smallest number of tokens at which the FFNs reach `flops_per_byte`, unfused and fused; None if none does.

    `device` is empty for a number that was typed.
    """

    flops_per_byte: float
    ridge_tokens: int | None
    ridge_tokens_fused: int | None
    device: str = ""


@dataclass(frozen=True)
class CostReport:
    """The figures of one source. `counts` and `costs` have a record for each number of tokens; `costs` is empty if the
    number of active experts is unknown. `ridges` belong to the typed number or to each device that has one; `floors`
    has a record for each device and number of tokens.
    """

    counts: tuple[ModelCount, ...]
    costs: tuple[TokenCost, ...]
    split: Split | None
    ridges: tuple[Ridge, ...] = ()
    floors: tuple[DeviceFloor, ...] = ()
    devices: tuple[str, ...] = ()
    exchange: ExpertExchange | None = None

    @property
    def count(self) -> ModelCount:
        """Return the row's count: that of the first number of tokens."""
        return self.counts[0]

    def row(self) -> dict[str, Any]:
        """Build the JSON: counts and costs; split, ridge and floors if requested."""
        more: dict[str, Any] = {"costs": [asdict(cost) for cost in self.costs]}
        more |= {"tensor_parallel": asdict(self.split)} if self.split else {}
        more |= {"expert_parallel": asdict(self.exchange)} if self.exchange else {}
        if self.devices:
            more["floors"] = [{**asdict(floor), **self._ridge_tokens(floor.device)} for floor in self.floors]
        elif self.ridges:
            more |= self._ridge_tokens("")
        return {**asdict(self.count), **more}

    def lines(self) -> list[dict[str, Any]]:
        """Build the CSV: one line for each number of tokens and device."""
        fixed = {name: getattr(self.split, name) for name in _OF_SPLIT} if self.split else {}
        if self.exchange:
            fixed |= {column: getattr(self.exchange, name) for column, name in _OF_EXCHANGE.items()}
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
        """The two numbers of tokens of a device's ridge, or of the typed one; null if there is no ridge."""
        ridge = next((one for one in self.ridges if one.device == device), None)
        return {name: getattr(ridge, name) if ridge else None for name in _OF_RIDGE}

    def _floor(self, device: str, tokens: int) -> dict[str, Any]:
        """The columns of a device's floor; all but its name are null if the number of active experts is unknown."""
        floor = next((one for one in self.floors if (one.device, one.tokens) == (device, tokens)), None)
        return {name: getattr(floor, name) if floor else None for name in _OF_FLOOR} | {"device": device}


@dataclass(frozen=True, kw_only=True)
class FigureQuestion(Options):
    """What to report besides the counts: a split over ranks, ridges, formats (default: as stored), numbers of tokens
    (default: 1)."""

    tp: TensorParallel = None
    ep: ExpertParallel = None
    ridge: Annotated[
        float | str | Sequence[str] | None,
        Opt(
            "--ridge", metavar="X|DEVICE,...", accepts=comma_list(_WORD, "FLOPs per byte, or names of devices"),
            repeat=True, group="What to count", completes="devices",
            help="Show how many tokens reach X FLOPs per byte; for accelerators, as in h100,b200, also the least time"
            " and whether the model fits. list shows all known ones.",
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
        """Convert, and read the ridge, the formats and the tokens, whose errors come before any model's."""
        super().__post_init__()
        _ = self.flops_per_byte, self.devices, self.formats, self.token_counts

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Return the numbers of tokens; () if none was given."""
        return token_counts(self.tokens, self.batch, self.seq_len)

    @property
    def formats(self) -> tuple[str | None, ...]:
        """Return the names of the formats; None is the stored one."""
        return tuple(storage(name, option("dtype")).name for name in listed(self.dtype)) or (None,)

    @property
    def flops_per_byte(self) -> float | None:
        """Return the ridge that was given as a number: a single one, above 0."""
        words = [word for word in self._ridges if _is_number(word)]
        if words and len(self._ridges) > 1:
            what = f"{option('ridge')} takes one number of FLOPs per byte, or names of devices"
            raise FFNError(what, "ask for one at a time")
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
        """Compute every model's figures in each format; errors name the model if there are several."""
        reports = []
        for resolved in models:
            try:
                reports += [self.report(resolved, name) for name in self.formats]
            except FFNError as error:
                raise (error.within(resolved.model.name) if len(models) > 1 else error) from None
        return reports

    def report(self, model: Resolved, format: str | None = None, tokens: int | None = None) -> CostReport:
        """Compute one model's figures in one format; `tokens` overrides the question's."""
        numbers = (tokens,) if tokens else self.token_counts or (1,)
        return figures(model, format, numbers, self.tp, self.flops_per_byte, self.devices, self.ep)


def _is_number(word: str) -> bool:
    """Tell whether a word is meant as a number; an empty one is not a name either."""
    try:
        float(word)
    except ValueError:
        return not any(map(str.isalpha, word))
    return True


def figures(
    resolved: Resolved, dtype: str | None = None, tokens: tuple[int, ...] = (1,), ranks: int | None = None,
    ridge: float | None = None, devices: Sequence[Device] = (), ep: int | None = None,
) -> CostReport:  # fmt: skip
    """Compute the figures of a source, its weights in `dtype` (None: as stored, else fp32), over ranks × `ep` ranks.

    `ridge` is FLOPs per byte; `devices` have ridges and time floors of their own. A dtype whose blocks do not fit is
    refused, and ranks that d_ff or the experts do not divide over.
    """
    model, weights = resolved.model, storage_of(resolved, dtype)
    known = "top_k" not in model.unknown  # else the number of active experts is unknown
    over = sent = None
    if ranks or ep:
        from ffncli.models.counting.parallel import exchange, split

        over = split(model, ranks or 1, weights, tokens[0], ep or 1)
        sent = exchange(model, ep, weights, tokens[0]) if ep else None
    counts = tuple(count(resolved, dtype, number) for number in tokens)
    costs = token_costs(model, weights, tokens, ranks or 1, ep or 1) if known else ()
    needed = counts[0].model_weight_bytes or counts[0].weight_bytes
    typed = [] if ridge is None else [(ridge, "")]
    of_devices = [(flops_per_byte, one.name) for one in devices if (flops_per_byte := ridge_of(one, weights))]
    grid = Ranks(ranks or 1, ep or 1)
    ridges = tuple(_ridge(model, weights, number, grid, name) for number, name in (*typed, *of_devices))
    floors = tuple(floor for device in devices for floor in device_floors(device, costs, weights, needed))
    return CostReport(counts, costs, over, ridges, floors, tuple(device.name for device in devices), sent)


def _ridge(model: Model, weights: DType, flops_per_byte: float, grid: Ranks, device: str) -> Ridge:
    """The ridge; unreached if the number of active experts is unknown."""
    if "top_k" in model.unknown:
        return Ridge(flops_per_byte, None, None, device)
    plain, fused = (ridge_tokens(model, weights, flops_per_byte, grid.tp, fused, grid.ep) for fused in (False, True))
    return Ridge(flops_per_byte, plain, fused, device)
