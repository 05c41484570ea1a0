"""`ffncli.verify`, the call behind `ffn verify`; its arguments have the names of the command's options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ffncli.block.dtypes import dtype
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError, option, shown_path
from ffncli.models.counting.parallel import check_ranks
from ffncli.models.dimensions import Dimensions, leading_axes, with_dimensions
from ffncli.models.examples import notebook
from ffncli.models.model import Group, Resolved
from ffncli.models.source import is_user_module
from ffncli.options.accept import listed
from ffncli.options.opt import call
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.ranks.environment import RANK_TIMEOUT, device_of, require_ranks, split_asked_for, torchrun
from ffncli.run.user.load import load
from ffncli.run.verify.question import VerifyQuestion, kernels_and_checks
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.user.options import Source
    from ffncli.run.verify.checks.case import SplitRun, UserModule
    from ffncli.run.verify.verify import Verdict


def verdict_of(question: VerifyQuestion) -> Verdict:
    """Run the verification; a failed check is a row of the verdict, not an error."""
    with package_errors(), question.limited():
        return _verdict(question)


verify = call(VerifyQuestion, verdict_of, "verify")


def _verdict(question: VerifyQuestion) -> Verdict:
    kernels, names = kernels_and_checks(question)
    counts = listed(question.tokens)
    if len(counts) > 1 and not question.referee:
        raise FFNError(
            f"{option('tokens')} must be one number, got {len(counts)}", f"only {option('referee')} tries several"
        )
    leading = leading_axes(counts[0] if counts else None, question.batch, question.seq_len)
    ranks = _split(question, names)
    with sleep_while_waiting():  # a user's module imports torch
        resolved, user_module = _block(question)
        against = None if question.against is None else _reference(question.against, resolved, question.seed or 0)
        _require_split(resolved, question.layer, ranks)

    # The code below needs torch; every error that can be raised without torch has already been raised.
    set_threads(question.threads)
    from ffncli.run.verify.verify import verify_layer

    split, device = _split_run(question, ranks)
    if question.referee:
        from ffncli.run.user.hosted import TimeLimits
        from ffncli.run.verify.referee import certify

        times = {"load": question.load_time, "call": question.call_time}
        limits = TimeLimits(**{name: seconds for name, seconds in times.items() if seconds is not None})
        return certify(
            resolved, kernels[0], question.layer, dtype=question.dtype, device=device, seed=question.seed,
            tolerance=question.tolerance, batch_invariant=question.batch_invariant, passes=question.passes,
            threads=question.threads, limits=limits, isolate=question.isolate,
            tokens=counts or (() if leading is None else (prod(leading),)),
        )  # fmt: skip
    return verify_layer(
        resolved, question.layer, input=question.input, leading=leading, dtype=question.dtype, device=device,
        seed=question.seed, checks=names, kernels=kernels, tolerance=question.tolerance, user_module=user_module,
        against=against, split=split,
    )  # fmt: skip


def _block(question: VerifyQuestion) -> tuple[Resolved, UserModule | None]:
    """Return the block to verify and, if the block was identified from a user's module, that module."""
    source, dimensions = question.source, question.dimensions
    assert not isinstance(source, os.PathLike)  # the question's converter has turned paths into strings
    # The default is the notebook's block, because the check of train mode needs its dropout.
    if source is None and question.d_model is None:
        resolved = with_dimensions(notebook(), dimensions)
        return replace(resolved, model=replace(resolved.model, name="a small built-in block")), None
    if source is None or isinstance(source, Resolved) or (isinstance(source, str) and not is_user_module(source)):
        resolved = load(source, dimensions)
        _require_tensors(resolved)
        return resolved, None
    from ffncli.run.user.module import load_module, load_object
    from ffncli.run.verify.checks.case import UserModule

    seed = question.seed or 0
    loaded = load_module(source, dimensions, seed) if isinstance(source, str) else load_object(source, dimensions)
    return loaded.model, UserModule(loaded.module, loaded.runner)


def _require_tensors(resolved: Resolved) -> None:
    """Raise FFNError for a directory without tensors, because random weights would prove nothing about the directory's
    model.

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


def _reference(against: Source, resolved: Resolved, seed: int) -> Resolved:
    """Return the model to compare with; a user's module is built with the d_model of the model under test."""
    named = isinstance(against, str) and is_user_module(against)
    return load(against, Dimensions(d_model=resolved.model.main.spec.d_model if named else None), seed)


# --- over several ranks -----------------------------------------------------------------------------------------------


def _split(question: VerifyQuestion, checks: Sequence[str] | None) -> Ranks | None:
    """Return the split that the question requests; None for one process. `checks` are the checks to run, None for all.

    Raises FFNError for contradictory options, and RanksNeeded for missing ranks, before any Python file of the user is
    loaded.
    """
    ranks = split_asked_for(question.tp, question.ep)
    if ranks is None:
        if question.rank_timeout is not None or "ranks" in (checks or ()):
            what = option("rank_timeout") if question.rank_timeout is not None else option("check", "ranks")
            raise FFNError(
                f"{what} needs several processes", f"add {option('tp')} or {option('ep')}, or start it with torchrun"
            )
        return None
    if checks and "ranks" not in checks:
        what = option("check", ",".join(checks))
        raise FFNError(f"{what} runs nothing over several ranks", f"add ranks to {option('check')}")
    if question.referee:
        raise FFNError(
            f"{option('referee')} judges a kernel in one process",
            f"leave out {option('tp')} and {option('ep')}, and torchrun",
        )
    if isinstance(question.input, str) and question.input == "-":
        raise FFNError(f"{option('input', '-')}: several ranks cannot read one standard input", "write it to a file")
    if isinstance(question.source, str) and is_user_module(question.source):
        require_ranks(ranks)
    return ranks


def _require_split(model: Resolved, layer: int | str | None, ranks: Ranks | None) -> None:
    """Reject a split that the layer does not allow, and suggest the nearest possible rank counts; raise RanksNeeded if
    the split needs several processes. Weights are counted as floats, whatever their format in the file."""
    if ranks is not None:
        chosen = model.model.layer(layer)
        alone = replace(model.model, groups=(Group(chosen.stack, (chosen.index,), chosen.spec),))
        check_ranks(alone, ranks, dtype("fp32"))
        require_ranks(ranks)


def _split_run(question: VerifyQuestion, ranks: Ranks | None) -> tuple[SplitRun | None, str]:
    """Return (the run over several ranks, or None in a single process; the device to use)."""
    from ffncli.run.verify.checks.case import SplitRun

    place = torchrun()
    if ranks is None or place is None:
        return None, question.device
    patience = question.rank_timeout or RANK_TIMEOUT
    return SplitRun(ranks, place.rank, patience), device_of(place, question.device)
