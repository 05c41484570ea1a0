"""A block in one line, as trace and verify head their pages with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffncli.run.engine.block_summary import BlockSummary


def dimensions_text(block: BlockSummary) -> str:
    """`d_model 4, d_ff 8, relu, plain, bias`; a final layer alone has neither d_ff nor activation."""
    kind, bias = "gated" if block.gated else "plain", "bias" if block.bias else "no bias"
    ffn = "" if block.d_ff is None else f", d_ff {block.d_ff}, {block.activation}, {kind}"
    return f"d_model {block.d_model}{ffn}, {bias}"
