"""The tape of what is kept, against the storages that torch's autograd really saves."""

from collections.abc import Sequence

import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.kept import kept
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Experts, Step, id_inputs
from ffncli.run.engine.execute import EVAL, Mode, execute
from tests.oracles.saved import kept_storages
from tests.run.engine.test_backward import LIMITS, MIXTURES, NORMS, OTHER, inputs_of, randomised

TOKENS = 5


def both(block: Sequence[Step], dtype: torch.dtype, mode: Mode = EVAL) -> tuple[int, int]:
    """Return (bytes on the tape, bytes that torch keeps)."""
    weights, inputs = randomised(block, dtype), inputs_of(block, dtype)
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in weights.items()}
    given = {n: t if n in id_inputs(block) else t.requires_grad_() for n, t in inputs.items()}
    routes: dict[str, torch.Tensor] = {}

    def compute() -> torch.Tensor:
        out = torch.ones(())
        for event in execute(block, leaves, given, mode):
            out = event.tensor
            routes[event.name] = event.tensor.detach()
        return out

    real = sum(kept_storages(compute, leaves).values())
    loads = {
        s.output: (routes[s.inputs[1]].flatten(0, -2)[:, s.op.entries] != 0).sum(0).tolist()
        for s in block if isinstance(s.op, Experts)
    }  # fmt: skip
    tape = kept(block, TOKENS, dtype.itemsize, loads=loads, train=mode.train)
    return sum(one.bytes for one in tape), real


SPECS = {
    **{f"{n}-{g}": FFNSpec(6, 10, n, gated=g, bias=True) for n in TABLE for g in (False, True)},
    **{f"limit-{n}-{name}": FFNSpec(6, 10, name, gated=True, limits=limit) for n, limit in LIMITS.items()
       for name in ("silu", "relu", "identity") if limit.gate_cap is None or name != "relu"},
    **{f"norm-{at}": spec for at, spec in enumerate(NORMS)}, **OTHER,
    **{f"moe-{name}-{score}": FFNSpec(6, 10, "swiglu", norm="rmsnorm", residual=True, moe=__import__(
        "dataclasses").replace(moe, score_dtype=score), learned_scale=name == "shared-routed")
       for name, moe in MIXTURES.items() for score in ("fp32", "input")},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("name", SPECS)
def test_to_the_byte(name: str, dtype: torch.dtype) -> None:
    tape, real = both(steps(SPECS[name]), dtype)
    assert tape == real
