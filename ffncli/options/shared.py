"""Options that several commands share, each with a single meaning: annotated types for the fields of option records."""

import os
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from ffncli.options.accept import (
    COUNT,
    COUNTS,
    IDS,
    NATURAL,
    NUMBERS,
    PATH,
    PROMPT,
    RANKS,
    SECONDS,
    THREADS,
    Accepts,
    number_or_text,
    text,
    whole,
)
from ffncli.options.opt import COMPUTE, INPUT, SOURCE, Opt

KINDS_OF_SOURCE = "Model name, directory, file or hf://org/name; 512x2048:gelu; my.py:Class (runs that file)."
SPLIT, VIEW = "Ranks", "What to show"

Path: TypeAlias = str | os.PathLike[str]
Counts: TypeAlias = int | Sequence[int]
Numbers: TypeAlias = int | str | Sequence[int]

LAYER = number_or_text("a whole number or text such as 'decoder.3'")
Layer = Annotated[
    int | str | None,
    Opt(
        "-l", "--layer", metavar="N", group=SOURCE, daily=True,
        help="Layer, counted from 0; decoder.3 in a model with two stacks.",
        accepts=LAYER,
    ),
]  # fmt: skip
LayerOrAll = Annotated[
    int | str | None,
    Opt(
        "-l", "--layer", metavar="N|all", group=SOURCE, daily=True,
        help="Layer, counted from 0; decoder.3 in a model with two stacks; all gives one row per layer.",
        accepts=LAYER,
    ),
]  # fmt: skip
Prompt = Annotated[
    str | None,
    Opt(
        "-p", "--prompt", metavar="TEXT", accepts=PROMPT, repeat=True, group=INPUT, daily=True,
        help="Run the model on TEXT, and use the real input of its FFN.",
    ),
]  # fmt: skip
InputIds = Annotated[
    str | Sequence[int] | None,
    Opt(
        "--input-ids", metavar="N,...", accepts=IDS, repeat=True, group=INPUT,
        help="Run the model on these token ids instead.",
    ),
]  # fmt: skip
Position = Annotated[
    Numbers | None,
    Opt(
        "--position", metavar="N,...", accepts=NUMBERS, repeat=True, group=INPUT,
        help="Tokens to show: -1 (the last), 0,3 or 2:5. [default: all]",
    ),
]  # fmt: skip
Tokens = Annotated[
    int | None, Opt("-n", "--tokens", metavar="N", accepts=COUNT, group=INPUT, daily=True, help="Number of tokens.")
]
TokenList = Annotated[
    Counts | None,
    Opt(
        "-n", "--tokens", metavar="N,...", accepts=COUNTS, repeat=True, group=INPUT, daily=True,
        help="Number of tokens; several give one row each.",
    ),
]  # fmt: skip
Batch = Annotated[
    int | None,
    Opt("--batch", metavar="N", accepts=COUNT, group=INPUT, help="Batch size; with --seq-len, instead of --tokens."),
]
SeqLen = Annotated[int | None, Opt("--seq-len", metavar="N", accepts=COUNT, group=INPUT, help="Tokens per sequence.")]
Dtype = Annotated[
    str | None,
    Opt(
        "--dtype", metavar="NAME", accepts=Accepts("text: fp32, fp64, bf16 or fp16", text), group=COMPUTE, daily=True,
        completes="dtypes",
        help="Compute in fp32, fp64, bf16 or fp16. [default: fp32]",
    ),
]  # fmt: skip
Device = Annotated[
    str,
    Opt(
        "--device", metavar="NAME", accepts=Accepts("text: cpu, cuda or cuda:1", text), group=COMPUTE,
        help="Device: cpu, cuda or cuda:1.",
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    Opt(
        "--seed", metavar="N", accepts=NATURAL, group=COMPUTE,
        help="Seed of random weights and random input. [default: 0]",
    ),
]  # fmt: skip
Threads = Annotated[int | None, Opt("--threads", metavar="N", accepts=THREADS, group=COMPUTE, help="CPU threads.")]
LoadTime = Annotated[
    float | None,
    Opt(
        "--load-time", metavar="TIME", accepts=SECONDS, group=SOURCE,
        help="Time limit for loading your Python file. [default: 3m]",
    ),
]  # fmt: skip
TensorParallel = Annotated[
    int | None,
    Opt(
        "--tp", "--tensor-parallel", metavar="N", accepts=RANKS, group=SPLIT,
        help="Split every d_ff over N ranks (tensor parallelism).",
    ),
]  # fmt: skip
ExpertParallel = Annotated[
    int | None,
    Opt(
        "--ep", "--expert-parallel", metavar="N", accepts=RANKS, group=SPLIT,
        help="Split the experts of a mixture over N ranks (expert parallelism).",
    ),
]  # fmt: skip
RankTimeout = Annotated[
    float | None,
    Opt(
        "--rank-timeout", metavar="TIME", accepts=SECONDS, group=SPLIT,
        help="Time limit for waiting for another rank, at the start and in every collective. [default: 2m]",
    ),
]  # fmt: skip
TopUnits = Annotated[
    int | None,
    Opt(
        "--top-units", metavar="N", accepts=whole(0, 1000), group=VIEW, daily=True,
        help="Show the N largest hidden units of each token, and over all tokens.",
    ),
]  # fmt: skip
Save = Annotated[
    Path | None,
    Opt(
        "--save", metavar="FILE", accepts=PATH, daily=True,
        help="Save every tensor: .safetensors, .npz, .json; or all values: .csv, .parquet.",
    ),
]  # fmt: skip
Force = Annotated[bool, Opt("--force", after="out", help="Overwrite existing files.")]
Output = Annotated[
    str | None,
    Opt(
        "-o", "--output", metavar="FILE", accepts=PATH, daily=True,
        help="Write to FILE, in the format of its suffix (.json, .csv, .md); - is stdout.",
    ),
]  # fmt: skip
