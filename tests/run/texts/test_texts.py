"""What the founding texts say, computed: every figure against a source of its own, every check seen to fail."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.shard import Ranks
from ffncli.block.steps import Activation
from ffncli.models.examples import find, merged_first
from ffncli.models.model import Example, block_model
from ffncli.run.engine import sharded
from ffncli.run.engine.prepare import Prepared, prepare
from ffncli.run.engine.trace import trace
from ffncli.run.ranks.one_process import rank_trace
from ffncli.run.texts import TEXTS, explained, facts, llama, notebook
from ffncli.run.texts.fact import Fact, departure, doubled, drawn, error, intermediates, number, table
from ffncli.run.texts.llama import bends
from tests.oracles import notebook as printed


def ready(name: str, **asked) -> Prepared:
    return prepare(find(name), **asked)


def by_topic(name: str, run: Prepared) -> dict[str, Fact]:
    found = facts(name, run)
    assert len({fact.topic for fact in found}) == len(found)
    return {fact.topic: fact for fact in found}


@pytest.fixture(scope="module")
def of_notebook() -> dict[str, Fact]:
    return by_topic("notebook", ready("notebook"))


@pytest.fixture(scope="module")
def of_llama() -> dict[str, Fact]:
    return by_topic("llama", ready("llama"))


@pytest.fixture(scope="module")
def of_bert() -> dict[str, Fact]:
    return by_topic("bert", ready("bert"))


# --- the notebook -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", printed.PRINTED)
def test_every_number_of_the_notebook(name):
    run = ready("notebook")
    record = trace(run.steps, run.weights, run.inputs, run.mode, show=None).step(name)
    rows = [row for batch in record.values for row in batch]
    assert [[number(v) for v in row] for row in rows] == printed.PRINTED[name]


def test_the_notebooks_oracle_is_the_fixture():
    """The expected numbers follow from the package's weights and mask by plain Python too."""
    from importlib.resources import files

    data = json.loads(files("ffncli.models").joinpath("notebook.json").read_text("utf-8"))
    weights, dropped = data["weights"], {tuple(pair) for pair in data["dropped"]["dropout"]}

    def linear(name: str, row: list[float]) -> list[float]:
        pairs = zip(weights[f"{name}.weight"], weights[f"{name}.bias"], strict=True)
        return [sum(w * v for w, v in zip(unit, row, strict=True)) + bias for unit, bias in pairs]

    for token in range(6):
        up = linear("up", [4.0 * token + unit for unit in range(4)])
        kept = [0.0 if (token, unit) in dropped else max(v, 0.0) / 0.9 for unit, v in enumerate(up)]
        down = linear("down", kept)
        for found, expected in ((up, printed.UP), (kept, printed.DROPOUT), (down, printed.DOWN)):
            assert found == pytest.approx([float(v) for v in expected[token]], abs=5.1e-5)


def test_what_the_notebook_prints_is_said(of_notebook):
    assert of_notebook["pre-activations up[0, 0]"].found.split() == printed.UP[0]
    for name, rows in printed.PRINTED.items():
        halves = [[[row[:2] for row in rows[:3]], [row[:2] for row in rows[3:]]]]
        assert of_notebook[f"{name}[:, :, :2]"].found == str(halves[0]).replace("'", "")
    assert of_notebook["range of the output"].found == " … ".join(printed.OUTPUT_RANGE)
    assert of_notebook["negatives before ReLU"].found == str(printed.NEGATIVES_BEFORE_RELU)
    assert of_notebook["negatives after ReLU"].found == str(printed.NEGATIVES_AFTER_RELU)
    zeros = f"{printed.ZEROS_BEFORE_DROPOUT} → {printed.ZEROS_AFTER_DROPOUT}"
    assert of_notebook["zeros before and after dropout"].found == zeros
    assert of_notebook["kept values are scaled by 1/(1−p)"].found == f"{printed.KEPT_BEFORE} → {printed.KEPT_AFTER}"
    dropped = of_notebook["zeros that dropout makes"]
    assert dropped.found == f"{printed.DROPPED} of {printed.LIVE} live values (18 %)"
    few = sum(math.comb(33, k) * 0.1**k * 0.9 ** (33 - k) for k in range(6))
    assert f"{100 * (1 - few):.0f} % of masks" in dropped.note
    assert dropped.verdict == "wrong"


def test_step_by_step_is_the_module(of_notebook):
    """The naive comparison fails, the one with one mask does not; both repeated here in plain torch."""
    run = doubled(ready("notebook"))
    w, x = run.weights, run.inputs["x"]

    def call(p: float) -> torch.Tensor:
        hidden = functional.dropout(functional.linear(x, w["up.weight"], w["up.bias"]).relu(), p)
        return functional.linear(hidden, w["down.weight"], w["down.bias"])

    with torch.random.fork_rng():
        torch.manual_seed(0)
        apart = float((call(0.1) - call(0.1)).abs().max())
    naive = of_notebook["step by step = module, two calls in train mode"]
    assert naive.found == f"False, max difference {apart:.4f}"
    assert "each call draws its own mask" in naive.note
    for mode in ("eval mode", "train mode, same mask"):
        assert of_notebook[f"step by step = module, {mode}"].found == "True, max difference below 1e-12"


def test_facts_leave_torchs_generator_alone():
    run = ready("notebook")
    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    facts("notebook", run)
    assert torch.equal(torch.rand(3), first)


def test_zero_input(of_notebook):
    run = doubled(ready("notebook"))
    w = run.weights
    row = functional.linear(w["up.bias"].relu(), w["down.weight"], w["down.bias"])
    assert of_notebook["with biases a zero input does not give zero"].found == f"every row {table(row)}"
    assert of_notebook["without biases a zero input gives zero"].found == "max |f(0)| = 0"
    assert "[-0.1398, " in of_notebook["with biases a zero input does not give zero"].found
    # With the mask the rows that keep all their live units differ from those that do not.
    live = w["up.bias"].relu()
    rows = functional.linear(live * run.mode.masks["dropout"].flatten(0, -2) / 0.9, w["down.weight"], w["down.bias"])
    assert f"{float((rows - rows[0]).abs().max()):.4f} apart" in of_notebook["zero input in train mode"].found


def test_ranges_show_nothing(of_notebook):
    fact = of_notebook["the ranges show that the block is non-linear"]
    assert fact.verdict == "wrong"
    assert fact.found.endswith("with relu, below 1e-12 with identity")
    w = doubled(ready("notebook")).weights
    x = torch.arange(24, dtype=torch.float64).reshape(6, 4)
    flat = (x @ w["up.weight"].T + w["up.bias"]) @ w["down.weight"].T + w["down.bias"]
    assert f"{float(flat.min()):.4f} … {float(flat.max()):.4f}" in fact.note


def test_departure_is_zero_for_affine_maps_alone():
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    assert departure(lambda x: 3 * x + 7, a, b) < 1e-12
    assert departure(lambda x: x * x, a, b) == pytest.approx(float((2 * a * b).abs().max()))


def test_the_line(of_notebook):
    fact = of_notebook["a bias of −1 separates the two classes"]
    assert (fact.verdict, fact.found) == ("wrong", "−4 < b < −2 does")
    for b, separates in ((-1, False), (-2.5, True), (-3.9, True), (-4.5, False)):
        sides = [(sum(point) + b > 0) == bool(label) for point, label in notebook.POINTS]
        assert all(sides) == separates


def test_another_mask_contradicts_the_notebook():
    example = find("notebook")
    runs = [by_topic("notebook", prepare(example, seed=seed)) for seed in range(1, 9)]
    for topic in ("zeros before and after dropout", "zeros that dropout makes"):
        assert {found[topic].verdict for found in runs} == {"holds", "wrong"}  # 6 or so, and about 10 %, in some alone


def test_a_constant_block_contradicts_our_objections():
    """One that gives zero for everything is shift-invariant, and gives zero for zero."""
    run = ready("notebook")
    linear = tuple(replace(s, op=Activation("tanh")) if isinstance(s.op, Activation) else s for s in run.steps)
    nothing = {name: torch.full_like(w, float(name == "up.bias")) for name, w in run.weights.items()}
    found = by_topic("notebook", replace(run, steps=linear, weights=nothing))
    assert found["biases bring shift invariance"].verdict == "holds"
    assert found["with biases a zero input does not give zero"].verdict == "wrong"


# --- the explanation --------------------------------------------------------------------------------------------------


def test_worked_gelu_values():
    found = by_topic("explained", ready("explained"))
    wrong = {"gelu(0.21)": "0.1225", "gelu(-0.15)": "-0.0661", "gelu(0.28)": "0.1709"}
    for x, said in explained.WORKED:
        fact = found[f"gelu({x:g})"]
        phi = 0.5 * (1 + math.erf(x / math.sqrt(2)))
        assert fact.found == f"{x * phi:.4f}"
        assert fact.said == said
        assert f"= {phi:.4f}" in fact.note
        assert (fact.verdict == "wrong") == (fact.topic in wrong)
        assert fact.found == wrong.get(fact.topic, fact.found)
    assert (found["Φ(0.18)"].found, found["Φ(0.18)"].verdict) == ("0.571", "wrong")


def test_hello_has_its_four_numbers():
    x = ready("explained").inputs["x"]
    assert x.shape == (1, 512)
    assert [round(float(x[0, i]), 3) for i in (0, 1, 2, 511)] == [0.146, 0.108, 0.192, 0.11]
    others = x[0, 3:511]
    assert 0.12 < float(others.std()) < 0.17
    assert torch.equal(ready("explained", leading=(3,)).inputs["x"][0, :3], x[0, :3])
    assert not torch.equal(ready("explained", seed=1).inputs["x"][0, 3:6], x[0, 3:6])


def test_one_unit_written_out():
    run = ready("explained")
    found = by_topic("explained", run)["with the values of this run"]
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 2048)  # random weights are drawn as torch draws them
    value = float(layer(run.inputs["x"])[0, 0].detach())
    assert found.found.endswith(f"= {value:.4f}")
    assert found.note == f"up[0] of the trace is {value:.4f}"
    w = layer.weight[0].tolist()
    assert found.found.startswith(f"0.146·{w[0]:.4f} + 0.108·{w[1]:.4f} + ... + 0.110·{w[511]:.4f} + ")


def test_attention_is_not_linear():
    """With torch's own attention."""

    def draw(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    x, weights = draw(0, 8, 64), draw(1, 3, 64, 64) / 8
    doubled_input, twice = (
        functional.scaled_dot_product_attention(*(factor * x @ w for w in weights)) for factor in (2, 1)
    )
    share = float((doubled_input - 2 * twice).norm() / (2 * twice).norm())
    fact = by_topic("explained", ready("explained"))["attention is linear"]
    assert fact.found == f"f(2x) is {100 * share:.0f} % away from 2 f(x)"
    assert fact.verdict == "wrong"


def test_mixing_tokens_is_found(monkeypatch):
    monkeypatch.setattr(explained, "function", lambda steps, weights: lambda x: x.cumsum(0))
    fact = by_topic("explained", ready("explained"))["every position goes through the same function on its own"]
    assert fact.verdict == "wrong"


# --- the Llama engine -------------------------------------------------------------------------------------------------


def test_one_collective(of_llama):
    fact = of_llama["collectives of one block"]
    gather = (4 - 1) * 11008 // 4 * 4  # three other nodes, this node's slice, float32
    assert fact.found == f"collectives: 1; the All-Gather is not needed and would cost {gather:,} bytes"
    assert f"{2 * 3 * 4096 * 4 // 4:,}" in fact.note
    assert fact.verdict == "wrong"


def test_bytes_grow_with_the_nodes(of_llama):
    """Every node sends its 4096 sums of 4 bytes to each of the others; around a ring, 2 (n - 1) / n of them."""
    fact = of_llama["bytes that each of 2, 4, 8, 16 nodes sends to sum Y"]
    assert fact.found == ", ".join(f"{(n - 1) * 4096 * 4:,}" for n in (2, 4, 8, 16))
    assert ", ".join(f"{2 * (n - 1) * 4096 * 4 // n:,}" for n in (2, 4, 8, 16)) in fact.note


def test_slices_and_names(of_llama):
    assert of_llama["slices of W1 (and W3) and of W2 on 4 nodes"].found == "[4096, 2752] and [2752, 4096]"
    assert of_llama["what W1, W3 and W2 are"].verdict == "holds"
    assert of_llama["the split of W1 and W3 by outputs is called"].found == "column-parallel by Megatron"
    assert of_llama["the split of W2 by inputs is called"].found == "row-parallel by Megatron"
    assert of_llama["the guide's D, L, H, Y"].found == "gate, up, hidden, down"
    assert of_llama["the block begins with"].found == "x + attention"
    assert of_llama["partial sums of 4 nodes, each of full width, summed = whole"].verdict == "holds"
    assert of_llama["RMSNorm is x / sqrt(mean(x²) + ε) times its weight"].verdict == "holds"
    assert "[1, 2, 11008]" in of_llama["shapes dim → ffDim → dim"].found


def test_ratios_and_formats(of_llama):
    assert of_llama["d_ff over d_model of llama-2-7b"].note == "11,008 / 4,096 = 2.6875"
    assert of_llama["bits per weight of Q40"].found == f"{8 * (2 + 16) / 32:g}"
    assert of_llama["bits per weight of Q80"].found == f"{8 * (2 + 32) / 32:g}"
    assert f"{3 * 4096 * 11008:,}" in of_llama["SwiGLU is a stronger non-linearity"].note


def test_q80_is_the_format_of_the_library():
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * 3
    values[1, 32:] = 0
    kind = GGMLQuantizationType.Q8_0
    theirs = torch.from_numpy(dequantize(quantize(values.numpy(), kind), kind))
    assert torch.equal(llama.q80(values), theirs)


def test_what_q80_between_the_steps_changes():
    run = small_llama(64)
    seen = intermediates(run)
    w = run.weights
    norm = llama.q80(seen["norm"])
    hidden = llama.q80(functional.silu(norm @ w["gate.weight"].T) * (norm @ w["up.weight"].T))
    apart = (hidden @ w["down.weight"].T - seen["down"]).abs().max() / seen["down"].abs().max()
    assert 0.001 < apart < 0.1
    assert llama._between_the_steps(run, seen).found == f"Y moves by {100 * apart:.1f} %"


def small_llama(d_model: int = 16) -> Prepared:
    spec = FFNSpec(d_model, 32, "swiglu", norm="rmsnorm")
    example = Example({}, "randn", (3, 16), block=merged_first(steps(spec)))
    return prepare(replace(block_model(spec, ""), example=example))


def test_wrong_slices_are_found(monkeypatch):
    run = small_llama()
    seen = intermediates(run)

    def verdict() -> str:
        return llama._whole(rank_trace(run.steps, run.weights, run.inputs, Ranks(4), seen)).verdict

    assert verdict() == "holds"
    right = sharded.share_of
    monkeypatch.setattr(sharded, "share_of", lambda *given: right(*given[:3], min(given[3] + 1, 3)))
    assert verdict() == "wrong"


@pytest.fixture(scope="module")
def conv_run() -> Prepared:
    return ready("conv")


def test_the_notes(conv_run):
    found = by_topic("conv", conv_run)
    assert found["widths"].found == "512 → 2048 → 512"
    assert found["the block equals two 1×1 convolutions over (B, d_model, L)"].verdict == "holds"
    flops = 2 * 2 * 512 * 2048 + 2048 + 2048 + 512
    assert found["as 1×1 convolutions it can be faster"].found == f"{flops:,} FLOPs per token either way"
    assert found["W of the final layer"].found == "V×512 = [32000, 512]"
    for topic in ("softmax makes probabilities of the logits", "the likeliest token has the largest logit"):
        assert found[topic].verdict == "holds"
    for depth in ("one block", "a stack of three"):
        assert found[f"without a non-linearity {depth} is one linear map"].verdict == "holds"
    x = np.linspace(-3, 3, 400)
    line = np.polyval(np.polyfit(x, np.sin(2 * x), 1), x) - np.sin(2 * x)
    assert f"{np.sqrt(np.mean(line**2)):.2g} at 256" in found["the same with identity units"].found
    for name in ("relu", "sigmoid", "tanh"):
        fact = found[f"one hidden layer of enough {name} units approximates any continuous function"]
        assert fact.verdict == "holds"
        assert fact.found.endswith("below 0.001 at 256")
    tall = by_topic("conv", ready("conv", leading=(3,)))
    assert tall["the block equals two 1×1 convolutions over (B, d_model, L)"].note == "on (1, 512, 3)"


def test_another_block_is_no_pair_of_relu_convolutions(conv_run):
    other = tuple(replace(s, op=Activation("gelu")) if isinstance(s.op, Activation) else s for s in conv_run.steps)
    found = by_topic("conv", replace(conv_run, steps=other))
    assert found["the block equals two 1×1 convolutions over (B, d_model, L)"].verdict == "wrong"


# --- questions and answers --------------------------------------------------------------------------------------------


def test_the_size_of_bert(of_bert):
    ffn, attention, norms = 2 * 768 * 3072 + 3072 + 768, 4 * (768 * 768 + 768), 2 * 2 * 768
    fact = of_bert["the FFN's share of a layer's parameters"]
    assert fact.found == f"{100 * ffn / (ffn + attention + norms):.1f} %" == "66.6 %"
    assert fact.note.startswith(f"{attention:,} attention, {ffn:,} FFN, {norms:,} norms")
    assert of_bert["parameters in all"].found == f"{ffn:,}"
    assert of_bert["parameters of W1"].found == of_bert["parameters of W2"].found == "2.36 M"
    assert of_bert["parameters of the attention"].found == f"{attention:,}"
    sizes = [f"{n}x {2 * 768 * 768 * n + 768 * n + 768:,}" for n in (1, 4, 8)]
    assert of_bert["parameters at d_ff of 1, 4 and 8 times d_model"].found == ", ".join(sizes)


def test_not_in_every_layer_is_the_ffn_the_majority(of_bert):
    fact = of_bert["the FFN's share of a layer's parameters"]
    # Kimi Delta Attention of 32 heads of 128: q, k, v, two gates and the output, beta, short convolutions; two norms.
    ffn, inner = 3 * 2560 * 6144, 32 * 128
    least = ffn / (ffn + 6 * 2560 * inner + 2560 * 32 + 3 * 4 * inner + inner + 32 + 128 + 2 * 2560)
    assert f"from {100 * least:.1f} % (ling-3-flash, decoder layers)" in fact.note
    assert fact.verdict == "depends"


def test_the_balance_point(of_bert):
    fact = of_bert["4x is the balance point"]
    assert fact.verdict == "depends"
    assert "2x (exaone-4-1.2b) and 8x (gemma-7b)" in fact.note


def test_slopes(of_bert):
    for name in ("relu", "gelu"):
        x = torch.tensor([-1.0, -0.1, 0.1, 1.0], dtype=torch.float64, requires_grad=True)
        (slopes,) = torch.autograd.grad(getattr(functional, name)(x).sum(), x)
        (fact,) = (fact for topic, fact in of_bert.items() if topic.startswith(f"{name} has"))
        expected = zip(slopes.tolist(), ("-1", "-0.1", "0.1", "1"), strict=True)
        assert fact.found == "slope " + ", ".join(f"{s:.3f} at {at}" for s, at in expected)
    assert "by up to 0.25;" in of_bert["'if A and B then C' needs a non-linearity"].note


def held_out(samples: int, times: int) -> float:
    """The held-out error of a block `times` as wide as its 8 inputs, by numpy's least squares."""
    up, bias, test, direction, x, noise = (
        drawn(*shape, seed=seed).numpy()
        for seed, shape in enumerate(((8, 64), (64,), (4000, 8), (8, 1), (3200, 8), (3200, 1)), 1)
    )
    direction = direction / np.sqrt(8)
    x, noise = x[:samples], 0.3 * noise[:samples]
    hidden, unseen = (np.maximum(part @ up[:, : 8 * times] + bias[: 8 * times], 0) for part in (x, test))
    fit = np.linalg.lstsq(hidden, np.sin(x @ direction) + noise, rcond=None)[0]
    return float(np.sqrt(np.mean((unseen @ fit - np.sin(test @ direction)) ** 2)))


def test_overfitting_depends_on_the_data(of_bert):
    fact = of_bert["8x overfits"]
    for samples in (80, 3200):
        errors = ", ".join(f"{held_out(samples, times):.2f} at {times}x" for times in (1, 4, 8))
        assert f"{errors} after {samples:,} noisy samples" in fact.found
    assert fact.verdict == "depends"


def test_rounding_reads_the_same_everywhere():
    assert (error(3e-16, 1e-12), error(0.25, 1e-12), number(-0.00001)) == ("below 1e-12", "0.25", "0.0000")


@pytest.mark.parametrize("name", ["explained", "conv", "bert"])
def test_verdicts_do_not_hang_on_the_seed(name):
    """Facts are about the texts, not about what was drawn."""
    first, other = (by_topic(name, ready(name, seed=seed, leading=(3,))) for seed in (0, 7))
    assert {t: f.verdict for t, f in first.items()} == {t: f.verdict for t, f in other.items()}
    assert set(TEXTS) == {"notebook", "explained", "llama", "conv", "bert"}


@pytest.mark.parametrize("name", ["swiglu", "silu", "gelu", "relu"])
def test_departures_are_those_of_torchs_layers(name: str):
    d_model, generator = 12, torch.Generator().manual_seed(0)
    width = 32 if name == "swiglu" else 48

    def layer(into: int, out: int) -> torch.Tensor:
        weight = torch.empty(out, into)
        torch.nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator)
        return weight.double()

    first, *gate = [layer(d_model, width) for _ in range(2 if name == "swiglu" else 1)]
    down = layer(width, d_model)
    bend = functional.silu if name == "swiglu" else getattr(functional, name)

    def f(x: torch.Tensor) -> torch.Tensor:
        hidden = bend(x @ first.T)
        return (hidden * (x @ gate[0].T) if gate else hidden) @ down.T

    a, b = drawn(512, d_model), drawn(512, d_model, seed=1)
    wanted = (f(a + b) - f(a) - f(b) + f(0 * a)).abs().max() / f(a + b).abs().max()
    assert bends(d_model)[name] == pytest.approx(wanted.item(), rel=1e-12)
    assert first.numel() * (3 if gate else 2) == 1152  # the same number of parameters in all four
