"""The cost of a block, computed from its steps: parameters, FLOPs, bytes. The costs of the parts add up to the cost of
the whole.

Conventions (also printed in every JSON answer): 1 multiply-add = 2 FLOPs. Elementwise work is 1 per element for bias,
activation, multiply and add, 4 for RMSNorm, 7 for LayerNorm, 0 for dropout. A router costs 1 per logit for its score, 1
per logit for a choice correction, top_k for a renormalisation and top_k for a scale; mixing the outputs of the chosen
experts costs one multiply per expert and the adds that sum them. `params` counts the FFN's parameters: weights, biases,
the router, learned activation parameters; norms are counted separately, and only if no other branch reads their output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

from ffncli.block import steps as ops
from ffncli.block.steps import Shape, Step, experts_per_token, input_shapes, of_norm, shapes
from ffncli.options.accept import NATURAL, Accepts, several
from ffncli.options.arguments import checked
from ffncli.system.notebook import Shown

CONVENTIONS: Mapping[str, str] = {
    "ffn_params": "weights, FFN biases, router (bias, choice correction, shared-expert gate), learned activation"
    " parameters; norms are counted separately",
    "ffn_params_active": "per token: top_k experts, and everything else in full",
    "norm_params": "norms that only the FFN branch uses",
    "matmul_flops": "1 multiply-add = 2 FLOPs; biases are elementwise",
    "elementwise_flops": "1 per element for bias, activation, multiply, add; RMSNorm 4, LayerNorm 7; dropout 0;"
    " routing: 1 per logit for the score and for a choice correction, top_k for a renormalisation and for a scale,"
    " and the multiplies and adds that mix the chosen experts",
    "d_ff": "width of one projection; in MoE, the width of one routed expert",
}


class Additive(Shown):
    """The base class of records of counts: the counts of the parts add up to the counts of the whole."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def times(self, n: int) -> Self:
        """Return the counts of n identical parts."""
        return type(self)(*(a * n for a in vars(self).values()))


@dataclass(frozen=True)
class Cost(Additive):
    """The cost of some steps on some tokens. All fields are counts; `elements` counts the values written, to be
    multiplied by the bytes per value.

    `params_active` counts the parameters that one token uses. `matmul_flops` and `elementwise_flops` are for a forward
    pass over all tokens.
    """

    params: int = 0
    params_active: int = 0
    norm_params: int = 0
    matmul_flops: int = 0
    elementwise_flops: int = 0
    elements: int = 0

    @property
    def flops(self) -> int:
        """The sum of matmul and elementwise FLOPs."""
        return self.matmul_flops + self.elementwise_flops

    def weight_bytes(self, width: float) -> int:
        """Return the bytes of the FFN's parameters, norms excluded, at `width` bytes per parameter."""
        return round(self.params * width)

    def activation_bytes(self, width: float) -> int:
        """Return the bytes of all intermediates, each written once: what an unfused forward pass keeps for backward."""
        return round(self.elements * width)


def _known(step: Any) -> Step:
    if not (isinstance(step, Step) and isinstance(step.op, ops.Op)):
        raise TypeError
    return step


STEPS = several(Accepts("a step", _known), "steps, as from ffncli.steps", least=0)


@checked(steps=STEPS, tokens=NATURAL)
def cost(steps: Sequence[Step], tokens: int = 1) -> Cost:
    """Return the cost of a block on `tokens` tokens. Raises FFNError if its shapes do not fit."""
    return sum(step_costs(steps, input_shapes(steps, (tokens,))).values(), Cost())


def step_costs(steps: Sequence[Step], inputs: Mapping[str, Shape]) -> dict[str, Cost]:
    """Return each step's cost, keyed by its output's name, for inputs of these shapes."""
    shapes_by_name = shapes(steps, inputs)
    taken = experts_per_token(steps)
    return {s.output: _step(s, shapes_by_name, taken) for s in steps}


def _step(step: Step, shapes: Mapping[str, Shape], taken: Mapping[str, int]) -> Cost:
    op, out = step.op, shapes[step.output]
    numbers = sum(prod(axis.size for axis in axes) for axes in step.untied_parameters().values())
    elements, tokens = prod(out), prod(out[:-1])
    match op:
        case ops.Linear():
            flops = 2 * tokens * op.into.size * op.out.size
            params, norm_params = (0, numbers) if of_norm(step) else (numbers, 0)
            return Cost(params, params, norm_params, flops, elements if op.bias else 0, elements)
        case ops.Activation():
            return Cost(numbers, numbers, elementwise_flops=elements, elements=elements)
        case ops.Multiply():
            factors = len(step.inputs) - 1 + (op.learned is not None)
            return Cost(numbers, numbers, elementwise_flops=elements * factors, elements=elements)
        case ops.Add():
            adds = len(step.inputs) - 1 + (op.scale != 1) + (op.bias is not None)
            return Cost(numbers, numbers, elementwise_flops=elements * adds, elements=elements)
        case ops.Norm():
            norm_params = 0 if op.shared else numbers
            return Cost(0, 0, norm_params, 0, elements * (4 if op.kind == "rmsnorm" else 7), elements)
        case ops.Dropout():
            return Cost(elements=elements)
        case ops.Route():
            factors = (op.renormalise and op.order == "score_first") + (op.scale != 1) + op.learned_scale
            scores = (op.top_k if op.order == "one_by_one" else 1) * elements
            corrected = (op.experts.size - op.always) * tokens if op.correction else 0
            return Cost(numbers, numbers, 0, 0, scores + corrected + tokens * op.taken * factors, elements)
        case ops.Experts():
            return _experts(op, taken[step.output], shapes[step.inputs[0]], out)
        case ops.AllReduce():
            return Cost(elements=elements)
        case _:
            raise AssertionError(f"cost has no branch for {type(op).__name__}")


def _experts(op: ops.Experts, top_k: int, x: Shape, out: Shape) -> Cost:
    """Return a mixture's cost: the parameters of all experts; per token, the work of top_k experts and of mixing their
    outputs."""
    one = cost(op.program, tokens=prod(x[:-1]))
    weighed = out if op.weigh == "output" else x
    mixing = top_k * prod(weighed) + (top_k - 1) * prod(out)
    common = sum(prod(axis.size for axis in axes) for name, axes in op.parameters().items() if op.is_common(name))
    return Cost(
        params=one.params * op.experts.size,
        params_active=one.params_active * top_k,
        norm_params=(one.norm_params - common) * op.experts.size + common,
        matmul_flops=one.matmul_flops * top_k,
        elementwise_flops=one.elementwise_flops * top_k + mixing,
        elements=one.elements * top_k + prod(out),
    )
