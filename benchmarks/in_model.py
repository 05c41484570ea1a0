"""Tokens per second of whole models: as transformers runs them, and with kernels in place of their FFNs, in one run.

What: `ffn bench DIR --in-model` of models of random weights that this script makes, a Llama with a gated FFN and a
GPT-2 with a plain one, 4 layers of d_model 512 or as `--d-model` says, on 1, 32 and 512 tokens. Speed does not depend
on the weights. The ratio is the time of a forward with kernels over that of the same model without, with its interval.

Limits: one machine; a batch of one, without a cache of keys and values; small models, whose head and attention take a
larger share than in large ones. `--source DIR` measures a real one.

    python -m benchmarks.in_model [--save FILE] ...    # continues FILE
    python -m benchmarks.in_model --summary FILE
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.benched import START_S, Asked, about_line, bench, number
from benchmarks.common import machine
from benchmarks.conv1x1 import ratio
from benchmarks.kept import Kept, read
from benchmarks.timers import now

RESULTS = Path(__file__).parent / "results" / "in_model.csv"
COLUMNS = (
    "date", "model", "kernel", "tokens", "threads", "dtype", "status", "verdict", "ratio", "low", "high",
    "tokens_per_s", "model_tokens_per_s", "logits_error", "logits_limit", "error_max", "aa_low", "aa_high", "processes",
    "wall_s", "warnings", "note",
)  # fmt: skip
Rows = Sequence[Mapping[str, str]]


def made(name: str, d_model: int, layers: int, folder: Path) -> None:
    """A model of random weights in a folder, as transformers saves it."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2}
    config = {
        "llama": lambda: transformers.LlamaConfig(
            **sizes, hidden_size=d_model, intermediate_size=d_model * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=d_model // 64, max_position_embeddings=1024,
        ),
        "gpt2": lambda: transformers.GPT2Config(**sizes, n_embd=d_model, n_layer=layers, n_head=d_model // 64),
    }[name]()  # fmt: skip
    transformers.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def measured(
    source: str, model: str, kernels: str, place: tuple[str, int, str], asked: Asked
) -> list[dict[str, object]]:
    """A row for each kernel and number of tokens, from one invocation; `place` is (tokens, threads, dtype)."""
    tokens, threads, dtype = place
    answer = bench(
        source, "--in-model", "--tokens", tokens, "--threads", str(threads), "--dtype", dtype, "--kernel", kernels,
        *asked.options(),
    )  # fmt: skip
    alone = {row["case"]: row for row in answer.rows if row["kernel"] == "model"}
    same = ("tokens", "status", "verdict", "processes", "warnings", "note")
    figures = ("ratio", "aa_low", "aa_high", "tokens_per_s", "logits_error", "logits_limit", "error_max")
    return [
        {
            **{name: row[name] for name in same}, **{name: number(row, name) for name in figures},
            "date": now(), "model": model, "kernel": row["kernel"].removeprefix("model+"), "threads": threads,
            "dtype": dtype, "low": number(row, "ratio_low"), "high": number(row, "ratio_high"),
            "model_tokens_per_s": number(alone[row["case"]], "tokens_per_s"), "wall_s": answer.wall_s,
        }
        for row in answer.rows if row["kernel"] != "model"
    ]  # fmt: skip


def sentence(rows: Rows) -> str:
    """The answer in one line: of every model the kernel with the least ratio, and where; "" without rows."""
    known = [row for row in rows if row["ratio"]]
    parts = []
    for model in dict.fromkeys(row["model"] for row in known):
        best = min((row for row in known if row["model"] == model), key=lambda row: float(row["ratio"]))
        where = f"{best['tokens']} tokens, {best['dtype']}, {best['threads']} threads"
        parts.append(f"{model} with {best['kernel']} {ratio(best)} at {where}")
    return (
        f"time of a forward over the model's alone, {about_line(known, 'cpu', 'torch')}: {'; '.join(parts)}"
        if parts
        else ""
    )


def summary(rows: Rows) -> str:
    """A Markdown table with every case, and the sentence."""
    lines = ["| model | kernel | tokens | dtype | threads | tokens/s | alone | ratio | verdict |", "| --- " * 9 + "|"]
    for row in sorted(rows, key=lambda r: (r["model"], r["dtype"], int(r["threads"]), int(r["tokens"]), r["kernel"])):
        speeds = (f"{float(row[name]):,.0f}" if row[name] else "" for name in ("tokens_per_s", "model_tokens_per_s"))
        cells = (
            row["model"],
            row["kernel"],
            row["tokens"],
            row["dtype"],
            row["threads"],
            *speeds,
            ratio(row),
            row["verdict"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    line = sentence(rows)
    return "\n".join(lines) + (f"\n\n{line[0].upper()}{line[1:]}." if line else "")


def main() -> int:
    """Measure what is missing, print the answer."""
    words = argparse.ArgumentParser(description="Whole models with and without kernels in place of their FFNs.")
    words.add_argument("--save", metavar="FILE", help="rows go there as they come; an interrupted run goes on")
    words.add_argument("--summary", metavar="FILE", help="measure nothing, print the figures of FILE")
    words.add_argument("--source", metavar="DIR", help="a real model in place of the two that are made")
    words.add_argument("--models", default="llama,gpt2")
    words.add_argument("--d-model", type=int, default=512)
    words.add_argument("--layers", type=int, default=4)
    words.add_argument("--kernels", default="auto,eager,onednn_packed,mkl")
    words.add_argument("--tokens", default="1,32,512")
    words.add_argument("--threads", default="1,2")
    words.add_argument("--dtypes", default="fp32,bf16")
    words.add_argument("--processes", type=int, default=5)
    words.add_argument("--max-time", type=float, default=20.0, help="seconds of a case")
    words.add_argument("--precision", default="1%")
    options = words.parse_args()
    if options.summary:
        print(summary(read(options.summary)))
        return 0
    kept = Kept(options.save, COLUMNS, machine("ffncli", "torch", "transformers"))
    names = [Path(options.source).name] if options.source else options.models.split(",")
    todo = [(n, int(t), d) for n in names for d in options.dtypes.split(",") for t in options.threads.split(",")]
    tokens = options.tokens.split(",")
    each = options.processes * 3 * START_S + len(tokens) * options.max_time * 1.5
    print(f"about {len(todo) * each / 60:.0f} minutes in all", flush=True)
    asked = Asked(options.processes, options.max_time, options.precision)
    with tempfile.TemporaryDirectory() as folder:
        for name, threads, dtype in todo:
            if all(kept.has(model=name, tokens=t, threads=threads, dtype=dtype) for t in tokens):
                continue
            source = options.source or str(Path(folder, name))
            if not Path(source).exists():
                made(name, options.d_model, options.layers, Path(folder))
            kept.add_all(measured(source, name, options.kernels, (options.tokens, threads, dtype), asked))
            print(f"{name}, {dtype}, {threads} threads: done", flush=True)
    print(summary(kept.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
