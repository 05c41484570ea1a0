"""Rounding, recognised by its result: the format for which rounding one side's values gives the other side's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ffncli.block.dtypes import find_storage
from ffncli.block.formats import FORMATS, Format, format_of
from ffncli.errors import FFNError
from ffncli.run.quantize.quantized import quantize

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CASTS = {**PLAIN, "fp8:cast": torch.float8_e4m3fn, "fp8_e5m2:cast": torch.float8_e5m2}  # without a scale
_LARGEST = {"int8": (127, 128), "int4": (7, 8)}  # what divides the largest magnitude elsewhere; ours are 127.5 and 7.5
_TURNED = ":transposed"  # blocks along the columns, as of a matrix that is stored as [in, out]
_SHARED = {
    "fp8": ("channel", "tensor", "block128"), "fp8_e5m2": ("channel", "tensor", "block128"),
    "int8": ("channel", "g128", "g64", "g32", "tensor"), "int4": ("g128", "g64", "g32", "channel"),
}  # fmt: skip
_ROWS, _TILE = 4, 128  # rows that are tried first; with tiles
_LINES = 512  # rows in which the order of neighbours is compared
_STEP = 1 << 18
_MOST_FAILURES = 6
_SAME = 0.999  # share of the values that must be those of the format
_ULPS_OF_FP32 = 2.0


@dataclass(frozen=True)
class RoundedTo:
    """The `side` whose values are the other side's, rounded to `format`; `exact` is the share of values that are those
    of the format's own library. `stored`: the format is that of the file, and the change is within its error."""

    format: str
    side: str
    exact: float = 1.0
    stored: bool = False


@dataclass
class Lattices:
    """Recognises rounding in one pair of matrices after the other; formats that were found are tried first."""

    seen: dict[tuple[str, str], None] = field(default_factory=dict)
    failures: int = 0

    def rounding(self, base: Tensor, new: Tensor, plain: tuple[str, str], packed: tuple[str, str]) -> RoundedTo | None:
        """Return how two unequal matrices differ if only by rounding. `plain` are the narrowest plain formats that hold
        all values of each, `packed` the formats of their files."""
        if plain[0] == plain[1] == "fp32" and _neighbours(base, new):
            return RoundedTo("fp32", "NEW")
        ordered = [base.dim() > 1 and keeps_order(base, new, axis) for axis in (1, 0)]
        for form, side in self._candidates(plain, packed, ordered):
            before, after, lattice = (base, new, plain[1]) if side == "NEW" else (new, base, plain[0])
            exact = _share(before, after, form, lattice)
            if exact >= _SAME:
                self.seen.setdefault((form, side))
                return RoundedTo(form.partition("/")[0], side, exact)
        self.failures += any(ordered)
        return _within(base, new, packed)

    def _candidates(
        self, plain: tuple[str, str], packed: tuple[str, str], ordered: Sequence[bool]
    ) -> Iterator[tuple[str, str]]:
        """Yield formats with the side that may have been rounded to them, the likeliest first. `ordered`: whether
        neighbours in a row, and in a column, keep their order."""
        for side, form, other in (("NEW", *plain[::-1]), ("BASE", *plain)):
            if form != other and form in PLAIN:
                yield form, side
        names = [form for form in _NAMES if ordered[_TURNED in form]]
        yield from ((form, side) for form, side in self.seen if form in names)
        for side, name in zip(("NEW", "BASE"), packed[::-1], strict=True):
            if name:
                yield from ((form, side) for form in names if form.partition(":")[0] == _stem(name))
        if self.failures < _MOST_FAILURES or self.seen:  # a model that was rounded has few matrices that were not
            yield from ((form, side) for side in ("NEW", "BASE") for form in names)


def _names() -> list[str]:
    """Return every format with each rule and each usual way to share scales, plain floats of 16 bits left out; a number
    after a slash is the divisor of an integer format's largest magnitude."""
    out: list[str] = [name for name in _CASTS if name not in PLAIN]
    for row in FORMATS.values():
        if row.name in PLAIN:
            continue
        rules = [f":{rule}" for rule in row.rules] if len(row.rules) > 1 else [""]
        ways = [f":{way}" for way in _SHARED.get(row.name, ())] or [""]
        more = [":asymmetric"] if row.name in ("int8", "int4") else []
        out += [f"{row.name}{way}{rule}{word}" for word in ["", *more] for way in ways for rule in rules]
        out += [f"{row.name}{way}/{top}" for way in ways for top in _LARGEST.get(row.name, ())]
    turned = (name for name in out if name not in _CASTS and ":tensor" not in name)
    return out + ["".join([*name.partition("/")[:1], _TURNED, *name.partition("/")[1:]]) for name in turned]


_NAMES = _names()


def _stem(packed: str) -> str:
    """Return a file's format as our formats are called: `fp8` for `fp8-block128`, `q4_0` for `Q4_0`."""
    return packed.lower().partition("-")[0]


def narrowest(values: Tensor, among: Sequence[str] = ("bf16", "fp16")) -> list[str]:
    """Return the plain formats of 16 bits that hold all these values."""
    return [name for name in among if torch.equal(values.to(PLAIN[name]).float(), values)]


def keeps_order(base: Tensor, new: Tensor, axis: int) -> bool:
    """Return whether neighbours along an axis are in the same order in both matrices, but for values that are not those
    of a format. Every format rounds two such values with one scale, so it makes them equal at most."""
    signs = []
    for side in (base[:_LINES], new[:_LINES]):
        rows = side if axis else side.T
        signs.append((rows[:, 1::2] - rows[:, : rows.shape[1] // 2 * 2 : 2]).sign())
    return bool((signs[0] * signs[1] < 0).float().mean() <= 2 * (1 - _SAME))


def _neighbours(base: Tensor, new: Tensor) -> bool:
    """Return whether all values differ by at most two units in the last place of float32."""
    for x, y in _pieces(base, new):
        ulp = torch.exp2((torch.frexp(torch.maximum(x.abs(), y.abs()))[1] - 24).double())
        if bool(((x.double() - y.double()).abs() > _ULPS_OF_FP32 * ulp).any()):
            return False
    return True


def _share(before: Tensor, after: Tensor, form: str, lattice: str) -> float:
    """Return the share of values of `after` that `before` has after rounding; 0 as soon as some rows have too few."""
    if form in _CASTS:
        equal = sum(int((x.to(_CASTS[form]).float() == y).sum()) for x, y in _pieces(before, after))
        return equal / before.numel()
    if _TURNED in form:
        before, after = before.T, after.T
    name, _, top = form.replace(_TURNED, "").partition("/")
    made = format_of(name)
    whole = made.shared == "tensor" or made.name == "nvfp4"  # the largest value decides for all
    rows = _TILE if made.shared.startswith("block") else _ROWS
    if _equal(before, after, made, top, lattice, slice(0, rows), whole) < _SAME:
        return 0.0
    step = max(1, _STEP // before.shape[1] // _TILE) * _TILE
    sums = [0.0, 0.0]
    for start in range(0, len(before), step):
        part = slice(start, start + step)
        share, count = _equal(before, after, made, top, lattice, part, whole), len(before[part])
        sums = [sums[0] + share * count, sums[1] + count]
    return sums[0] / sums[1]


def _equal(before: Tensor, after: Tensor, form: Format, top: str, lattice: str, rows: slice, whole: bool) -> float:
    x, y = before[rows].contiguous(), after[rows]
    if whole:  # rows with the least and the largest value give the part the tensor's scale
        ends = torch.stack([before.amin(1).argmin(), before.amax(1).argmax()])
        x, y = torch.cat([x, before[ends]]), torch.cat([y, after[ends]])
    try:
        made = _with_scales_of(x, form, int(top)) if top else quantize(x, form).dequantize()
    except FFNError:  # its blocks do not fit this width
        return 0.0
    made = made.to(PLAIN[lattice]).float() if lattice in PLAIN else made
    near = (made - y).abs() <= 1e-6 * y.abs() if top and lattice not in PLAIN else made == y
    return float(near.float().mean())


def _with_scales_of(x: Tensor, form: Format, top: int) -> Tensor:
    """Round to integers times the largest magnitude of each block divided by `top`. Raises FFNError for a width that
    the blocks do not divide."""
    width = {"channel": x.shape[1], "tensor": x.numel()}.get(form.shared) or int(form.shared[1:])
    if x.numel() % width or (form.shared != "tensor" and x.shape[1] % width):
        raise FFNError(f"blocks of {width} do not divide {x.shape[1]}")
    parts = x.reshape(-1, width)
    scales = (parts.abs().amax(1, keepdim=True) / top).clamp(min=torch.finfo(x.dtype).tiny)
    return ((parts / scales).round().clamp(-top, form.largest) * scales).view(x.shape)


def _within(base: Tensor, new: Tensor, packed: tuple[str, str]) -> RoundedTo | None:
    """Return the rounding that a packed file shows: the error of k bits for each block is some 2^-k of the values."""
    limits = [(name, row.bits_per_weight) for name in packed if name and (row := find_storage(_stem(name)))]
    limits += [(name, float(bits)) for name in packed if (bits := _bits(name))]
    if not limits:
        return None
    error = sum(float((x.double() - y).square().sum()) for x, y in _pieces(base, new))
    size = sum(float(x.double().square().sum()) for x, _ in _pieces(base, new))
    if error > size * sum(2.0 ** (1 - int(bits)) for _, bits in limits) ** 2:
        return None
    side = "NEW" if packed[1] else "BASE"
    return RoundedTo(packed[1] or packed[0], "both" if all(packed) else side, 0.0, True)


def _bits(name: str) -> int:
    """Return the bits in the name of a packed format without a row of its own: `gptq-4bit`."""
    word = name.rpartition("-")[2]
    return int(word.removesuffix("bit")) if word.endswith("bit") and word.removesuffix("bit").isdigit() else 0


def _pieces(base: Tensor, new: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both matrices, or vectors, in blocks of rows."""
    step = max(1, _STEP // max(1, base.shape[-1])) if base.dim() > 1 else len(base) or 1
    for start in range(0, len(base), step):
        yield base[start : start + step], new[start : start + step]
