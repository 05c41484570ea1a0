"""Every number of a topic against torch, a closed form or a published figure; every topic against the rules for all."""

import math
import re
import shlex

import pytest
import torch

import ffncli
from ffncli.block.activations import known_names
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.run.quantize.quantized import quantize
from ffncli.run.topics.call import topics
from ffncli.run.topics.topic import Topic
from tests.oracles.activations import ORACLES
from tests.oracles.counts import MOE

PARTS = (
    "ffn activation gate 4x neuron moe tensor-parallel expert-parallel norm residual dropout tolerance scale int4 fp8 "
    "mxfp4 nvfp4 gradient loss learning-rate load-balancing optimizer recompute zero roofline prefill kernel noise "
    "drift interval outlier cold-weights zipf certificate unembed ablation expert-cache low-rank "
    "budget merging quantile memory seed"
).split()
PRINTED = (
    "roofline drift noise inconclusive outlier kernel unembed prefill decode tolerance certificate zipf cold-weights "
    "flush fp8 mxfp4 gradient backward loss lr optimizer adamw muon sgd recompute kept zero z-loss load-balancing "
    "entropy ridge bound floor verdict faster slower same ratio baseline margin warm shared-weights referee ulps eps "
    "logits promotes dead-units spikes clock throttled stolen preempted launch-bound correlated kurtosis "
    "saliency belady lru lfu lora effective-rank cosine kl interval spectrum attribution ablation of-ideal collective "
    "anchor gemm_ratio quantize budget recipe seed page-faults peak-memory perplexity quantile histogram merge "
    "pruning slerp "
    "p_holm of-roof busiest imbalance placement redundant bits-per-weight bandwidth"
).split()


def text(topic: Topic) -> str:
    return " ".join(topic.sentences)


def column(topic: Topic, name: str) -> list:
    return [row[topic.example.columns.index(name)] for row in topic.example.rows]


def phi(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def drawn(*layers: tuple[int, int], bias: bool = False, tokens: int = 1) -> tuple[list[torch.nn.Linear], torch.Tensor]:
    """The layers and then the input as torch draws them with seed 0."""
    torch.manual_seed(0)
    return [torch.nn.Linear(*sizes, bias=bias) for sizes in layers], torch.randn(tokens, layers[0][0])


# --- all topics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [line.topic for line in topics()])
def test_a_topic_is_short_and_its_commands_run(call, name):
    topic = ffncli.explain(name)
    assert 3 <= len(topic.sentences) <= 6
    assert all(sentence.endswith(".") and len(sentence) <= 170 for sentence in topic.sentences)
    assert 3 <= len(topic.example.rows) <= 12
    assert all(len(row) == len(topic.example.columns) for row in topic.example.rows)
    for command in (topic.example.command, topic.next):
        assert call(*shlex.split(command)[1:])[0] == 0, command


def test_what_cites_a_paper_lists_it():
    for name in PARTS:
        topic = ffncli.explain(name)
        for author, year in re.findall(r"(\w+)(?: et al\.)? (\d{4})\)", text(topic)):
            assert any(source.startswith(author) and year in source for source in topic.sources), (name, author)


def test_every_name_of_an_activation_is_a_topic():
    for name in [*known_names(), "swiglu_oai"]:
        topic = ffncli.explain(name)
        assert name in (topic.topic, *topic.aliases), name
    assert ffncli.explain(" GELU-new ").topic == "gelu_tanh"


@pytest.mark.parametrize(
    ("alias", "topic"),
    [
        ("mlp", "ffn"),
        ("router", "moe"),
        ("rmsnorm", "norm"),
        ("d_ff", "4x"),
        ("TP", "tensor-parallel"),
        ("all-reduce", "tensor-parallel"),
        ("expert parallelism", "expert-parallel"),
        ("group size", "scale"),
        ("e4m3", "fp8"),
    ],
)
def test_other_names_lead_there(alias, topic):
    assert ffncli.explain(alias).topic == topic


@pytest.mark.parametrize("word", PRINTED)
def test_what_is_printed_has_a_topic(word):
    topic = ffncli.explain(word)
    assert word in (topic.topic, *topic.aliases)


def test_every_warning_has_a_topic():
    from ffncli.bench.judge.warnings import TOPICS, Code, advice
    from ffncli.bench.results.row import BenchWarning

    assert {*TOPICS} == {*Code}
    for code in Code:
        assert ffncli.explain(TOPICS[code]).topic == TOPICS[code]
        assert advice(BenchWarning(code, "x")).endswith(f" (ffn explain {TOPICS[code]})")
        assert ffncli.explain(code.value), code


def test_no_name_means_two_topics():
    names = [name for line in topics() for name in (line.topic, *line.aliases)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(("name", "hint"), [("gleu", "did you mean 'gelu' or 'glu'"), ("zzzz", "topics: ffn, activat")])
def test_an_unknown_topic(name, hint):
    with pytest.raises(FFNError, match=re.escape(f"unknown topic '{name}'; {hint}")) as error:
        ffncli.explain(name)
    assert error.value.code == 2


# --- functions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORACLES)
def test_the_values_and_statements_of_a_function(name):
    topic, f = ffncli.explain(name), ORACLES[name]
    xs = torch.tensor(column(topic, "x"), dtype=torch.float64, requires_grad=True)
    values = f(xs)
    (slopes,) = torch.autograd.grad(values.sum(), xs)
    assert column(topic, name) == pytest.approx(values.tolist(), abs=1e-6)
    assert column(topic, "slope") == pytest.approx(slopes.tolist(), abs=1e-6)
    other = topic.example.columns[-1]
    assert column(topic, other) == pytest.approx(ORACLES[other](xs).tolist(), abs=1e-12)
    grid = torch.linspace(-40, 40, 800_001, dtype=torch.float64, requires_grad=True)
    made = f(grid)
    if low := re.search(r"Its minimum is (\S+?)(,|\.)( |$)", text(topic)):
        assert float(low[1]) == pytest.approx(float(made.detach().min()), rel=5e-4, abs=5e-5)
    else:
        assert "It has no minimum." in text(topic)
        far = f(torch.tensor([-1e3, -1e2], dtype=torch.float64)).tolist()
        assert far[0] < far[1] < 0
    if at := re.search(r"at x = (-?[\d.]+\d)", text(topic)):
        assert float(grid[made.argmin()].detach()) == pytest.approx(float(at[1]), abs=1e-3)
    zeros = {"relu": 0.5, "relu2": 0.5, "relu6": 0.5, "hardswish": phi(-3)}  # elsewhere no interval is zero
    assert f"Of standard normal inputs {100 * zeros.get(name, 0):.3g} % become exactly zero" in text(topic)
    (steep,) = torch.autograd.grad(made.sum(), grid)
    jumps = [float(grid[i].detach()) for i in ((steep[1:] - steep[:-1]).abs() > 1e-3).nonzero().flatten()]
    stated = [
        float(x)
        for x in re.findall(r"its slope jumps at ((?:[^.;]|\.\d)+?)(?: and it|\.$|\. )", text(topic))
        for x in x.split(" and ")
    ]
    assert all(any(abs(jump - x) < 1e-3 for x in stated) for jump in jumps), (jumps, stated)
    assert len(stated) >= min(1, len(jumps))


def test_what_is_said_of_gelu_relu_and_silu():
    gelu, relu, silu_topic = (text(ffncli.explain(name)) for name in ("gelu", "relu", "silu"))
    assert f"So it lets {100 * phi(2):.1f} % of 2 through ({2 * phi(2):.4f}) and {100 * phi(-2):.2f} % of -2" in gelu
    assert "the chance that a standard normal number is below it. Φ(x), the normal distribution's cumulative" in gelu
    assert dict(zip(*(column(ffncli.explain("gelu"), c) for c in ("x", "gelu")), strict=True))[-0.75] == pytest.approx(
        -0.75 * phi(-0.75), abs=1e-15
    )
    assert "So it lets 100 % of 2 through (2.0000) and 0 % of -2 (0.0000). Its minimum is 0, for all neg" in relu
    assert "50 % become exactly zero; its slope jumps at 0. Its slope is 0 below 0, so" in relu
    assert f"lets {100 * silu(2) / 2:.1f} % of 2 through ({silu(2):.4f}) and {-100 * silu(-2) / 2:.1f} %" in silu_topic
    assert "it is smooth everywhere" in silu_topic


def test_an_activation_in_general():
    topic = ffncli.explain("activation")
    assert f"at 3: relu 3.0000, gelu {3 * phi(3):.4f}, silu {silu(3):.4f})." in text(topic)
    assert f"at -1: relu 0.0000, gelu {-phi(-1):.4f}, silu {silu(-1):.4f})." in text(topic)
    assert [row[1:] for row in topic.example.rows] == [
        pytest.approx((max(x, 0), x * phi(x), silu(x)), abs=1e-12) for x in column(topic, "x")
    ]
    specs = {name: catalog.find(name).model.main.spec for name in ("transformer-base", "bert-base", "llama-2-7b")}
    assert {name: (spec.activation, spec.gated) for name, spec in specs.items()} == {
        "transformer-base": ("relu", False), "bert-base": ("gelu", False), "llama-2-7b": ("silu", True),
    }  # fmt: skip
    assert "The first Transformer uses relu, BERT uses gelu, and Llama uses silu in a gate." in topic.sentences


def test_a_gated_unit():
    topic = ffncli.explain("swiglu")
    assert f"up = 3 becomes {3 * silu(2):.4f} at gate = 2, and {3 * silu(-2):.4f} at gate = -2." in text(topic)
    assert f"512x2048 plain ({2 * 512 * 2048:,} weights) to 512x1365 gated ({3 * 512 * 1365:,})" in text(topic)
    assert [row[1:] for row in topic.example.rows] == [
        pytest.approx((silu(g), 3 * silu(g))) for g in column(topic, "gate")
    ]


# --- the parts of a block ---------------------------------------------------------------------------------------------


def layer_share(ffn: int, d_model: int, biases: bool) -> str:
    """The FFN's share of a layer with plain attention: four square matrices, two norms."""
    others = 4 * d_model**2 + (4 * d_model + 4 * d_model if biases else 2 * d_model)
    return f"{100 * ffn / (ffn + others):.1f} %"


def test_the_block(call):
    topic = ffncli.explain("ffn")
    assert f"{layer_share(3 * 4096 * 11008, 4096, False)} of a layer's, in llama-2-7b." in text(topic)
    assert f"{2 * 2 * 4 * 8} of the {2 * 2 * 4 * 8 + 8 + 8 + 4} operations below." in text(topic)
    (up, down), _ = drawn((4, 8), (8, 4), bias=True)
    with torch.no_grad():
        x = torch.arange(4.0)
        states = [x, up(x), up(x).relu(), down(up(x).relu())]
    assert column(topic, "first four") == ["  ".join(f"{v:.4f}" for v in s[:4].tolist()) for s in states]
    assert column(topic, "numbers") == [4, 8, 8, 4]


def test_why_four_times():
    topic = ffncli.explain("4x")
    assert "d_model 512 and d_ff 2048" in text(topic)
    assert f"(in gpt2 {layer_share(8 * 768**2 + 5 * 768, 768, True)})" in text(topic)
    assert f"llama-2-7b has {11008 / 4096:.4g}x, but gemma-7b {24576 / 3072:g}x" in text(topic)
    specs = [catalog.find(name).model.main.spec for name in catalog.names()]
    plain = [spec for spec in specs if not spec.gated and not spec.moe]
    assert f"{sum(s.d_ff == 4 * s.d_model for s in plain)} of the {len(plain)} plain models" in text(topic)
    assert [row[1:] for row in topic.example.rows] == [
        (512 * r, 2 * 512 * 512 * r + 512 * r + 512, 4 * 512 * 512 * r) for r in (1, 2, 4, 8)
    ]


def test_the_gate():
    topic = ffncli.explain("gate")
    (gate, up, _), x = drawn((4, 6), (4, 6), (6, 4))
    with torch.no_grad():
        g, u = gate(x)[0], up(x)[0]
        act = torch.nn.functional.silu(g)
    expected = list(zip(range(6), *(t.tolist() for t in (g, act, u, act * u)), strict=True))
    assert [pytest.approx(row, abs=1e-6) for row in expected] == list(topic.example.rows)
    unit = int(act.abs().argmin())
    said = (
        f"unit {unit} has up {float(u[unit]):.4f} and silu(gate) {float(act[unit]):.4f}: {float((act * u)[unit]):.4f}"
    )
    assert said in text(topic)
    specs = [catalog.find(name).model.main.spec for name in catalog.names()]
    assert f"{sum(spec.gated for spec in specs)} of the {len(specs)} models" in text(topic)


def test_a_neuron():
    topic = ffncli.explain("neuron")
    (up, down), _ = drawn((4, 8), (8, 4), bias=True)
    with torch.no_grad():
        read = up(torch.arange(4.0))
        fires = read.relu()
        out = down(fires)
        written = down.weight.T * fires[:, None]
    for i, row in enumerate(topic.example.rows[:8]):
        assert row == (str(i), *map(pytest.approx, [float(read[i]), float(fires[i])], [1e-6] * 2),
                       *(pytest.approx(v, abs=1e-6) for v in written[i].tolist()))  # fmt: skip
    bias, total = (row[3:] for row in topic.example.rows[8:])
    assert bias == pytest.approx(down.bias.tolist(), abs=1e-7)
    assert total == pytest.approx(out.tolist(), abs=1e-6)
    sums = [math.fsum(row[3 + i] for row in topic.example.rows[:9]) for i in range(4)]
    assert sums == pytest.approx(total, abs=1e-6)
    most = int(fires.argmax())
    said = (
        f"neuron {most} fires most, {float(fires[most]):.4f}, and writes {float(written[most][3]):.4f} to out 3; the "
    )
    assert f"{said}sum with b2 there is {float(out[3]):.4f}." in text(topic)
    assert f"12 layers of 3,072 neurons, so {12 * 3072:,} patterns" in text(topic)


def test_a_mixture_of_experts():
    topic = ffncli.explain("moe")
    *_, experts, top_k, _, total, active = MOE["mixtral-8x7b"][1:]
    assert f"uses {top_k} of {experts} experts, {active / 1e9:.1f} of {total / 1e9:.1f} billion" in text(topic)
    logits = ffncli.trace("4x8:swiglu", experts=4)["router"]
    best = logits.topk(2, dim=-1)
    weights = best.values.softmax(-1)  # of the chosen scores alone: the same as all of them, normalised
    for token, row in enumerate(topic.example.rows):
        assert row[:2] == (token, ", ".join(map(str, best.indices[token].tolist())))
        assert row[2] == ", ".join(f"{w:.4f}" for w in weights[token].tolist())


def test_tensor_parallelism():
    topic = ffncli.explain("tensor-parallel")
    (gate, up, down), x = drawn((4, 8), (4, 8), (8, 4))
    with torch.no_grad():
        hidden = torch.nn.functional.silu(gate(x)) * up(x)
        sums = [(hidden[0, half] @ down.weight[:, half].T).tolist() for half in (slice(4), slice(4, 8))]
        whole = down(hidden)[0].tolist()
    assert column(topic, "down") == ["rank 0", "rank 1", "sum", "without a split"]
    assert [row[1:] for row in topic.example.rows] == [pytest.approx(v, abs=1e-6) for v in (*sums, whole, whole)]
    said = f"out 0 is {sums[0][0]:.4f} from rank 0 plus {sums[1][0]:.4f} from rank 1, which is {whole[0]:.4f}, the"
    assert said in text(topic)
    params, per_token = 32 * 3 * 4096 * 11008, 2 * 7 * (4096 // 8) * 2  # 7 rounds twice, an eighth of bf16's 2 bytes
    assert f"On 8 ranks each rank has {params / 8e9:.2f} of llama-2-7b's {params / 1e9:.2f} billion" in text(topic)
    assert f"sends {per_token:,} bytes per token and layer" in text(topic)


def test_expert_parallelism():
    topic = ffncli.explain("expert-parallel")
    chosen = ffncli.trace("4x8:swiglu", experts=6, tokens=6)["router"].topk(2, dim=-1).indices.tolist()
    for token, (row, experts) in enumerate(zip(topic.example.rows, chosen, strict=True)):
        home, places = token // 3, [expert // 3 for expert in experts]
        assert row == (token, home, ", ".join(map(str, experts)), ", ".join(map(str, places)), 2 - places.count(home))
    sent = sum(expert // 3 != token // 3 for token, experts in enumerate(chosen) for expert in experts)
    assert f"has experts 0-2 and rank 1 has 3-5: {sent} of 12 chosen experts are on the other rank" in text(topic)
    assert f"in mixtral-8x7b on 8 ranks, these are {7 * 2 * 4096 * 2 // 8:,} bytes per token and layer" in text(topic)


def test_norms():
    topic = ffncli.explain("norm")
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert column(topic, "x") == x.tolist()
    assert column(topic, "layernorm") == pytest.approx(torch.nn.functional.layer_norm(x, (4,)).tolist(), abs=1e-5)
    assert column(topic, "rmsnorm") == pytest.approx(torch.nn.functional.rms_norm(x, (4,)).tolist(), abs=1e-5)
    assert "the mean (here 2.5)" in text(topic)
    assert f"root mean square (here {math.sqrt(30 / 4):.4f})" in text(topic)
    specs = {
        name: catalog.find(name).model.main.spec for name in ("gpt2", "llama-2-7b", "transformer-base", "bert-base")
    }
    assert [spec.norm_position for spec in specs.values()] == ["pre", "pre", "post", "post"]


def test_the_residual():
    topic = ffncli.explain("residual")
    (up, down), x = drawn((4, 8), (8, 4), bias=True)
    with torch.no_grad():
        added = down(up(torch.nn.functional.rms_norm(x, (4,), eps=1e-5)).relu())
    expected = [
        (i, *values) for i, values in enumerate(zip(*((t[0].tolist()) for t in (x, added, x + added)), strict=True))
    ]
    assert list(topic.example.rows) == [pytest.approx(row, abs=1e-5) for row in expected]
    assert f"x has length {float(x.norm()):.4f} and a correction of length {float(added.norm()):.4f}" in text(topic)


def test_dropout():
    topic = ffncli.explain("dropout")
    (up, _), x = drawn((4, 8), (8, 4), bias=True)
    with torch.no_grad():
        act = torch.nn.functional.gelu(up(x))[0].tolist()
    assert column(topic, "act") == pytest.approx(act, abs=1e-6)
    kept = [after for after in column(topic, "dropout") if after]
    assert all(after in (0.0, pytest.approx(2 * before, abs=1e-6)) for _, before, after in topic.example.rows)
    assert f"Below, {8 - len(kept)} of 8 values are dropped" in text(topic)
    assert "(p = 0.5: times 2)" in text(topic)


def test_tolerances_by_hand_and_errors_within_them():
    """eps is 2⁻²³ and 2⁻⁷; the errors of a block of torch's own products lie below the limits, not far below."""
    topic = ffncli.explain("rtol")
    assert topic.topic == "tolerance"
    for width, *figures in topic.example.rows:
        for eps, (error, limit) in zip((2.0**-23, 2.0**-7), (figures[:2], figures[2:]), strict=True):
            assert limit == pytest.approx(4 * (1 + 2.0**-23 * math.sqrt(width) / eps), rel=1e-12)
            assert limit / 500 < error < limit
    assert "1.19e-07 in fp32, 0.00781 in bf16" in text(topic)
    assert "at width 1024 that is 1.6e-05;" in text(topic)


# --- formats ----------------------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def four_bits(x: torch.Tensor) -> torch.Tensor:
    """The nearest values of E2M1; none of these weights is a tie."""
    return E2M1[(x.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)] * x.sign()


def by_hand(name: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale, what the codes mean) of each value of a matrix [128, 128]."""
    blocks = w.reshape(128, -1, {"mxfp4": 32, "nvfp4": 16}.get(name, 128))
    largest = blocks.abs().amax(-1, keepdim=True)
    if name == "int4":
        scale = largest / 7.5
        values = (blocks / scale).round().clamp(-8, 7)
    elif name == "fp8":
        scale = largest / 448
        values = (blocks / scale).to(torch.float8_e4m3fn).float()
    elif name == "mxfp4":
        scale = 2.0 ** (largest.log2().floor() - 2)
        values = four_bits((blocks / scale).clamp(-6, 6))
    else:
        whole = w.abs().max() / (448 * 6)
        scale = (largest / 6 / whole).to(torch.float8_e4m3fn).float() * whole
        values = four_bits((blocks / scale).clamp(-6, 6))
    return scale.expand_as(blocks).reshape(w.shape), values.reshape(w.shape)


@pytest.mark.parametrize(
    ("name", "bits"), [("int4", 4.25), ("fp8", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.5 + 32 / 16384)]
)
def test_a_format_s_codes_are_those_by_hand(name, bits):
    (gate, *_), _ = drawn((128, 128), (128, 128), (128, 128))
    w = gate.weight.detach()
    scale, values = by_hand(name, w)
    topic, at = ffncli.explain(name), (3, 1)
    rows = {row[0]: row[1:] for row in topic.example.rows}
    assert {*range(6)} <= {*rows}
    for i, (value, scaled, code, means, stored, error) in rows.items():
        assert value == float(w[3, i])
        assert scaled == pytest.approx(float(w[3, i] / scale[3, i]), rel=1e-5)
        assert (code % 16 if "fp4" in name else code) == code
        assert means == float(values[3, i])
        assert stored == pytest.approx(float(values[3, i] * scale[3, i]), rel=1e-5)
        assert error == pytest.approx(stored - value, abs=1e-7)
    lost = float((values * scale - w).norm() / w.norm())
    assert f"{float(scale[at]):.4g}" in text(topic)
    assert f"With scales that is {bits:.4g} bits a weight, and the error is {100 * lost:.3g} % of W1's norm." in text(
        topic
    )


def test_scales_of_smaller_groups_are_more_and_hurt_fewer_channels():
    (gate, *_), _ = drawn((128, 128), (128, 128), (128, 128))
    w = gate.weight.detach().clone()
    w[:, 3] *= 30
    topic = ffncli.explain("scale")
    assert column(topic, "scales") == [128 * 8, 128 * 4, 128 * 2, 128, 1]
    assert column(topic, "bits a weight") == [4 + 32 * n / 16384 for n in column(topic, "scales")]
    for words, median in zip(column(topic, "group size"), column(topic, "of the median channel %"), strict=True):
        size = {"channel": 128, "tensor": 16384}.get(words) or int(words[1:])
        blocks = w.reshape(-1, size)
        scale = blocks.abs().amax(-1, keepdim=True) / 7.5
        near = ((blocks / scale).round().clamp(-8, 7) * scale).reshape(w.shape)
        errors = (near - w).norm(dim=0) / w.norm(dim=0)
        assert median == pytest.approx(100 * float(errors.median()), rel=1e-3)


# --- training and measuring -------------------------------------------------------------------------------------------


def test_gradients_are_those_of_autograd():
    topic = ffncli.explain("gradient")
    layers, x = drawn((4, 6), (6, 4), bias=True)
    up = layers[0](x)
    act = torch.relu(up)
    up.retain_grad()
    act.retain_grad()
    layers[1](act).square().mean().backward()
    for name, tensor in (("up", up), ("act", act), ("d act", act.grad), ("d up", up.grad)):
        assert column(topic, name) == pytest.approx(tensor[0].tolist(), rel=1e-5, abs=1e-8)


def test_losses_by_hand():
    for p, entropy, gradient, square in ffncli.explain("loss").example.rows:
        assert (entropy, gradient, square) == pytest.approx((-math.log(p), p - 1, (1 - p) ** 2))


def test_learning_rates_against_sgd():
    topic = ffncli.explain("learning-rate")
    layers, x = drawn((4, 6), (6, 4), bias=True, tokens=2)
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
    start = {n: t.clone() for n, t in model.state_dict().items()}
    for lr, after, change, predicted in topic.example.rows:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        steep = sum(float(p.grad.square().sum()) for p in model.parameters())
        optimizer.step()
        assert after == pytest.approx(float(model(x).square().mean()), rel=1e-4)
        assert change == pytest.approx(after - loss.item(), rel=1e-3)
        assert predicted == pytest.approx(-lr * steep, rel=1e-4)


def test_balance_is_1_if_even_and_the_number_of_experts_if_one_gets_all():
    topic = ffncli.explain("load-balancing")
    assert column(topic, "switch")[0] == pytest.approx(1.0)
    assert column(topic, "entropy bits")[0] == 2.0
    chance = math.exp(4) / (math.exp(4) + 3)
    assert column(topic, "switch")[-1] == pytest.approx(4 * chance)
    assert column(topic, "z-loss") == pytest.approx([math.log(math.exp(4) + 3) ** 2] * 4)


def test_memory_of_llama_by_hand():
    layers, d, f, tokens = 32, 4096, 11008, 4096
    params = layers * (3 * d * f + d)
    names, bytes_ = (column(ffncli.explain("optimizer"), name) for name in ("optimizer", "state, bytes"))
    states = dict(zip(names, bytes_, strict=True))
    assert states["sgd"] == 0
    assert states["adamw"] == 2 * 2 * params + layers * 4 * 4
    kept = column(ffncli.explain("recompute"), "kept, bytes")
    assert kept[0] == layers * (4 * tokens * d + 4 * tokens + 2 * 2 * tokens * d + 2 * 4 * tokens * f)
    assert kept[2] == layers * 2 * tokens * d
    again = column(ffncli.explain("recompute"), "FLOPs again")
    assert again[:2] == [0, layers * 2 * tokens * f]
    stages = ffncli.explain("zero").example.rows
    assert [row[1] for row in stages] == [2 * params] * 3 + [2 * params // 8]
    assert [row[3] for row in stages] == [states["adamw"], *[states["adamw"] // 8] * 3]


def test_roofline_and_prefill_by_hand():
    matrices = 32 * 3 * 4096 * 11008
    rows = ffncli.explain("roofline").example.rows
    assert rows[0][3] == pytest.approx(1e3 * 2 * matrices / 3.35e12, rel=0.01)
    assert rows[-1][3] == pytest.approx(1e3 * 2 * 4096 * matrices / 989.4e12, rel=0.01)
    assert [row[2] for row in rows] == ["memory"] * 3 + ["compute"] * 2
    assert ffncli.explain("prefill").example.rows[0][2] == pytest.approx(2 * matrices, rel=0.001)
    assert column(ffncli.explain("cold-weights"), "bytes a layer")[1] == pytest.approx(2 * matrices / 32, rel=0.001)


def test_measuring_by_hand():
    from statistics import median

    times = column(ffncli.explain("outlier"), "ms")
    away = [abs(t - median(times)) for t in times]
    assert column(ffncli.explain("outlier"), "scaled MADs from the median")[-1] == pytest.approx(
        away[-1] / (1.4826 * median(away))
    )
    widths = [high - low for _, low, high, _ in ffncli.explain("interval").example.rows]
    assert widths[1] / widths[2] == pytest.approx(2 * 2.131 / 1.998)
    assert {row[3] for row in ffncli.explain("interval").example.rows} == {"faster", "inconclusive"}
    assert {round(row[3], 12) for row in ffncli.explain("drift").example.rows} == {0.8}
    total = sum(rank**-1.2 for rank in range(1, 9))
    assert column(ffncli.explain("zipf"), "zipf:1.2 %") == pytest.approx([100 * r**-1.2 / total for r in range(1, 9)])
    off = column(ffncli.explain("noise"), "off by")
    assert off[-1] < 0.01
    assert all(row[2] < 16 for row in [(0, 0, r[3]) for r in ffncli.explain("certificate").example.rows])
    rows = ffncli.explain("kernel").example.rows
    assert all(fused < unfused for _, unfused, fused, _ in rows)
    logits, probs = (column(ffncli.explain("unembed"), name) for name in ("logit", "probability"))
    assert probs == pytest.approx(torch.tensor(logits).softmax(0).tolist(), rel=1e-5)


def test_ablation():
    """With each unit's column of W2 set to 0, by torch; attribution by autograd."""
    session = ffncli.trace("4x6:gelu", tokens=2)
    weights = {n: t.clone() for n, t in session.prepared.weights.items()}

    def loss(act: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.linear(act, weights["down.weight"], weights.get("down.bias"))
        return out.double().square().mean()

    act = session["act"].clone().requires_grad_()
    loss(act).backward()
    for unit, size, change, predicted in ffncli.explain("ablation").example.rows:
        without = session["act"].clone()
        without[:, unit] = 0
        assert size == pytest.approx(float(session["act"][:, unit].norm()), rel=1e-6)
        assert change == pytest.approx(float(loss(without) - loss(session["act"])), rel=1e-4, abs=1e-9)
        assert predicted == pytest.approx(-float((act.detach() * act.grad)[:, unit].sum()), rel=1e-4)


def test_a_cache_of_experts():
    """Replayed by hand; Belady's by trying every eviction would take too long: it is at least the others'."""
    from random import Random

    topic = ffncli.explain("belady")
    choices = Random(0).choices(range(8), [1 / rank for rank in range(1, 9)], k=400)
    for slots, lru, *others, best in topic.example.rows:
        held, hits = [], 0
        for expert in choices:
            hits += expert in held
            held = [*(one for one in held if one != expert), expert][-slots:]
        assert lru == pytest.approx(hits / 4)
        assert best >= max(lru, *others)
    assert f"in 4 slots lru serves {topic.example.rows[1][1]:.1f} %" in text(topic)


def test_changes_of_low_rank():
    rows = ffncli.explain("lora").example.rows
    assert [row[0] for row in rows] == [1, 2, 8, 32]
    assert rows[0][3:] == pytest.approx((1, 1), abs=1e-6)
    for rank, size, cosine, largest, effective in rows:
        assert size == pytest.approx(0.1)
        assert cosine == pytest.approx(1 / (1 + 0.1**2) ** 0.5, abs=0.005)  # of a change that is orthogonal to it
        assert 1 / rank <= largest + 1e-9
        assert effective <= rank + 1e-6


def test_kurtosis_in_the_topic_of_outliers():
    times = column(ffncli.explain("kurtosis"), "ms")
    off = [one - sum(times) / 8 for one in times]
    value = sum(x**4 for x in off) / 8 / (sum(x**2 for x in off) / 8) ** 2
    assert f"{value:.4f} here" in text(ffncli.explain("outlier"))


def test_a_budget():
    topic = ffncli.explain("budget")
    (one, other), x = drawn((64, 256), (256, 64), bias=True, tokens=16)
    # nvfp4: an fp8 scale for 16 values, an fp32 one for the tensor; fp8: an fp32 scale for each row
    size = 64 * 256
    bits = {("up", "nvfp4"): 4 + 8 / 16 + 32 / size, ("up", "fp8"): 8 + 32 / 64, ("down", "fp8"): 8 + 32 / 256}
    bits["down", "nvfp4"] = bits["up", "nvfp4"]
    functional = torch.nn.functional
    with torch.no_grad():
        exact = other(one(x).relu())
        for first, second, taken, error in topic.example.rows:
            up, down = (quantize(w.weight, form).dequantize() for w, form in ((one, first), (other, second)))
            out = functional.linear(functional.linear(x, up, one.bias).relu(), down, other.bias)
            assert error == pytest.approx(100 * float((out - exact).norm() / exact.norm()), rel=1e-5)
            assert taken == pytest.approx((bits["up", first] + bits["down", second]) / 2)
    _, chosen, *_ = topic.example.rows
    assert chosen[:2] == ("nvfp4", "fp8")
    assert f"they take {chosen[2]:.4g}, and err by {chosen[3]:.3g} %." in text(topic)


def test_merges():
    topic = ffncli.explain("merging")
    a, b = torch.eye(2, dtype=torch.float64)
    for t, linear, of_a, of_b, length in topic.example.rows:
        assert linear == pytest.approx(float(((1 - t) * a + t * b).norm()))
        angle = math.pi / 2  # Shoemake's formula
        on_arc = (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)
        assert (of_a, of_b) == pytest.approx(on_arc.tolist(), abs=1e-12)
        assert length == pytest.approx(1)


def test_quantiles():
    topic = ffncli.explain("quantile")
    (up, _), x = drawn((4, 8), (8, 4), bias=True, tokens=8)
    with torch.no_grad():
        values = torch.nn.functional.gelu(up(x)).flatten()
    counts, edges = torch.histogram(values.double(), 8)
    assert column(topic, "values") == counts.tolist()
    assert [*column(topic, "from"), topic.example.rows[-1][1]] == pytest.approx(edges.tolist(), abs=1e-6)
    assert column(topic, "up to here %") == pytest.approx((100 * counts.cumsum(0) / 64).tolist())
    assert f"the median, is {float(values.quantile(0.5)):.4f}. Their mean is {float(values.mean()):.4f}:" in text(topic)


def test_peak_memory():
    topic = ffncli.explain("peak memory")
    for tokens, x, step, at_once in topic.example.rows:
        one, other = (torch.empty(tokens, width, dtype=torch.bfloat16, device="meta").nbytes for width in (4096, 11008))
        assert (x, step, at_once) == (one, other, 3 * other)
    assert "In llama-2-7b, that is 135.3 MB for 2,048 tokens in bf16." in text(topic)


def test_seeds():
    first, again, *others = ffncli.explain("seed").example.rows
    assert first == again
    for seed, weight, std, out in (first, *others):
        torch.manual_seed(seed)
        up, down, x = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.randn(1, 4)
        with torch.no_grad():
            expected = [float(up.weight[0, 0]), float(up.weight.std()), float(down(up(x).relu())[0, 0])]
        assert (weight, std, out) == pytest.approx(expected, abs=1e-6)


def test_what_is_said_of_perplexity_and_of_bare_products():
    assert "e to that is its perplexity" in text(ffncli.explain("perplexity"))
    assert "`gemm_ratio`" in text(ffncli.explain("gemm_ratio"))
    assert "anchor" in text(ffncli.explain("anchor"))
