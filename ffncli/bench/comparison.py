"""`ffncli.compare`: run what `ffn compare` runs on two checkpoints, traces, or results of several files each."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ffncli.bench.judge.compare import ResultComparison, Rules
from ffncli.bench.judge.compare import compare as compare_rows
from ffncli.bench.judge.history import History, read_history
from ffncli.bench.results.csv_file import is_results, read_rows
from ffncli.block.activations import known_names
from ffncli.errors import FFNError, option, shown
from ffncli.models.files.checkpoint import PICKLED
from ffncli.models.files.headers import MOST_HEADER_BYTES
from ffncli.options import conflicts
from ffncli.options.accept import FROM_ZERO, PATH, PATHS, PROMPT, TEXT, listed, percentage
from ffncli.options.conflicts import Conflict
from ffncli.options.opt import Opt, Options, call, chosen
from ffncli.options.shared import Path as FilePath
from ffncli.run.corpus.question import PROMPTS, recorded_routes
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.checkpoints.results import CheckpointComparison
    from ffncli.run.corpus.compare_routes import RoutesComparison
    from ffncli.run.saved.compare import TraceComparison

Kind = Literal["results", "a saved trace", "a checkpoint", "routes"]
_results = partial(Opt, group="Results of ffn bench", daily=True)
_checkpoints = partial(Opt, group="Checkpoints", daily=True)
_KINDS: Mapping[str, str] = {  # of the options that are not for every kind
    "fail_if_slower": "results", "margin": "results", "allow_mismatch": "results", "strict": "results",
    "with_": "a checkpoint", "expect": "a checkpoint", "exact_spectra": "a checkpoint", "prompt": "a checkpoint",
    "prompts": "a checkpoint",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompareQuestion(Options):
    """Compare two checkpoints, two results of `ffn bench` (each side is one or more CSV files), two saved
    traces, or two routes.

    A checkpoint is a model's directory, a .safetensors, .gguf or .pt file, `hf://org/name`, or `BASE+ADAPTER` with a
    LoRA of PEFT; an adapter alone is merged into `base`. `findings` says what was done to it, the likeliest first, with
    numbers as evidence; `rows` has a record for each parameter. `with_` names a third checkpoint, of a merge; `expect`
    a finding, so that `passed` says whether it is the first one. Without it, `passed` says whether each parameter's
    relative change is at most `tolerance` (default 0). `prompt` and `prompts` also run both models.

    For results, each ratio is the time of `new` divided by the time of `base`, with a 95 % interval. `margin` (0.02: up
    to 2 % counts as the same) and `fail_if_slower` are fractions. A regression does not raise an error; it is listed in
    `regressions`. With `history`, which names many results, as in 'results/*.csv', the answer has a line for each
    machine, case and kernel, with its times and its changes. For traces, `first` is the first step whose relative error
    exceeds `tolerance` (which defaults by dtype). For routes, `rows` has a record for each layer: how many choices
    differ, at how many tokens, and by what margin. All comparisons have `frame()`, a DataFrame of the rows.

    Raises FFNError for other files, for results from different machines (unless `allow_mismatch` is set), and for
    traces and checkpoints of different blocks.
    """

    base: Annotated[
        FilePath | Iterable[FilePath] | None,
        Opt(
            metavar="BASE",
            accepts=PATHS,
            help="A checkpoint (directory, file, hf://org/name, BASE+ADAPTER), results of ffn bench"
            " (one or several: a.csv,b.csv), a saved trace, or routes of tokens to experts.",
        ),
    ] = field(default=None, kw_only=False)
    new: Annotated[
        FilePath | Iterable[FilePath] | None,
        Opt(metavar="NEW", accepts=PATHS, help="The same kind of file, to compare with BASE. Optional with --plot."),
    ] = field(default=None, kw_only=False)
    history: Annotated[
        FilePath | Iterable[FilePath] | None,
        _results(
            "--history", metavar="FILES", accepts=PATHS,
            help="Show each kernel's time over all results that FILES ('results/*.csv') match, and where it changed.",
        ),
    ] = None  # fmt: skip
    fail_if_slower: Annotated[
        float | None,
        _results(
            "--fail-if-slower",
            metavar="X%",
            accepts=percentage(zero=True),
            help="Exit 1 if a kernel is certainly more than X% slower, or no longer correct.",
        ),
    ] = None
    margin: Annotated[
        float | None,
        _results(
            "--margin", metavar="X%", accepts=percentage(zero=True),
            help="Differences up to X% count as the same. [default: 2%]",
        ),
    ] = None  # fmt: skip
    allow_mismatch: Annotated[
        bool,
        _results(
            "--allow-mismatch",
            daily=False,
            help="Compare results from different machines or versions; the gate is then off.",
        ),
    ] = False
    tolerance: Annotated[
        float | None,
        Opt(
            "--tolerance", accepts=FROM_ZERO, group="Saved traces and checkpoints", daily=True,
            help="Largest relative error, or change of a parameter, allowed. [default: of traces by dtype, such as 1e-5"
            " for fp32 and 1e-2 for bf16; of checkpoints 0]",
        ),
    ] = None  # fmt: skip
    expect: Annotated[
        str | None,
        _checkpoints(
            "--expect", metavar="FINDING", completes="findings", accepts=TEXT,
            help="Exit 0 if this is what was done, else 1: same, rounding:q4_0, lora, finetuned, scaled, ...",
        ),
    ] = None  # fmt: skip
    with_: Annotated[
        FilePath | None,
        _checkpoints("--with", metavar="C", accepts=PATH, help="A third checkpoint: NEW may be a merge of BASE and C."),
    ] = None
    prompt: Annotated[
        str | Sequence[str] | None,
        _checkpoints("-p", "--prompt", accepts=PROMPT, help="Also run both models on TEXT, and compare activations."),
    ] = None
    prompts: Annotated[
        FilePath | Sequence[str] | None,
        _checkpoints("--prompts", metavar="FILE|-", accepts=PROMPTS, help="The same on the first lines of FILE."),
    ] = None
    exact_spectra: Annotated[
        bool,
        _checkpoints(
            "--exact-spectra", daily=False, help="Compute spectra by svdvals of the whole matrix, which needs memory."
        ),
    ] = False

    @property
    def rules(self) -> Rules:
        """The rules for comparing results: which rows fail, and which differences count as the same."""
        return Rules(Rules.margin if self.margin is None else self.margin, self.fail_if_slower, self.allow_mismatch)


@package_errors()
def compared(
    question: CompareQuestion,
) -> ResultComparison | TraceComparison | RoutesComparison | CheckpointComparison | History:
    """Compare the two sides of a question, or all results of its history."""
    if question.history is not None:
        return history_of(question)
    kind = kind_of(question, chosen(question))
    if kind == "a checkpoint":
        return compared_checkpoints(question)
    base, new = sides(question)
    if kind == "routes":
        from ffncli.run.corpus.compare_routes import compare_routes
        from ffncli.run.corpus.routes import read_routes

        return compare_routes(read_routes(base[0]), read_routes(new[0]))
    if kind == "results":
        return compare_results(base, new, question.rules)
    from ffncli.run.saved.compare import compare as compare_traces
    from ffncli.run.saved.saved import open_saved

    return compare_traces(open_saved(base[0]), open_saved(new[0]), question.tolerance)


compare = call(CompareQuestion, compared, "compare")


HISTORY = (Conflict("history", allows="fail_if_slower", why="it compares all files of a history"),)


def history_of(question: CompareQuestion) -> History:
    """Return the history of a question. Raises FFNError for options that compare two sides."""
    conflicts.check(HISTORY, question)
    names = [name for text in listed(question.history) for name in ([text] if _is_file(text) else text.split(","))]
    return read_history(names, question.fail_if_slower)


def compared_checkpoints(question: CompareQuestion, **shown_by: Any) -> CheckpointComparison:
    """Compare the checkpoints of a question; `shown_by` are the functions that show notes and progress."""
    from ffncli.run.checkpoints.call import compare_sources

    base, new = (str(listed(side)[0]) for side in (question.base, question.new))
    third = None if question.with_ is None else str(question.with_)
    return compare_sources(
        base, new, third, question.tolerance, question.expect, question.exact_spectra, question.prompt,
        question.prompts, **shown_by,
    )  # fmt: skip


# --- what kind of files -----------------------------------------------------------------------------------------------


def kind_of(question: CompareQuestion, options: Collection[str]) -> Kind:
    """Return what both sides are. Raises FFNError for two kinds, and if `options` has one for another kind."""
    if question.base is None:
        raise FFNError(f"{option('base')} is missing", f"give two files, or {option('history')} with many results")
    if question.new is None:
        hint = "give two checkpoints, results or traces, or one result of ffn bench with --plot"
        raise FFNError(f"{option('new')} is missing", hint)
    names = [listed(question.base), listed(question.new)]
    both = [len(side) == 1 and _is_checkpoint(side[0]) for side in names]
    kinds: list[Kind] = ["a checkpoint" if one else "a saved trace" for one in both]
    for at, side in enumerate(names):
        if len(side) == 1 and recorded_routes(str(side[0]), traces=False) is not None:
            kinds[at] = "routes"
        elif not both[at] and _all_results(paths_of(side, names)):
            kinds[at] = "results"
    if kinds[0] != kinds[1]:
        words = [shown(",".join(map(str, side)), 200) for side in names]
        verbs = ["is" if kind == "a checkpoint" else "holds" for kind in kinds]
        what = f"{words[0]} {verbs[0]} {kinds[0]}, {words[1]} {verbs[1]} {kinds[1]}"
        raise FFNError(what, "give two files of the same kind")
    if kinds[0] == "results" and "tolerance" in options:
        hint = f"for results, {option('margin')} sets what counts as the same"
        raise FFNError(f"{option('tolerance')} is for saved traces and checkpoints", hint)
    if kinds[0] == "routes" and (wrong := [name for name in options if name not in ("base", "new")]):
        raise FFNError(f"{option(wrong[0])} is not for routes", "leave it out")
    other = next((name for name in options if _KINDS.get(name, kinds[0]) != kinds[0]), None)
    if other is not None:
        of = "results of ffn bench" if _KINDS[other] == "results" else "checkpoints"
        ours = {"results": "results", "a saved trace": "saved traces", "a checkpoint": "checkpoints"}[kinds[0]]
        raise FFNError(f"{option(other)} is for {of}", f"these are {ours}")
    return kinds[0]


def _is_checkpoint(name: str) -> bool:
    """Return whether a name is that of weights: a directory, an address, a file of tensors that no trace saved, or a
    checkpoint and an adapter."""
    path = Path(os.path.expanduser(name))
    if name[:5].lower() in ("hf://", "https", "http:") or os.path.isdir(path):
        return True
    if not _is_file(name):
        first = name.partition("+")[0]
        return first != name and _is_checkpoint(first)
    if path.suffix in (".gguf", *PICKLED):
        return True
    if path.suffix not in (".safetensors", ".json"):
        return False
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else MOST_HEADER_BYTES
        start = file.read(min(size, MOST_HEADER_BYTES) if path.suffix == ".safetensors" else 1 << 16)
    return b'"ffn_trace"' not in start


def _all_results(paths: Sequence[Path]) -> bool:
    """Return whether all files are results. Raises FFNError if only some are."""
    are = [is_results(path) for path in paths]
    if not all(are) and len(paths) > 1:
        name = str(paths[are.index(False)])
        raise FFNError(f"{shown(name, 200)} is not a CSV", "only results may have several files per side")
    return all(are)


def sides(question: CompareQuestion) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files of BASE and of NEW. Raises FFNError for names that are not files."""
    names = (listed(question.base), listed(question.new))
    return paths_of(names[0], names), paths_of(names[1], names)


def paths_of(side: Sequence[str], both: Sequence[Sequence[str]] = ()) -> tuple[Path, ...]:
    """Return the files of one side. Each entry of `side` is a name or a comma-separated list of names. Raises FFNError
    for names that are not files.

    If the names on `both` sides are all activations, the error suggests the command that compares activations.
    """
    names = [name for text in side for name in ([text] if _is_file(text) else text.split(","))]
    missing = [name for name in names if not _is_file(name)]
    if missing and both and all(name.lower().replace("-", "_") in known_names() for side in both for name in side):
        words = " ".join(name for side in both for name in side)
        raise FFNError("ffn compare compares files", f"did you mean `ffn activations {words}`?")
    if missing:
        what = "is not a file" if missing[0] and os.path.exists(os.path.expanduser(missing[0])) else "does not exist"
        hint = "make results with ffn bench --save FILE.csv, a trace with ffn trace --save FILE"
        raise FFNError(f"{shown(missing[0], 200)} {what}", hint)
    if not names:
        raise FFNError("one side has no files", "give one file, or several results")
    return tuple(Path(os.path.expanduser(name)) for name in names)


def _is_file(name: str) -> bool:
    return bool(name) and os.path.isfile(os.path.expanduser(name))


def compare_results(base: Sequence[Path], new: Sequence[Path], rules: Rules) -> ResultComparison:
    """Compare the rows of the files. Raises FFNError for files without rows."""
    rows = [[row for path in paths for row in read_rows(path)] for paths in (base, new)]
    for paths, side in zip((base, new), rows, strict=True):
        if not side:
            raise FFNError(f"{shown(','.join(map(str, paths)), 200)} holds no rows", "the run did not finish any case")
    return compare_rows(rows[0], rows[1], rules)
