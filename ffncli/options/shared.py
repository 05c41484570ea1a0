"""Options that several commands share, each with a single meaning: annotated types for the fields of option records."""

import os
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

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

Pass: TypeAlias = Literal["forward", "forward+backward"]
Path: TypeAlias = str | os.PathLike[str]
Counts: TypeAlias = int | Sequence[int]
Numbers: TypeAlias = int | str | Sequence[int]

LAYER = number_or_text("a whole number or a string such as 'decoder.3'")
Layer = Annotated[
    int | str | None,
    Opt(
        "-l", "--layer", group=SOURCE, daily=True,
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
        "-p", "--prompt", accepts=PROMPT, group=INPUT, daily=True,
        help="Run the model on TEXT, and use the real input of its FFN.",
    ),
]  # fmt: skip
InputIds = Annotated[
    str | Sequence[int] | None,
    Opt("--input-ids", accepts=IDS, group=INPUT, help="Run the model on these token ids instead."),
]
Position = Annotated[
    Numbers | None,
    Opt("--position", accepts=NUMBERS, group=INPUT, help="Tokens to show: -1 (the last), 0,3 or 2:5. [default: all]"),
]
Tokens = Annotated[int | None, Opt("-n", "--tokens", accepts=COUNT, group=INPUT, daily=True, help="Number of tokens.")]
TokenList = Annotated[
    Counts | None,
    Opt("-n", "--tokens", accepts=COUNTS, group=INPUT, daily=True, help="Number of tokens; several give one row each."),
]
Batch = Annotated[
    int | None, Opt("--batch", accepts=COUNT, group=INPUT, help="Batch size; with --seq-len, instead of --tokens.")
]
SeqLen = Annotated[int | None, Opt("--seq-len", accepts=COUNT, group=INPUT, help="Tokens per sequence.")]
DTYPE = Accepts("a string: fp32, fp64, bf16 or fp16", text, metavar="NAME")
Dtype = Annotated[
    str | None,
    Opt(
        "--dtype", accepts=DTYPE, group=COMPUTE, daily=True,
        completes="dtypes",
        help="Compute in fp32, fp64, bf16 or fp16. [default: fp32]",
    ),
]  # fmt: skip
Device = Annotated[
    str,
    Opt(
        "--device", accepts=Accepts("a string: cpu, cuda or cuda:1", text, metavar="NAME"), group=COMPUTE,
        help="Device: cpu, cuda or cuda:1.",
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    Opt("--seed", accepts=NATURAL, group=COMPUTE, help="Seed of random weights and random input. [default: 0]"),
]
Threads = Annotated[int | None, Opt("--threads", accepts=THREADS, group=COMPUTE, help="CPU threads.")]
LoadTime = Annotated[
    float | None,
    Opt("--load-time", accepts=SECONDS, group=SOURCE, help="Time limit for loading your Python file. [default: 3m]"),
]
TensorParallel = Annotated[
    int | None,
    Opt(
        "--tp", "--tensor-parallel", accepts=RANKS, group=SPLIT,
        help="Split every d_ff over N ranks (tensor parallelism).",
    ),
]  # fmt: skip
ExpertParallel = Annotated[
    int | None,
    Opt(
        "--ep", "--expert-parallel", accepts=RANKS, group=SPLIT,
        help="Split the experts of a mixture over N ranks (expert parallelism).",
    ),
]  # fmt: skip
RankTimeout = Annotated[
    float | None,
    Opt(
        "--rank-timeout", accepts=SECONDS, group=SPLIT,
        help="Time limit for waiting for another rank, at the start and in every collective. [default: 2m]",
    ),
]  # fmt: skip
TopUnits = Annotated[
    int | None,
    Opt(
        "--top-units", accepts=whole(0, 1000), group=VIEW, daily=True,
        help="Show the N largest hidden units of each token, and over all tokens.",
    ),
]  # fmt: skip
Strict = Annotated[
    bool, Opt("--strict", group=COMPUTE, help="Exit 4 if the source does not determine the bytes or the totals.")
]
Save = Annotated[
    Path | None,
    Opt(
        "--save", accepts=PATH, daily=True,
        help="Save every tensor: .safetensors, .npz, .json; or all values: .csv, .parquet.",
    ),
]  # fmt: skip
Force = Annotated[bool, Opt("--force", after="out", help="Overwrite existing files.")]
Output = Annotated[
    str | None,
    Opt(
        "-o", "--output", accepts=PATH, daily=True,
        help="Write to FILE, in the format of its suffix (.json, .csv, .md, .html); - is stdout.",
    ),
]  # fmt: skip
