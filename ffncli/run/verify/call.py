"""`ffncli.verify`: what `ffn verify` does, as a call with the command line's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from ffncli.errors import FFNError, shown, shown_path
from ffncli.kernels.choice import KernelChoice, choices
from ffncli.models.dimensions import Dimensions, leading_axes, with_dimensions
from ffncli.models.examples import Example, notebook
from ffncli.models.model import Resolved
from ffncli.models.source import is_user_module
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.user.arguments import DimensionNames, Input, Number, Source, converted
from ffncli.run.user.load import load
from ffncli.run.verify.split import require_split, split_of, split_run
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from torch import nn

    from ffncli.run.engine.prepare import LayerRequest
    from ffncli.run.verify.checks.case import UserModule
    from ffncli.run.verify.verify import Verdict


@package_errors()
def verify(
    source: Source = None,
    *,
    layer: Number | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    input: Input = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    threads: int | None = None,
    check: str | Iterable[str] = (),
    kernel: str | Iterable[str] = (),
    against: Source = None,
    tolerance: float | None = None,
    referee: bool = False,
    batch_invariant: bool = False,
    load_time: float | None = None,
    call_time: float | None = None,
    tp: int | None = None,
    ep: int | None = None,
    rank_timeout: float | None = None,
    **dimensions: Unpack[DimensionNames],
) -> Verdict:
    """Prove that ways of computing a block agree, as `ffn verify` does; a failed check is a row that did not pass.

    >>> import ffncli
    >>> verdict = ffncli.verify("64x256:gelu", check=["module", "tokens"])
    >>> verdict.failed, verdict.rows[0].subject
    ((), 'torch.nn, eval')

    The arguments are the command line's options by their names, and mean the same (`ffn verify --help`); `source`, the
    dimensions and `threads` are those of `ffncli.trace`. Where `source` is a module in a Python file, `my.py:Class`,
    that module is run and compared too. With `referee` the verdict is on the one kernel, and has a `certificate`; times
    are in seconds. With `tp` and `ep` the block also runs over the processes that torchrun has started, each of which
    makes this call; rank 0's verdict has the rows. Raises FFNError for what the command line refuses and other types.
    """
    options = converted(locals(), "verify")
    _require_referee(options)
    names, compared = _names(options["check"], options["kernel"]), choices(options["kernel"])
    leading = leading_axes(tokens, batch, seq_len)
    ranks = split_of(options, names)
    example = notebook() if source is None and options["dimensions"].d_model is None else None
    with sleep_while_waiting():  # a user's module imports torch
        resolved, user_module = _block(options, example)
        other = None if against is None else _reference(options["against"], resolved, options["seed"] or 0)
        require_split(resolved, options["layer"], ranks)

    # From here on torch is needed; every error that can be raised without it has been raised.
    set_threads(threads)
    from ffncli.run.engine.prepare import LayerRequest
    from ffncli.run.verify.verify import VerifyQuestion, verify_layer

    split, device = split_run(ranks, options)
    request = LayerRequest(options["layer"], options["input"], leading, options["dtype"], device, options["seed"])
    if options["referee"]:
        return _certified(resolved, compared[0], request, options, example)
    question = VerifyQuestion(request, names, compared, options["tolerance"], user_module, other, split)
    return verify_layer(resolved, question, example)


def _block(options: Mapping[str, Any], example: Example | None) -> tuple[Resolved, UserModule | None]:
    """The block to verify, and the user's module that it was identified from."""
    if example:
        return _built_in(with_dimensions(example.model, options["dimensions"])), None
    resolved, user_module = _model(options["source"], options["dimensions"], options["seed"] or 0)
    _require_tensors(resolved)
    return resolved, user_module


def _certified(
    resolved: Resolved, kernel: KernelChoice, request: LayerRequest, options: Mapping[str, Any], example: Any
) -> Verdict:
    """The referee's verdict on one kernel."""
    from ffncli.run.user.hosted import TimeLimits
    from ffncli.run.verify.referee import RefereeQuestion, certify

    given = {name: options[f"{name}_time"] for name in ("load", "call") if options[f"{name}_time"] is not None}
    limits, tolerance, invariant = TimeLimits(**given), options["tolerance"], options["batch_invariant"]
    return certify(
        resolved, RefereeQuestion(kernel, request, tolerance, invariant, options["threads"], limits), example
    )


def _built_in(resolved: Resolved) -> Resolved:
    """The block of a call without a source, by a plain name. It is the notebook's, whose dropout train mode needs."""
    return replace(resolved, model=replace(resolved.model, name="a small built-in block"))


def _require_referee(options: Mapping[str, Any]) -> None:
    """Raises FFNError for options that mean nothing to the referee, and for the referee's without it."""
    given = [name for name, value in options.items() if value not in (None, (), False)]
    if not options["referee"]:
        if only := next((name for name in ("batch_invariant", "load_time", "call_time") if name in given), None):
            raise FFNError(f"{_option(only)} needs --referee", "it is the referee's")
        return
    if other := next((n for n in ("check", "against", "input", "tokens", "batch", "seq_len") if n in given), None):
        raise FFNError(f"--referee contradicts {_option(other)}", "it runs its own checks, on inputs that it draws")
    kernels = choices(options["kernel"])
    if len(kernels) != 1:
        raise FFNError(f"--referee judges one kernel, not {len(kernels)}", "name it: --kernel mine.py:mlp")
    if kernels[0].factor is not None:
        raise FFNError(f"--kernel: {shown(kernels[0].text)} can only be timed", f"judge {shown(kernels[0].kernel)}")
    source = options["source"]
    if isinstance(source, str) and is_user_module(source):
        raise FFNError(
            f"--referee runs no Python file as SOURCE, got {shown(source)}", "give dimensions or a checkpoint"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _names(checks: Sequence[str], kernels: Sequence[str]) -> tuple[str, ...] | None:
    """The names of the checks to run, None for all. Raises FFNError for kernels without the check that runs them."""
    if not checks:
        return None
    names = tuple(name.strip() for text in checks for name in text.split(","))
    if kernels and "kernels" not in names:
        raise FFNError(
            f"--kernel contradicts --check {shown(','.join(names))}",
            "no kernel would be checked: add kernels to --check",
        )
    return names


def _model(
    source: str | Resolved | nn.Module | None, chosen: Dimensions, seed: int
) -> tuple[Resolved, UserModule | None]:
    """The model, and the user's module where the source is one."""
    if source is None or isinstance(source, Resolved) or (isinstance(source, str) and not is_user_module(source)):
        return load(source, chosen), None
    from ffncli.run.user.module import load_module, load_object
    from ffncli.run.verify.checks.case import UserModule

    loaded = load_module(source, chosen, seed) if isinstance(source, str) else load_object(source, chosen)
    return loaded.model, UserModule(loaded.module, loaded.runner)


def _reference(against: str | Resolved | nn.Module, resolved: Resolved, seed: int) -> Resolved:
    """The model to compare with; a user's module is built with the d_model of the model under test."""
    named = isinstance(against, str) and is_user_module(against)
    return load(against, Dimensions(d_model=str(resolved.model.main.spec.d_model) if named else None), seed)


def _require_tensors(resolved: Resolved) -> None:
    """Raises FFNError for a directory without tensors: random weights would prove nothing about the file's weights.

    A config.json given as the source is verified with random weights.
    """
    folder = resolved.location
    if resolved.checkpoint is not None or folder is None or resolved.source.endswith(".json"):
        return
    pickled = any(any(folder.glob(f"*{end}")) for end in (".bin", ".pt", ".pth"))
    there = "only pickled weights, which are never loaded" if pickled else "no safetensors"
    config = shown_path(folder / "config.json")
    raise FFNError(
        f"nothing to verify: {shown_path(folder)} has {there}", f"{config} can be verified with random weights"
    )
