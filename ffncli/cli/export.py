"""`ffn export`: writes a block in another form, and shows what was written as a page, JSON and CSV."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.errors import FFNError, clean, option, shown
from ffncli.options.opt import Opt
from ffncli.run.export.call import FORMS, Export, ExportQuestion, exported, require_form
from ffncli.run.export.problem import CONVENTIONS
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.system.files import check_writable

_COLUMNS = ("tokens", "matmul_flops", "elementwise_flops", "bytes")


@dataclass(frozen=True, kw_only=True)
class ExportedOutputOptions(OutputOptions):
    """The output options, except that -o names the exported file or folder instead of a copy of the page."""

    out: Annotated[
        str | None,
        Opt(
            "-o", "--output", metavar="PATH", daily=True,
            help="Write to PATH: a file, or a folder for flashinfer-trace. [default: torch and latex: stdout]",
        ),
    ] = None  # fmt: skip

    def output(self) -> Output:
        """Return where and how the page is written."""
        return OutputOptions.output(replace(self, out=None))

    def path(self, form: str) -> str | None:
        """Return the path to write, None for stdout. Raises FFNError if it is not writable or has the wrong suffix."""
        suffix, out = FORMS[form].suffix, None if self.out is None else os.path.expanduser(self.out)
        page = self.json or self.csv or self.format is not None
        if out in (None, "-"):
            if not (suffix and FORMS[form].text) and not (page and out is None):
                named = f"file: {option('out', 'block' + suffix)}" if suffix else "folder"
                raise FFNError(f"{option('form', form)} needs {option('out')}", f"name the {named}")
            return None
        assert out is not None
        given = os.path.splitext(out)[1].lower()
        if suffix and given not in (suffix, "", ".txt"):
            raise FFNError(
                f"-o {shown(self.out)}: {option('form', form)} writes {suffix} files", f"name it -o NAME{suffix}"
            )
        if suffix:
            check_writable(out, self.force, option("out"))
        return out


@spread
def command(*, question: ExportQuestion, show: ExportedOutputOptions) -> None:
    """Write a block for torch, FlashInfer-Bench, ONNX or LaTeX, with its reference, tolerance, FLOPs and bytes.

    Examples:
      ffn export llama-2-7b --as torch                  # a module and its reference
      ffn export llama-2-7b --as latex -o llama.tex     # formulas and a table
      ffn export gpt2 --as flashinfer-trace -o arena    # writes a folder
      ffn export ./my-model -l 1 --as torch -n 1,4096   # with two workloads
    """
    output = show.output()
    if question.form is None:
        raise FFNError("Missing option '--as'", f"name a form: {', '.join(FORMS)}")
    path = show.path(require_form(question.form))
    made = exported(question)
    output.notes(*made.notes)
    written = () if path is None else made.write(path, show.force)
    if written or show.json or show.csv or show.format is not None:
        output.show(answer(made, written))
        if path is not None:
            output.wrote(path)
    else:
        output.write(made.text)


def answer(made: Export, written: Sequence[str]) -> Answer:
    """Build the answer; JSON contains the files that were not written to disk, if they are text files."""
    problem = made.problem
    rows = [tuple(getattr(one, name) for name in _COLUMNS) for one in problem.workloads]
    paths = list(written) or list(made.files)
    files = [
        {
            "path": clean(path),
            "bytes": len(contents if isinstance(contents, bytes) else contents.encode()),
            "text": None if written or isinstance(contents, bytes) else contents,
        }
        for path, contents in zip(paths, made.files.values(), strict=True)
    ]
    body = {
        "form": made.form,
        "part": problem.part,
        "name": problem.name,
        "source": problem.source,
        "citation": problem.citation,
        "layer": None if problem.bare else f"{problem.layer.stack}.{problem.layer.index}",
        "dtype": problem.dtype.name,
        "params": problem.params,
        "tolerance": problem.tolerance,
        "formulas": problem.formulas,
        "rows": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
        "files": files,
    }
    allowed = f"{problem.params:,} parameters; error up to {problem.tolerance:.3g} in {problem.dtype.name}"
    parts: list[Part] = [
        Heading(clean(problem.title), made.form),
        Line(allowed),
        Table(tuple(name.replace("_", " ").replace("flops", "FLOPs") for name in _COLUMNS), rows),
        *(Line(clean(path)) for path in written if len(written) > 1),
    ]
    return Answer("export", body, Table(_COLUMNS, rows), parts, CONVENTIONS)
