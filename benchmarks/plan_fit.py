"""Fit the constants of `ffn plan` to published times of products and mixtures, and say how well they predict others.

What: for every device and class of formats, eight constants (`ffncli/models/counting/times/kernels.py`), fitted to the
products (`experts` to the mixtures); for all together, the exponent with which uneven experts cost time. Each
prediction's 80 % interval comes from shapes that were left out. The constants go to `ffncli/system/times.toml`.

How well: shapes are halved by a hash, several times; one half is fitted, intervals included, and the other half judged,
in turn. Mixtures are judged by leaving one shape out. Then one device is left out: what a new one may expect.

    python -m benchmarks.plan_fit --products FILE.csv --mixtures FILE.csv [--write] [--save FILE.csv]

The files have the columns of the public repository ai-dynamo/aiconfigurator (gz too). The exit code is 1 if a target is
missed.
"""

import argparse
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from math import log
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks import script
from benchmarks.plan_published import Judged, all_predictions, figures_of, judged_text, missed
from ffncli.models.counting.times.fit import (
    LEAST,
    MeasuredKernels,
    ends,
    ends_of,
    errors_of_mixtures,
    errors_of_products,
    experts_factor,
    fitted_constants,
    part_of,
)
from ffncli.models.counting.times.fitted import BOUNDS, Ends, Fitted
from ffncli.models.counting.times.kernels import CLASSES, Chip, TimeConstants, chip_of
from ffncli.models.counting.times.published import PublishedTimes, read_csv
from ffncli.system.hardware import devices

TIMES = script.ROOT / "ffncli/system/times.toml"
COLUMNS = (
    "part", "device", "class", "work", "n", "median_error", "signed_median", "coverage", "mean_width", "low", "high",
)  # fmt: skip
_COLOURS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#404040")
SPLITS = 3
SKEWS = (0.0, 0.05, 0.1, 0.15, 0.2)
# Classes without products of their own take the constants of the first of these that has some.
INSTEAD = {"mxfp4_weights": ("int4_weights", "bf16"), "mxfp4_mxfp8": ("fp8_block", "fp8"),
           "fp8_static": ("fp8",), "int4_weights": ("bf16",), "int8_weights": ("bf16",)}  # fmt: skip
# Cards with the same architecture as one that was measured.
ALSO = {
    "A100 80GB SXM": ("A100 40GB", "A100 80GB PCIe", "A30"),
    "H100 SXM5": ("H100 PCIe", "H100 NVL", "GH200 96GB"), "H200 SXM": ("H200 NVL", "GH200 144GB"),
    "B300": ("GB300",), "L40S": ("L40", "L4", "RTX 6000 Ada"),
    "RTX PRO 6000 Blackwell Server": ("RTX PRO 6000 Blackwell Workstation",),
}  # fmt: skip
Cell = tuple[str, str]
Rows = Mapping[Cell, tuple[Sequence[MeasuredKernels], Sequence[MeasuredKernels]]]


def chip(cell: Cell) -> Chip:
    """Return the data sheet's figures for a device and a class."""
    found = chip_of(next(one for one in devices() if one.name == cell[0]), cell[1])
    assert found is not None
    return found


def fits(rows: Rows, skew: float, instead: Mapping[Cell, TimeConstants] | None = None) -> dict[Cell, TimeConstants]:
    """Fit every cell; `instead` has constants for the classes of devices without products."""
    found: dict[Cell, TimeConstants] = {}
    for cell, (products, _) in rows.items():
        if products:
            found[cell] = fitted_constants(products, chip(cell), quantizes=CLASSES[cell[1]].x_bytes < 2)
    for cell in rows:
        if cell not in found:
            names = (cell[1], *INSTEAD.get(cell[1], ()))
            own = next((found[cell[0], name] for name in names if (cell[0], name) in found), None)
            found[cell] = own or middle([c for (_, n), c in found.items() if n in names[:2]] or [*found.values()])
    return {
        cell: replace(one, experts=experts_factor(rows[cell][1], chip(cell), one, skew)) for cell, one in found.items()
    }


def middle(several: Sequence[TimeConstants]) -> TimeConstants:
    """Return the median of every constant."""
    return TimeConstants(*(statistics.median(values) for values in zip(*map(astuple, several), strict=True)))


def intervals(rows: Rows, found: Mapping[Cell, TimeConstants], skew: float) -> dict[Cell, Fitted]:
    """Add intervals from shapes that were left out. Where there are few rows, they are those of the class."""
    errors = [
        {cell: errors_of_products(a, chip(cell), CLASSES[cell[1]].x_bytes < 2) for cell, (a, _) in rows.items()},
        {cell: errors_of_mixtures(b, chip(cell), found[cell], skew) for cell, (_, b) in rows.items()},
    ]
    out = {}
    for cell, one in found.items():
        both = []
        for kind in errors:
            own = kind[cell]
            if len(own) < LEAST:
                alike = [e for (_, name), some in kind.items() if name == cell[1] for e in some]
                own = alike if len(alike) >= LEAST else [e for some in kind.values() for e in some]
            both.append(ends_of(own, chip(cell), one))
        out[cell] = Fitted(one, both[0], both[1], cell[0], sum(map(len, rows[cell])))
    return out


def judge(rows: Iterable[MeasuredKernels], cell: Cell, fitted: Fitted, skew: float) -> list[Judged]:
    """Predict rows and compare."""
    return [Judged.of(row, cell, fitted, chip(cell), skew) for row in rows]


def measured_rows(found: PublishedTimes) -> dict[Cell, tuple[list[MeasuredKernels], list[MeasuredKernels]]]:
    """Return the measurements by device and class."""
    return {cell: ([one.measured for one in a], [one.measured for one in b]) for cell, (a, b) in found.cells.items()}


def halves(rows: Rows, salt: int) -> tuple[Rows, Rows]:
    """Halve the rows by a hash of their shapes."""

    def of(some: Sequence[MeasuredKernels], half: int) -> list[MeasuredKernels]:
        return [row for row in some if part_of(row.shape, 2, salt) == half]

    first, second = ({cell: (of(a, half), of(b, half)) for cell, (a, b) in rows.items()} for half in (0, 1))
    return first, second


def of_halves(rows: Rows, skew: float, splits: int = SPLITS) -> list[Judged]:
    """Judge products of one half by constants and intervals of the other, for several splits."""
    out: list[Judged] = []
    for salt in range(splits):
        for fitted, kept in zip(halves(rows, salt), halves(rows, salt)[::-1], strict=True):
            only = {cell: (products, ()) for cell, (products, _) in fitted.items() if products}
            found = intervals(only, fits(only, skew), skew)
            for cell, one in found.items():
                out += judge(kept[cell][0], cell, one, skew)
    return out


def of_left_out_shapes(rows: Rows, skew: float) -> list[Judged]:
    """Judge the mixtures of every shape by constants and intervals of the other shapes."""
    base = fits(rows, skew)
    shapes = dict.fromkeys(row.shape for _, mixtures in rows.values() for row in mixtures)
    out: list[Judged] = []
    for shape in shapes:
        rest = {cell: ((), [row for row in b if row.shape != shape]) for cell, (_, b) in rows.items()}
        some = {cell: replace(base[cell], experts=experts_factor(parts[1], chip(cell), base[cell], skew))
                for cell, parts in rest.items()}  # fmt: skip
        found = intervals(rest, some, skew)
        for cell, (_, mixtures) in rows.items():
            out += judge([row for row in mixtures if row.shape == shape], cell, found[cell], skew)
    return out


def of_left_out_devices(rows: Rows, found: Mapping[Cell, TimeConstants], skew: float) -> dict[str, list[Judged]]:
    """Judge every device by the medians of each class on the other devices."""
    out: dict[str, list[Judged]] = {}
    for cell, parts in rows.items():
        others = [one for (device, name), one in found.items() if name == cell[1] and device != cell[0]]
        if others:
            one = Fitted(middle(others), dict.fromkeys(BOUNDS, (1.0, 1.0)), dict.fromkeys(BOUNDS, (1.0, 1.0)), "", 0)
            for part in parts:
                out.setdefault(cell[1], []).extend(judge(part, cell, one, skew))
    return out


def general(name: str, found: Mapping[Cell, Fitted], apart: Sequence[Judged]) -> Fitted:
    """Return what a class is predicted with on a device without times: medians, and the errors of left-out devices."""
    own = [one for (_, kind), one in found.items() if kind == name]
    both = []
    for mixtures in (False, True):
        alike = [one for one in apart if one.mixture == mixtures] or list(apart)
        some = {bound: [-one.error for one in alike if one.bound == bound] for bound in BOUNDS}
        every = [-one.error for one in alike]
        cells = [one.experts if mixtures else one.products for one in own]
        both.append({
            bound: wider(ends(few if len(few) >= LEAST else every), [one[bound] for one in cells])
            for bound, few in some.items()
        })  # fmt: skip
    return Fitted(middle([one.constants for one in own]), both[0], both[1], "", sum(one.rows for one in own))


def wider(apart: Ends, known: Sequence[Ends]) -> Ends:
    """Return the interval on a left-out device, but no narrower than the median one of measured devices."""
    lows, highs = zip(*known, strict=True)
    return min(apart[0], statistics.median(lows)), max(apart[1], statistics.median(highs))


def best_skew(rows: Rows) -> float:
    """Return the exponent with the least median error of mixtures, all shapes left out in turn."""
    base = fits(rows, 0.0)

    def error(skew: float) -> float:
        found = [e for cell, (_, b) in rows.items() for _, e in errors_of_mixtures(b, chip(cell), base[cell], skew)]
        return statistics.median(map(abs, found))

    return min(SKEWS, key=error)


# --- writing ----------------------------------------------------------------------------------------------------------


def toml(found: Mapping[Cell, Fitted], classes: Mapping[str, Fitted], skew: float, links: Ends, source: str) -> str:
    """Return the text of `times.toml`."""
    names = ", ".join(field.name for field in fields(TimeConstants))
    lines = [
        "# What `ffn plan` predicts times with: eight constants for each device and class of formats, written by",
        "# `python -m benchmarks.plan_fit --write`; `ffncli/models/counting/times/kernels.py` explains them.",
        "#",
        f"# constants  {names}",
        "# products   measured ÷ predicted, the ends of its 80 % interval on shapes that were not fitted: bound by",
        "#            memory, bound by compute; experts: the same of mixtures. Of [classes]: on other devices",
        "# rows       how many times were fitted",
        "# skew       the exponent with which uneven experts cost time; links: measured ÷ predicted of collectives",
        "# also       devices of the same architecture, without times",
        "",
        f'source = "{source}"', f"skew = {skew:g}", f"links = {_numbers(links)}", "", "[classes]",
        *(f"{name} = {_inline(one)}" for name, one in classes.items()),
    ]  # fmt: skip
    for device in dict.fromkeys(cell[0] for cell in found):
        lines += ["", "[[fitted]]", f'device = "{device}"', f"also = {_names(ALSO.get(device, ()))}"]
        lines += [f"{name} = {_inline(one)}" for (on, name), one in found.items() if on == device]
    return "\n".join(lines) + "\n"


def _inline(one: Fitted) -> str:
    cells = {"constants": astuple(one.constants), "products": _flat(one.products), "experts": _flat(one.experts)}
    return (
        "{ " + ", ".join(f"{name} = {_numbers(values)}" for name, values in cells.items()) + f", rows = {one.rows} }}"
    )


def _flat(ends: Mapping[str, Ends]) -> tuple[float, ...]:
    return tuple(value for bound in BOUNDS for value in ends[bound])


def _numbers(values: Iterable[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


def _names(values: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"


# --- what the manual shows --------------------------------------------------------------------------------------------


def rows_of(judged: Sequence[Judged], part: str, device: bool = True) -> list[dict[str, object]]:
    """Return a row of the results for each class and kind of work, on each device or on all."""
    groups: dict[tuple[str, str, str], list[Judged]] = {}
    for one in judged:
        for name in ("all", one.device) if device else ("all",):
            groups.setdefault((name, one.kind, one.work), []).append(one)
    rows = []
    for (name, kind, work), some in sorted(groups.items()):
        middle, signed, inside, width = figures_of(some)
        low, high = ends([-one.error for one in some])
        figures = (len(some), middle, signed, inside, width, low, high)
        rows.append(dict(zip(COLUMNS, (part, name, kind, work, *figures), strict=True)))
    return rows


def summary(rows: script.Rows) -> str:
    """Return the table of all devices: errors on other shapes, and on a device that was left out."""
    new = {(row["class"], row["work"]): row for row in rows if row["part"] == "device"}
    lines = []
    for row in rows:
        if row["part"] == "shape" and row["device"] == "all":
            other = new.get((row["class"], row["work"]))
            lines.append((
                row["class"], row["work"], f"{int(row['n']):,}", _share(row, "median_error"), _share(row, "coverage"),
                _share(row, "mean_width"), "" if other is None else _share(other, "median_error"),
                "" if other is None else f"{float(other['low']):.2f} to {float(other['high']):.2f}",
            ))  # fmt: skip
    names = ("class", "work", "times", "median error on other shapes", "in the 80 % interval", "its mean width",
             "median error on another device", "80 % of measured ÷ predicted there")  # fmt: skip
    return script.table(names, lines)


def _share(row: script.Row, name: str) -> str:
    return f"{100 * float(row[name]):.1f} %"


def stored() -> list[tuple[str, str, TimeConstants]]:
    """Return (device, class, constants) of every cell in `times.toml`."""
    rows = tomllib.loads(TIMES.read_text("utf-8"))["fitted"]
    return [
        (row["device"], name, TimeConstants(*row[name]["constants"])) for row in rows for name in CLASSES if name in row
    ]


def constants_table() -> str:
    """Return the constants that `ffn plan` uses."""
    names = [field.name for field in fields(TimeConstants)]
    lines = [(device, kind, *(f"{value:.3g}" for value in astuple(one))) for device, kind, one in stored()]
    return script.table(("device", "class", *(f"`{name}`" for name in names)), lines)


def picture() -> str:
    """Return the constants as SVG: a panel for each, a line for each class, a dot for each device."""
    cells, names = stored(), [field.name for field in fields(TimeConstants)]
    kinds = [name for name in CLASSES if any(kind == name for _, kind, _ in cells)]
    colours = dict(zip(dict.fromkeys(device for device, _, _ in cells), _COLOURS, strict=False))
    high, wide, left = 20 * len(kinds) + 46, 330, 110
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * wide} {4 * high + 76}" font-family="sans-serif">',
        f'<rect width="{2 * wide}" height="{4 * high + 76}" fill="#ffffff"/>',
    ]
    for n, name in enumerate(names):
        x, y = wide * (n % 2), high * (n // 2)
        most = max(getattr(one, name) for _, _, one in cells)
        out.append(_text(x + left, y + 18, f"{name}, 0 to {most:.3g}"))
        for line, kind in enumerate(kinds):
            at = y + 38 + 20 * line
            out.append(_text(x + 8, at + 4, kind, 11))
            out.append(f'<path d="M{x + left} {at}h{wide - left - 20}" stroke="#dddddd"/>')
            for device, own, one in cells:
                if own == kind:
                    to = x + left + (wide - left - 20) * getattr(one, name) / most
                    out.append(f'<circle cx="{to:.1f}" cy="{at}" r="4" fill="{colours[device]}" opacity="0.8"/>')
    for n, (device, colour) in enumerate(colours.items()):
        x, y = 20 + 215 * (n % 3), 4 * high + 16 + 22 * (n // 3)
        out += [f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>', _text(x + 10, y + 4, device, 11)]
    return "\n".join([*out, "</svg>", ""])


def _text(x: int, y: int, text: str, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#202124">{escape(text)}</text>'


def main() -> int:
    """Fit, judge, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", required=True, metavar="FILE")
    parser.add_argument("--mixtures", required=True, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="write ffncli/system/times.toml")
    parser.add_argument("--save", metavar="FILE", help="write the tables as CSV")
    options = parser.parse_args()
    read = PublishedTimes()
    read_csv(options.products, "product", read)
    read_csv(options.mixtures, "mixture", read)
    rows = measured_rows(read)
    skew = best_skew(rows)
    found = intervals(rows, fits(rows, skew), skew)
    apart = of_left_out_devices(rows, {cell: one.constants for cell, one in found.items()}, skew)
    classes = {name: general(name, found, apart.get(name, [])) for name in CLASSES}
    if options.write:
        source = "ai-dynamo/aiconfigurator at 095f58a5 (Apache-2.0), half of its shapes"
        reduces = [-log(1 + one.error) for one in all_predictions() if one.figure.what == "all-reduce"]
        TIMES.write_text(toml(found, classes, skew, ends(reduces), source), "utf-8")
    judged = [*of_halves(rows, skew), *of_left_out_shapes(rows, skew)]
    left = [one for some in apart.values() for one in some]
    results = [*rows_of(judged, "shape"), *rows_of(left, "device", device=False)]
    if options.save:
        Path(options.save).unlink(missing_ok=True)
        script.Kept(options.save, COLUMNS, {}).add_all(results)
    cells = [{name: script.cell(value) for name, value in row.items()} for row in results]
    print(summary(cells), judged_text(judged), sep="\n\n")
    return int(bool(missed(judged)))


if __name__ == "__main__":
    sys.exit(main())
