"""`ffn export`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from ffncli.cli.common import values
from ffncli.cli.common.option import COMPUTE, INPUT, SOURCE, option
from ffncli.cli.common.options import KINDS_OF_SOURCE, OutputOptions, Text, TokenListOptions
from ffncli.cli.common.parsers import natural, numbers
from ffncli.cli.common.spread import spread
from ffncli.cli.export.page import answer
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import Dimensions
from ffncli.options.opt import Opt
from ffncli.run.export.call import FORMS, export, require_form
from ffncli.run.user.time_limit import LoadOptions
from ffncli.show.output import Output
from ffncli.system.files import check_writable

_what = partial(option, "What to write")

ExportSource = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help=f"{KINDS_OF_SOURCE} [default: a block of --d-model]",
        autocompletion=values.models,
    ),
]
As = Annotated[
    str | None,
    _what("--as", metavar="FORM", daily=True, values=values.forms,
          help="Form: torch (a Python file), flashinfer-trace (a folder), onnx or latex."),
]  # fmt: skip
WhichPart = Annotated[
    Text,
    _what("--part", metavar="NAME", values=values.parts,
          help="Part to write: block, with its norms and residual, or ffn alone, as in `ffn bench`."
          " [default: block; flashinfer-trace: ffn]"),
]  # fmt: skip
Large = Annotated[bool, _what("--large", help="With onnx: write a file of more than 200 MB too.")]
LayerName = Annotated[
    Text,
    option(SOURCE, "-l", "--layer", metavar="N", daily=True,
           help="Layer, counted from 0; decoder.3 in a model with two stacks."
           " [default: the first of the most common kind]"),
]  # fmt: skip
DTypeName = Annotated[
    Text,
    option(COMPUTE, "--dtype", metavar="NAME", daily=True, values=values.dtypes,
           help="Format of weights and inputs: fp32, fp64, bf16 or fp16. [default: as released, else fp32]"),
]  # fmt: skip
Seed = Annotated[
    int | None,
    option(COMPUTE, "--seed", metavar="N", parser=natural("--seed"),
           help="With onnx: seed of the weights of a SOURCE without any. [default: 0]"),
]  # fmt: skip


@dataclass(frozen=True)
class WorkloadOptions(TokenListOptions):
    """--tokens as the sizes that are written."""

    tokens: Annotated[
        list[Any] | None,
        option(INPUT, "-n", "--tokens", metavar="N,...", daily=True, parser=numbers("--tokens"),
               help="Numbers of tokens of the workloads. [default: 1,32,1024]"),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportedOutputOptions(OutputOptions):
    """The same, with the exported file or folder in the place of a copy of the page."""

    out: Annotated[
        str | None,
        Opt(
            "-o", "--output", metavar="PATH", daily=True,
            help="Write to PATH: a file, or a folder for flashinfer-trace. [default: torch and latex: stdout]",
        ),
    ] = None  # fmt: skip

    def output(self) -> Output:
        """The sink for the page."""
        return OutputOptions.output(replace(self, out=None))

    def path(self, form: str) -> str | None:
        """Where to write; None for stdout. Raises FFNError for a file that cannot be written, or of another suffix."""
        suffix, out = FORMS[form].suffix, None if self.out is None else os.path.expanduser(self.out)
        page = self.json or self.csv or self.format is not None
        if out in (None, "-"):
            if not (suffix and FORMS[form].text) and not (page and out is None):
                raise FFNError(f"--as {form} needs -o", f"name the {'file: -o block' + suffix if suffix else 'folder'}")
            return None
        assert out is not None
        given = os.path.splitext(out)[1].lower()
        if suffix and given not in (suffix, "", ".txt"):
            raise FFNError(f"-o {shown(self.out)}: --as {form} writes {suffix} files", f"name it -o NAME{suffix}")
        if suffix:
            check_writable(out, self.force, "-o")
        return out


@spread
def command(
    *,
    source: ExportSource = None,
    form: As = None,
    part: WhichPart = None,
    large: Large = False,
    layer: LayerName = None,
    tokens: WorkloadOptions,
    dtype: DTypeName = None,
    seed: Seed = None,
    dimensions: Dimensions,
    load_limit: LoadOptions,
    show: ExportedOutputOptions,
) -> None:
    """Write a block for torch, FlashInfer-Bench, ONNX or LaTeX, with its reference, tolerance, FLOPs and bytes.

    Examples:
      ffn export llama-2-7b --as torch                  # a module and its reference
      ffn export llama-2-7b --as latex -o llama.tex     # formulas and a table
      ffn export gpt2 --as flashinfer-trace -o arena    # a folder that it loads
      ffn export ./my-model -l 1 --as torch -n 1,4096   # its workloads
    """
    output = show.output()
    load_limit.apply()
    form = require_form(form)
    path = show.path(form)
    made = export(source, form, part, layer, tokens.numbers() or None, dtype, seed, large, **vars(dimensions))
    output.notes(*made.notes)
    written = () if path is None else made.write(path, show.force)
    if written or show.json or show.csv or show.format is not None:
        output.show(answer(made, written))
    else:
        output.write(made.text)
