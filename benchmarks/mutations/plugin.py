"""A plugin of pytest: tells coverage at each moment which test runs, and keeps who uses what tests share.

Coverage by itself says which test ran a line *first*: what a module's fixture or a cached helper did would be put
down to the test that happened to come first. Here it counts for every test that uses it.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage
from coverage.numbits import nums_to_numbits

from benchmarks.mutations.follow import FOLDER, NOW


class Plugin:
    """Says at each moment which test, fixture or cached helper runs, and keeps who uses what is shared."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, folder / f"now-{os.getpid()}"
        os.environ[NOW] = str(self.now)
        self.label = ""
        self.users: dict[str, set[str]] = defaultdict(set)
        self.lines: set[tuple[str, str, bytes]] = set()
        self.same: dict[bytes, bytes] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        real = functools.lru_cache
        functools.lru_cache = functools.partial(self.lru_cache, real)

    def lru_cache(self, real: Any, maxsize: Any = 128, typed: bool = False) -> Any:
        """functools.lru_cache, but what a cached function of ours does counts for all its callers."""
        if callable(maxsize):
            return self.lru_cache(real)(maxsize)

        def decorate(function: Callable[..., Any]) -> Any:
            ours = function.__module__.startswith(("tests.", "ffncli."))
            return self.shared(function, real(maxsize, typed)) if ours else real(maxsize, typed)(function)

        return decorate

    def shared(self, function: Callable[..., Any], cached: Any) -> Callable[..., Any]:
        def label(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            key = hash((args, tuple(kwargs.items())))
            return f"cache:{os.getpid()}:{function.__module__}.{function.__qualname__}:{key}"

        @cached  # type: ignore[untyped-decorator]
        @functools.wraps(function)
        def compute(*args: Any, **kwargs: Any) -> Any:
            with self.under(label(args, kwargs)):
                return function(*args, **kwargs)

        @functools.wraps(compute)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.users[label(args, kwargs)].add(self.label)
            return compute(*args, **kwargs)

        call.cache_clear, call.cache_info = compute.cache_clear, compute.cache_info  # type: ignore[attr-defined]
        return call

    @contextmanager
    def under(self, label: str) -> Iterator[None]:
        """What runs in here, in this process and in those it starts, is put down to that label."""
        before = self.label
        self.switch(label)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, label: str) -> None:
        """From here on that label; the lines until here are the last one's. (coverage.switch_context does the same in
        50 ms: it writes a row for every file that was ever seen.)"""
        measured: Any = Coverage.current()
        for file, lines in measured._collector.data.items():
            if lines:
                bits = nums_to_numbits(lines)
                lines.clear()
                self.lines.add((file, self.label, self.same.setdefault(bits, bits)))
        self.label = label
        self.now.write_text(label, "utf-8")

    def pytest_runtest_protocol(self, item: Any) -> None:
        self.switch(item.nodeid)
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            if definitions[-1].scope != "function":
                self.users[_fixture(definitions[-1])].add(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.switch("")
        left = {"seconds": self.seconds, "failed": self.failed, "users": self.users, "lines": self.lines}
        (self.folder / f"tests-{os.getpid()}.pickle").write_bytes(pickle.dumps(left))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        with self.under(_fixture(fixturedef)):
            return (yield)


def _fixture(definition: Any) -> str:
    return f"fixture:{definition.baseid}::{definition.argname}"


def pytest_configure(config: Any) -> None:
    """`-p benchmarks.mutations.plugin`: before any test, so before the package, is imported."""
    if FOLDER in os.environ:
        config.pluginmanager.register(Plugin(Path(os.environ[FOLDER])), "mutations")
