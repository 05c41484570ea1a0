"""A plugin of pytest: of all that is collected only the chosen tests, in their order; and which one failed first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

CHOSEN = "FFN_CHOSEN_TESTS"  # a file: the ids of the tests as JSON; beside it, with `.failed`, those that failed


class Plugin:
    def __init__(self, path: Path) -> None:
        self.order = {name: n for n, name in enumerate(json.loads(path.read_text("utf-8")))}
        self.failed = path.with_suffix(".failed")
        self.failed.write_text("", "utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        chosen = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in self.order])
        items[:] = chosen

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._say(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say(report.nodeid)

    def _say(self, name: str) -> None:
        with open(self.failed, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Plugin(Path(os.environ[CHOSEN])), "chosen")
