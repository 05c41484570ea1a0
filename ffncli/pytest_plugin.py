"""The pytest plugin: fixtures that judge and time kernels in a project's own tests.

    def test_mlp(ffn_judge, ffn_faster):
        ffn_judge("4096x1536:swiglu", mlp, tokens=[1, 33], backward=True)
        ffn_faster("4096x1536:swiglu", mlp, "eager", by="3%")

Every pytest of an environment that has ffn imports this file, so it imports ffn and torch only inside functions.
PYTEST_DONT_REWRITE: it has no assertion for pytest to explain.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ffncli.bench.results.csv_file import ResultRows
    from ffncli.run.verify.verify import Verdict


@pytest.fixture(scope="session")
def ffn_judge() -> Callable[..., Verdict]:
    """Judge a kernel as `ffn verify --referee` does: ffn_judge("4096x1536:swiglu", mlp, tokens=[1, 33]).

    The kernel is a function or a class at the top of a Python file, "file.py:name", or the name of one of ffn's
    kernels. `tokens` are more token counts to try. `backward=True` demands gradients, False leaves them out.
    Other arguments are those of `ffncli.verify`. Returns the verdict; a refused kernel fails the test.
    """
    _require_torch()
    return _judge


@pytest.fixture(scope="session")
def ffn_faster() -> Callable[..., ResultRows]:
    """Require that a kernel is faster than another: ffn_faster("4096x1536:swiglu", new, old, by="3%").

    Kernels are given as for ffn_judge. `new` must take at least `by` less time than `old`, with its whole 95 %
    interval, and both must be right. Other arguments are those of `ffncli.benchmark`. Returns the rows.
    """
    _require_torch()
    return _faster


def _require_torch() -> None:
    """Skip the test, with the reason, if a package that kernels need is missing."""
    from ffncli.errors import FFNError
    from ffncli.system.packages import require_installed

    try:
        require_installed("torch", "numpy")
    except FFNError as error:
        pytest.skip(str(error))


def _judge(source: Any, kernel: object, *, tokens: Any = None, backward: bool | None = None, **options: Any) -> Verdict:
    with _failing("ffn_judge"):
        from ffncli.cli.verify import referee_answer
        from ffncli.run.verify.call import verify
        from ffncli.show.output import plain

        passes: Any = None if backward is None else "forward+backward" if backward else "forward"
        verdict = verify(source, kernel=_named(kernel), referee=True, tokens=tokens, passes=passes, **options)
        certificate = verdict.certificate
        assert certificate is not None
    if certificate.reason:
        lines = plain(referee_answer(verdict, certificate).parts, "utf-8")
        raise _failed(f"refused: {certificate.kernel}: {certificate.reason}\n\n{lines}")
    return verdict


def _faster(source: Any, new: object, old: object, *, by: str | float = "3%", **options: Any) -> ResultRows:
    with _failing("ffn_faster"):
        from ffncli.bench.benchmark import BenchQuestion, measured
        from ffncli.bench.judge.gate import failure, not_faster
        from ffncli.bench.results.csv_file import ResultRows
        from ffncli.cli.bench.page import case_parts
        from ffncli.options.accept import converted, percentage
        from ffncli.options.opt import call
        from ffncli.show.output import plain

        least = converted("by", by, percentage(0.99, zero=True))
        ask = call(BenchQuestion, measured, "ffn_faster")
        result = ask(source, kernel=_labelled(new, "new"), baseline=_labelled(old, "old"), **options)
    rows, request = result.rows, result.request
    broken = failure(rows, request, None)
    reasons = [str(broken)] if broken else not_faster(rows, least)
    if reasons:
        parts = [part for case in request.cases for part in case_parts(case, [r for r in rows if r.case == case.key])]
        raise _failed("\n".join([*reasons, "", plain(parts, "utf-8")]))
    return ResultRows(rows)


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """A context in which an FFNError fails the test with one line, and in which processes that load a kernel import
    what this one can: pytest may have added folders to sys.path."""
    from ffncli.errors import FFNError, clean

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        try:
            yield
        except FFNError as error:
            raise _failed(f"{name}: {clean(str(error))}") from None


def _failed(text: str) -> BaseException:
    """Return what `pytest.fail` raises: a failed test that shows this text, without a traceback."""
    return pytest.fail.Exception(text, pytrace=False)


def _named(kernel: object) -> str:
    """Return a kernel as `--kernel` names it. Raises FFNError for an object that a new process cannot find: it must be
    a global of the module that defines it, and the module a Python file."""
    if isinstance(kernel, str | os.PathLike):
        return os.fspath(kernel)
    from ffncli.errors import FFNError, shown

    name = getattr(kernel, "__qualname__", "")
    module = sys.modules.get(getattr(kernel, "__module__", None) or "")
    names = [one for one, value in (vars(module) if module else {}).items() if value is kernel]
    file = getattr(module, "__file__", None) or ""
    if not names or not file.endswith(".py"):
        what = shown(name) if isinstance(name, str) and name else shown(kernel)
        why = f"{what} is not at the top of a Python file, where another process would find it"
        raise FFNError(why, "move it there, or give 'file.py:name'")
    return f"{os.path.relpath(file)}:{name if name in names else names[0]}"


def _labelled(kernel: object, label: str) -> str:
    """Return a kernel as `--kernel` names it; one from a file, which may be called like another, gets this label."""
    from dataclasses import replace

    from ffncli.kernels.choice import parse

    choice = parse(_named(kernel))
    return (choice if choice.file is None else replace(choice, label=label)).text
