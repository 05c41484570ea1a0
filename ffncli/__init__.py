"""ffn: an inspector and benchmark for the transformer's feed-forward network, as a library.

Each command is also a function here, which is loaded on first use: `import ffncli` alone imports neither torch nor
numpy.

    >>> import ffncli
    >>> spec = ffncli.FFNSpec(4096, 11008, "swiglu")
    >>> ffncli.cost(ffncli.steps(spec)).params
    135266304
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_WHERE = {
    "__version__": ("ffncli.version", "__version__"),
    "FFNError": ("ffncli.errors", "FFNError"),
    "FFNSpec": ("ffncli.block.recipe", "FFNSpec"),
    "MoE": ("ffncli.block.recipe", "MoE"),
    "admit": ("ffncli.bench.public.admission", "admit"),
    "activation": ("ffncli.block.analysis.facts", "activation"),
    "approximate": ("ffncli.run.approximate.call", "approximate"),
    "benchmark": ("ffncli.bench.benchmark", "benchmark"),
    "compare": ("ffncli.bench.comparison", "compare"),
    "corpus": ("ffncli.run.corpus.call", "corpus"),
    "cost": ("ffncli.block.cost", "cost"),
    "count": ("ffncli.run.user.load", "count"),
    "experts": ("ffncli.run.corpus.call", "experts"),
    "explain": ("ffncli.run.topics.call", "explain"),
    "export": ("ffncli.run.export.call", "export"),
    "kernel": ("ffncli.bench.in_model", "kernel"),
    "kernel_names": ("ffncli.kernels", "kernel_names"),
    "load": ("ffncli.run.trace.loaded", "load"),
    "merge": ("ffncli.bench.results.merge", "merge"),
    "plan": ("ffncli.run.user.load", "plan"),
    "precision": ("ffncli.run.precision.call", "precision"),
    "quantize": ("ffncli.run.quantize.quantized", "quantize"),
    "read_results": ("ffncli.bench.results.csv_file", "read_results"),
    "replace": ("ffncli.bench.in_model", "replace"),
    "report": ("ffncli.pages.call", "report"),
    "steps": ("ffncli.block.recipe", "steps"),
    "survey": ("ffncli.run.trace.call", "survey"),
    "trace": ("ffncli.run.trace.call", "trace"),
    "unit": ("ffncli.run.trace.call", "unit"),
    "verify": ("ffncli.run.verify.call", "verify"),
}

__all__ = [
    "FFNError",
    "FFNSpec",
    "MoE",
    "activation",
    "admit",
    "approximate",
    "benchmark",
    "compare",
    "corpus",
    "cost",
    "count",
    "experts",
    "explain",
    "export",
    "kernel",
    "kernel_names",
    "load",
    "merge",
    "plan",
    "precision",
    "quantize",
    "read_results",
    "replace",
    "report",
    "steps",
    "survey",
    "trace",
    "unit",
    "verify",
]

if TYPE_CHECKING:
    from ffncli.bench.benchmark import benchmark
    from ffncli.bench.comparison import compare
    from ffncli.bench.in_model import kernel, replace
    from ffncli.bench.public.admission import admit
    from ffncli.bench.results.csv_file import read_results
    from ffncli.bench.results.merge import merge
    from ffncli.block.analysis.facts import activation
    from ffncli.block.cost import cost
    from ffncli.block.recipe import FFNSpec, MoE, steps
    from ffncli.errors import FFNError
    from ffncli.kernels import kernel_names
    from ffncli.pages.call import report
    from ffncli.run.approximate.call import approximate
    from ffncli.run.corpus.call import corpus, experts
    from ffncli.run.export.call import export
    from ffncli.run.precision.call import precision
    from ffncli.run.quantize.quantized import quantize
    from ffncli.run.topics.call import explain
    from ffncli.run.trace.call import survey, trace, unit
    from ffncli.run.trace.loaded import load
    from ffncli.run.user.load import count, plan
    from ffncli.run.verify.call import verify
    from ffncli.version import __version__ as __version__


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        module, attribute = _WHERE[name]
        value = getattr(import_module(module), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ffncli' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
