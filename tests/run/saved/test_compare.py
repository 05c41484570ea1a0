"""Two tensors side by side, held to numpy; and what a misread looks like, made by hand."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.run.engine.trace import trace
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure import gap as measured
from ffncli.run.saved.compare import compare, difference
from ffncli.run.saved.saved import kept_for_saving, open_saved, save

nan, inf = math.nan, math.inf


@settings(max_examples=40)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.integers(0, 10**6))
def test_the_worst_element_is_numpys(values, seed):
    base = torch.tensor(values, dtype=torch.float32)
    noise = torch.randn(base.shape, generator=torch.Generator().manual_seed(seed))
    new = base + 1e-3 * noise
    found = difference(new, base)
    gap = np.abs(new.double().numpy() - base.double().numpy())
    assert found.max_error == gap.max()
    size = np.abs(values).max()
    if size:
        assert found.relative_error == gap.max() / size
    if gap.max():
        at = int(gap.argmax())
        assert found.worst == f"[{at}]"
        assert found.ulps == (gap[at] / np.spacing(np.float32(abs(values[at]))) if values[at] else None)
    assert found.agrees == (gap.max() == 0 or (size > 0 and gap.max() / size <= 1e-5))


def test_pieces_say_what_the_whole_says(monkeypatch):
    base, new = torch.randn(7, 11), torch.randn(7, 11)
    whole = difference(new, base)
    for piece in (1, 5, 77):
        monkeypatch.setattr(measured, "_PIECE", piece)
        assert difference(new, base) == whole
    odd = base.clone()
    odd[2, 3] = odd[5, 5] = nan
    one = difference(odd, base)
    assert (one.worst, one.nonfinite, one.max_error) == ("[2,3]", 2, 0.0)


@pytest.mark.parametrize(
    ("base", "new", "agrees", "nonfinite", "max_error"),
    [
        ([1, nan], [1, nan], True, 0, 0),
        ([1, nan], [1, 2], False, 1, 0),
        ([1, 2], [nan, 2], False, 1, 0),
        ([1, inf], [1, inf], True, 0, 0),
        ([1, inf], [1, -inf], False, 1, 0),
        ([nan, inf], [inf, nan], False, 2, 0),
        ([0, 0], [0, 0], True, 0, 0),
        ([0, 0], [0, 1e-30], False, 0, 1e-30),
        ([0.0, 1], [-0.0, 1], True, 0, 0),
        ([3, inf], [1, inf], False, 0, 2),
    ],
)
def test_what_is_not_finite(base, new, agrees, nonfinite, max_error):
    found = difference(*(torch.tensor(v, dtype=torch.float64) for v in (new, base)))
    assert (found.agrees, found.nonfinite, found.max_error) == (agrees, nonfinite, max_error)
    assert (found.worst is None) == (agrees or max_error == nonfinite == 0)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_narrower_dtype_decides(wide):
    base = torch.tensor([1.0, 2.0], dtype=wide)
    found = difference(base.bfloat16() + 2**-7, base)
    assert (found.dtype, found.tolerance, found.max_error) == ("bfloat16", 1e-2, 2**-7)
    assert (found.ulps, found.relative_error, found.agrees) == (1.0, 2**-8, True)
    assert difference(base, base).dtype == str(wide)[6:]


# --- causes -----------------------------------------------------------------------------------------------------------


def saved(path: Path, spec: FFNSpec, change=lambda weights: {}, keep_weights=True, inside=frozenset()):
    block = steps(spec)
    weights = random_weights(block, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(2)
    weights = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in weights.items()}
    weights |= change(weights)
    x = {"x": torch.randn(6, spec.d_model, generator=torch.Generator().manual_seed(1))}
    result = trace(block, weights, x, keep=kept_for_saving(block, x, inside), inside=inside)
    save(path, block, result, {}, weights if keep_weights else {})
    return open_saved(path)


GATED, PLAIN = FFNSpec(8, 12, "swiglu", norm="rmsnorm"), FFNSpec(8, 8, "gelu")
MIXED = FFNSpec(8, 12, "swiglu", bias=True, moe=MoE(3, 3, shared_experts=1))
ORDER = torch.randperm(12, generator=torch.Generator().manual_seed(4))


def swapped(weights, prefix=""):
    gates, ups = (f"{prefix}gate", f"{prefix}up")
    return {
        f"{to}.{kind}": weights[f"{of}.{kind}"]
        for to, of in ((gates, ups), (ups, gates)) for kind in ("weight", "bias") if f"{of}.{kind}" in weights
    }  # fmt: skip


CASES = [
    (GATED, lambda w: {"gate.weight": -w["gate.weight"]}, "gate", "all signs of {} are flipped", True),
    (GATED, lambda w: {"up.weight": 3 * w["up.weight"]}, "up", "{} in NEW is 3 times its value in BASE", True),
    (GATED, lambda w: {"gate.weight": w["gate.weight"][ORDER]}, "gate", "the {rows} of {} are in another order", True),
    (GATED, lambda w: {"gate.weight": 0 * w["gate.weight"]}, "gate", "{} is zero everywhere in NEW", True),
    (GATED, lambda w: {"gate.weight": w["gate.weight"] * torch.arange(2.0, 14)[:, None]}, "gate",
     "each of the {rows} of {} is scaled by its own factor, such as 2", True),
    (PLAIN, lambda w: {"up.weight": w["up.weight"].T}, "up", "up.weight is transposed", False),
    (PLAIN, lambda w: {"up.bias": 0 * w["up.bias"]}, "up",
     "each of the features of up is shifted by its own amount, as by a bias", None),
    (MIXED, lambda w: swapped(w, "shared."), "shared.gate", "shared.gate and shared.up are swapped", True),
    (GATED, lambda w: {"norm.weight": w["norm.weight"] + 1}, "norm",
     "each of the features of norm is scaled by its own factor, such as ", None),
    (PLAIN, lambda w: {"down.weight": w["down.weight"] + torch.eye(8)}, "down",
     "no known pattern; save with --save-weights to compare its weights too", None),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "change", "step", "words", "values_show_it"), CASES)
def test_a_cause_is_named(tmp_path, spec, change, step, words, values_show_it):
    """From the weights, and where these are not saved from the step's values."""
    for kept in (True, False):
        if (kept and values_show_it is None) or (not kept and values_show_it is False):
            continue
        base = saved(tmp_path / f"base{kept}.npz", spec, keep_weights=kept)
        new = saved(tmp_path / f"new{kept}.npz", spec, change, keep_weights=kept)
        found = compare(base, new)
        assert found.first == step
        name = f"{step}.weight" if kept else step
        assert found.causes[0].startswith(words.replace("{rows}", "rows" if kept else "features").replace("{}", name))


@pytest.mark.parametrize("inside", [frozenset(), None])
def test_experts_weights_are_looked_at_with_and_without_their_steps(tmp_path, inside):
    base = saved(tmp_path / "base.npz", MIXED, inside=inside)
    new = saved(tmp_path / "new.npz", MIXED, swapped, inside=inside)
    found = compare(base, new)
    assert found.first == ("experts" if inside is not None else "experts.0.gate")
    assert found.causes[0] == "gate and up are swapped"


def test_columns_of_a_fused_matrix_in_any_other_order(tmp_path):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))

    def cut(weights):
        fused = torch.cat((weights["gate.weight"], weights["up.weight"]))[order]
        return {"gate.weight": fused[:12], "up.weight": fused[12:]}

    for kept in (True, False):
        base = saved(tmp_path / "base.npz", GATED, keep_weights=kept)
        new = saved(tmp_path / "new.npz", GATED, cut, keep_weights=kept)
        (cause, *_) = compare(base, new).causes
        assert cause.endswith("in another order: one fused matrix was cut in a different way")


def test_input_columns_in_another_order(tmp_path):
    order = [3, 1, 2, 0, 4, 5, 7, 6]
    new = saved(tmp_path / "n.npz", GATED, lambda w: {"gate.weight": w["gate.weight"][:, order]})
    found = compare(saved(tmp_path / "b.npz", GATED), new)
    assert found.causes == ("the columns (inputs) of gate.weight are in another order",)


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_one_value_that_is_not_finite_is_no_pattern(tmp_path, value):
    """Beside an infinite value every difference is small: no cause may be made of that."""

    def spoiled(weights):
        weight = weights["gate.weight"].clone()
        weight[2, 1] = value
        return {"gate.weight": weight}

    fine, odd = saved(tmp_path / "fine.npz", GATED), saved(tmp_path / "odd.npz", GATED, spoiled)
    assert compare(fine, odd).causes == ("gate.weight differs",)
    assert compare(odd, fine).causes == ("gate.weight differs",)


def test_equal_weights_leave_the_arithmetic(tmp_path):
    base, new = saved(tmp_path / "b.npz", GATED), saved(tmp_path / "n.npz", GATED)
    wrong = replace(new, container=_Changed(new.container, "down"))
    found = compare(base, wrong)
    assert (found.first, found.causes) == (
        "down",
        ("the weights of down are the same in both: the arithmetic differs",),
    )
    wrong = replace(new, container=_Changed(new.container, "hidden"))
    assert compare(base, wrong).causes == ("the inputs of hidden agree: its multiply itself differs",)


def test_weights_that_differ_without_a_known_pattern_are_named(tmp_path):
    new = saved(tmp_path / "n.npz", PLAIN, lambda w: {"down.weight": w["down.weight"] + torch.eye(8)})
    assert compare(saved(tmp_path / "b.npz", PLAIN), new).causes == ("down.weight differs",)


class _Changed:
    """A container in which one step's values are others."""

    def __init__(self, inner, step):
        self.inner, self.step, self.shapes, self.record = inner, step, inner.shapes, inner.record

    def tensor(self, name):
        found = self.inner.tensor(name)
        return (
            found + torch.rand(found.shape, generator=torch.Generator().manual_seed(9)) if name == self.step else found
        )


def test_rows_of_other_tokens_are_not_compared(tmp_path):
    """As many tokens, but others: their rows say nothing about each other."""
    base, new = (saved(tmp_path / f"{n}.npz", MIXED, inside=None) for n in "bn")
    found = compare(base, replace(new, container=_Changed(new.container, "tokens/experts.1")))
    assert found.first is None
    assert not any(row.step.startswith("experts.1.") for row in found.rows)
    assert any(row.step.startswith("experts.0.") for row in found.rows)
    assert found.mismatches[0].field == "experts.1.gate: tokens"


def test_a_tolerance_of_ones_own(tmp_path):
    base = saved(tmp_path / "b.npz", GATED)
    new = saved(tmp_path / "n.npz", GATED, lambda w: {"gate.weight": w["gate.weight"] * (1 + 1e-4)})
    assert compare(base, new).first == "gate"
    assert compare(base, new, 1e-3).first is None
    assert compare(base, base, 0.0).first is None


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 5), (3, 3, 3), (0,), (0, 3)])
@pytest.mark.parametrize("name", ["gate.weight", "gate.bias", "norm.weight"])
@pytest.mark.parametrize("first", ["norm", "gate"])
def test_weights_of_any_shape_are_looked_at(tmp_path, first, name, shape):
    """A file may say anything: weights that fit nothing are no reason to fail."""
    base, new = saved(tmp_path / "b.npz", GATED), saved(tmp_path / "n.npz", GATED)
    strange = torch.zeros(shape)

    class Strange(_Changed):
        def __init__(self, inner, size):
            super().__init__(inner, first)
            self.size, self.shapes = size, {**inner.shapes, f"weights/{name}": shape}

        def tensor(self, wanted):
            if wanted == f"weights/{name}":
                return strange + self.size
            return super().tensor(wanted) if self.size else self.inner.tensor(wanted)

    ours, theirs = (replace(s, container=Strange(s.container, size)) for size, s in enumerate((base, new)))
    found = compare(ours, theirs)
    assert found.first == first
    assert found.causes
    alone = replace(new, container=_Changed(new.container, first))
    alone.container.shapes = {n: s for n, s in alone.container.shapes.items() if not n.startswith("weights/")}
    assert compare(ours, alone).causes
