"""How well does `ffn plan --device cpu --measured FILE` predict this CPU, for blocks that were not measured?

What: `ffn bench` measures some blocks (plain, gated, a mixture; 1 to 512 tokens; float32 and bfloat16) into one file.
From this file `ffn plan` predicts other blocks, also with token counts in between, which are then measured too. The
error is predicted ÷ measured − 1; the target for the median absolute error is 25 %.

How: one kernel, eager, so that each row is a block; 78 cases, about 10 minutes. Blocks to learn from and blocks to
predict alternate. If another job slows the machine during a part of the run, this appears as an error.

    python -m benchmarks.plan_measured [--save FILE] [--max-time 2] [--quick]    # 2 s a case; quick: 2 processes, 0.5 s
    python -m benchmarks.plan_measured --summary FILE

The exit code is 1 if the median absolute error is above 25 %.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks import script
from benchmarks.script import Kept, Mark, Row, Rows, command, number, output_of, read

MARK = 0.25
TYPES = "fp32,bf16"
COLUMNS = ("date", "part", "source", "kind", "tokens", "dtype", "cache", "time_s", "predicted_s", "error", "processes")


@dataclass(frozen=True)
class Block:
    """A block as typed on the command line, and the token counts for which it is measured."""

    kind: str
    words: tuple[str, ...]
    tokens: str

    @property
    def source(self) -> str:
        """SOURCE and options as one string, as in the rows."""
        return " ".join(self.words)


# Up to 16 tokens, `ffn bench` uses cold weights, above that warm ones; the counts cover both ranges.
TOKENS, OTHER_TOKENS = "1,4,16,32,128,512", "1,8,64,256,512"
SEEN = (
    Block("plain", ("512x2048:gelu",), TOKENS),
    Block("plain", ("1024x4096:gelu",), TOKENS),
    Block("gated", ("1024x2816:swiglu",), TOKENS),
    Block("mixture", ("384x1024:swiglu", "--experts", "8", "--top-k", "2"), TOKENS),
)
NEW = (
    Block("plain", ("768x3072:gelu",), OTHER_TOKENS),
    Block("gated", ("896x2432:swiglu",), OTHER_TOKENS),
    Block("mixture", ("512x1152:swiglu", "--experts", "6", "--top-k", "2"), OTHER_TOKENS),
)


def benched(block: Block, method: Sequence[str], path: Path) -> Rows:
    """Measure a block into the file `path`, and return its rows."""
    words = command(
        "bench", *block.words, "-n", block.tokens, "--dtype", TYPES, "--device", "cpu", "-k", "eager",
        *method, "--save", str(path), "--json", "-q",
    )  # fmt: skip
    output_of(words, (0, 4))
    return read(path)


def predictions(block: Block, path: Path) -> dict[tuple[str, str], float]:
    """Return a mapping from (dtype, tokens) to the seconds that `ffn plan` predicts from that file."""
    words = command(
        "plan", *block.words, "-n", block.tokens, "--dtype", TYPES, "--tp", "1", "--device", "cpu", "--measured",
        str(path), "--json", "-q",
    )  # fmt: skip
    return {(row["dtype"], str(row["tokens"])): row["time_s"] for row in json.loads(output_of(words))["rows"]}


def joined(paths: Sequence[Path], into: Path) -> Path:
    """Join several results into one file, and return its path."""
    into.write_text("".join(path.read_text("utf-8") for path in paths), "utf-8")
    return into


def row_of(block: Block, part: str, row: Row, predicted_s: float | None = None) -> dict[str, object]:
    """Return the row of a measurement, with its prediction if there is one."""
    time_s = number(row, "time_s")
    error = None if predicted_s is None or not time_s else predicted_s / time_s - 1
    return {
        "date": script.now(), "part": part, "source": block.source, "kind": block.kind, "tokens": row["tokens"],
        "dtype": row["dtype"], "cache": row["cache"], "time_s": time_s, "predicted_s": predicted_s, "error": error,
        "processes": row["processes"],
    }  # fmt: skip


def measure(
    kept: Kept, method: Sequence[str], folder: Path, seen: Sequence[Block] = SEEN, new: Sequence[Block] = NEW
) -> None:
    """Measure blocks of both groups alternately, because a machine's speed drifts; then predict the new blocks."""
    rows: dict[Block, Rows] = {}
    turns = [block for pair in zip_longest(seen, new) for block in pair if block is not None]
    for block in turns:
        print(f"{block.kind} {block.source}", file=sys.stderr, flush=True)
        rows[block] = benched(block, method, _file(block, folder))
    known = joined([_file(block, folder) for block in seen], folder / "seen.csv")
    for block in seen:
        kept.add_all([row_of(block, "seen", row) for row in rows[block]])
    for block in new:
        expected = predictions(block, known)
        kept.add_all([row_of(block, "new", row, expected[row["dtype"], row["tokens"]]) for row in rows[block]])


def _file(block: Block, folder: Path) -> Path:
    return folder / f"{block.words[0].partition(':')[0]}.csv"


def errors_of(rows: Rows) -> list[float]:
    """Return the errors of all predictions."""
    return [error for row in rows if (error := number(row, "error")) is not None]


def summary(rows: Rows) -> str:
    """Return the target, then medians and worst errors by kind, by dtype, and for few or many tokens."""
    whole = _middle(errors_of(rows))
    found: list[Mark] = [
        ("median absolute error", _text(rows), f"{100 * MARK:.0f} %", None if whole is None else whole <= MARK)
    ]
    for name in ("kind", "dtype"):
        values = dict.fromkeys(row[name] for row in rows)
        found += [(value, _text([row for row in rows if row[name] == value]), "", True) for value in values]
    few = [row for row in rows if int(row["tokens"]) <= 16]
    found += [("up to 16 tokens", _text(few), "", True), ("more", _text([r for r in rows if r not in few]), "", True)]
    return "\n".join([script.about_line(rows, "cpu", "torch", "ffncli"), "", script.marks(found)])


def _middle(errors: Sequence[float]) -> float | None:
    return statistics.median(map(abs, errors)) if errors else None


def _text(rows: Rows) -> str:
    errors = errors_of(rows)
    if not errors:
        return "no prediction"
    middle, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
    return f"{100 * middle:.1f} % of {len(errors)}, worst {100 * worst:+.0f} %"


def measured(kept: Kept, options: argparse.Namespace) -> None:
    """Measure in a temporary folder."""
    if options.quick:
        options.processes, options.max_time = 2, 0.5
    with tempfile.TemporaryDirectory() as folder:
        measure(kept, script.how(options), Path(folder))


def judged(rows: Rows) -> tuple[str, bool]:
    """Return the summary, and whether the target is reached."""
    return summary(rows), (_middle(errors_of(rows)) or 0) <= MARK


if __name__ == "__main__":
    packages = ("ffncli", "torch")
    script.main(__doc__, packages, COLUMNS, measured, judged, processes=3, max_time=2.0, quick=False)
