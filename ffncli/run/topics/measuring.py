"""The topics about speed, measurements and readings: roofline, prefill, kernels, noise, intervals, caches, ..."""

from __future__ import annotations

from math import cos, exp, pi, sin, sqrt
from random import Random
from statistics import mean, median, stdev

from ffncli.block import dtypes
from ffncli.models.counting.traffic import device_floors, ridge_of, token_costs
from ffncli.run.topics.topic import NumberTable, Topic, TopicLine, Value, catalog_model, fixed, tiny_run
from ffncli.show.text import bytes_text, percent
from ffncli.system.hardware import named

_MODEL, _DEVICE, _BF16 = "llama-2-7b", "h100", "bf16"
_TIMES = (10.02, 10.05, 9.98, 10.01, 10.04, 9.97, 10.03, 14.6)  # eight timings of one call, in ms; the last disturbed


def roofline_topic(line: TopicLine) -> Topic:
    """Explain the roofline by token counts on an accelerator."""
    device, weights, model = named(_DEVICE, "device"), dtypes.dtype(_BF16), catalog_model(_MODEL).model
    costs = token_costs(model, weights, (1, 32, 256, 1024, 4096))
    floors = device_floors(device, costs, weights, 0)
    ridge = ridge_of(device, weights) or 0.0
    rows = tuple(
        (cost.tokens, cost.flops_per_byte, floor.bound, 1e3 * (floor.floor_s or 0.0))
        for cost, floor in zip(costs, floors, strict=True)
    )
    return line.explained(
        (
            "A device has two limits, the rate at which it multiplies and the rate at which it reads memory.",
            "Work with few FLOPs per byte waits for memory; work with many waits for the arithmetic.",
            f"The ridge is where both take equally long: {ridge:.4g} FLOPs per byte on an H100 in bf16.",
            "One token reads every weight for one multiplication each, so more tokens raise the intensity.",
            "The larger of the two times is the floor, under which no kernel can be; a faster time is a mistake.",
            "`gemm_ratio` compares with what was measured: a kernel's time over that of its matrix products alone.",
        ),
        NumberTable(f"ffn params {_MODEL} --dtype {_BF16} --ridge {_DEVICE} --tokens 1,32,256,1024,4096",
                    ("tokens", "FLOPs/byte", "bound by", "floor, ms"), rows),
        f"ffn plan {_MODEL} --device {_DEVICE}", ("Williams, Waterman & Patterson 2009, CACM 52(4)",),
    )  # fmt: skip


def prefill_topic(line: TopicLine) -> Topic:
    """Explain prefill and decode by the weights that a token reads."""
    model, weights = catalog_model(_MODEL).model, dtypes.dtype(_BF16)
    phases = {"decode, one text": 1, "decode, 64 texts": 64, "prefill, 2048 tokens": 2048}
    costs = token_costs(model, weights, tuple(phases.values()))
    rows = tuple(
        (what, one.tokens, one.weight_bytes_read / one.tokens, one.flops_per_byte)
        for what, one in zip(phases, costs, strict=True)
    )
    return line.explained(
        (
            "A model reads a prompt in one pass over all its tokens (prefill), then writes token by token (decode).",
            "Both read the same weights; prefill shares one reading among thousands of tokens.",
            f"In decode, every token of one text reads {bytes_text(int(rows[0][2]))} of FFN weights in {_MODEL}.",
            "So decode is bound by memory and prefill by arithmetic, and a server decodes many texts together.",
        ),
        NumberTable(f"ffn params {_MODEL} --dtype {_BF16} --tokens 1,64,2048",
                    ("phase", "tokens a pass", "weight bytes a token", "FLOPs/byte"), rows),
        f"ffn params {_MODEL} --ridge {_DEVICE} --tokens 1,2048", (),
    )  # fmt: skip


def kernel_topic(line: TopicLine) -> Topic:
    """Explain kernels by the bytes that fused and unfused ones move."""
    model, weights = catalog_model(_MODEL).model, dtypes.dtype(_BF16)
    rows = tuple(
        (one.tokens, one.activation_bytes, one.activation_bytes_fused, one.weight_bytes_read)
        for one in token_costs(model, weights, (1, 32, 1024, 4096))
    )
    return line.explained(
        (
            "A kernel is a way to compute the block: the same formula, other code.",
            "`eager` runs step by step, so every intermediate goes to memory and comes back.",
            "A fused kernel keeps intermediates in registers: below, it moves fewer bytes for activations.",
            "`packed` multiplies gate and up as one matrix; `compiled` lets torch.compile fuse the steps.",
            "On a GPU each call is also a launch of some microseconds, which few tokens do not hide.",
        ),
        NumberTable(f"ffn params {_MODEL} --dtype {_BF16} --tokens 1,32,1024,4096",
                    ("tokens", "activations, unfused", "fused", "weights"), rows),
        "ffn bench --list-kernels", (),
    )  # fmt: skip


def noise_topic(line: TopicLine) -> Topic:
    """Explain noise by comparing drawn times of the same code with each other."""
    draw, rows = Random(0), []
    for rounds in (4, 16, 64, 256):
        ratios = [draw.lognormvariate(0, 0.05) / draw.lognormvariate(0, 0.05) for _ in range(rounds)]
        rows.append((rounds, min(ratios), max(ratios), median(ratios), abs(median(ratios) - 1)))
    return line.explained(
        (
            "The same code takes another time in each run: other tasks, clocks and memory change.",
            "So `ffn bench` also times identical code against itself (A/A): what differs there is noise.",
            "Below, times are drawn that scatter by 5 %: single rounds differ widely, medians of many hardly.",
            "A difference smaller than the noise is not a result; the verdict then is `inconclusive`.",
            "Preempted, throttled, stolen, load and waiting say that other tasks or a limit took the cores.",
        ),
        NumberTable("ffn doctor --no-noise", ("rounds", "least A/A ratio", "largest", "median", "off by"), tuple(rows)),
        "ffn bench --list-kernels", (),
    )  # fmt: skip


def drift_topic(line: TopicLine) -> Topic:
    """Explain drift by a machine that slows down during a run."""
    slower = [1 + 0.01 * at for at in range(6)]
    rows = tuple((at, 10 * f, 8 * f, 8 * f / (10 * f)) for at, f in enumerate(slower))
    apart = mean(row[1] for row in rows[:3]), mean(row[2] for row in rows[3:])
    return line.explained(
        (
            "A machine's speed changes during a run: it warms up, lowers its clock, or meets a power limit.",
            "Below every round is 1 % slower than the one before, for baseline and kernel alike.",
            f"Timing all of one, then all of the other gives a ratio of {fixed(apart[1] / apart[0])}.",
            "Timing them in turns gives 0.8000 in every round: ratios hold, times do not.",
            "The anchor, a fixed loop in the same rounds, tells a machine's change from a kernel's.",
            "`drift`, `clock`, `gpu-throttled` and `power-capped` warn that times are not reproducible.",
        ),
        NumberTable("ffn doctor --no-noise", ("round", "baseline, ms", "kernel, ms", "ratio"), rows),
        "ffn bench --list-kernels", (),
    )  # fmt: skip


def interval_topic(line: TopicLine) -> Topic:
    """Explain intervals and verdicts by numbers of rounds."""
    spread, quantiles = stdev(_TIMES[:-1]) / 10, {4: 3.182, 16: 2.131, 64: 1.998, 256: 1.969}
    halves = {n: quantile * spread / sqrt(n) for n, quantile in quantiles.items()}
    rows = tuple(
        (n, 0.992 - half, 0.992 + half, "faster" if 0.992 + half < 1 / 1.005 else "inconclusive")
        for n, half in halves.items()
    )
    return line.explained(
        (
            "A measured ratio comes with a 95 % interval: other runs like this one would mostly fall into it.",
            "More rounds make it narrower, by the square root: four times the rounds, half the width.",
            "`faster` or `slower` needs the whole interval beyond the margin, `same` needs it within the margin.",
            "Anything else is `inconclusive`: measure longer, or accept that the difference is small.",
            "One process is one draw of memory and code placement, so an interval over several is more honest.",
        ),
        NumberTable("ffn doctor --no-noise", ("rounds", "low", "high", "verdict at a margin of 0.5 %"), rows),
        "ffn bench --list-kernels", ("Student 1908, Biometrika 6(1)",),
    )  # fmt: skip


def outlier_topic(line: TopicLine) -> Topic:
    """Explain outliers by one disturbed timing."""
    middle = median(_TIMES)
    width = 1.4826 * median(abs(one - middle) for one in _TIMES)
    off = [one - mean(_TIMES) for one in _TIMES]
    kurtosis = mean(x**4 for x in off) / mean(x**2 for x in off) ** 2
    rows: list[tuple[Value, ...]] = [(at, one, (one - middle) / width) for at, one in enumerate(_TIMES)]
    return line.explained(
        (
            "An outlier is a value far from the others: here one timing of eight that another task disturbed.",
            f"It moves the mean to {fixed(mean(_TIMES))}, but the median only to {fixed(middle)}.",
            "The distance is measured in scaled MADs, the median distance from the median times 1.4826.",
            "`spikes` warns if more than a tenth of the blocks are outliers; they stay in the results.",
            f"Kurtosis is the mean fourth power over the mean square, squared: 3 if normal, {fixed(kurtosis)} here.",
            "In a model, outlier channels are features with values many times the others; 4-bit formats lose there.",
        ),
        NumberTable("ffn doctor --no-noise", ("timing", "ms", "scaled MADs from the median"), tuple(rows)),
        "ffn explain scale", (),
    )  # fmt: skip


def cache_topic(line: TopicLine) -> Topic:
    """Explain cold and warm weights by the size of a layer's matrices."""
    rows, cache = [], 32e6
    for name in ("gpt2", "llama-2-7b", "llama-3-70b"):
        model = catalog_model(name).model
        size = token_costs(model, dtypes.dtype(_BF16), (1,))[0].weight_bytes_read / (model.layer_count or 1)
        rows.append((name, size, min(1.0, cache / size), 1e6 * size / 3.35e12))
    return line.explained(
        (
            "A benchmark that runs one layer again and again finds its weights in the cache (warm).",
            "A model comes back to a layer after all the others, so it reads the weights from memory (cold).",
            f"Of a layer of llama-2-7b, a cache of 32 MB holds {percent(rows[1][2])}.",
            "`cold-weights` goes through copies that exceed the cache; `flush` empties the cache before each call.",
            "With few tokens the difference can be several times, so results say which mode they have.",
        ),
        NumberTable(f"ffn params {_MODEL} --dtype {_BF16} --tokens 1",
                    ("model", "bytes a layer", "share in 32 MB", "µs at 3.35 TB/s"), tuple(rows)),
        "ffn bench --list-kernels", (),
    )  # fmt: skip


def zipf_topic(line: TopicLine) -> Topic:
    """Explain Zipf's law by the loads of experts."""
    experts, skew = 8, (0.0, 0.6, 1.2)
    sums = {s: sum(rank**-s for rank in range(1, experts + 1)) for s in skew}
    rows: list[tuple[Value, ...]] = [
        (rank, *(100 * rank**-s / sums[s] for s in skew)) for rank in range(1, experts + 1)
    ]
    return line.explained(
        (
            "In many data sets the second most frequent thing is about half as frequent as the first (Zipf's law).",
            "Experts of a mixture are chosen unevenly too, and a layer waits for the busiest one.",
            "`--routing zipf:1.2` gives the expert of rank r a chance in proportion to 1 / r^1.2.",
            f"Of {experts} experts, the first then gets {rows[0][3]:.1f} % of the choices instead of 12.5 %.",
        ),
        NumberTable("ffn trace 8x16:swiglu --experts 8 --tokens 8", ("rank", "even %", "zipf:0.6 %", "zipf:1.2 %"),
                    tuple(rows)),
        "ffn explain load-balancing", ("Zipf 1935, The Psycho-Biology of Language",),
    )  # fmt: skip


def certificate_topic(line: TopicLine) -> Topic:
    """Explain certificates by the errors of a block in several dtypes."""
    import torch

    from ffncli.run.engine.execute import run as execute_run

    ready = tiny_run("16x64:swiglu", tokens=4).prepared

    def output(kind: torch.dtype) -> torch.Tensor:
        weights, inputs = ({n: t.to(kind) for n, t in of.items()} for of in (ready.weights, ready.inputs))
        return execute_run(ready.steps, weights, inputs).double()

    exact, rows = output(torch.float64), list[tuple[Value, ...]]()
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        error, eps = float((output(kind) - exact).abs().max() / exact.abs().max()), torch.finfo(kind).eps
        rows.append((str(kind).removeprefix("torch."), error, eps, error / eps))
    return line.explained(
        (
            "A certificate is what `ffn verify --referee` writes about one kernel: its trials and the result.",
            "The referee computes the block in float64 itself and runs the kernel in another process.",
            "It tries odd token counts, strided and poisoned buffers, used memory, and the backward pass.",
            "Errors are judged by the dtype: below, a correct block's are a few units of its eps.",
            "It names the file by its sha256, so a changed file has no certificate.",
        ),
        NumberTable("ffn verify 16x64:swiglu --check tokens", ("dtype", "relative error", "eps", "in eps"),
                    tuple(rows)),
        "ffn explain tolerance", (),
    )  # fmt: skip


def unembed_topic(line: TopicLine) -> Topic:
    """Explain unembedding by a final layer of five tokens."""
    vocab = 5
    from ffncli.models.examples import final_layer_alone
    from ffncli.run.engine.prepare import prepare
    from ffncli.run.engine.trace import trace

    ready = prepare(final_layer_alone(4, vocab, True), leading=(1,), vocab=vocab)
    made = trace(ready.steps, ready.weights, ready.inputs, ready.mode)
    logits, probs = made.step("logits").values[0], made.step("probs").values[0]
    best = max(range(vocab), key=lambda at: logits[at])
    rows = tuple((at, logits[at], probs[at], exp(logits[at] - logits[best])) for at in range(vocab))
    return line.explained(
        (
            "A model's head turns the last vector of the residual stream into a logit for each token it knows.",
            "Unembedding sends another vector through the same norm and head: an FFN's output, or a unit's column.",
            "The tokens with the largest logits are what that vector promotes (the logit lens).",
            f"Below, token {best} has the largest logit, and after the softmax the probability {fixed(probs[best])}.",
            "As a part of the stream a vector counts less: the final norm divides it by the whole stream's size.",
        ),
        NumberTable(f"ffn trace --d-model 4 --vocab {vocab} --tokens 1",
                    ("token", "logit", "probability", "of the best"), rows),
        "ffn trace --d-model 4 --vocab 5 --tokens 1", ("nostalgebraist 2020, interpreting GPT: the logit lens",
                                                         "Geva et al. 2022, arXiv:2203.14680"),
    )  # fmt: skip


def expert_cache_topic(line: TopicLine) -> Topic:
    """Explain caches of experts by a replay of drawn choices."""
    from ffncli.run.corpus.placement import cache_hits

    policies, slots = ("lru", "lfu", "pin", "best"), (2, 4, 6)
    choices = Random(0).choices(range(8), [1 / rank for rank in range(1, 9)], k=400)
    hits = {(one.policy, one.slots): 100 * (one.hit_rate or 0.0) for one in cache_hits(choices, policies, slots)}
    return line.explained(
        (
            "A device that cannot hold all experts keeps some in slots of a cache and loads others when needed.",
            "lru evicts the expert whose last use is longest ago, lfu the one used least; pin keeps the most used.",
            "best is Belady's bound: it evicts the expert whose next use is farthest, which only a replay knows.",
            f"Below, {len(choices)} drawn choices of 8 experts: in 4 slots lru serves {hits['lru', 4]:.1f} % of them.",
            f"No policy serves more than best, {hits['best', 4]:.1f} %.",
            "On several ranks, a placement (EPLB) balances their loads, and redundant copies relieve the busiest.",
        ),
        NumberTable("ffn trace 8x16:swiglu --experts 8 --tokens 8", ("slots", *(f"{name} %" for name in policies)),
                    tuple((size, *(hits[name, size] for name in policies)) for size in slots)),
        "ffn experts --help", ("Belady 1966, IBM Systems Journal 5(2)",),
    )  # fmt: skip


def low_rank_topic(line: TopicLine) -> Topic:
    """Explain ranks and spectra by changes of one matrix that are equally large."""
    import torch

    matrix = tiny_run("32x32:relu", tokens=1).prepared.weights["up.weight"].double()
    generator = torch.Generator().manual_seed(0)
    rows: list[tuple[Value, ...]] = []
    for rank in (1, 2, 8, 32):
        one, other = (torch.randn(32, rank, generator=generator, dtype=torch.float64) for _ in range(2))
        change = 0.1 * matrix.norm() * (product := one @ other.T) / product.norm()
        shares = torch.linalg.svdvals(change).square() / change.square().sum()
        cosine = torch.cosine_similarity((matrix + change).flatten(), matrix.flatten(), dim=0)
        effective = float(torch.special.entr(shares).sum().exp())
        rows.append((rank, float(change.norm() / matrix.norm()), float(cosine), float(shares[0]), effective))
    return line.explained(
        (
            "A fine-tuned matrix is the old one plus a change; LoRA writes the change as B · A, of low rank.",
            "The singular values of a change (its spectrum) are its sizes in directions that do not overlap.",
            "The effective rank is e to the entropy of their squares' shares: 1 if one direction has it all.",
            "Cosine is 1 if two matrices differ by a factor only, and 0 if they have nothing in common.",
            "Below, four changes of the same size: size and cosine do not tell them apart, the spectrum does.",
        ),
        NumberTable("ffn trace 4x8:relu --tokens 1", ("rank", "change / old", "cosine with old", "share of the largest",
                                                       "effective rank"), tuple(rows)),
        "ffn compare --help", ("Hu et al. 2021, arXiv:2106.09685", "Roy & Vetterli 2007, EUSIPCO"),
    )  # fmt: skip


def quantile_topic(line: TopicLine) -> Topic:
    """Explain quantiles and histograms by the values of one step."""
    source, tokens, bins = "4x8:gelu", 8, 8
    run = tiny_run(source, tokens=tokens)
    values = sorted(value for row in run["act"].values for value in row)
    low, high = values[0], values[-1]
    width = (high - low) / bins
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width))] += 1
    middle = (values[len(values) // 2 - 1] + values[len(values) // 2]) / 2
    below, rows = 0, list[tuple[Value, ...]]()
    for at, count in enumerate(counts):
        below += count
        rows.append((low + at * width, low + (at + 1) * width, count, 100 * below / len(values)))
    return line.explained(
        (
            "A histogram counts values in ranges of equal width: it shows a distribution's shape.",
            "The q-quantile is the value that a share q of all values does not exceed; percentiles are q in percent.",
            f"Below, of {len(values):,} outputs of gelu the 0.5-quantile, the median, is {fixed(middle)}.",
            f"Their mean is {fixed(mean(values))}: a few large values move a mean, and hardly a median.",
            "The largest of many values says little of the rest; so maps of a page end at the 99th percentile.",
        ),
        NumberTable(f"ffn trace {source} --tokens {tokens}", ("from", "to", "values", "up to here %"), tuple(rows)),
        "ffn explain outlier", (),
    )  # fmt: skip


def memory_topic(line: TopicLine) -> Topic:
    """Explain peak memory by what a gated block holds at once."""
    spec, size = catalog_model(_MODEL).model.main.spec, 2
    rows = tuple(
        (tokens, size * tokens * spec.d_model, size * tokens * spec.d_ff, 3 * size * tokens * spec.d_ff)
        for tokens in (1, 128, 2048, 16_384)
    )
    return line.explained(
        (
            "Peak memory is the most that a call needs at once, besides its weights and its input.",
            "Step by step, a gated block holds the activation's output, up and their product: 3 · d_ff values a token.",
            f"In {_MODEL}, that is {bytes_text(rows[2][3])} for {rows[2][0]:,} tokens in bf16.",
            "A fused kernel holds a tile of them, and a kernel that takes the tokens in slices holds one slice.",
            "The first use of a page of new memory is a page fault, in which the system finds it and fills it with 0.",
            "Page faults in every call mean that a kernel asks for new buffers each time.",
        ),
        NumberTable(f"ffn params {_MODEL} --dtype {_BF16} --tokens 1,128,2048,16384",
                    ("tokens", "bytes of x", "of one step", "at once"), rows),
        "ffn explain recompute", (),
    )  # fmt: skip


def seed_topic(line: TopicLine) -> Topic:
    """Explain seeds by the weights and outputs that they draw."""
    source, rows = "4x8:relu", list[tuple[Value, ...]]()
    for seed in (0, 0, 1, 2):
        run = tiny_run(source, tokens=1, seed=seed)
        weight = run.prepared.weights["up.weight"]
        rows.append((seed, float(weight[0, 0]), float(weight.std()), run["down"].values[0][0]))
    return line.explained(
        (
            "A seed is the number from which a generator of random numbers starts.",
            "The same seed draws the same weights and inputs; another seed draws others of the same distribution.",
            "Below, seed 0 gives the same numbers twice; the weights of other seeds scatter about as widely.",
            "A result that depends on its seed is luck: try several before you believe it.",
            "Results say their seed, so that a run can be repeated; other versions of torch may draw otherwise.",
        ),
        NumberTable(f"ffn trace {source} --tokens 1 --seed 1", ("seed", "W1[0,0]", "std of W1", "out[0,0]"),
                    tuple(rows)),
        f"ffn trace {source} --tokens 1 --seed 2", (),
    )  # fmt: skip


def merging_topic(line: TopicLine) -> Topic:
    """Explain merges by the lengths of vectors between two that are 90 degrees apart."""
    rows: list[tuple[Value, ...]] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        linear = sqrt((1 - share) ** 2 + share**2)
        a, b = cos(share * pi / 2), sin(share * pi / 2)  # sin((1 - t) Ω) / sin Ω and sin(t Ω) / sin Ω at Ω = 90 degrees
        rows.append((share, linear, a, b, sqrt(a * a + b * b)))
    return line.explained(
        (
            "Merging makes one model of two without training: a linear merge is (1 - t) · A + t · B.",
            f"Unlike changes cancel in a mean: below, half of each of two vectors has length {fixed(rows[2][1])}.",  # type: ignore[arg-type]
            "SLERP goes along the arc between A and B instead, so that equal lengths stay as they are.",
            "Pruning removes weights, units or experts, or sets them to 0; those that matter least go first.",
            "`ffn compare BASE NEW --with C` finds merges and their t; pruned values are counted without C.",
        ),
        NumberTable("ffn compare --help", ("t", "length, linear", "SLERP: of A", "of B", "length"), tuple(rows)),
        "ffn explain low-rank", ("Shoemake 1985, SIGGRAPH '85", "Wortsman et al. 2022, arXiv:2203.05482"),
    )  # fmt: skip
