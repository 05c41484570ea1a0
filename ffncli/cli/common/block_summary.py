"""A block in one line, the heading of the pages of trace and verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffncli.run.engine.prepare import BlockSummary


def dimensions_text(block: BlockSummary) -> str:
    """`d_model 4, d_ff 8, relu, plain, bias`; a final layer alone has neither d_ff nor activation.

    A mixture of experts adds the number of experts and how many a token uses; `d_ff` is one expert's.
    """
    kind, bias = "gated" if block.gated else "plain", "bias" if block.bias else "no bias"
    ffn = "" if block.d_ff is None else f", d_ff {block.d_ff}, {block.activation}, {kind}"
    norm = f", {block.norm}" if block.norm else ""
    shared = f" + {block.shared_experts} shared" if block.shared_experts else ""
    moe = f", MoE of {block.experts} experts{shared}, top {block.top_k}" if block.experts else ""
    return f"d_model {block.d_model}{ffn}, {bias}{norm}{moe}"
