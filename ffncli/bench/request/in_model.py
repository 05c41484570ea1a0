"""`--in-model`: what it can measure, which is asked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.bench.records import MODEL, Method
from ffncli.bench.request.grid import Grid, load_block
from ffncli.bench.request.kernels import ChosenKernels
from ffncli.errors import FFNError, shown
from ffncli.kernels import AUTO
from ffncli.kernels.choice import KernelChoice, choices
from ffncli.models.dimensions import Dimensions
from ffncli.models.runnable import folder_of

IN_MODEL = (AUTO,)  # if no kernel is named


def require_model(grid: Grid, baseline: str | None, method: Method) -> None:
    """Raises FFNError for a source that transformers cannot load as a model, and for options of a single block."""
    other = {
        "--by-step": method.by_step, "--sustained": method.sustained, "--launch graphs": method.launch == "graphs",
        "--pass": set(grid.passes) - {"forward"}, "--cache": set(grid.caches) - {"warm"}, "--routing": grid.routings,
        "--input": grid.input, "--tp and --ep": grid.ranks.world_size > 1,
        "dimension options": grid.overrides != Dimensions(),
    }  # fmt: skip
    if wrong := next((name for name, given in other.items() if given), None):
        raise FFNError(
            f"--in-model contradicts {wrong}", "it times the forward of a whole model, as its directory has it"
        )
    if baseline not in (None, MODEL):
        raise FFNError(f"--in-model: the baseline is the model alone, not {shown(baseline)}", "leave out --baseline")
    if grid.source is None:
        raise FFNError("--in-model needs a SOURCE", "give a directory with config.json and safetensors")
    folder_of(load_block(grid.source, Dimensions()), "--in-model")


def named_kernels(chosen: ChosenKernels, texts: Sequence[str]) -> tuple[KernelChoice, ...]:
    """The kernels that were named, without a baseline that was put before them.

    Raises FFNError for one that can only be timed by itself.
    """
    kernels = chosen.kernels[len(chosen.kernels) - len(choices(texts)) :]
    if slow := next((choice for choice in kernels if choice.factor is not None), None):
        raise FFNError(f"--in-model: {shown(slow.text)} can only be timed by itself", "leave it out")
    return kernels
