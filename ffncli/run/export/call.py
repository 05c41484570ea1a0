"""`ffncli.export`: a block in the form that another program loads, as `ffn export` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ffncli.block.recipe import one_of
from ffncli.block.steps import parameters
from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError, did_you_mean, shown, shown_path
from ffncli.models.model import Resolved
from ffncli.models.runnable import require_runnable
from ffncli.run.export.problem import ExportProblem, Part, problem_of
from ffncli.run.user.arguments import DimensionNames, Source, converted
from ffncli.run.user.load import load
from ffncli.system.files import check_writable, written_whole
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ExportForm:
    """One way to write a block: the suffix of its file, or none where it is a folder; whether it is text."""

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
class Export:
    """A block in another form: path → contents of its files, of which all but `flashinfer-trace` have one."""

    form: str
    problem: ExportProblem
    files: Mapping[str, str | bytes]
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The file's text. Raises FFNError for a form of several files, or of bytes."""
        contents = next(iter(self.files.values()))
        if len(self.files) > 1 or isinstance(contents, bytes):
            raise FFNError(f"--as {self.form} is not a text", "write it: -o PATH")
        return contents

    def write(self, path: str | Path, force: bool = False) -> tuple[str, ...]:
        """Write it to a file, or to a folder, and return the paths. Existing files are replaced only with `force`.

        Raises FFNError for those, and if the system refuses (exit 3); a file is written whole or not at all.
        """
        target = Path(path)
        folder = not FORMS[self.form].suffix
        paths = {target / name if folder else target: contents for name, contents in self.files.items()}
        if not folder:
            check_writable(str(target), force, "-o")
        elif not force and (there := next((one for one in paths if one.exists()), None)):
            raise FFNError(f"{shown_path(there)} exists already", "choose another -o FOLDER, or give --force")
        for one, contents in paths.items():
            if folder:
                _make_folder(one.parent)
            with written_whole(one) as file:
                file.write(contents if isinstance(contents, bytes) else contents.encode())
        return tuple(map(str, paths))


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FFNError(f"cannot write {shown_path(path)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None


def export(
    source: Source = None,
    form: str = "torch",
    part: str | None = None,
    layer: int | str | None = None,
    tokens: int | Sequence[int] | None = None,
    dtype: str | None = None,
    seed: int | None = None,
    large: bool = False,
    **dimensions: Unpack[DimensionNames],
) -> Export:
    """A block as a torch module, a FlashInfer-Bench problem, an ONNX model or LaTeX.

    >>> import ffncli
    >>> ffncli.export("llama-2-7b", form="latex", tokens=1).text.splitlines()[0]
    '% llama-2-7b, decoder layer 0: d_model 4096, d_ff 11008, silu, gated'

    `form` is that of `ffn export --as`; `part` is `block`, with its norms and residual, or `ffn` alone (the default of
    flashinfer-trace, and what `ffn bench` times). `tokens` are the workloads. An ONNX model has the source's weights,
    or random ones of `seed`; `large` lets it have more than 200 MB. torch is imported for `onnx`, and for a source in a
    Python file. Raises FFNError for whatever the command line refuses, and for an argument of the wrong type.
    """
    options = converted(locals(), "export")
    form = require_form(options["form"])
    chosen: Part = one_of("--part", options["part"] or FORMS[form].part, Part)
    if form != "onnx" and (options["seed"] is not None or options["large"]):
        raise FFNError(f"--as {form} writes no weights", "give --seed and --large with --as onnx")
    with package_errors():
        resolved = load(options["source"], options["dimensions"], options["seed"] or 0)
        require_runnable(resolved)
        problem = problem_of(resolved, chosen, options["layer"], options["dtype"], options["tokens"] or ())
        if form == "onnx":
            return _onnx(resolved, problem, options)
    files, notes = _WRITERS[form](problem)
    return Export(form, problem, files, (*resolved.notes, *notes))


def require_form(form: str | None) -> str:
    """The form, if there is one of that name, else FFNError."""
    if form is None:
        raise FFNError("Missing option '--as'", f"name a form: {', '.join(FORMS)}")
    if form not in FORMS:
        raise FFNError(f"--as: unknown form {shown(form)}", did_you_mean(form, [*FORMS], f"use {', '.join(FORMS)}"))
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


def _onnx(resolved: Resolved, problem: ExportProblem, options: Mapping[str, Any]) -> Export:
    """With the weights of the source, else with random ones."""
    from ffncli.run.engine.prepare import LayerRequest, prepare
    from ffncli.run.export.onnx_model import check_exportable, onnx_bytes

    check_exportable(problem, options["large"])
    name = f"{problem.layer.stack}.{problem.layer.index}"
    ready = prepare(resolved, LayerRequest(name, leading=(1,), dtype=problem.dtype.name, seed=options["seed"]))
    tokens = [one.tokens for one in problem.workloads]
    exact = problem_of(resolved, problem.part, name, problem.dtype.name, tokens, ready.steps)
    weights = {name: ready.weights[name] for name in parameters(exact.steps)}
    raw = onnx_bytes(exact, weights, ready.origin)
    return Export("onnx", exact, {"block.onnx": raw}, (*resolved.notes, f"with {ready.origin}", *ready.notes))
