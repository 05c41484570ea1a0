"""Kernels against the reference in float64, and the packed kernel against the eager one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.kernels import built_in
from ffncli.kernels.kernel import Kernel
from ffncli.run.engine.reference import in_float64, output_and_experts, same_experts
from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.row import CheckRow


class BrokenContract(Exception):
    """A kernel broke its contract; the text says how."""


def fused(case: CheckedBlock) -> Iterator[CheckRow]:
    """gate and up in one matrix, against gate and up separate, in the same dtype."""
    judge, packed = case.judge("fused"), built_in("packed")
    reason = packed.refuses(case.ffn) or built_in("eager").refuses(case.ffn)
    if reason:
        yield judge.skips("packed = eager", reason)
        return
    one, two = (compute(case, kernel) for kernel in (packed, built_in("eager")))
    yield judge.equal("packed = eager", one, two, "gate and up as one matrix")


def kernels(case: CheckedBlock) -> Iterator[CheckRow]:
    """Every kernel in the case's dtype, against the reference execution in float64."""
    reference, went = in_float64(case.ffn, case.ffn_weights, {case.entry: case.x})
    _, near = output_and_experts(case.ffn, case.ffn_weights, {case.entry: case.x})
    same, left_out = same_experts(near, went, len(case.x))
    for kernel in case.kernels:
        judge = replace(case, computes=kernel.computes).judge("kernels")
        reason = kernel.refusal(case.ffn, case.device, case.dtype)
        if reason:
            yield judge.skips(kernel.name, reason)
            continue
        try:
            output = compute(case, kernel)
        except (FFNError, BrokenContract) as error:
            yield judge.fails(kernel.name, error.message if isinstance(error, FFNError) else str(error))
            continue
        declared = kernel.computes and f"computes in {kernel.computes}"
        note = "; ".join(filter(None, (kernel.origin, declared, left_out)))
        yield judge.equal(kernel.name, output[same], reference[same], note)


def compute(case: CheckedBlock, kernel: Kernel) -> Tensor:
    """A kernel's output for the case's x [tokens, d_model]. Raises BrokenContract if it breaks its contract.

    It is called with other tokens first, so that a kernel that caches its first result is caught.
    """
    weights = dict(case.ffn_weights)
    if kernel.origin:  # a user's kernel, which may write where it should not
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    before = {name: tensor._version for name, tensor in weights.items()}
    params = kernel.prepare(case.ffn, weights)
    call = kernel.build(case.ffn, case.device, case.dtype)
    call(case.x.flip(0), params)
    x = case.x.clone()
    out: object = call(x, params)
    if not isinstance(out, Tensor):
        raise BrokenContract(f"returns a {type(out).__name__}, not a tensor")
    if out.shape != case.x.shape:
        raise BrokenContract(f"returns shape {list(out.shape)}, expected {list(case.x.shape)}")
    if out.dtype != case.dtype:
        raise BrokenContract(
            f"returns {str(out.dtype).removeprefix('torch.')}, expected {str(case.dtype).removeprefix('torch.')}"
        )
    if not torch.equal(x, case.x):
        raise BrokenContract("changes its input x")
    changed = [name for name, tensor in weights.items() if tensor._version != before[name]]
    if changed:
        raise BrokenContract(f"changes the weight {changed[0]}")
    return out
