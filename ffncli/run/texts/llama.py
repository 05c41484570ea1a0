"""A guide to the feed-forward block of an engine that runs Llama on several nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ffncli.block import dtypes
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.shard import shard
from ffncli.block.steps import AllReduce, Norm, Step, parameters, weight_symbol
from ffncli.models import catalog
from ffncli.models.counting.iso_params import iso_params
from ffncli.models.counting.tensor_parallel import all_gather_bytes, ring_all_reduce_bytes, split
from ffncli.run.engine.execute import run
from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.sharded import share_of
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import gap
from ffncli.run.texts.fact import (
    Fact,
    Verdict,
    agrees,
    compared,
    departure,
    drawn,
    error,
    function,
    intermediates,
)

NODES = 4
ROUNDING = 1e-5  # of float32 sums of 11008 terms


def facts(ready: Prepared) -> tuple[Fact, ...]:
    """Names, the merge-add, the norm, the split over nodes and the bytes sent, ratios, formats, the effect of Q80."""
    tensors = intermediates(ready)
    return (
        *_names(ready.steps), *_order(ready, tensors), *_slices(ready), _whole(ready, tensors), _collectives(ready),
        *_ratios(), _at_equal_parameters(ready), _bends(), _experts(), *_formats(), _between_the_steps(ready, tensors),
    )  # fmt: skip


def _names(steps: Sequence[Step]) -> list[Fact]:
    symbols = ", ".join(f"{weight_symbol(name, 'weight', steps)} {name}" for name in ("gate", "up", "down"))
    return [
        compared("what W1, W3 and W2 are", "W1 gate, W3 up, W2 down", symbols),
        Fact("the text's D, L, H, Y", "gate, up, hidden, down", note="D = X·W1, L = X·W3, H = SiLU(D) ⊙ L, Y = H·W2"),
    ]


def _order(ready: Prepared, tensors: Mapping[str, Tensor]) -> list[Fact]:
    """The merge-add first, then the norm as the text writes it, then the shapes."""
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


def _slices(ready: Prepared) -> list[Fact]:
    """One node's part of each matrix, by the actual split, and the two names in use for it."""
    part = {n: [axis.size for axis in axes] for n, axes in parameters(shard(ready.steps, 0, NODES)).items()}
    shapes = f"{part['gate.weight'][::-1]} and {part['down.weight'][::-1]}"
    return [
        compared(
            "slices of W1 (and W3) and of W2 on 4 nodes", "[4096, 2752] and [2752, 4096]", shapes,
            f"as W[in, out]; torch's gate.weight is {part['gate.weight']}, down.weight {part['down.weight']}",
        ),
        Fact(
            "the split of W1 and W3 by outputs is called", f"{_place('gate.weight')}-parallel by Megatron",
            "row matmul", "depends", "two names of one split: rows of the stored [out, in] are columns of W[in, out]",
        ),
        Fact("the split of W2 by inputs is called", f"{_place('down.weight')}-parallel by Megatron"),
    ]  # fmt: skip


def _place(name: str) -> str:
    """The name of a tensor's split over ranks, from the model's own count."""
    resolved = catalog.find("llama-2-7b")
    assert resolved is not None
    parts = split(resolved.model, NODES, dtypes.dtype("fp32")).groups[0].slices
    return next(part.place for part in parts if part.name == name)


def _whole(ready: Prepared, tensors: Mapping[str, Tensor]) -> Fact:
    """Every node runs its own steps on its own slices; only the sum needs the other nodes."""
    partial = [_node(ready, rank) for rank in range(NODES)]
    apart = gap(torch.stack(partial).sum(0), tensors["down"]).relative
    shape = list(partial[0].shape)
    return Fact(
        "partial sums of 4 nodes, each of full width, summed = whole",
        f"{NODES} × {shape}, relative difference {error(apart, ROUNDING)}", "", agrees(apart, ROUNDING),
    )  # fmt: skip


def _node(ready: Prepared, rank: int) -> Tensor:
    """One node's partial `down`: the steps of `shard` up to their AllReduce, on slices of the weights."""
    steps = tuple(s for s in shard(ready.steps, rank, NODES) if not isinstance(s.op, AllReduce))
    return run(steps, share_of(ready.weights, ready.steps, steps, rank), ready.inputs)


def _collectives(ready: Prepared) -> Fact:
    """Counted in the steps that a node runs; bytes are what one node sends for one token in float32."""
    steps = shard(ready.steps, 0, NODES)
    count = sum(isinstance(s.op, AllReduce) for s in steps)
    sizes = {name: axes[0].size for name, axes in parameters(steps).items()}
    width = dtypes.dtype("fp32").block_bytes
    gather = all_gather_bytes(sizes["gate.weight"] * width, NODES)
    reduce = ring_all_reduce_bytes(sizes["down.weight"] * width, NODES)
    figure = f"collectives: {count}; the All-Gather is not needed, it would cost {gather:,} bytes"
    verdict: Verdict = "wrong" if count != 2 else "holds"
    return Fact(
        "collectives of one block", figure, "an All-Gather after W1 and W3, an All-Reduce after W2", verdict,
        f"sent by each of {NODES} nodes for each token of one gathered tensor in fp32, on top of the ring all-reduce's "
        f"{reduce:,.0f}; SiLU and ⊙ need the node's own slice alone, and W2's inputs are split the same way",
    )  # fmt: skip


def _ratios() -> list[Fact]:
    out = []
    for name, stated, digits in (("llama-2-7b", "2.7", 1), ("gpt2", "4", 0)):
        model = catalog.find(name)
        assert model is not None
        spec = model.main.spec
        ratio = spec.d_ff / spec.d_model
        topic = f"d_ff over d_model of {name}"
        out.append(compared(topic, stated, f"{ratio:.{digits}f}", f"{spec.d_ff:,} / {spec.d_model:,} = {ratio:g}"))
    return out


def _at_equal_parameters(ready: Prepared) -> Fact:
    pair = iso_params(ready.layer.spec)
    return Fact(
        "SwiGLU is a stronger non-linearity",
        f"gated d_ff {pair.gated_d_ff:,} and plain d_ff {pair.plain_d_ff:,} differ by {pair.difference_percent:+.2f} %",
        "", "depends",
        f"compare at equal parameters ({pair.gated_params:,}): it has three matrices, so a plain block may be half as "
        "wide again; which of the two is better is a matter of training, not of the formula: "
        "ffn approximate --activation swiglu,silu",
        "ffn params 4096x11008:swiglu --iso-params",
    )  # fmt: skip


def bends(d_model: int) -> dict[str, float]:
    """How far blocks of equal size are from linear maps: `departure` over max |f|, by activation.

    The gated one is 8/3 d_model wide, the plain ones 4 d_model; weights initialised as by nn.Linear, 512 random inputs.
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
        "departure from a linear map at equal parameters, max |f(a+b) − f(a) − f(b) + f(0)| / max |f|", ratios,
        note="d_model 96, gated d_ff 256, plain d_ff 384, drawn weights; the gate multiplies, so it grows as x²",
    )  # fmt: skip


def _experts() -> Fact:
    model = catalog.find("qwen3-30b-a3b")
    assert model is not None
    spec = model.main.spec
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
    """The engine rounds the input of W1 and W3, and H before W2, to Q80: how much that changes Y."""
    names = [step.output for step in ready.steps]
    after_norm, after_hidden = names.index("norm") + 1, names.index("hidden") + 1
    hidden = run(ready.steps[after_norm:after_hidden], ready.weights, {"norm": q80(tensors["norm"])})
    down = run(ready.steps[after_hidden:], ready.weights, {"hidden": q80(hidden)})
    return Fact(
        "activations quantized to Q80 between the steps",
        f"Y moves by {100 * gap(down, tensors['down']).relative:.1f} %",
        note="what enters W1 and W3, and H: max difference over max |Y|, with weights in full",
    )


def q80(values: Tensor) -> Tensor:
    """The values as Q80 stores them: signed bytes, one fp16 scale (largest of the block / 127) per 32 of a row."""
    blocks = values.reshape(-1, dtypes.storage("q8_0").block)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale).nan_to_num().round() * scale.half().to(values.dtype)).reshape(values.shape)
