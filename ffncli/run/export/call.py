"""`ffncli.export`, the call behind `ffn export`: writes a block in the format of another program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from ffncli.block.recipe import one_of
from ffncli.block.steps import parameters
from ffncli.errors import ExitCode, FFNError, did_you_mean, option, shown, shown_path
from ffncli.models.dimensions import Dimensions, token_counts
from ffncli.models.model import Resolved, require_runnable
from ffncli.options.accept import COUNTS, NATURAL
from ffncli.options.opt import COMPUTE, INPUT, SOURCE, Opt, call
from ffncli.options.shared import DTYPE, LAYER, Batch, Counts, SeqLen
from ffncli.run.export.problem import ExportProblem, Part, problem_of
from ffncli.run.user.load import load
from ffncli.run.user.options import Source
from ffncli.run.user.options import source as source_option
from ffncli.run.user.time_limit import LoadOptions
from ffncli.system.files import check_writable, written_together
from ffncli.system.notebook import Shown
from ffncli.system.packages import package_errors

_what = partial(Opt, group="What to write")


@dataclass(frozen=True)
class ExportForm:
    """A form of export: the suffix of its file (empty for a folder), whether the file is text, and the part of a block
    that it has by default."""

    suffix: str
    text: bool = True
    part: Part = "block"


FORMS: Mapping[str, ExportForm] = {
    "torch": ExportForm(".py"),
    "flashinfer-trace": ExportForm("", part="ffn"),
    "onnx": ExportForm(".onnx", text=False),
    "latex": ExportForm(".tex"),
}


@dataclass(frozen=True)
class Export(Shown):
    """An exported block. `files` maps paths to contents; all forms except `flashinfer-trace` have one file."""

    form: str
    problem: ExportProblem
    files: Mapping[str, str | bytes]
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The contents of the only file, as a string; raises FFNError for a form with several files, or with bytes."""
        contents = next(iter(self.files.values()))
        if len(self.files) > 1 or isinstance(contents, bytes):
            raise FFNError(f"{option('form', self.form)} is not text", f"write it: {option('out', 'PATH')}")
        return contents

    def write(self, path: str | Path, force: bool = False) -> tuple[str, ...]:
        """Write the export to a file or folder, and return the paths. Existing files are replaced only with `force`;
        all files are written completely, or none."""
        target = Path(path)
        folder = not FORMS[self.form].suffix
        paths = {target / name if folder else target: contents for name, contents in self.files.items()}
        if not folder:
            check_writable(str(target), force, option("out"))
        elif not force and (there := next((one for one in paths if one.exists()), None)):
            raise FFNError(f"{shown_path(there)} exists already", f"choose another folder, or give {option('force')}")
        for one in paths if folder else ():
            _make_folder(one.parent)
        with written_together(*paths) as files:
            for file, contents in zip(files, paths.values(), strict=True):
                file.write(contents if isinstance(contents, bytes) else contents.encode())
        return tuple(map(str, paths))


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FFNError(f"cannot write {shown_path(path)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None


@dataclass(frozen=True, kw_only=True)
class ExportQuestion(Dimensions, LoadOptions):
    """Export a block as a torch module, a FlashInfer-Bench problem, an ONNX model or LaTeX.

    >>> import ffncli
    >>> ffncli.export("llama-2-7b", form="latex", tokens=1).text.splitlines()[0]
    '% llama-2-7b, decoder layer 0: d_model 4096, d_ff 11008, silu, gated'

    `form` is a form of `ffn export --as` (default: torch). `part` is `block`, which includes norms and residual, or
    `ffn`, which is only the FFN (the default for flashinfer-trace, and the part that `ffn bench` times). `tokens` are
    the token counts of the workloads. An ONNX model contains the source's weights, or random weights drawn with `seed`;
    `large` allows more than 200 MB. torch is imported only for `onnx`, or if the source is a Python file.
    """

    source: Annotated[Source | None, source_option("a block of --d-model")] = field(default=None, kw_only=False)
    form: Annotated[
        str | None,
        _what(
            "--as", metavar="FORM", daily=True, completes="forms",
            help="Form: torch (a Python file), flashinfer-trace (a folder), onnx or latex.",
        ),
    ] = field(default=None, kw_only=False)  # fmt: skip
    part: Annotated[
        str | None,
        _what(
            "--part", metavar="NAME", completes="parts",
            help="Part to write: block, with its norms and residual, or ffn alone, as in `ffn bench`."
            " [default: block; flashinfer-trace: ffn]",
        ),
    ] = None  # fmt: skip
    large: Annotated[bool, _what("--large", help="With onnx: allow a file of more than 200 MB.")] = False
    layer: Annotated[
        int | str | None,
        Opt(
            "-l", "--layer", accepts=LAYER, group=SOURCE, daily=True,
            help="Layer, counted from 0; decoder.3 in a model with two stacks."
            " [default: the first of the most common kind]",
        ),
    ] = None  # fmt: skip
    tokens: Annotated[
        Counts | None,
        Opt(
            "-n", "--tokens", accepts=COUNTS, group=INPUT, daily=True,
            help="Token counts of the workloads. [default: 1,32,1024]",
        ),
    ] = None  # fmt: skip
    batch: Batch = None
    seq_len: SeqLen = None
    dtype: Annotated[
        str | None,
        Opt(
            "--dtype", accepts=DTYPE, group=COMPUTE,
            daily=True, completes="dtypes",
            help="Format of weights and inputs: fp32, fp64, bf16 or fp16. [default: as released, else fp32]",
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None,
        Opt(
            "--seed", accepts=NATURAL, group=COMPUTE,
            help="With onnx: seed for random weights if SOURCE has none. [default: 0]",
        ),
    ] = None  # fmt: skip


def exported(question: ExportQuestion) -> Export:
    """Export the block of the question in the requested form."""
    form = require_form(question.form or "torch")
    part: Part = one_of(option("part"), question.part or FORMS[form].part, Part)
    if form != "onnx" and (question.seed is not None or question.large):
        raise FFNError(
            f"{option('form', form)} writes no weights",
            f"give {option('seed')} and {option('large')} with {option('form', 'onnx')}",
        )
    with package_errors(), question.limited():
        resolved = load(question.source, question.dimensions, question.seed or 0)
        require_runnable(resolved)
        tokens = token_counts(question.tokens, question.batch, question.seq_len)
        problem = problem_of(resolved, part, question.layer, question.dtype, tokens)
        if form == "onnx":
            return _onnx(resolved, problem, question)
    files, notes = _WRITERS[form](problem)
    return Export(form, problem, files, (*resolved.notes, *notes))


export = call(ExportQuestion, exported, "export")


def require_form(form: str) -> str:
    """Return `form` if it is the name of a form; raise FFNError otherwise."""
    if form not in FORMS:
        hint = did_you_mean(form, [*FORMS], f"use {', '.join(FORMS)}")
        raise FFNError(f"{option('form')}: unknown form {shown(form)}", hint)
    return form


def _torch(problem: ExportProblem) -> tuple[dict[str, str], tuple[str, ...]]:
    from ffncli.run.export.torch_module import torch_file

    return {"block.py": torch_file(problem)}, ()


def _flashinfer(problem: ExportProblem) -> tuple[dict[str, str], tuple[str, ...]]:
    from ffncli.run.export.flashinfer import notes, trace_files

    return trace_files(problem), notes(problem)


def _latex(problem: ExportProblem) -> tuple[dict[str, str], tuple[str, ...]]:
    from ffncli.run.export.latex import latex_text

    return {"block.tex": latex_text(problem)}, ()


_WRITERS: Mapping[str, Callable[[ExportProblem], tuple[dict[str, str], tuple[str, ...]]]] = {
    "torch": _torch, "flashinfer-trace": _flashinfer, "latex": _latex,
}  # fmt: skip


def _onnx(resolved: Resolved, problem: ExportProblem, question: ExportQuestion) -> Export:
    """Export an ONNX model with the weights of the source, or with random weights if the source has none."""
    from ffncli.run.engine.prepare import prepare
    from ffncli.run.export.onnx_model import check_exportable, onnx_bytes

    check_exportable(problem, question.large)
    name = f"{problem.layer.stack}.{problem.layer.index}"
    ready = prepare(resolved, problem.layer, leading=(1,), dtype=problem.dtype.name, seed=question.seed)
    tokens = [one.tokens for one in problem.workloads]
    exact = problem_of(resolved, problem.part, name, problem.dtype.name, tokens, ready.steps)
    weights = {name: ready.weights[name] for name in parameters(exact.steps)}
    raw = onnx_bytes(exact, weights, ready.origin)
    return Export("onnx", exact, {"block.onnx": raw}, (*resolved.notes, f"with {ready.origin}", *ready.notes))
