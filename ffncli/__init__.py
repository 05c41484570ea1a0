"""ffn: an inspector and benchmark for the transformer's feed-forward network, as a library.

The same calls as the command line, loaded when first used: `import ffncli` alone imports neither torch nor numpy.

    >>> import ffncli
    >>> spec = ffncli.FFNSpec(4096, 11008, "swiglu")
    >>> ffncli.cost(ffncli.steps(spec)).params
    135266304
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "FFNSpec": "ffncli.block.recipe",
    "MoE": "ffncli.block.recipe",
    "steps": "ffncli.block.recipe",
    "cost": "ffncli.block.cost",
    "count": "ffncli.models.count",
    "load": "ffncli.models.source",
    "trace": "ffncli.run.trace",
    "FFNError": "ffncli.errors",
}

__all__ = ["FFNError", "FFNSpec", "MoE", "cost", "count", "load", "steps", "trace"]

if TYPE_CHECKING:
    from ffncli.block.cost import cost
    from ffncli.block.recipe import FFNSpec, MoE, steps
    from ffncli.errors import FFNError
    from ffncli.models.count import count
    from ffncli.models.source import load
    from ffncli.run.trace import trace


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ffncli' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
