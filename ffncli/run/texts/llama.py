"""A guide to the feed-forward block of an engine that runs Llama on several nodes."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ffncli.block import dtypes
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.shard import Ranks
from ffncli.block.steps import Norm, Step, parameters
from ffncli.block.symbols import weight_symbol
from ffncli.models import catalog
from ffncli.models.counting.iso_params import iso_params
from ffncli.run.engine.execute import run
from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import gap
from ffncli.run.ranks.one_process import RankTrace, rank_trace
from ffncli.run.texts.fact import Fact, agrees, compared, departure, drawn, error, function, intermediates

NODES = 4
ROUNDING = 1e-5  # rounding error of float32 sums over 11008 terms


def facts(ready: Prepared) -> tuple[Fact, ...]:
    """Check names, merge-add, norm, the split over nodes and the bytes sent, ratios, formats, and the effect of Q80."""
    tensors = intermediates(ready)
    split = rank_trace(ready.steps, ready.weights, ready.inputs, Ranks(NODES), tensors, show=1)
    return (
        *_names(ready.steps), *_order(ready, tensors), *_slices(split), _whole(split), *_collectives(split),
        *_ratios(), _at_equal_parameters(ready), _bends(), _experts(), *_formats(), _between_the_steps(ready, tensors),
    )  # fmt: skip


def _names(steps: Sequence[Step]) -> list[Fact]:
    symbols = ", ".join(f"{weight_symbol(name, 'weight', steps)} {name}" for name in ("gate", "up", "down"))
    return [
        compared("what W1, W3 and W2 are", "W1 gate, W3 up, W2 down", symbols),
        Fact("the guide's D, L, H, Y", "gate, up, hidden, down", note="D = X·W1, L = X·W3, H = SiLU(D) ⊙ L, Y = H·W2"),
    ]


def _order(ready: Prepared, tensors: Mapping[str, Tensor]) -> list[Fact]:
    """Check the merge-add, then the norm as written in the guide, then the shapes."""
    first, norm = ready.steps[0], next(s for s in ready.steps if isinstance(s.op, Norm))
    assert isinstance(norm.op, Norm)
    merged, eps = tensors["merged"], norm.op.eps
    expected = merged / (merged.square().mean(-1, keepdim=True) + eps).sqrt() * ready.weights["norm.weight"]
    apart = gap(tensors["norm"], expected).relative
    start, wide, end = (list(tensors[name].shape) for name in ("norm", "gate", "down"))
    same = start == end and wide == [*start[:-1], parameters(ready.steps)["gate.weight"][0].size]
    return [
        compared("the block begins with", "x + attention", " + ".join(first.inputs), f"{first.output} has two inputs"),
        Fact(
            "RMSNorm is x / sqrt(mean(x²) + ε) times its weight", f"relative difference {error(apart, ROUNDING)}",
            "", agrees(apart, ROUNDING),
        ),
        Fact("shapes dim → ffDim → dim", f"{start} → {wide} → {end}", "", "holds" if same else "wrong"),
    ]  # fmt: skip


def _slices(split: RankTrace) -> list[Fact]:
    """Return one node's part of each matrix in the actual split, and the two common names of the split."""
    part = {weight.name: weight for step in split.steps for weight in step.weights}
    gate, down = part["gate.weight"], part["down.weight"]
    return [
        compared(
            "slices of W1 (and W3) and of W2 on 4 nodes", "[4096, 2752] and [2752, 4096]",
            f"{[*gate.shape]} and {[*down.shape]}",
            f"as W[in, out]; torch's gate.weight is {[*gate.shape[::-1]]}, down.weight {[*down.shape[::-1]]}",
        ),
        Fact(
            "the split of W1 and W3 by outputs is called", f"{gate.place}-parallel by Megatron",
            "row matmul", "depends", "two names for one split: rows of the stored [out, in] are columns of W[in, out]",
        ),
        Fact("the split of W2 by inputs is called", f"{down.place}-parallel by Megatron"),
    ]  # fmt: skip


def _whole(split: RankTrace) -> Fact:
    """Check the sum of the nodes' results; every node runs its own steps on its own slices."""
    (one,), apart = split.collectives, split.agreement.relative_error
    return Fact(
        "partial sums of 4 nodes, each of full width, summed = whole",
        f"{len(one.parts)} × {[*one.parts[0].shape]}, relative difference {error(apart, ROUNDING)}",
        "",
        agrees(apart, ROUNDING),
    )


def _collectives(split: RankTrace) -> list[Fact]:
    """Return facts about a node's collectives: how many there are, and the bytes sent for one token in float32."""
    tokens = split.shares[0].tokens
    gather, reduce = split.unneeded_all_gather_bytes // tokens, split.shares[0].ring_all_reduce_bytes / tokens
    figure = f"collectives: {split.all_reduces}; the All-Gather is not needed and would cost {gather:,} bytes"
    sent = [
        (f"{one.gather_and_sum_bytes // tokens:,}", f"{one.ring_all_reduce_bytes / tokens:,.0f}") for one in split.wire
    ]
    return [
        Fact(
            "collectives of one block", figure, "an All-Gather after W1 and W3, an All-Reduce after W2",
            "wrong" if split.all_reduces != 2 else "holds",
            f"bytes that each of {NODES} nodes sends per token for one gathered fp32 tensor, on top of the ring "
            f"all-reduce's {reduce:,.0f}; SiLU and ⊙ need only the node's own slice, and W2's inputs are split the "
            "same way",
        ),
        Fact(
            f"bytes that each of {', '.join(str(one.ranks) for one in split.wire)} nodes sends to sum Y",
            ", ".join(theirs for theirs, _ in sent), "", "",
            "the engine sends every partial sum to all other nodes (n − 1 times Y) and adds there; a ring all-reduce "
            f"sends less than twice Y: {', '.join(ring for _, ring in sent)}; one token in fp32",
            "ffn trace 4096x11008:swiglu --tp 4 -n 1",
        ),
    ]  # fmt: skip


def _ratios() -> list[Fact]:
    out = []
    for name, stated, digits in (("llama-2-7b", "2.7", 1), ("gpt2", "4", 0)):
        resolved = catalog.find(name)
        assert resolved is not None
        spec = resolved.model.main.spec
        ratio = spec.d_ff / spec.d_model
        topic = f"d_ff over d_model of {name}"
        out.append(compared(topic, stated, f"{ratio:.{digits}f}", f"{spec.d_ff:,} / {spec.d_model:,} = {ratio:g}"))
    return out


def _at_equal_parameters(ready: Prepared) -> Fact:
    pair = iso_params(ready.layer.spec)
    return Fact(
        "SwiGLU is a stronger non-linearity",
        f"gated d_ff {pair.gated_d_ff:,} and plain d_ff {pair.plain_d_ff:,} differ by {pair.difference_percent:+.2f} %",
        "",
        "depends",
        f"compare at equal parameters ({pair.gated_params:,}): swiglu has three matrices, so a plain block may be "
        "1.5 times as wide; training decides which is better, not the formula: "
        "ffn approximate --activation swiglu,silu",
        "ffn params 4096x11008:swiglu --iso-params",
    )


def bends(d_model: int) -> dict[str, float]:
    """Measure how far blocks of equal size are from linear maps: `departure` divided by max |f|, by activation.

    The gated block has a d_ff of 8/3 d_model, the plain blocks have a d_ff of 4 d_model. Weights are initialised as in
    nn.Linear; there are 512 random inputs.
    """
    a, b = drawn(512, d_model), drawn(512, d_model, seed=1)
    out = {}
    widths = {"swiglu": 8 * d_model // 3, **dict.fromkeys(("silu", "gelu", "relu"), 4 * d_model)}
    for name, width in widths.items():
        block = steps(FFNSpec(d_model, width, name, bias=False))
        f = function(block, random_weights(block, torch.Generator().manual_seed(0), torch.float64))
        out[name] = departure(f, a, b) / float(f(a + b).abs().max())
    return out


def _bends() -> Fact:
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in bends(96).items())
    return Fact(
        "departure from a linear map at equal parameters, max |f(a+b) − f(a) − f(b) + f(0)| / max |f|",
        ratios,
        note="d_model 96, gated d_ff 256, plain d_ff 384, random weights; the gate multiplies, so swiglu grows as x²",
    )


def _experts() -> Fact:
    resolved = catalog.find("qwen3-30b-a3b")
    assert resolved is not None
    spec = resolved.model.main.spec
    return Fact(
        "in a mixture of experts ffDim is one expert's width", f"{spec.d_ff:,}", "", "holds",
        f"Qwen3-30B-A3B: {spec.moe.experts if spec.moe else 0} experts of d_ff {spec.d_ff}, d_model {spec.d_model:,}",
        "ffn params qwen3-30b-a3b",
    )  # fmt: skip


def _formats() -> list[Fact]:
    out = []
    for name, ours, stated in (("Q40", "q4_0", "4.5"), ("Q80", "q8_0", "8.5")):
        form = dtypes.storage(ours)
        note = f"{form.block} weights and one fp16 scale in {form.block_bytes} bytes ({ours})"
        out.append(compared(f"bits per weight of {name}", stated, f"{form.bits_per_weight:g}", note))
    return out


def _between_the_steps(ready: Prepared, tensors: Mapping[str, Tensor]) -> Fact:
    """Measure how much Y changes if the inputs of W1, W3 and W2 are rounded to Q80."""
    names = [step.output for step in ready.steps]
    after_norm, after_hidden = names.index("norm") + 1, names.index("hidden") + 1
    hidden = run(ready.steps[after_norm:after_hidden], ready.weights, {"norm": q80(tensors["norm"])})
    down = run(ready.steps[after_hidden:], ready.weights, {"hidden": q80(hidden)})
    return Fact(
        "activations quantized to Q80 between the steps",
        f"Y moves by {100 * gap(down, tensors['down']).relative:.1f} %",
        note="the inputs of W1 and W3, and H, are rounded: max difference over max |Y|, with unquantized weights",
    )


def q80(values: Tensor) -> Tensor:
    """Round values to Q80: signed bytes, with one fp16 scale (maximum magnitude / 127) per block of 32 values."""
    blocks = values.reshape(-1, dtypes.storage("q8_0").block)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale).nan_to_num().round() * scale.half().to(values.dtype)).reshape(values.shape)
