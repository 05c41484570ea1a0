"""Shell completions for option values, by the name that an `Opt` has for them; a list is imported when a shell asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, get_args

# name → (module, what there, its values from that)
_LISTS: dict[str, tuple[str, str, Callable[[Any], Iterable[str]]]] = {
    "models": ("ffncli.models.catalog", "names", lambda names: names()),
    "devices": ("ffncli.system.hardware", "typed_names", lambda names: names()),
    "skews": ("ffncli.models.counting.expert_load", "UNIFORM", lambda uniform: [uniform, "zipf:1.2"]),
    "links": ("ffncli.system.hardware", "links", lambda links: [link.name for link in links()]),
    "gates": ("ffncli.block.activations", "GATED", list),
    "limited": ("ffncli.block.activations", "UNITS_WITH_LIMITS", list),
    "functions": ("ffncli.block.activations", "TABLE", list),
    "kernels": ("ffncli.kernels", "BUILT_IN", lambda built_in: [*built_in, "auto"]),
    "forms": ("ffncli.run.export.call", "FORMS", list),
    "parts": ("ffncli.run.export.problem", "Part", get_args),
    "examples": ("ffncli.models.examples", "EXAMPLES", list),
    "checks": ("ffncli.run.verify.question", "CHECK_STATEMENTS", list),
    "targets": ("ffncli.run.approximate.question", "TARGETS", list),
    "dtypes": ("ffncli.block.dtypes", "TABLE", lambda rows: [row.name for row in rows]),
    "stored": ("ffncli.block.dtypes", "STORED", lambda rows: [row.name for row in rows]),
    "rounding": ("ffncli.block.analysis.rounding", "FORMATS", list),
    "norms": ("ffncli.block.recipe", "NormKind", get_args),
    "norm_positions": ("ffncli.block.recipe", "NormPosition", get_args),
    "suites": ("ffncli.bench.request.suite", "SUITES", list),
    "launchers": ("ffncli.bench.request.cluster", "LauncherName", get_args),
    "formats": ("ffncli.show.output", "Format", get_args),
    "colors": ("ffncli.show.color", "COLORS", list),
}


def values(names: str) -> list[str]:
    """The values of one list, or of several: `functions gates`."""
    lists = (_LISTS[name] for name in names.split())
    return [value for module, name, read in lists for value in read(getattr(import_module(module), name))]
