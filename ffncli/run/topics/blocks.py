"""The topics about parts of a block and about blocks split over devices; figures are computed, sources are cited."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

from ffncli.block import dtypes
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.shard import Ranks
from ffncli.models.counting.parallel import exchange, split
from ffncli.run.topics.topic import (
    NumberTable,
    TinyRun,
    Topic,
    TopicLine,
    Value,
    catalog_model,
    fixed,
    routes,
    tiny_run,
)
from ffncli.show.text import percent

if TYPE_CHECKING:
    from ffncli.models.counting.count import ModelCount


_ATTENTION_IS_ALL = "Vaswani et al. 2017, arXiv:1706.03762"


def block_topic(line: TopicLine) -> Topic:
    """Explain the feed-forward network."""
    run, llama = tiny_run(tokens=1), _model("llama-2-7b")
    return line.explained(
        (
            "A transformer layer has two halves: attention mixes tokens; the feed-forward network (FFN, MLP) works on "
            "each token alone.",
            "W1 turns a token's d_model values into d_ff hidden values, an activation function is applied to each of "
            "them, and W2 maps them back to d_model values.",
            f"Most parameters are here: {percent(llama.ffn_share_of_layer or 0)} of a layer's, in llama-2-7b.",
            "Each weight costs one multiplication and one addition per token: "
            f"{cost(run.prepared.steps).matmul_flops} of the {sum(s.flops for s in run.trace.steps)} operations below.",
        ),
        NumberTable(
            "ffn trace --tokens 1",
            ("step", "formula", "numbers", "first four"),
            tuple((s.name, s.formula, s.shape[-1], "  ".join(map(fixed, s.values[0][:4]))) for s in run.trace.steps),
        ),
        "ffn trace",
        (_ATTENTION_IS_ALL,),
    )


def width_topic(line: TopicLine) -> Topic:
    """Explain why d_ff is 4 times d_model."""
    plain = [one for one in _known_models() if not one.gated and not one.experts]
    kept = [one for one in plain if one.d_ff == 4 * one.d_model]
    specs = {ratio: FFNSpec(512, 512 * ratio, "gelu") for ratio in (1, 2, 4, 8)}
    costs = {ratio: cost(steps(spec)) for ratio, spec in specs.items()}
    base, gpt2, llama, gemma = map(_model, ("transformer-base", "gpt2", "llama-2-7b", "gemma-7b"))
    return line.explained(
        (
            f"The first Transformer has d_model {base.d_model} and d_ff {base.d_ff}, and {len(kept)} of the "
            f"{len(plain)} plain models in `ffn models` keep that ratio.",
            "It is a convention, not a law; with it, the FFN has 8 d_model² weights, compared with 4 d_model² in the "
            f"attention: two thirds of a layer (in gpt2 {percent(gpt2.ffn_share_of_layer or 0)}).",
            "Parameters and operations grow in proportion to d_ff, as the table shows.",
            "At the same total size the loss depends only weakly on the ratio (Kaplan et al. 2020).",
            "A gated block has three matrices, so at 8/3 ≈ 2.67x it costs as much as a plain block at 4x: "
            f"llama-2-7b has {llama.d_ff / llama.d_model:.4g}x, but gemma-7b {gemma.d_ff / gemma.d_model:g}x.",
        ),
        NumberTable(
            "ffn params 512x2048:gelu --sweep d_ff=1x,2x,4x,8x",
            ("ratio", "d_ff", "parameters", "matmul FLOPs per token"),
            tuple((f"{r}x", specs[r].d_ff, one.params, one.matmul_flops) for r, one in costs.items()),
        ),
        "ffn params gpt2 llama-2-7b gemma-7b",
        (_ATTENTION_IS_ALL, "Kaplan et al. 2020, arXiv:2001.08361, section 3.1"),
    )


def gate_topic(line: TopicLine) -> Topic:
    """Explain the gate."""
    source = "4x6:swiglu"
    run = tiny_run(source, tokens=1)
    names = ("gate", "act", "up", "hidden")
    units = _columns(run, names)
    models = _known_models()
    closed = min(units, key=lambda unit: abs(unit[2]))
    return line.explained(
        (
            "A gated block projects the token twice, gate = x · W1 and up = x · W3, and hidden = f(gate) ⊙ up.",
            "So each token decides, unit by unit, how much of up passes: where f(gate) is near zero, the unit is off.",
            f"Below, unit {closed[0]} has up {fixed(closed[3])} and silu(gate) {fixed(closed[2])}: "
            f"{fixed(closed[4])} passes.",
            "This product can multiply one value of the token by another, which a plain relu or gelu block only "
            "approximates.",
            "In T5, gated blocks reached a lower perplexity than plain blocks of the same size (Shazeer 2020); "
            f"{sum(one.gated for one in models)} of the {len(models)} models in `ffn models` are gated.",
            "The block is named after f: silu in swiglu, gelu in geglu, relu in reglu, the sigmoid in glu.",
        ),
        NumberTable(f"ffn trace {source} --tokens 1", ("unit", "gate", "silu(gate)", "up", "hidden"), tuple(units)),
        "ffn activations swiglu geglu reglu",
        ("Shazeer 2020, arXiv:2002.05202", "Dauphin et al. 2016, arXiv:1612.08083"),
    )


def neuron_topic(line: TopicLine) -> Topic:
    """Explain what one hidden unit does."""
    run, gpt2 = tiny_run(tokens=1), _model("gpt2")
    weights = {name: tensor.tolist() for name, tensor in run.prepared.weights.items()}
    strength, out, width = run["act"].values[0], run["down"].values[0], gpt2.d_ff
    written = [[fires * row[unit] for row in weights["down.weight"]] for unit, fires in enumerate(strength)]
    rows = [(str(i), up, fires, *written[i]) for i, (_, up, fires) in enumerate(_columns(run, ("up", "act")))]
    most = max(range(len(strength)), key=lambda unit: strength[unit])
    layers = gpt2.layers or 0
    return line.explained(
        (
            "Neuron i is column i of W1, its bias, the activation, and row i of W2.",
            "It reads: the dot product of the token with its column measures how well the token fits its pattern.",
            "It fires: the activation turns the match into a strength; with relu, zero if nothing matches.",
            "It writes: it adds the strength times its row of W2 to the output, to which b2 is also added.",
            f"Below, neuron {most} fires most, {fixed(strength[most])}, and writes {fixed(written[most][-1])} "
            f"to out 3; the sum with b2 there is {fixed(out[-1])}.",
            f"gpt2 has {layers} layers of {width:,} neurons, so {layers * width:,} patterns, each with the vector that "
            "its neuron writes: a kind of memory (Geva et al. 2021).",
        ),
        NumberTable(
            "ffn trace --tokens 1 --explain 'down[0,3]'",
            ("neuron", "reads", "fires", *(f"out {i}" for i in range(len(out)))),
            (*rows, ("b2", None, None, *weights["down.bias"]), ("sum", None, None, *out)),
        ),
        "ffn trace 64x256:swiglu --tokens 100 --top-units 3",
        ("Geva et al. 2021, arXiv:2012.14913",),
    )


def moe_topic(line: TopicLine) -> Topic:
    """Explain the mixture of experts."""
    source = "4x8:swiglu"
    run, mixtral = tiny_run(source, experts=4), _model("mixtral-8x7b")
    total, active = mixtral.ffn_params_total, mixtral.ffn_params_active or 0
    return line.explained(
        (
            "A mixture of experts (MoE) has several FFNs in a layer; a router picks top_k of them for each token.",
            "The router is one small matrix: x · W_router scores the experts; softmax turns the best scores into the "
            "weights with which those experts' outputs are added.",
            f"So a model has many parameters and uses few per token: mixtral-8x7b uses {mixtral.top_k} of "
            f"{mixtral.experts} experts, {active / 1e9:.1f} of {total / 1e9:.1f} billion FFN parameters.",
            "The price is memory: all experts stay loaded, because the next token may choose others.",
            "Some models add shared experts, which every token uses besides the chosen ones.",
        ),
        NumberTable(f"ffn trace {source} --experts 4", ("token", "experts", "weights"), tuple(routes(run))),
        "ffn params mixtral-8x7b deepseek-v3",
        ("Shazeer et al. 2017, arXiv:1701.06538", "Jiang et al. 2024, arXiv:2401.04088"),
    )


def norm_topic(line: TopicLine) -> Topic:
    """Explain what a norm does."""
    x = (1.0, 2.0, 3.0, 4.0)
    text = ",".join(f"{value:g}" for value in x)
    layer, rms = (tiny_run("4x8", norm=kind, input=text)["norm"].values[0] for kind in ("layernorm", "rmsnorm"))
    mean, rms_of_x = sum(x) / len(x), sqrt(sum(value * value for value in x) / len(x))
    return line.explained(
        (
            "A norm rescales each token's vector, so that the matrices read values of one size at every depth.",
            f"LayerNorm subtracts the mean (here {mean:g}) and divides by the standard deviation.",
            f"RMSNorm only divides by the root mean square (here {fixed(rms_of_x)}), which is cheaper.",
            "Both then multiply by a learned weight per dimension; LayerNorm also adds a learned bias.",
            "Pre-norm (GPT-2, Llama) rescales the block's input; post-norm (first Transformer, BERT) rescales the sum "
            "of the block's input and output.",
        ),
        NumberTable(
            f"ffn trace 4x8 --norm layernorm --input {text}",
            ("dimension", "x", "layernorm", "rmsnorm"),
            tuple((i, *values) for i, values in enumerate(zip(x, layer, rms, strict=True))),
        ),
        f"ffn trace 4x8 --norm rmsnorm --input {text}",
        ("Ba et al. 2016, arXiv:1607.06450", "Zhang & Sennrich 2019, arXiv:1910.07467"),
    )


def residual_topic(line: TopicLine) -> Topic:
    """Explain the residual connection."""
    run = tiny_run("4x8", tokens=1, residual=True, norm="rmsnorm")
    names = ("x", "down", "out")
    lengths = {name: sqrt(sum(value * value for value in run[name].values[0])) for name in names}
    return line.explained(
        (
            "The block does not replace the token's vector: its result is added to it, out = x + down.",
            "So a block of zero weights changes nothing: each layer learns a correction, not a whole new vector.",
            f"Below, x has length {fixed(lengths['x'])} and a correction of length {fixed(lengths['down'])} is added.",
            "Gradients pass an addition unchanged, which lets very deep stacks be trained (He et al. 2015).",
            "The sum that runs through all layers is called the residual stream.",
        ),
        NumberTable(
            "ffn trace 4x8 --residual --norm rmsnorm --tokens 1", ("dimension", *names), tuple(_columns(run, names))
        ),
        "ffn explain norm",
        ("He et al. 2015, arXiv:1512.03385",),
    )


def dropout_topic(line: TopicLine) -> Topic:
    """Explain what dropout does."""
    p = 0.5
    run = tiny_run("4x8:gelu", tokens=1, dropout=p, train=True)
    record = run["dropout"]
    return line.explained(
        (
            "In training each hidden value becomes zero with probability p, so the model cannot rely on single units.",
            f"The others are divided by 1 - p (p = {p:g}: times {1 / (1 - p):g}), which keeps the mean the same.",
            f"Below, {record.dropped} of {record.live} values are dropped; another seed drops others.",
            "At inference nothing is dropped: the step passes everything through.",
            "ffn runs blocks in inference mode; --train turns dropout on.",
        ),
        NumberTable(
            f"ffn trace 4x8:gelu --dropout {p:g} --train --tokens 1",
            ("unit", "act", "dropout"),
            tuple(_columns(run, ("act", "dropout"))),
        ),
        "ffn trace --example notebook",
        ("Srivastava et al. 2014, JMLR 15:1929",),
    )


def tolerance_topic(line: TopicLine) -> Topic:
    """Explain the bound of `ffn verify`, with the errors of blocks of several widths."""
    import torch

    from ffncli.run.engine.execute import run
    from ffncli.run.engine.reference import in_float64
    from ffncli.run.engine.weights import random_weights
    from ffncli.run.measure.gap import gap, tolerance_for

    rows: list[tuple[Value, ...]] = []
    for width in (64, 1024, 16384):
        block = steps(FFNSpec(16, width, "swiglu"))
        row: list[Value] = [width]
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            weights = random_weights(block, generator, dtype)
            inputs = {"x": torch.randn(16, 16, generator=generator).to(dtype)}
            with torch.no_grad():
                error = gap(run(block, weights, inputs), in_float64(block, weights, inputs)[0]).relative
            eps = torch.finfo(dtype).eps
            row += [error / eps, tolerance_for(dtype, width) / eps]
        rows.append(tuple(row))
    fp32, bf16 = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16))
    limit = tolerance_for(torch.float32, 1024)
    return line.explained(
        (
            "Every step rounds, and each implementation in its own order, so two correct results differ a little.",
            f"eps is the distance from 1 to the next number: {fp32:.3g} in fp32, {bf16:.3g} in bf16.",
            "A sum of n products makes n rounding errors of random sign, which grow as √n.",
            "So ffn accepts max|a - b| / max|b| up to 4 × (eps + eps_sum × √width); width is the larger of d_model and "
            "d_ff.",
            f"In fp32 at width 1024 that is {limit:.2g}; in bf16 eps_sum is fp32's, because sums are kept in fp32.",
            "Lower precision, a lost bias or a swapped matrix is far above it; --tolerance sets another limit.",
        ),
        NumberTable(
            "ffn verify 16x64:swiglu --check kernels --kernel eager",
            ("width", "fp32 error / eps", "limit / eps", "bf16 error / eps", "its limit / eps"),
            tuple(rows),
        ),
        "ffn verify 16x64:swiglu --kernel eager --referee",
        ("Higham & Mary 2019, SIAM J. Sci. Comput. 41(5), A2815",),
    )


def _columns(run: TinyRun, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the first token's values at these steps: a column for each step, a row for each index."""
    return [(i, *row) for i, row in enumerate(zip(*(run[name].values[0] for name in names), strict=True))]


def _known_models() -> list[ModelCount]:
    """Return the counts of every model in the catalog."""
    from ffncli.models import catalog

    return list(map(_model, catalog.names()))


def _model(name: str) -> ModelCount:
    """Return the counts of a model in the catalog."""
    from ffncli.models.counting.count import count

    return count(catalog_model(name))


_RANKS = 8  # number of ranks in sentences about a model of the catalog


def tensor_parallel_topic(line: TopicLine) -> Topic:
    """Explain tensor parallelism."""
    source, ranks = "4x8:swiglu", Ranks(tp=2)
    tiny = tiny_run(source, tokens=1)
    sums, total = _partial_sums(tiny, ranks)
    model = catalog_model("llama-2-7b").model
    share = split(model, _RANKS, dtypes.dtype("bf16"))
    rows: list[tuple[Value, ...]] = [(f"rank {rank}", *values) for rank, values in enumerate(sums)]
    return line.explained(
        (
            "Tensor parallelism (TP) splits every block over n devices, called ranks: each computes d_ff / n of the "
            "hidden units.",
            "A rank holds the columns of W1 and W3 (column-parallel) and the rows of W2 (row-parallel) that belong to "
            "its units, so ranks exchange nothing before the output.",
            "Each rank's output sums over its units only; one all-reduce adds these partial sums and gives every rank "
            "the result.",
            f"Below, out 0 is {fixed(sums[0][0])} from rank 0 plus {fixed(sums[1][0])} from rank 1, which is "
            f"{fixed(total[0])}, the same as without a split.",
            f"On {_RANKS} ranks each rank has {share.rank_0_params_total / 1e9:.2f} of llama-2-7b's "
            f"{share.whole_params_total / 1e9:.2f} billion FFN parameters, and sends "
            f"{share.ring_all_reduce_bytes_per_token:,.0f} bytes per token and layer (a ring, bf16).",
            "That needs fast links, so TP is mostly used inside one machine (Narayanan et al. 2021).",
        ),
        NumberTable(
            f"ffn trace {source} --tokens 1 --tp {ranks.tp}",
            ("down", *(f"out {i}" for i in range(len(total)))),
            (*rows, ("sum", *total), ("without a split", *tiny["down"].values[0])),
        ),
        "ffn plan llama-2-70b --tp 1,2,4,8",
        ("Shoeybi et al. 2019, arXiv:1909.08053", "Narayanan et al. 2021, arXiv:2104.04473"),
    )


def expert_parallel_topic(line: TopicLine) -> Topic:
    """Explain expert parallelism."""
    source, experts, tokens, ranks = "4x8:swiglu", 6, 6, 2
    each = experts // ranks
    rows = _journeys(tiny_run(source, tokens=tokens, experts=experts), ranks, each)
    sent = sum(row[-1] for row in rows)
    choices = sum(len(row[2].split(",")) for row in rows)
    mixtral = exchange(catalog_model("mixtral-8x7b").model, _RANKS, dtypes.dtype("bf16"))
    return line.explained(
        (
            "Expert parallelism (EP) spreads the experts of a mixture over n ranks: each has whole experts, a share "
            "of the tokens, and a copy of the router.",
            "A token's vector goes to the ranks of the experts that it chose (dispatch) and their results come back "
            "(combine): two all-to-alls per layer.",
            f"Below, rank 0 has experts 0-{each - 1} and rank 1 has {each}-{experts - 1}: {sent} of {choices} chosen "
            "experts are on the other rank, so a vector is sent to each and one comes back.",
            "If all experts are equally likely, (n - 1) / n of the choices leave a rank: in mixtral-8x7b on "
            f"{_RANKS} ranks, these are {mixtral.dispatch_bytes_per_token:,.0f} bytes per token and layer (bf16).",
            "A layer waits for the rank whose experts got the most tokens, so training also rewards an even spread "
            "(Lepikhin et al. 2020).",
        ),
        NumberTable(
            f"ffn trace {source} --experts {experts} --tokens {tokens} --ep {ranks}",
            ("token", "on rank", "experts", "on ranks", "sent"),
            tuple(rows),
        ),
        "ffn plan mixtral-8x7b --ep 1,2,4,8",
        ("Lepikhin et al. 2020, arXiv:2006.16668",),
    )


def _partial_sums(tiny: TinyRun, ranks: Ranks) -> tuple[list[list[float]], list[float]]:
    """Return (each rank's part of the first token's output, the sum of the parts), as the ranks compute them."""
    import torch

    from ffncli.run.engine.sharded import execute_ranks

    ready = tiny.prepared
    with torch.no_grad():
        *_, last = execute_ranks(ready.steps, ready.weights, ready.inputs, ranks)
    return [part[0].tolist() for part in last.parts], last.tensors[0][0].tolist()


def _journeys(tiny: TinyRun, ranks: int, each: int) -> list[tuple[int, int, str, str, int]]:
    """Return (token, its rank, its experts, the experts' ranks, number of vectors sent) for every token; its experts
    are in descending order of weight."""
    import torch

    from ffncli.run.engine.sharded import tokens_of_rank

    chosen = routes(tiny)
    numbers = torch.arange(len(chosen))[:, None]
    homes = {int(token): place for place in range(ranks) for token in tokens_of_rank(numbers, place, ranks)}
    rows = []
    for token, experts, _ in chosen:
        places = [int(expert) // each for expert in experts.split(", ")]
        away = sum(place != homes[token] for place in places)
        rows.append((token, homes[token], experts, ", ".join(map(str, places)), away))
    return rows
