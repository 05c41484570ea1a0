"""Does `ffn precision --layer all` rank a sensitive layer first?

What: a Llama of 12 layers of width 64, with random weights. In one layer, one channel of W1 and W3 is `times` as large,
and the norm before it makes that channel of the input so much smaller that the layer computes the same; only its blocks
round worse. Each of 20 seeds draws other weights, and the layer. The weights are rounded; the row has the layer's rank
by its error, in each format.

Targets: first in 20 of 20 for × 300, in the formats whose blocks lie along the channels (4 bits); for × 10, and for
formats of 8 bits, the number is reported.

    python -m benchmarks.precision_planted [--save FILE]
"""

import argparse
from pathlib import Path

import ffncli
from benchmarks import script
from benchmarks.script import Kept, Mark, Rows
from tests.oracles.checkpoints import sensitive

LAYERS, TOKENS = 12, 32
FORMATS = ("nvfp4", "mxfp4", "int4:g32", "q4_0", "int8", "fp8")
JUDGED = FORMATS[:4]
COLUMNS = ("times", "format", "seed", "layer", "rank", "error_rel", "median_error_rel")


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Add the rows of all seeds."""
    for times in options.times:
        for seed in range(options.seeds):
            layer = (5 * seed + 3) % LAYERS
            if kept.has(times=times, seed=seed):
                continue
            with script.scratch("planted") as folder:
                source = sensitive(Path(folder, "model"), times, layer, seed)
                found = ffncli.precision(source, layer="all", dtype=FORMATS, what="weights", tokens=TOKENS, seed=seed)
            for name in FORMATS:
                rows = [row for row in found.rows if row.format == name]
                rank = next(at for at, row in enumerate(rows, 1) if row.layer == layer)
                mine, median = rows[rank - 1].error_rel, rows[LAYERS // 2].error_rel
                kept.add(dict(zip(COLUMNS, (times, name, seed, layer, rank, mine, median), strict=True)))


def summary(rows: Rows) -> tuple[str, bool]:
    """Return how often the layer is first."""
    marks: list[Mark] = []
    for times in dict.fromkeys(row["times"] for row in rows):
        for name in FORMATS:
            mine = [row for row in rows if (row["times"], row["format"]) == (times, name)]
            first = sum(row["rank"] == "1" for row in mine)
            ratio = sorted(float(row["error_rel"]) / float(row["median_error_rel"]) for row in mine)[len(mine) // 2]
            judged, met = times == "300" and name in JUDGED, first == len(mine)
            figure = f"{first} of {len(mine)}; its error is {ratio:.3g} × the median layer's"
            marks.append((f"first, × {times}, {name}", figure, "all" if judged else "", met or not judged))
    return script.marks(marks), all(good for *_, good in marks)


if __name__ == "__main__":
    script.main(__doc__, ("ffncli", "torch"), COLUMNS, measure, summary, seeds=20, times=(300, 10))
