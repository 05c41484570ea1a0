"""The options of `ffn verify`, and its checks with their statements. The help imports this file, so it must not import
torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, get_args

from ffncli.errors import FFNError, option, shown
from ffncli.kernels.choice import KernelChoice, choices
from ffncli.models.dimensions import Dimensions
from ffncli.models.source import is_user_module
from ffncli.options import shared
from ffncli.options.accept import COUNTS, FROM_ZERO, SECONDS, TEXT, TEXTS, Accepts, choice, several
from ffncli.options.conflicts import Conflict, check
from ffncli.options.opt import INPUT, Opt
from ffncli.options.shared import Pass
from ffncli.run.user.options import Against, Input, ModelSource
from ffncli.run.user.time_limit import LoadOptions

CHECK_STATEMENTS: Mapping[str, str] = {
    "finite": "weights and input have no NaN and no Inf",
    "module": "step by step = nn.Module, in eval and in train mode",
    "convolution": "Linear = Conv1d with kernel 1",
    "tokens": "every token is computed independently of the others",
    "collapse": "without its activation the block is one matrix (float64)",
    "nonlinearity": "f(a + b) - f(a) - f(b) + f(0) = 0 if linear (float64)",
    "zero": "a zero input gives zero if there are no biases",
    "shards": "the sum over the shards of n ranks is the whole block",
    "ranks": "the block over the processes of --tp and --ep = the whole",
    "fused": "gate and up packed in one matrix = separate matrices",
    "kernels": "every kernel = the reference in float64",
    "layout": "how the file's tensors were read, and the effect of a misreading",
}

REFEREE_STATEMENTS: Mapping[str, str] = {
    "shapes": "matches float64 for any number of tokens",
    "repeats": "the same input gives the same bits",
    "state": "no call changes the output of another",
    "special": "matches float64 for zeros, subnormals, large numbers",
    "isolation": "NaN stays NaN, and NaN or Inf changes no other token",
    "batch": "a token's bits are the same alone and in every batch",
    "precision": "the error matches the dtype's own arithmetic",
    "gradients": "every gradient matches float64",
    "gradient-class": "their errors match the dtype's own arithmetic",
    "gradient-batch": "a token's dx has the same bits alone and in a batch",
    "threads": "no call leaves a thread running",
    "untouched": "neither the input nor the weights are changed",
    "replay": "an input seen before takes as much work as a new one",
    "drawn": "matches float64 at drawn token counts and scales",
    "calls": "the same bits in a drawn number of calls",
    "elsewhere": "is as right in a process unlike the referee's",
    "weights": "matches float64 for other weights, of other scales",
    "widths": "matches float64 at widths not divisible by 8",
    "experts": "the order of the experts does not matter",
}

_what, _referee = partial(Opt, group="What to verify", daily=True), partial(Opt, group="Referee")
_TOKENS = Opt(
    "-n", "--tokens", accepts=COUNTS, group=INPUT, daily=True, help="Number of tokens; --referee tries several."
)
_CHECKS = Accepts(
    "names of checks, such as 'module'",
    lambda value: tuple(name.strip() for text in TEXTS.convert(value) for name in text.split(",")),
    metavar="NAME,...", repeat=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VerifyQuestion(Dimensions, LoadOptions):
    """Prove that different ways of computing a block agree, as `ffn verify` does; a failed check is a row with `passed`
    False.

    >>> import ffncli
    >>> verdict = ffncli.verify("64x256:gelu", check=["module", "tokens"])
    >>> verdict.failed, verdict.rows[0].subject
    ((), 'torch.nn, eval')

    The arguments have the names and meanings of the command line's options (`ffn verify --help`); `source`, the
    dimensions and `threads` are the same as in `ffncli.trace`. If `source` is a module in a Python file
    (`my.py:Class`), that module is run and compared too. With `referee`, the verdict is about one kernel and includes a
    `certificate`. Times are in seconds, or strings such as "2m". With `tp` or `ep`, the block is also split over the
    processes started by torchrun, each of which must make this call; the rows are in the verdict of rank 0.
    """

    source: ModelSource = field(default=None, kw_only=False)
    check: Annotated[
        str | Iterable[str],
        _what(
            "--check", accepts=_CHECKS, completes="checks",
            help=f"Run only these checks: {', '.join(CHECK_STATEMENTS)}. [default: all]",
        ),
    ] = ()  # fmt: skip
    kernel: Annotated[
        str | Iterable[str],
        _what(
            "-k", "--kernel", metavar="NAME,...", completes="kernels",
            accepts=several(TEXT, "names such as 'eager' or 'mine.py:mlp'", least=0),
            help="Kernels to check: eager, packed, ..., all, or your [label=]file.py:name (runs that file);"
            " main:file.py:name is the file at a git commit.",
        ),
    ] = ()  # fmt: skip
    against: Against = None
    tolerance: Annotated[
        float | None,
        _what("--tolerance", accepts=FROM_ZERO, help="Largest relative error that passes. [default: by dtype]"),
    ] = None
    layer: shared.Layer = None
    input: Input = None
    device: shared.Device = "cpu"
    seed: shared.Seed = None
    threads: shared.Threads = None
    dtype: shared.Dtype = None
    tokens: Annotated[shared.Counts | None, _TOKENS] = None
    batch: shared.Batch = None
    seq_len: shared.SeqLen = None
    referee: Annotated[
        bool,
        _referee(
            "--referee", daily=True, help="Judge one kernel in a separate process; -o FILE.json writes its certificate."
        ),
    ] = False
    batch_invariant: Annotated[
        bool, _referee("--batch-invariant", help="Require the same bits for a token alone and in any batch.")
    ] = False
    passes: Annotated[
        Pass | None,
        _referee(
            "--pass",
            accepts=choice(*get_args(Pass)),
            help="forward, or forward+backward to require gradients. [default: gradients if the output has them]",
        ),
    ] = None
    isolate: Annotated[
        bool,
        _referee(
            "--isolate",
            help="Run the kernel in a process that can write only to a folder of its own and cannot signal others"
            " (Linux).",
        ),
    ] = False
    call_time: Annotated[
        float | None,
        _referee(
            "--call-time", accepts=SECONDS,
            help="Time limit for one call of the kernel, compiling included. [default: 1m]",
        ),
    ] = None  # fmt: skip
    tp: shared.TensorParallel = None
    ep: shared.ExpertParallel = None
    rank_timeout: shared.RankTimeout = None


CONFLICTS = (
    Conflict(
        "referee",
        contradicts="check against input",
        why="the referee runs its own checks on random inputs",
    ),
    Conflict("batch_invariant passes isolate call_time", needs="referee", why="it applies only to the referee"),
)


def kernels_and_checks(question: VerifyQuestion) -> tuple[tuple[KernelChoice, ...], tuple[str, ...] | None]:
    """Return (kernels, names of the checks or None for all); raise FFNError if the options contradict each other."""
    check(CONFLICTS, question)
    names, kernels = tuple(question.check) or None, choices(question.kernel)
    if question.referee:
        _require_one_kernel(question, kernels)
    if kernels and names and "kernels" not in names:
        raise FFNError(
            f"{option('kernel')} contradicts {option('check', ','.join(names))}",
            f"no kernel would be checked: add kernels to {option('check')}",
        )
    return kernels, names


def _require_one_kernel(question: VerifyQuestion, kernels: tuple[KernelChoice, ...]) -> None:
    """Raise FFNError unless there is exactly one kernel to judge, and the block is not a user's own module."""
    if len(kernels) != 1:
        raise FFNError(
            f"{option('referee')} judges one kernel, not {len(kernels)}", f"name it: {option('kernel', 'mine.py:mlp')}"
        )
    if kernels[0].factor is not None:
        raise FFNError(
            f"{option('kernel')}: {shown(kernels[0].text)} can only be timed", f"judge {shown(kernels[0].kernel)}"
        )
    source = question.source
    if isinstance(source, str) and is_user_module(source):
        raise FFNError(
            f"{option('referee')} runs no Python file as SOURCE, got {shown(source)}", "give dimensions or a checkpoint"
        )
