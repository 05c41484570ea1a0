"""Small blocks that come with the package, numbers and all: the blocks of the texts that `ffn trace --example` runs.

What a text specifies is here (dimensions, some numbers of an input, a whole set of weights); anything else is
drawn when the block runs, and `evidence` says so. `demo` is the block that runs
without a source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from importlib.resources import files
from typing import Any

from ffncli.block.recipe import FFNSpec, final_layer, merged_first, steps
from ffncli.block.steps import Step
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.models.dimensions import Dimensions, from_dimensions, merged
from ffncli.models.model import Resolved, block_model


@dataclass(frozen=True)
class Example:
    """A block with everything that its run needs: weights as nested lists ({}: drawn), the input's name and shape.

    `dropped` lists, per dropout step, the (token, unit) pairs that its mask drops. A random input is multiplied by
    `scale`, then `given` puts single numbers into it, by (token, unit). `block` are its steps if the model's spec
    cannot express them, `vocab` the width of a final layer that follows (0: none), `aliases` the text's names of ours.
    `fixed`: the text gives the whole input, so no option may choose another.
    """

    model: Resolved
    weights: dict[str, Any]
    input: str
    shape: tuple[int, ...]
    dropped: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    scale: float = 1.0
    given: Mapping[tuple[int, int], float] = field(default_factory=dict)
    block: tuple[Step, ...] | None = None
    vocab: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: bool = False

    @property
    def steps(self) -> tuple[Step, ...]:
        """The block as assignments, without any requested final layer."""
        return steps(self.model.model.main.spec) if self.block is None else self.block


def notebook() -> Example:
    """The 4 → 8 → 4 ReLU block with dropout 0.1 that a notebook prints step by step."""
    data = json.loads(files("ffncli.models").joinpath("notebook.json").read_text("utf-8"))
    spec = FFNSpec(data["d_model"], data["d_ff"], data["activation"], dropout=data["dropout"])
    dropped = {step: [(token, unit) for token, unit in pairs] for step, pairs in data["dropped"].items()}
    model = block_model(spec, "", "the notebook's block")
    return Example(model, data["weights"], data["input"], tuple(data["shape"]), dropped, fixed=True)


def _explained() -> Example:
    """512 → 2048 → 512 with exact GELU, on the vector of the word "Hello" after attention."""
    given = {(0, 0): 0.146, (0, 1): 0.108, (0, 2): 0.192, (0, 511): 0.11}
    note = "the text gives 4 of the 512 numbers of 'Hello' (0.146, 0.108, 0.192 first, 0.11 last)"
    ours = "ours: the other 508, drawn as large as those four, and all weights"
    block = _block(FFNSpec(512, 2048, "gelu"), "the explained block", note, ours)
    return Example(block, {}, "randn", (1, 512), scale=0.143, given=given)


def _llama() -> Example:
    """Merge-add, RMSNorm, SwiGLU 4096 → 11008 → 4096: a layer of Llama-2-7B as an engine for several nodes runs it."""
    spec = FFNSpec(4096, 11008, "swiglu", norm="rmsnorm")
    model = _block(spec, "the Llama engine's block", "the text gives dimensions alone", "ours: all weights and inputs")
    names = {"gate": "D", "up": "L", "hidden": "H", "down": "Y"}
    return Example(model, {}, "randn", (1, 2, 4096), block=merged_first(steps(spec)), aliases=names)


def _conv() -> Example:
    """512 → 2048 → 512 with ReLU, then the final layer over a vocabulary."""
    model = _block(
        FFNSpec(512, 2048, "relu"), "the block as two 1×1 convolutions, and the final layer",
        "the text gives dimensions alone", "ours: all weights, inputs and the vocabulary of 32,000",
    )  # fmt: skip
    return Example(model, {}, "randn", (2, 2, 512), vocab=32_000)


def _bert() -> Example:
    """BERT's 768 → 3072 → 768 with GELU, added to its input and normalised."""
    spec = FFNSpec(768, 3072, "gelu", norm="layernorm", norm_position="post", norm_eps=1e-12, residual=True)
    model = _block(spec, "BERT's block", "the text gives dimensions alone", "ours: all weights and inputs")
    return Example(model, {}, "randn", (1, 4, 768))


EXAMPLES: Mapping[str, Callable[[], Example]] = {
    "notebook": notebook, "explained": _explained, "llama": _llama, "conv": _conv, "bert": _bert,
}  # fmt: skip


def find(name: str) -> Example:
    """The example of that name. Raises FFNError with the nearest names if there is none."""
    key = name.strip().lower()
    if key not in EXAMPLES:
        known = ", ".join(EXAMPLES)
        hint = did_you_mean(key, list(EXAMPLES), f"use one of {known}")
        raise FFNError(f"--example: unknown example {shown(name)}", hint if known in hint else f"{hint} ({known})")
    return EXAMPLES[key]()


def final_layer_alone(d_model: int, vocab: int, bias: bool) -> Example:
    """`logits = x · W + b` and its softmax, with weights and input to be drawn at random."""
    spec = FFNSpec(d_model, d_model, bias=bias)
    model = block_model(spec, "", f"the final layer, {d_model} → {vocab:,}")
    return Example(model, {}, "randn", (4, d_model), block=final_layer("x", d_model, vocab, bias))


def _block(spec: FFNSpec, name: str, *evidence: str) -> Resolved:
    return replace(block_model(spec, "", name), evidence=evidence)


def demo(options: Dimensions) -> Example:
    """The small block that `ffn trace` runs without a source: 4 → 8 → 4 with ReLU, changed by the options.

    Its input is two tokens of the numbers 0 to 7, so that a reader can follow the sums.
    """
    resolved = from_dimensions(merged(Dimensions(d_model=4, d_ff=8), options))
    about = "a small demo block; `ffn trace SOURCE` runs yours"
    return Example(replace(resolved, evidence=(about,), notes=()), {}, "arange", (2, resolved.model.main.spec.d_model))
