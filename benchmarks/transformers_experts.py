"""transformers' own mixture of experts (Qwen3-MoE) as kernels: `--kernel hf=benchmarks/transformers_experts.py:eager`.

A kernel is the module with the block's weights and an `experts_implementation` that needs no other package.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

from ffncli.block.steps import Experts, Route
from ffncli.kernels.kernel import Computes, Kernel, Params, Steps

_COMPUTED = {"router.weight", "gate.weight", "up.weight", "down.weight"}


def refuses(steps: Steps) -> str | None:
    """Return why Qwen3-MoE cannot compute a block: it has SwiGLU experts, softmax and weights that sum to 1."""
    ops = {step.output: step.op for step in steps}
    route, experts = ops.get("route"), ops.get("experts")
    if not isinstance(route, Route) or not isinstance(experts, Experts):
        return "a dense block has no experts"
    names = {name for step in steps for name in step.parameters()}
    usual = Route(route.experts, route.top_k)  # a renormalised softmax in float32
    acts = {step.op.function for step in experts.program if step.output == "act"}
    return None if names == _COMPUTED and route == usual and acts == {"silu"} else "is not Qwen3-MoE's"


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Return the router, one tensor with gate above up of all experts, and one with down of all experts."""
    return (
        weights["router.weight"],
        torch.cat([weights["gate.weight"], weights["up.weight"]], 1),
        weights["down.weight"],
    )


def build(implementation: str, steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Return a function that calls the module on x, after putting the parameters where torch looks them up."""
    route = next(step.op for step in steps if isinstance(step.op, Route))
    shapes = next(step.op.parameters() for step in steps if isinstance(step.op, Experts))
    experts, d_ff, d_model = (axis.size for axis in shapes["up.weight"])
    config = Qwen3MoeConfig(
        hidden_size=d_model, moe_intermediate_size=d_ff, num_experts=experts, num_experts_per_tok=route.top_k,
        norm_topk_prob=True, hidden_act="silu",
    )  # fmt: skip
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = Qwen3MoeSparseMoeBlock(config).eval()

    def run(x: Tensor, params: Params) -> Tensor:
        module.gate._parameters["weight"] = params[0]
        module.experts._parameters.update(gate_up_proj=params[1], down_proj=params[2])
        return module(x[None])[0]

    return run


eager, batched_mm, grouped_mm = (
    Kernel(name, partial(build, name), prepare, refuses=refuses) for name in ("eager", "batched_mm", "grouped_mm")
)
