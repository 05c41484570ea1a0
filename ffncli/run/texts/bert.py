"""Questions and answers on the Transformer: BERT's block, its size relative to attention, widths, slopes, position."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ffncli.block.activations import TABLE
from ffncli.block.cost import cost
from ffncli.block.formulas import SCALAR
from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_steps, parameters
from ffncli.models import catalog
from ffncli.models.counting.count import count
from ffncli.models.model import Resolved
from ffncli.run.engine.prepare import Prepared
from ffncli.run.texts.fact import Fact, Verdict, compared, drawn, number


def facts(ready: Prepared) -> tuple[Fact, ...]:
    """Check parameters, the share of the layer, wider and narrower blocks, ReLU and GELU, position in the layer."""
    models = [model for name in catalog.names() if (model := catalog.find(name))]
    return (*_parameters(ready), *_share(models), *_widths(ready), _balance(models), *_slopes(), _and(), _place(ready))


def _parameters(ready: Prepared) -> list[Fact]:
    sizes = {name: [axis.size for axis in axes] for name, axes in parameters(ready.steps).items()}
    first, second = (a * b for a, b in (sizes["up.weight"], sizes["down.weight"]))
    whole = cost(ready.steps).params
    biases = whole - first - second
    show = "ffn params bert-base"
    return [
        compared("d_model and d_ff of BERT", "768, 3072", f"{sizes['up.weight'][1]}, {sizes['up.weight'][0]}"),
        compared("parameters of W1", "2.36 M", f"{first / 1e6:.2f} M", f"{first:,}"),
        compared("parameters of W2", "2.36 M", f"{second / 1e6:.2f} M", f"{second:,}"),
        Fact(
            "parameters in all", f"{whole:,}", "about 4.7 M", "holds" if f"{whole / 1e6:.1f}" == "4.7" else "wrong",
            f"{biases:,} of them biases", show,
        ),
    ]  # fmt: skip


def _share(models: Sequence[Resolved]) -> list[Fact]:
    """Return the FFN's share of a layer's parameters, in BERT and in every known model whose attention is known."""
    counted = {resolved.model.name: count(resolved) for resolved in models}
    bert = counted["bert-base"]
    shares = {
        name if len(c.groups) == 1 else f"{name}, {group.stack} layers": group.ffn_share_of_layer
        for name, c in counted.items() for group in c.groups if group.ffn_share_of_layer is not None
    }  # fmt: skip
    assert bert.ffn_share_of_layer is not None
    assert bert.attention_params_per_layer is not None
    most = sum(share > 0.5 for share in shares.values())
    low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    attention = f"{bert.attention_params_per_layer:,}"
    here = (
        f"{attention} attention, {bert.ffn_params_per_layer:,} FFN, {bert.layer_norm_params_per_layer:,} norms; the "
        f"FFN is the majority in {most} of the {len(shares)} kinds of layers in known models: from "
        f"{100 * shares[low]:.1f} % ({low}) to {100 * shares[high]:.1f} % ({high})"
    )
    show = "ffn params bert-base"
    return [
        Fact(
            "the FFN's share of a layer's parameters", f"{100 * bert.ffn_share_of_layer:.1f} %", "the majority",
            "holds" if most == len(shares) else "depends", here, show,
        ),
        Fact(
            "parameters of the attention", attention, "786 K",
            "holds" if round(bert.attention_params_per_layer, -3) == 786_000 else "wrong",
            f"W^Q, W^K, W^V and W^O are 768 × 768, plus biases; the stated figure is too small even without W^O: the "
            f"other three have {3 * bert.attention_params_per_layer // 4:,}", show,
        ),
    ]  # fmt: skip


def _widths(ready: Prepared) -> list[Fact]:
    """Compute the number of parameters at d_ff of 1, 4 and 8 times d_model."""
    spec = ready.layer.spec
    sizes = {n: cost(ffn_steps(steps(replace(spec, d_ff=n * spec.d_model)))).params for n in (1, 4, 8)}
    figure = ", ".join(f"{n}x {size:,}" for n, size in sizes.items())
    return [
        Fact(
            "parameters at d_ff of 1, 4 and 8 times d_model", figure, note=f"8x is {sizes[8] / sizes[4]:.2f} times 4x"
        ),
        _overfitting(),
    ]


def _overfitting(d_model: int = 8) -> Fact:
    """Fit blocks with d_ff of 1, 4 and 8 times d_model to few and to many noisy samples; return their held-out errors.

    The hidden layer is random, and the output layer is fitted by least squares; the target is the sine of x along one
    direction.
    """
    up, bias = drawn(d_model, 8 * d_model, seed=1), drawn(8 * d_model, seed=2)
    test, direction = drawn(4000, d_model, seed=3), drawn(d_model, 1, seed=4) / d_model**0.5
    few, many = 10 * d_model, 400 * d_model
    x, noise = drawn(many, d_model, seed=5), 0.3 * drawn(many, 1, seed=6)
    rmse: dict[int, dict[int, float]] = {few: {}, many: {}}
    for samples in rmse:
        for times in (1, 4, 8):
            width = times * d_model
            hidden, unseen = ((part @ up[:, :width] + bias[:width]).relu() for part in (x[:samples], test))
            fit = torch.linalg.lstsq(hidden, (x[:samples] @ direction).sin() + noise[:samples]).solution
            rmse[samples][times] = float((unseen @ fit - (test @ direction).sin()).square().mean().sqrt())
    texts = [
        f"{', '.join(f'{error:.2f} at {times}x' for times, error in errors.items())} after {samples:,} noisy samples"
        for samples, errors in rmse.items()
    ]
    overfits = {samples: errors[8] > errors[4] for samples, errors in rmse.items()}
    verdict: Verdict = "depends" if len(set(overfits.values())) == 2 else "holds" if overfits[many] else "wrong"
    return Fact(
        "8x overfits", "; ".join(texts), "", verdict,
        f"rmse on unseen inputs; d_model {d_model}, random hidden layer, fitted output layer; the answer depends on "
        "the amount of data; with training: ffn approximate --noise 0.3 --samples 16 --d-ff 1x,4x,8x",
    )  # fmt: skip


def _balance(models: Sequence[Resolved]) -> Fact:
    """Return how many of the known dense models have a d_ff of 4 times d_model."""
    dense = {
        m.model.name: m.model.main.spec.d_ff / m.model.main.spec.d_model
        for m in models
        if not any(g.spec.moe for g in m.model.groups)
    }
    four = sum(ratio == 4 for ratio in dense.values())
    gated = [m.model.main.spec.gated for m in models if m.model.name in dense and dense[m.model.name] == 4]
    low, high = min(dense, key=dense.__getitem__), max(dense, key=dense.__getitem__)
    return Fact(
        "4x is the balance point", f"{four} of {len(dense)} known dense models have it", "",
        "holds" if four == len(dense) else "depends",
        f"{len(gated) - sum(map(bool, gated))} of the {four} are plain; all models lie between {dense[low]:g}x ({low}) "
        f"and {dense[high]:g}x ({high}); gated blocks have three matrices, so their equivalent of 4x is 2.67x",
    )  # fmt: skip


def _slopes() -> list[Fact]:
    """Compute the slopes of relu and gelu around 0."""
    points = (-1.0, -0.1, 0.1, 1.0)
    slopes = {
        name: ", ".join(f"{number(float(TABLE[name].slope(x, SCALAR)), 3)} at {x:g}" for x in points)
        for name in ("relu", "gelu")
    }
    tiny = 1e-9
    jumps = {n: abs(float(TABLE[n].slope(tiny, SCALAR)) - float(TABLE[n].slope(-tiny, SCALAR))) for n in slopes}
    return [
        Fact(
            "relu has no gradient below 0", f"slope {slopes['relu']}", "",
            "holds" if TABLE["relu"].slope(-1.0, SCALAR) == 0 else "wrong",
        ),
        Fact(
            "gelu has a gradient below 0", f"slope {slopes['gelu']}", "",
            "holds" if TABLE["gelu"].slope(-1.0, SCALAR) != 0 else "wrong",
        ),
        Fact(
            "gelu is smooth where relu has a kink",
            f"the slope at 0 jumps by {number(jumps['relu'])} in relu, by {number(jumps['gelu'])} in gelu",
            "", "holds" if jumps["relu"] == 1 and jumps["gelu"] < 1e-6 else "wrong",
            "curves of both with their slopes: ffn activations relu gelu --plot",
        ),
    ]  # fmt: skip


def _and() -> Fact:
    """Compute `and` of two truth values with one relu unit; no linear map can do this."""
    cases = [(a, b) for a in (0.0, 1.0) for b in (0.0, 1.0)]
    unit = [float(TABLE["relu"].f(a + b - 1, SCALAR)) for a, b in cases]
    inputs = torch.tensor([[a, b, 1.0] for a, b in cases], dtype=torch.float64)
    target = torch.tensor([[a * b] for a, b in cases], dtype=torch.float64)
    best = (inputs @ torch.linalg.lstsq(inputs, target).solution - target).abs().max()
    same = unit == target.flatten().tolist()
    return Fact(
        "'if A and B then C' needs a non-linearity",
        f"relu(A + B − 1) is {', '.join(f'{v:g}' for v in unit)} on 00, 01, 10, 11", "", "holds" if same else "wrong",
        f"the best linear map misses by up to {float(best):.2f}; with training: ffn approximate --target and",
    )  # fmt: skip


def _place(ready: Prepared) -> Fact:
    order = [s.output for s in ready.steps]
    ends = order[-3:] == ["down", "out", "post_norm"]
    return Fact(
        "attention → add & norm → FFN → add & norm", f"x is the normalised attention output; {', '.join(order)}",
        "", "holds" if ends else "wrong", "BERT does so; most later models normalise before the block",
    )  # fmt: skip
