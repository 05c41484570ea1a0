"""Statistics, distances and distributions of tensors, in pieces, against numpy and torch on whole ones."""

import math
from collections.abc import Callable
from fractions import Fraction
from statistics import NormalDist

import numpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.value import NEAR_ZERO
from ffncli.errors import FFNError
from ffncli.run.engine.execute import execute
from ffncli.run.engine.trace import trace
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure import gap as measured
from ffncli.run.measure import statistics as chunks
from ffncli.run.measure import statistics as module
from ffncli.run.measure import statistics as statistics_module
from ffncli.run.measure.gap import Gap, agreement, gap, ulp
from ffncli.run.measure.statistics import BINS, PERCENTS, Distribution, Sampler, not_finite, statistics, unit_statistics

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COUNTS = ("zeros", "near_zeros", "negatives", "nan", "inf")


@pytest.fixture
def small_chunks(monkeypatch):
    """Seven values at a time: every border is met."""
    monkeypatch.setattr(module, "_CHUNK", 7)


def expected(tensor: torch.Tensor) -> dict:
    """In numpy, in float64, on the whole tensor at once."""
    near = torch.tensor(NEAR_ZERO, dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32).item()
    values = tensor.double().numpy().ravel()
    finite = values[np.isfinite(values)]
    none = not finite.size

    def first(extreme: float, find: Callable[[np.ndarray], np.integer]) -> tuple[int, ...]:
        kept = np.where(np.isfinite(values), values, extreme)
        return tuple(map(int, np.unravel_index(find(kept), tuple(tensor.shape))))

    return {
        "min_at": None if none else first(math.inf, np.argmin),
        "max_at": None if none else first(-math.inf, np.argmax),
        "min": None if none else finite.min(),
        "max": None if none else finite.max(),
        "mean": None if none else math.fsum(finite) / finite.size,
        "std": None if none else finite.std(),
        "zeros": int((values == 0).sum()),
        "near_zeros": int((np.abs(values) <= near).sum()),
        "negatives": int((values < 0).sum()),
        "nan": int(np.isnan(values).sum()),
        "inf": int(np.isinf(values).sum()),
    }


def check(tensor: torch.Tensor) -> module.Statistics:
    found, wanted = statistics(tensor), expected(tensor)
    assert {name: getattr(found, name) for name in COUNTS} == {name: wanted[name] for name in COUNTS}
    assert (found.min, found.max) == (wanted["min"], wanted["max"])
    assert (found.min_at, found.max_at) == (wanted["min_at"], wanted["max_at"])
    if wanted["mean"] is None:
        assert (found.mean, found.std, found.histogram) == (None, None, ())
        return found
    size = max(abs(found.min), abs(found.max))
    assert found.mean == pytest.approx(wanted["mean"], rel=1e-12, abs=1e-14 * size)
    assert found.std == pytest.approx(wanted["std"], rel=1e-10, abs=1e-13 * size)
    finite = tensor.numel() - found.nan - found.inf
    assert sum(found.histogram) == (0 if found.min == found.max else finite)
    return found


NUMBERS = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1e-3, -1e-3, 1.001e-3, 1e-45, math.nan, math.inf, -math.inf])
)


@pytest.mark.usefixtures("small_chunks")
def test_any_values_in_any_type_over_chunk_borders():
    @given(st.lists(NUMBERS, max_size=40), st.sampled_from(FLOATS))
    def holds(values, dtype):
        check(torch.tensor(values, dtype=dtype))

    holds()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 7), (0,), (4, 0), (1, 6), (1, 7), (1, 8)])
@pytest.mark.usefixtures("small_chunks")
def test_any_shape(shape, dtype):
    check(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_tensors_of_any_type(dtype):
    """Several chunks; float16's own sum would overflow, bfloat16's stop counting at 256."""
    x = torch.randn(1100, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = 0
    found = statistics(x)
    wanted = expected(x)
    assert {name: getattr(found, name) for name in COUNTS} == {name: wanted[name] for name in COUNTS}
    assert found.zeros > 300_000
    assert (found.mean, found.std) == (pytest.approx(wanted["mean"], rel=1e-9), pytest.approx(wanted["std"], rel=1e-12))
    assert statistics(torch.full((3, 70_000), 6e4, dtype=torch.float16)).mean == 60_000 - 60_000 % 32


@pytest.mark.parametrize("slice_of", ["transposed", "every other"])
def test_views_that_are_not_contiguous(slice_of):
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    check(x.T if slice_of == "transposed" else x[:, ::2])


def test_nan_and_inf_in_one_chunk_spoil_no_other(small_chunks):
    x = torch.arange(30.0)
    x[8], x[9], x[20], x[29] = math.nan, math.inf, -math.inf, -math.inf
    found = check(x)
    assert (found.nan, found.inf, found.negatives, found.min, found.max) == (1, 3, 2, 0.0, 28.0)
    assert check(torch.full((20,), math.nan)).nan == 20


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.1, 1e6, -3e-5, 0.0])
def test_a_constant_has_no_spread(value, dtype):
    x = torch.full((99, 101), value).to(dtype)
    if x.isfinite().all():
        found = statistics(x)
        assert (found.std, found.mean, found.histogram) == (0.0, x[0, 0].item(), ())


def test_a_small_spread_far_from_zero(monkeypatch):
    """1e8 ± 1: a plain sum of squares has lost it. Also where the values that are looked at first mislead."""
    exact = [10**8 + (i % 3) - 1 for i in range(3000)]
    mean = Fraction(sum(exact), 3000)
    std = math.sqrt(sum((v - mean) ** 2 for v in exact) / 3000)
    x = torch.tensor(exact, dtype=torch.float64)
    assert statistics(x).std == pytest.approx(std, rel=1e-12)
    monkeypatch.setattr(module, "_pivot", lambda flat: 0.0)
    assert statistics(x).std == pytest.approx(std, rel=1e-12)


def test_values_at_the_ends_of_float64():
    big = statistics(torch.tensor([1.7e308, -1.7e308, 1.7e308, -1.7e308], dtype=torch.float64))
    assert (big.mean, big.std) == (0.0, pytest.approx(1.7e308, rel=1e-12))
    assert (big.histogram[0], big.histogram[-1]) == (2, 2)
    tiny = statistics(torch.tensor([1e-300, 3e-300], dtype=torch.float64))
    assert (tiny.mean, tiny.std) == (pytest.approx(2e-300, rel=1e-12), pytest.approx(1e-300, rel=1e-12))
    wide = statistics(torch.tensor([3.4e38, -3.4e38, 0.0]))
    assert (wide.std, sum(wide.histogram)) == (pytest.approx(math.sqrt(2 / 3) * 3.4e38, rel=1e-6), 3)


def test_the_histogram_is_numpys():
    x = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = statistics(x)
    assert (list(found.histogram), found.histogram_stride) == (np.histogram(x.numpy(), BINS)[0].tolist(), 1)
    line = statistics(torch.arange(BINS * 4.0))
    assert line.histogram[0] == line.histogram[-1] == 4


def test_the_histogram_of_a_large_tensor_says_that_it_is_of_some(monkeypatch):
    monkeypatch.setattr(module, "_MOST_IN_HISTOGRAM", 800)
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] += 100  # a stride of 8 would always see the same columns: this one never, or one time in eight
    found = statistics(x)
    assert (found.histogram_stride, sum(found.histogram)) == (9, math.ceil(6400 / 9))
    assert sum(found.histogram[15:]) == pytest.approx(100 / 9, abs=2)
    assert found.mean == pytest.approx(x.double().mean().item(), rel=1e-12)  # all else is of all values


def test_no_tensor_of_its_size_is_made(monkeypatch):
    """float32 of 16 chunks: nothing larger than a chunk in float64 is allocated."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    monkeypatch.setattr(module, "_CHUNK", 1 << 12)
    monkeypatch.setattr(module, "_MOST_IN_HISTOGRAM", 1 << 12)
    x = torch.randn(64, 1 << 10)
    x[3, 5] = math.nan
    with Watch():
        statistics(x)
    assert 0 < largest <= 8 * (1 << 12)


def test_what_is_not_finite_is_counted_in_every_type(small_chunks):
    for dtype in FLOATS:
        x = torch.ones(5, 9, dtype=dtype)
        assert not_finite(x) == (0, 0)
        x[0, 0], x[1, 1], x[4, 8] = math.nan, math.inf, -math.inf
        assert not_finite(x) == (1, 2)
    assert not_finite(torch.empty(0)) == (0, 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_place_of_an_extreme_is_the_first_of_equal_ones(dtype, small_chunks):
    x = torch.randint(-2, 3, (4, 3, 5), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0, 0], x[0, 0, 1], x[3, 2, 4] = math.nan, math.inf, -math.inf
    seen = statistics(x)
    assert seen.max_at == tuple(int(i) for i in torch.unravel_index(x.nan_to_num(-9, -9, -9).argmax(), x.shape))
    assert seen.min_at == tuple(int(i) for i in torch.unravel_index(x.nan_to_num(9, 9, 9).argmin(), x.shape))
    assert (x[seen.min_at].item(), x[seen.max_at].item()) == (seen.min, seen.max) == (-2, 2)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", [0.0, 1.0, 1.5, -2.0, 3.9999, 1e-30, 1e-44, 65504.0, 7e4, 1e30])
def test_ulp_is_numpys_spacing(value: float) -> None:
    assert ulp(value, torch.float32) == float(abs(numpy.spacing(numpy.float32(value))))
    assert ulp(value, torch.float64) == float(abs(numpy.spacing(numpy.float64(value))))


def test_ulp_in_bfloat16() -> None:
    assert ulp(1.0, torch.bfloat16) == 2.0**-7
    assert ulp(-6.0, torch.bfloat16) == 4 * 2.0**-7
    assert math.isnan(ulp(INF, torch.bfloat16))


def test_a_gap_is_told_with_its_place_and_what_is_not_finite_beside_it() -> None:
    a = torch.tensor([[1.0, NAN, 5.0], [INF, 2.0, -INF]])
    b = torch.tensor([[1.0, NAN, 4.0], [INF, -8.0, INF]])
    assert gap(a, b) == Gap(10.0, 4, abs(b.flatten()[4].item()), 8.0, 1, 5)
    assert gap(b, b) == Gap(0.0, -1, 0.0, 8.0, 0, -1)
    assert gap(torch.ones(2), torch.zeros(2)).relative == INF
    assert gap(torch.zeros(0), torch.zeros(0)) == Gap()


@pytest.mark.parametrize("piece", [1, 4, 7])
def test_a_gap_does_not_depend_on_the_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(5, 4, generator=generator) for _ in range(2))
    a[1, 1], b[4, 3] = NAN, INF
    whole = gap(a, b)
    assert (whole.unlike, whole.first_unlike) == (2, 5)
    monkeypatch.setattr(measured, "_PIECE", piece)
    assert gap(a, b) == whole


def test_agreement_is_the_closed_form() -> None:
    theirs = torch.tensor([1.0, -4.0, 2.0])
    found = agreement(theirs + torch.tensor([0.0, 0.0, 2**-20]), theirs)
    assert (found.max_error, found.relative_error) == (2**-20, 2**-22)
    assert found.ulps == 4.0  # of 2, where they differ: its last place in float32 is 2⁻²²
    assert agreement(torch.tensor([0.5, 4.0]), torch.tensor([0.0, 4.0])).ulps is None
    assert agreement(theirs, theirs).ulps == 0
    assert agreement(theirs.bfloat16() * 1.0078125, theirs.bfloat16()).ulps == 1.0


def test_agreement_where_not_all_is_finite() -> None:
    assert agreement(torch.tensor([NAN, INF, 1.0]), torch.tensor([NAN, INF, 1.0])).max_error == 0
    assert agreement(torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0])).max_error == INF
    assert agreement(torch.tensor([1.0]), torch.tensor([0.0])).relative_error == INF
    with pytest.raises(FFNError, match="cannot be compared"):
        agreement(torch.zeros(2), torch.zeros(1, 2))


def found(values: Tensor, pieces: int) -> Distribution:
    """The distribution of rows that come some at a time."""
    seen = Sampler(values.shape[0], values.shape[1])
    for piece in values.chunk(pieces):
        seen.add(piece)
    return seen.distribution()


def values(kind: str) -> Tensor:
    drawn = torch.randn(60, 31, dtype=torch.float64)
    shaped = {
        "normal": drawn, "far": 1e6 + drawn, "skewed": drawn.exp(), "zeros": drawn.relu(), "tiny": 1e-30 * drawn,
        "fp32": drawn.float(), "bf16": drawn.bfloat16(),
    }  # fmt: skip
    return shaped[kind]


@pytest.mark.parametrize("pieces", [1, 7, 60])
@pytest.mark.parametrize("kind", ["normal", "far", "skewed", "zeros", "tiny", "fp32", "bf16"])
def test_figures_in_pieces_are_those_of_the_whole(kind: str, pieces: int) -> None:
    given = values(kind)
    d, x = found(given, pieces), given.double().flatten()
    near = 1e-6 if kind == "far" else 1e-9
    assert (d.values, d.nan, d.inf) == (x.numel(), 0, 0)
    assert (d.min, d.max) == (x.min().item(), x.max().item())
    assert d.mean == pytest.approx(x.mean().item(), rel=1e-12)
    mean, std = x.mean(), x.std(correction=0)
    assert d.std == pytest.approx(std.item(), rel=near)
    assert d.rms == pytest.approx(x.square().mean().sqrt().item(), rel=1e-9)
    z = (x - mean) / std
    assert d.skewness == pytest.approx(z.pow(3).mean().item(), rel=near, abs=near)
    assert d.excess_kurtosis == pytest.approx(z.pow(4).mean().item() - 3, rel=near, abs=near)
    assert d.negatives == int((x < 0).sum())
    assert d.zeros == int((x == 0).sum())
    assert d.near_zeros == int((given.abs() <= torch.tensor(1e-3, dtype=given.dtype)).sum())
    assert d.histogram == tuple(torch.histc(x, 24, x.min().item(), x.max().item()).int().tolist())
    assert [p.percent for p in d.percentiles] == list(PERCENTS)
    for p in d.percentiles:
        assert p.value == pytest.approx(x.quantile(p.percent / 100).item(), rel=1e-12)


def test_the_distance_from_a_normal_is_kolmogorovs() -> None:
    """By hand: at every value F jumps, and both of its sides are compared with Python's own normal distribution."""
    x = torch.randn(40, 3, dtype=torch.float64).exp()
    ordered = sorted(x.flatten().tolist())
    normal = NormalDist(x.mean().item(), x.std(correction=0).item())
    sides = [abs(share / 120 - normal.cdf(v)) for i, v in enumerate(ordered) for share in (i, i + 1)]
    assert found(x, 4).normal_distance == pytest.approx(max(sides), rel=1e-12)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    x = torch.tensor([[1.0, math.nan, -math.inf], [3.0, math.inf, -2.0]])
    d = found(x, 2)
    assert (d.values, d.nan, d.inf, d.negatives) == (6, 1, 2, 2)
    assert (d.min, d.max, d.mean) == (-2.0, 3.0, pytest.approx(2 / 3))
    assert [p.value for p in d.percentiles if p.percent == 50] == [1.0]
    none = found(torch.full((2, 3), math.nan), 1)
    assert (none.min, none.mean, none.percentiles, none.histogram, none.nan) == (None, None, (), (), 6)


def test_a_constant_has_no_shape() -> None:
    d = found(torch.full((5, 7), 0.1, dtype=torch.float64), 3)
    assert (d.mean, d.std, d.skewness, d.excess_kurtosis, d.normal_distance) == (0.1, 0.0, None, None, None)
    assert d.histogram == ()


def test_of_many_values_some_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values as from the whole tensor with that stride, however it is cut."""
    monkeypatch.setattr(statistics_module, "_MOST_IN_HISTOGRAM", 100)
    x = torch.randn(50, 20, dtype=torch.float64)
    for pieces in (1, 9, 50):
        d = found(x, pieces)
        some = x.flatten()[:: d.histogram_stride]
        assert d.histogram_stride == 11  # 10 would see every second column alone
        assert d.histogram == tuple(torch.histc(some, 24, x.min().item(), x.max().item()).int().tolist())
        assert d.percentiles[0].value == pytest.approx(some.quantile(0.01).item())


@pytest.fixture(params=[40, 1 << 20])
def chunk(request, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK", request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("chunk")
def test_dead_units_are_those_that_no_token_makes_active(dtype):
    x = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).relu().to(dtype) + 0.5
    x[:, [2, 7]] = 0
    x[:, 8] = 5e-4
    x[:, 9] = 0
    x[29, 9] = 1.0  # the last token alone
    x[:, 11] = math.nan
    found = unit_statistics(x.reshape(5, 6, 20))
    assert (found.units, found.tokens, found.dead, found.near_dead) == (20, 30, 2, 3)
    assert unit_statistics(torch.zeros(50, 20, dtype=dtype)).dead == 20
    assert found.largest_norm == found.most_active == ()


@pytest.mark.usefixtures("chunk")
def test_the_largest_units_are_numpys():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(25, 16, generator=draw)
    x[3, 4], x[20, 11] = -60.0, 30.0  # a large norm from one token is not much activity
    down = torch.randn(8, 16, generator=draw)
    found = unit_statistics(x, 3, down)
    values = x.double().numpy()
    norms, means = np.linalg.norm(values, axis=0), np.abs(values).mean(0)
    assert [u.unit for u in found.largest_norm] == np.argsort(-norms)[:3].tolist()
    assert [u.unit for u in found.most_active] == np.argsort(-means)[:3].tolist()
    assert (found.largest_norm[0].largest, found.largest_norm[0].token) == (-60.0, 3)
    for u in (*found.largest_norm, *found.most_active):
        assert (u.norm, u.mean_abs) == (pytest.approx(norms[u.unit], 1e-12), pytest.approx(means[u.unit], 1e-12))
        assert u.largest == values[u.token, u.unit] == max(values[:, u.unit], key=abs)
        alone = np.outer(values[:, u.unit], down.double().numpy()[:, u.unit])  # what it adds to the output
        assert u.writes == pytest.approx(np.linalg.norm(alone), rel=1e-12)


def test_more_units_than_there_are_ties_and_values_that_are_not_finite():
    x = torch.ones(2, 4)
    x[0, 1], x[1, 2] = math.nan, -math.inf
    found = unit_statistics(x, 9)
    assert [u.unit for u in found.largest_norm] == [0, 3, 1, 2]
    assert [(u.norm, u.token, u.writes) for u in found.largest_norm[2:]] == [(1.0, 1, None), (1.0, 0, None)]


def test_a_trace_has_units_where_they_are():
    block = steps(FFNSpec(8, 16, "swiglu"))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.randn(6, 8)
    found = trace(block, weights, {"x": x}, top_units=2)
    assert [r.name for r in found.steps if r.units] == ["act", "hidden"]
    tensors = {event.name: event.tensor for event in execute(block, weights, {"x": x})}
    best = found.step("hidden").units.largest_norm[0]
    assert best.norm == pytest.approx(tensors["hidden"].double().norm(dim=0).max().item(), rel=1e-12)
    assert best.writes == pytest.approx(best.norm * weights["down.weight"][:, best.unit].double().norm().item())
    assert found.step("act").units.largest_norm[0].writes is None
    assert trace(block, weights, {"x": x[:0]}).step("act").units is None


def test_experts_have_units_of_their_own_and_tokens_by_their_number():
    block = steps(FFNSpec(8, 16, "relu", moe=MoE(4, 1)))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    found = trace(block, weights, {"x": torch.randn(12, 8)}, inside=None, top_units=16)
    inner = [r for r in found.steps if r.units]
    assert inner
    assert all(r.name.startswith("experts.") and r.name.endswith(".act") for r in inner)
    for record in inner:
        e = int(record.name.split(".")[1])
        units = record.units
        assert units.tokens == len(record.tokens)
        assert {u.token for u in units.largest_norm} <= set(record.tokens)
        assert [one.token for one in units.per_token] == list(record.tokens)
        column = weights["down.weight"][e][:, units.largest_norm[0].unit].double().norm().item()
        assert units.largest_norm[0].writes == pytest.approx(units.largest_norm[0].norm * column)


def test_dropout_in_eval_hands_on_what_it_was_given():
    block = steps(FFNSpec(8, 16, "relu", dropout=0.5))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    found = trace(block, weights, {"x": torch.randn(6, 8)}, top_units=2)
    act, dropout = found.step("act"), found.step("dropout")
    assert (dropout.op, dropout.formula, dropout.inputs) == ("dropout", "dropout(act, 0.5)", ("act",))
    assert (dropout.zeros, dropout.std, dropout.values) == (act.zeros, act.std, act.values)
    assert (act.flops, dropout.flops, dropout.parameters) == (6 * 16, 0, ())
    assert [u.unit for u in dropout.units.largest_norm] == [u.unit for u in act.units.largest_norm]
    assert dropout.units.largest_norm[0].writes
