"""The subject of an export: the block's steps, workloads and tolerance. This file must not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ffncli.block.analysis.rounding import block_bound
from ffncli.block.cost import CONVENTIONS as COST_CONVENTIONS
from ffncli.block.cost import cost
from ffncli.block.dtypes import DType, activation_dtype, dtype, find_storage
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Route, Step, walk
from ffncli.block.symbols import right_hand_side
from ffncli.block.traffic import traffic
from ffncli.errors import FFNError, option, shown
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.model import Layer, Resolved

Part = Literal["block", "ffn"]
DEFAULT_TOKENS = (1, 32, 1024)
CONVENTIONS = {
    "matmul_flops": COST_CONVENTIONS["matmul_flops"],
    "elementwise_flops": COST_CONVENTIONS["elementwise_flops"],
    "bytes": "every used weight and the input read once, the output written once",
    "bytes_of_experts": "of E experts, E · (1 - (1 - top_k/E)^tokens), the number expected with uniform routing",
    "tolerance": "max|a - b| / max|b| where b is the block in float64, from the same rounded numbers",
}


@dataclass(frozen=True)
class Workload:
    """An input size, with the block's FLOPs and bytes for it, as defined in CONVENTIONS."""

    tokens: int
    matmul_flops: int
    elementwise_flops: int
    bytes: int


@dataclass(frozen=True)
class ExportProblem:
    """A block to export, or only its FFN (`part`). `tolerance` is the largest relative error for `dtype`."""

    name: str
    source: str
    citation: str
    layer: Layer
    bare: bool
    part: Part
    steps: tuple[Step, ...]
    dtype: DType
    params: int
    tolerance: float
    workloads: tuple[Workload, ...]

    @property
    def spec(self) -> FFNSpec:
        """The specification of the block."""
        return self.layer.spec

    @property
    def routed(self) -> bool:
        """Whether the block has a router."""
        return any(isinstance(step.op, Route) for step in self.steps)

    @property
    def conventions(self) -> dict[str, str]:
        """A mapping from the names of the workloads' figures to their definitions."""
        names = ("matmul_flops", "elementwise_flops", "bytes", *(("bytes_of_experts",) if self.routed else ()))
        return {name: CONVENTIONS[name] for name in names}

    @property
    def formulas(self) -> tuple[str, ...]:
        """The formulas of the block, one per step, such as `up = x · W1 + b1`."""
        return tuple(f"{name} = {right_hand_side(step, self.steps)}" for name, step in walk(self.steps))

    @property
    def title(self) -> str:
        """A title such as `llama-2-7b, decoder layer 0: d_model 4096, d_ff 11008, silu, gated`."""
        spec, moe = self.spec, self.spec.moe
        where = "" if self.bare else f", {self.layer.stack} layer {self.layer.index}"
        kind = "gated" if spec.gated else "plain"
        experts = f", {moe.experts} experts, top {moe.top_k}" if moe else ""
        return f"{self.name}{where}: d_model {spec.d_model}, d_ff {spec.d_ff}, {spec.activation}, {kind}{experts}"


def problem_of(
    resolved: Resolved, part: Part, layer: int | str | None = None, dtype_name: str | None = None,
    tokens: Sequence[int] = (), exact: tuple[Step, ...] | None = None,
) -> ExportProblem:  # fmt: skip
    """Describe a layer of a model; `exact` are the steps to export if the model's files do not describe all of them."""
    chosen = layer_of(resolved, layer)
    block = steps(chosen.spec) if exact is None else exact
    block = kernel_steps(block) if part == "ffn" else block
    kind = _dtype(resolved, dtype_name)
    spec = chosen.spec
    width = max(spec.d_model, spec.d_ff, spec.shared_width)
    fp32_scores = any(isinstance(step.op, Route) and step.op.score_dtype == "fp32" for step in block)
    total = cost(block)
    return ExportProblem(
        name=resolved.model.name,
        source=resolved.source,
        citation=resolved.citation,
        layer=chosen,
        bare=resolved.model.bare,
        part=part,
        steps=block,
        dtype=kind,
        params=total.params + total.norm_params,
        tolerance=block_bound(kind, width, fp32_scores),
        workloads=tuple(_workload(block, kind, count) for count in tokens or DEFAULT_TOKENS),
    )


def layer_of(resolved: Resolved, text: int | str | None) -> Layer:
    """Return the layer that `text` selects; if `text` is None, the first layer of the most common kind."""
    if text is not None:
        return resolved.model.layer(text)
    group = resolved.model.main
    return Layer(group.stack, group.layers[0], group.spec)


def _dtype(resolved: Resolved, name: str | None) -> DType:
    """Return the requested dtype, else the dtype in which the model was released or is stored, else fp32."""
    if name is not None:
        return dtype(name)
    stored = find_storage(resolved.model.dtype)
    return dtype("fp32") if stored is None else activation_dtype(stored)


def _workload(block: tuple[Step, ...], kind: DType, tokens: int) -> Workload:
    work = cost(block, tokens)
    moved = traffic(block, kind, kind, tokens).moved(fused=True) + work.norm_params * kind.block_bytes
    return Workload(tokens, work.matmul_flops, work.elementwise_flops, moved)


def refused(form: str, problem: ExportProblem, why: str, instead: str = "torch") -> FFNError:
    """Return the error for a block that a form cannot express; forms never approximate a block."""
    return FFNError(f"{option('form', form)}: {shown(problem.name)} {why}", f"{option('form', instead)} writes it")
