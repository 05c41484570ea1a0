"""Where a wrong kernel is wrong, and the slip that explains it; every wrong output is written out with torch."""

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

from ffncli.block.recipe import FFNSpec, MoE
from ffncli.run.engine.reference import in_float64
from ffncli.run.verify.checks.causes import Trial, explained
from tests.run.verify.test_referee import block_of

GATED = FFNSpec(12, 24, "swiglu")
SQUARE = FFNSpec(12, 12, "swiglu")
BIASED = FFNSpec(12, 24, "gelu", bias=True)
MIXTURE = FFNSpec(12, 24, "swiglu", moe=MoE(4, 2, scale=2.5))


def swiglu(x, w, act=silu):
    return linear(act(linear(x, w["gate.weight"])) * linear(x, w["up.weight"]), w["down.weight"])


def plain(x, w):
    return linear(
        gelu(linear(x, w["up.weight"], w.get("up.bias"))), w["down.weight"], w.get("down.bias")
    )  # fmt: skip


def mixture(x, w, renormalise=True, scale=2.5, weigh_inputs=False):
    scores, chosen = linear(x, w["router.weight"]).softmax(-1).topk(2, -1)
    scores = scale * (scores / scores.sum(-1, keepdim=True) if renormalise else scores)
    out = torch.zeros_like(x)
    for e in range(4):
        expert = {name: w[name][e] for name in ("gate.weight", "up.weight", "down.weight")}
        share = (scores * (chosen == e)).sum(-1, keepdim=True)
        out += swiglu(share * x, expert) if weigh_inputs else share * swiglu(x, expert)
    return out


def without(w, *names):
    return {name: tensor for name, tensor in w.items() if name not in names}


CASES = {
    "gate and up swapped": (GATED, lambda x, w: swiglu(x, {**w, "gate.weight": w["up.weight"],
                                                           "up.weight": w["gate.weight"]})),
    "gelu instead of silu": (GATED, lambda x, w: swiglu(x, w, gelu)),
    "sigmoid instead of silu": (GATED, lambda x, w: swiglu(x, w, torch.sigmoid)),
    "up transposed": (SQUARE, lambda x, w: swiglu(x, {**w, "up.weight": w["up.weight"].T})),
    "down transposed": (
        GATED, lambda x, w: swiglu(x, {**w, "down.weight": w["down.weight"].reshape(24, 12).T})
    ),
    "the residual added": (GATED, lambda x, w: x + swiglu(x, w)),
    "up.bias left out": (BIASED, lambda x, w: plain(x, without(w, "up.bias"))),
    "down.bias left out": (BIASED, lambda x, w: plain(x, without(w, "down.bias"))),
    "up.bias and down.bias left out": (BIASED, lambda x, w: plain(x, without(w, "up.bias", "down.bias"))),
    "scores without renormalisation": (MIXTURE, lambda x, w: mixture(x, w, renormalise=False)),
    "the router's scale left out": (MIXTURE, lambda x, w: mixture(x, w, scale=1.0)),
    "the scores applied to the experts' input": (MIXTURE, lambda x, w: mixture(x, w, weigh_inputs=True)),
}  # fmt: skip


def note_of(spec, wrong, counts=(17,)):
    block = block_of(spec)
    with torch.no_grad():
        for name, weight in block.ffn_weights.items():
            if name.endswith("bias"):
                weight.normal_(generator=torch.Generator().manual_seed(4))
    trials = []
    for count in counts:
        x = torch.randn(count, spec.d_model, generator=torch.Generator().manual_seed(5))
        output, reference = wrong(x, block.ffn_weights), in_float64(block.ffn, block.ffn_weights, {"x": x})[0]
        trials.append(Trial(block.judge("shapes").equal(str(count), output, reference), x, output, reference))
    rows = explained(block, trials)
    return next((row.note for row in rows if row.passed is False), None)


@pytest.mark.parametrize("slip", CASES)
def test_a_slip_is_named(slip):
    spec, wrong = CASES[slip]
    assert note_of(spec, wrong).startswith(f"it computes the block with {slip}; worst at [")


def test_a_right_kernel_needs_no_explanation():
    assert note_of(GATED, swiglu) is None
    assert note_of(BIASED, plain) is None
    assert note_of(MIXTURE, mixture) is None


def test_a_factor():
    assert note_of(GATED, lambda x, w: 0.5 * swiglu(x, w)).startswith("every value is 0.5 times the right one; ")


def changed(rows=slice(None), columns=slice(None), by=0.5):
    def wrong(x, w):
        y = swiglu(x, w)
        y[rows, columns] += by
        return y

    return wrong


def test_where_it_is_wrong():
    """The share of wrong rows and columns, and whether they are the last ones, as if a tile were left out."""
    note = note_of(GATED, changed(rows=slice(3, 4), columns=slice(7, 8)))
    assert note.startswith("worst at [3, 7]: ")
    assert note.endswith("; 1 of 17 rows and 1 of 12 columns are wrong")
    note = note_of(GATED, changed(rows=slice(16, 17)))
    assert note.endswith("; 1 of 17 rows and 12 of 12 columns are wrong (the last rows)")
    note = note_of(GATED, changed(rows=slice(-1, None), columns=slice(-4, None)))
    assert note.endswith("; 1 of 17 rows and 4 of 12 columns are wrong (the last rows and the last columns)")


def test_the_wrong_output_with_the_most_tokens_shows_where():
    """With 1 token every row of a kernel that leaves out a tile is wrong; with 64, none."""

    def tile_left_out(x, w):
        y = swiglu(x, w)
        y[len(y) // 8 * 8 :] = 0
        return y

    note = note_of(GATED, tile_left_out, counts=(1, 17, 64))
    assert note.startswith("with 17 tokens worst at [16, ")
    assert note.endswith("; 1 of 17 rows and 12 of 12 columns are wrong (the last rows)")
