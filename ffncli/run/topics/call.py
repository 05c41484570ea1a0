"""`ffncli.explain`: find a topic by name, and return its explanation."""

from collections.abc import Callable, Mapping

from ffncli.block.activations import CANONICAL, LIMITED, TABLE
from ffncli.block.analysis.gated import UNITS
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.options.accept import TEXT
from ffncli.options.arguments import checked
from ffncli.run.topics import blocks, formats, measuring, training
from ffncli.run.topics.topic import Topic, TopicLine, activation_topic, function_topic, unit_topic

_Builder = Callable[[TopicLine], Topic]
# maps a topic to (the function that explains it, a one-line definition, other names)
_PARTS: Mapping[str, tuple[_Builder, str, tuple[str, ...]]] = {
    "ffn": (
        blocks.block_topic,
        "the half of a transformer layer that works on each token by itself",
        ("mlp", "block", "feed-forward", "feedforward", "d_model"),
    ),
    "activation": (
        activation_topic,
        "the non-linear function between the two matrices",
        ("activations", "non-linearity"),
    ),
    "gate": (blocks.gate_topic, "a second projection that decides how much of the first passes", ("gated", "gating")),
    "4x": (
        blocks.width_topic,
        "why d_ff is four times d_model, and when it is not",
        ("d_ff", "width", "expansion", "4", "hidden"),
    ),
    "neuron": (
        blocks.neuron_topic,
        "one of the d_ff hidden units: it reads a pattern, fires, and writes",
        ("unit", "neurons", "units", "dead-units", "dead", "near-zero"),
    ),
    "moe": (
        blocks.moe_topic,
        "a mixture of experts: many blocks, of which each token uses a few",
        ("experts", "expert", "router", "mixture", "top_k", "routing"),
    ),
    "tensor-parallel": (
        blocks.tensor_parallel_topic,
        "n devices share the hidden units; one all-reduce adds their outputs",
        ("tp", "tensor-parallelism", "all-reduce", "allreduce", "parallel", "parallelism", "shard", "sharding", "rank",
         "collective", "collectives", "link", "link-time", "of-ideal"),
    ),
    "expert-parallel": (
        blocks.expert_parallel_topic,
        "n devices share the experts of a mixture; two all-to-alls carry the tokens",
        ("ep", "expert-parallelism", "all-to-all", "dispatch", "combine"),
    ),
    "norm": (
        blocks.norm_topic,
        "rescales every token's vector to a standard size",
        ("layernorm", "rmsnorm", "normalisation", "normalization"),
    ),
    "residual": (
        blocks.residual_topic,
        "the block's output is added to its input: out = x + down",
        ("skip", "shortcut", "residual-stream"),
    ),
    "dropout": (blocks.dropout_topic, "in training, random hidden values are set to zero", ()),
    "tolerance": (
        blocks.tolerance_topic,
        "how far apart two correct computations of a block may be, and why",
        ("rounding", "precision", "error", "eps", "atol", "rtol", "ulp", "ulps", "bf16", "fp16", "fp32",
         "fp64", "dtype"),
    ),
    "scale": (
        formats.scale_topic,
        "the factor that a block of values shares in a format with few bits",
        ("scales", "group-size", "group", "block-size", "quantization", "quantize", "bits-per-weight"),
    ),
    "int4": (formats.format_topic, "integers of 4 bits with a scale for each block", ("w4",)),
    "fp8": (formats.format_topic, "floats of 8 bits with a scale for each row", ("e4m3", "fp8_e4m3")),
    "mxfp4": (formats.format_topic, "floats of 4 bits, blocks of 32, powers of two as scales", ("mx",)),
    "nvfp4": (formats.format_topic, "floats of 4 bits, blocks of 16, fp8 scales", ("fp4", "e2m1")),
    "budget": (
        formats.budget_topic,
        "bits per weight that a model may take, and a format for each matrix",
        ("recipe", "recipes", "mixed-precision"),
    ),
    "gradient": (
        training.gradient_topic,
        "how much the loss changes with a value",
        ("gradients", "backward", "backprop", "backpropagation", "derivative"),
    ),
    "loss": (training.loss_topic, "one number that says how wrong an output is",
             ("mse", "cross-entropy", "objective", "nats", "kl", "divergence", "perplexity")),
    "ablation": (
        training.ablation_topic,
        "what changes without a unit or an expert",
        ("ablate", "ablations", "attribution", "patch", "patching", "saliency", "reap"),
    ),
    "learning-rate": (
        training.rate_topic,
        "how far one step of gradient descent goes",
        ("lr", "gradient-descent", "training-step", "step-size"),
    ),
    "load-balancing": (
        training.balance_topic,
        "losses that spread the tokens over the experts",
        ("load-balancing-loss", "balance", "aux-loss", "auxiliary-loss", "z-loss", "entropy", "even-load"),
    ),
    "optimizer": (
        training.optimizer_topic,
        "what turns gradients into steps, and what it remembers",
        ("optimizers", "adam", "adamw", "adamw8bit", "muon", "sgd", "momentum", "optimizer-state"),
    ),
    "recompute": (
        training.recompute_topic,
        "computing again for the backward pass instead of keeping",
        ("recomputation", "checkpointing", "gradient-checkpointing", "kept", "activation-memory"),
    ),
    "zero": (training.zero_topic, "data-parallel ranks share their states", ("fsdp", "data-parallel", "dp")),
    "roofline": (
        measuring.roofline_topic,
        "the least time that a device's two rates allow",
        ("roof", "ridge", "intensity", "arithmetic-intensity", "bound", "floor", "time-floor", "memory-bound",
         "compute-bound", "traffic", "flops", "peak", "bandwidth", "of-roof", "roof_fraction", "gemm", "gemm_ratio"),
    ),
    "prefill": (
        measuring.prefill_topic, "reading a prompt at once, and writing token by token", ("decode", "decoding"),
    ),
    "kernel": (
        measuring.kernel_topic,
        "one way to compute the block",
        ("kernels", "eager", "fused", "fusion", "packed", "compiled", "launch", "launches", "launch-bound"),
    ),
    "noise": (
        measuring.noise_topic,
        "why the same code takes another time, and how much that matters",
        ("a/a", "aa", "jitter", "unresolved", "preempted", "throttled", "stolen", "steal",
         "load", "waiting", "environment"),
    ),
    "drift": (
        measuring.drift_topic, "a machine whose speed changes during a run",
        ("clock", "gpu-throttled", "power-capped", "anchor"),
    ),
    "interval": (
        measuring.interval_topic,
        "how far a measured ratio may be from the true one",
        ("confidence", "verdict", "inconclusive", "faster", "slower", "same", "margin", "ratio", "baseline", "rounds",
         "one-process", "correlated", "resolvable-difference", "holm", "p_holm", "median"),
    ),
    "outlier": (measuring.outlier_topic, "a value far from the others", ("outliers", "spikes", "spike", "kurtosis")),
    "cold-weights": (
        measuring.cache_topic,
        "weights read from memory, as in a model, instead of the cache",
        ("cold", "warm", "flush", "cache", "cache-mode", "shared-weights"),
    ),
    "zipf": (measuring.zipf_topic, "a skewed load: the second half as often as the first", ("skew", "uniform")),
    "expert-cache": (
        measuring.expert_cache_topic,
        "which experts a small memory should keep",
        ("belady", "lru", "lfu", "pin", "slots", "hit-rate", "placement", "eplb", "redundant", "imbalance", "busiest"),
    ),
    "low-rank": (
        measuring.low_rank_topic,
        "a change of a matrix in few directions",
        ("lora", "effective-rank", "spectrum", "singular-values", "cosine", "fine-tuning", "rank-90"),
    ),
    "merging": (
        measuring.merging_topic,
        "one model made of two, or of a part of one",
        ("merge", "merged", "slerp", "linear-merge", "pruning", "pruned", "sparsity"),
    ),
    "quantile": (
        measuring.quantile_topic,
        "how values are distributed",
        ("quantiles", "percentile", "histogram", "histograms", "distribution"),
    ),
    "memory": (
        measuring.memory_topic, "what a call needs at once", ("peak-memory", "page-faults", "page-fault", "workspace")
    ),
    "seed": (measuring.seed_topic, "where random numbers start", ("seeds", "random", "reproducible")),
    "certificate": (
        measuring.certificate_topic, "what the referee says about a kernel", ("referee", "verify", "judge")
    ),
    "unembed": (
        measuring.unembed_topic,
        "which tokens a vector promotes",
        ("unembedding", "logit-lens", "logit", "logits", "promotes", "head", "vocabulary", "vocab",
         "probs", "softmax", "sampling", "top-p"),
    ),
}  # fmt: skip


@checked(topic=TEXT)
def explain(topic: str) -> Topic:
    """Explain a part of the block or an activation function, as `ffn explain` does.

    >>> import ffncli
    >>> ffncli.explain("gelu").sentences[0]
    'gelu(x) = x Φ(x): each number is multiplied by the chance that a standard normal number is below it.'

    Figures are computed at the time of the call; other statements cite their source.
    """
    name = find_topic(topic)
    if name is None:
        known = [*_PARTS, *_ALIASES]
        hint = did_you_mean(_key(topic), known, "topics: " + ", ".join([*_PARTS, "gelu, relu, silu, swiglu, ..."]))
        from ffncli.models import catalog  # only needed for an error

        if catalog.find(topic):
            hint = f"to see that model: ffn params {topic}"
        raise FFNError(f"unknown topic {shown(topic)}", hint)
    build = _PARTS[name][0] if name in _PARTS else unit_topic if name in UNITS else function_topic
    return build(next(line for line in topics() if line.topic == name))


def topics() -> tuple[TopicLine, ...]:
    """Return every topic: the parts of a block, then the functions."""
    parts = [TopicLine(name, title, aliases) for name, (_, title, aliases) in _PARTS.items()]
    units = [
        TopicLine(name, f"a gated unit: {unit.formula}", tuple(t for t, n in LIMITED.items() if n == name != t))
        for name, unit in UNITS.items()
    ]
    plain = [TopicLine(name, f"an activation function: {row.formula}", row.aliases) for name, row in TABLE.items()]
    return (*parts, *units, *plain)


def find_topic(text: str) -> str | None:
    """Return the name of the topic that `text` means, or None."""
    key = _key(text)
    return key if key in _PARTS else _ALIASES.get(key)


def _key(text: str) -> str:
    return "-".join(text.lower().split())


_FUNCTIONS = {**CANONICAL, **{name: name for name in UNITS}, **LIMITED}
_ALIASES: Mapping[str, str] = {
    **_FUNCTIONS,
    **{text.replace("_", "-"): name for text, name in _FUNCTIONS.items()},
    **{alias: name for name, (_, _, aliases) in _PARTS.items() for alias in aliases},
}
