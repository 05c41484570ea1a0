"""Tokens per second of whole models: as transformers runs them, and with kernels in place of their FFNs, in one run.

What: `ffn bench DIR --in-model` of models with random weights that this script creates: a Llama with a gated FFN and a
GPT-2 with a plain one, 4 layers of d_model 512 (or `--d-model`), on 1, 32 and 512 tokens. Speed does not depend on the
weights. The ratio is the time of a forward pass with kernels divided by the unchanged model's, with its interval.

Limits: one machine; a batch of one, without a KV cache; small models, in which head and attention take a larger share
than in large models. `--source DIR` measures a real model. --max-time limits a case, in seconds.

    python -m benchmarks.in_model [--save FILE] ...    # continues FILE
    python -m benchmarks.in_model --summary FILE
"""

import argparse
import tempfile
from itertools import product
from pathlib import Path

from benchmarks import script
from benchmarks.script import Kept, Rows, about_line, benched, how, ratio_text, table

COLUMNS = (
    "date", "model", "kernel", "tokens", "threads", "dtype", "status", "verdict", "ratio", "low", "high",
    "tokens_per_s", "model_tokens_per_s", "logits_error", "logits_limit", "error_max", "aa_low", "aa_high", "processes",
    "wall_s", "warnings", "note",
)  # fmt: skip


def made(name: str, d_model: int, layers: int, folder: Path) -> None:
    """Save a model with random weights in a folder, with save_pretrained."""
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


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Run `ffn bench` for each model, dtype and number of threads that has no row yet."""
    names = (Path(options.source).name,) if options.source else options.models
    with tempfile.TemporaryDirectory() as folder:
        for model, dtype, threads in product(names, options.dtypes, options.threads):
            same = {"model": model, "dtype": dtype, "threads": threads}
            if all(kept.has(**same, tokens=tokens) for tokens in options.tokens):
                continue
            source = options.source or str(Path(folder, model))
            if not Path(source).exists():
                made(model, options.d_model, options.layers, Path(folder))
            rows = benched(
                COLUMNS, source, "--in-model", "--tokens", ",".join(map(str, options.tokens)), "--threads",
                str(threads), "--dtype", dtype, "--kernel", ",".join(options.kernels), *how(options), **same,
            )  # fmt: skip
            alone = {row["tokens"]: row["tokens_per_s"] for row in rows if row["kernel"] == "model"}
            kept.add_all(
                row | {"kernel": kernel.removeprefix("model+"), "model_tokens_per_s": alone[row["tokens"]]}
                for row in rows
                if (kernel := str(row["kernel"])) != "model"
            )
            print(f"{model}, {dtype}, {threads} threads: done", flush=True)


def sentence(rows: Rows) -> str:
    """Return the answer in one line: for every model, the smallest ratio with its kernel and case; "" without rows."""
    known, parts = [row for row in rows if row["ratio"]], []
    for model in dict.fromkeys(row["model"] for row in known):
        best = min((row for row in known if row["model"] == model), key=lambda row: float(row["ratio"]))
        where = f"{best['tokens']} tokens, {best['dtype']}, {best['threads']} threads"
        parts.append(f"{model} with {best['kernel']} {ratio_text(best)} at {where}")
    what = "time of a forward pass divided by the unchanged model's"
    about = f"{what}, {about_line(known, 'cpu', 'torch')}" if known else ""
    return f"{about}: {'; '.join(parts)}" if parts else ""


def summary(rows: Rows) -> str:
    """Return a table with every case, and the sentence."""
    ordered = sorted(rows, key=lambda r: (r["model"], r["dtype"], int(r["threads"]), int(r["tokens"]), r["kernel"]))
    names, lines = ("model", "kernel", "tokens", "dtype", "threads"), []
    for row in ordered:
        speeds = (f"{float(row[name]):,.0f}" if row[name] else "" for name in ("tokens_per_s", "model_tokens_per_s"))
        lines.append((*(row[name] for name in names), *speeds, ratio_text(row), row["verdict"]))
    text, answer = table((*names, "tokens/s", "alone", "ratio", "verdict"), lines), sentence(rows)
    return text + (f"\n\n{answer[0].upper()}{answer[1:]}." if answer else "")


if __name__ == "__main__":
    script.main(
        __doc__, ("ffncli", "torch", "transformers"), COLUMNS, measure, summary, source=None, models=("llama", "gpt2"),
        d_model=512, layers=4, kernels=("auto", "eager", "onednn_packed", "mkl"), tokens=(1, 32, 512), threads=(1, 2),
        dtypes=("fp32", "bf16"), processes=5, max_time=20.0, precision="1%",
    )  # fmt: skip
