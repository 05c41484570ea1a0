"""Small blocks that ship with the package: a demo, and the blocks of five public texts about the feed-forward network.

What a text specifies is stored here: dimensions, some input values, or all weights. Everything else is drawn at random
when the block runs, and `evidence` says so.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files

from ffncli.block.recipe import FFNSpec, final_layer, merged_first, steps
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.models.dimensions import Dimensions, from_dimensions, merged
from ffncli.models.model import Example, Resolved, block_model

_DIMENSIONS_ALONE = "the published text gives only dimensions"


def notebook() -> Resolved:
    """Build the 4 → 8 → 4 ReLU block with dropout 0.1 that a notebook prints step by step."""
    data = json.loads(files("ffncli.models").joinpath("notebook.json").read_text("utf-8"))
    spec = FFNSpec(data["d_model"], data["d_ff"], data["activation"], dropout=data["dropout"])
    dropped = {step: [(token, unit) for token, unit in pairs] for step, pairs in data["dropped"].items()}
    example = Example(data["weights"], data["input"], tuple(data["shape"]), dropped, data["dropout"], fixed=True)
    return replace(block_model(spec, "", "the notebook's block"), example=example)


def _explained() -> Resolved:
    """Build 512 → 2048 → 512 with exact GELU; its input is the vector of the word "Hello" after attention."""
    given = {(0, 0): 0.146, (0, 1): 0.108, (0, 2): 0.192, (0, 511): 0.11}
    note = "the published text gives 4 of the 512 values of 'Hello' (0.146, 0.108, 0.192 first, 0.11 last)"
    ours = "chosen by ffn: the other 508 values, drawn at the scale of those four, and all weights"
    example = Example({}, "randn", (1, 512), scale=0.143, given=given)
    return _block(FFNSpec(512, 2048, "gelu"), "the explained block", example, note, ours)


def _llama() -> Resolved:
    """Build merge-add, RMSNorm and SwiGLU 4096 → 11008 → 4096: a layer of Llama-2-7B as run by a multi-node engine."""
    spec = FFNSpec(4096, 11008, "swiglu", norm="rmsnorm")
    names = {"gate": "D", "up": "L", "hidden": "H", "down": "Y"}
    example = Example({}, "randn", (1, 2, 4096), block=merged_first(steps(spec)), aliases=names)
    return _block(spec, "the Llama engine's block", example, _DIMENSIONS_ALONE, "chosen by ffn: all weights and inputs")


def _conv() -> Resolved:
    """Build 512 → 2048 → 512 with ReLU, followed by the final layer over a vocabulary."""
    return _block(
        FFNSpec(512, 2048, "relu"), "the block as two 1×1 convolutions, and the final layer",
        Example({}, "randn", (2, 2, 512), vocab=32_000), _DIMENSIONS_ALONE,
        "chosen by ffn: all weights, all inputs, and the vocabulary of 32,000",
    )  # fmt: skip


def _bert() -> Resolved:
    """Build BERT's 768 → 3072 → 768 with GELU, a residual connection and a norm after it."""
    spec = FFNSpec(768, 3072, "gelu", norm="layernorm", norm_position="post", norm_eps=1e-12, residual=True)
    example = Example({}, "randn", (1, 4, 768))
    return _block(spec, "BERT's block", example, _DIMENSIONS_ALONE, "chosen by ffn: all weights and inputs")


EXAMPLES: Mapping[str, Callable[[], Resolved]] = {
    "notebook": notebook, "explained": _explained, "llama": _llama, "conv": _conv, "bert": _bert,
}  # fmt: skip


def find(name: str) -> Resolved:
    """Return the example with this name."""
    key = name.strip().lower()
    if key not in EXAMPLES:
        known = ", ".join(EXAMPLES)
        hint = did_you_mean(key, list(EXAMPLES), f"use one of {known}")
        raise FFNError(
            f"{option('example')}: unknown example {shown(name)}", hint if known in hint else f"{hint} ({known})"
        )
    return EXAMPLES[key]()


def final_layer_alone(d_model: int, vocab: int, bias: bool) -> Resolved:
    """Build `logits = x · W + b` and its softmax, with random weights and input."""
    model = block_model(FFNSpec(d_model, d_model, bias=bias), "", f"the final layer, {d_model} → {vocab:,}")
    example = Example({}, "randn", (4, d_model), block=final_layer("x", d_model, vocab, bias))
    return replace(model, example=example)


def demo(options: Dimensions) -> Resolved:
    """Build the small block that `ffn trace` runs without a source: 4 → 8 → 4 with ReLU, changed by the options.

    Its input is two tokens with the values 0 to 7, so that readers can check the sums by hand.
    """
    resolved = from_dimensions(merged(Dimensions(d_model=4, d_ff=8), options))
    about = "a small demo block; `ffn trace SOURCE` runs yours"
    example = Example({}, "arange", (2, resolved.model.main.spec.d_model))
    return replace(resolved, evidence=(about,), notes=(), example=example)


def _block(spec: FFNSpec, name: str, example: Example, *evidence: str) -> Resolved:
    return replace(block_model(spec, "", name), evidence=evidence, example=example)
