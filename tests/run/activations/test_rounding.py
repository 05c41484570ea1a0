"""Rounding errors of activations, against mpmath one by one and against what torch itself says of its formats."""

import math

import mpmath
import pytest
import torch
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.run.activations.rounding import RoundingError, numbers, rounding_errors
from ffncli.run.measure.gap import ulp, ulp_each
from tests.oracles.exact import EXACT

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def one(name: str, dtype: str, way: str, std: float = 1.0) -> RoundingError:
    return next(e for e in rounding_errors([name], [dtype], std) if e.way == way)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_of_each_is_ulp_of_one(dtype):
    x = torch.tensor([0.0, 1.0, -1.0, 1.9, 2.0, 1e-45, 1e-30, 6e-8, 3e4, -0.49999], dtype=torch.float64)
    assert ulp_each(x, DTYPES[dtype]).tolist() == [ulp(v, DTYPES[dtype]) for v in x.tolist()]


def test_numbers_are_all_there_are():
    for dtype, count in (("bf16", 2 * 255 * 128 - 1), ("fp16", 2 * 31 * 1024 - 1)):
        x = numbers(dtype)
        assert x.dtype == DTYPES[dtype]
        assert len(x.double().unique()) == len(x) == count
        assert x.isfinite().all()
    x = numbers("fp32").double()
    assert torch.equal(x, x.unique())
    assert torch.equal(x, -x.flip(0))


@pytest.mark.parametrize(("dtype", "count"), [("bf16", 257), ("fp16", 1021)])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu", "silu", "xielu", "laplace", "mish", "relu2"])
def test_no_number_is_worse_than_the_worst(name, dtype, count):
    """Some numbers and the worst one, with the exact value at 40 digits."""
    for e in rounding_errors([name], [dtype]):
        every = numbers(dtype)
        learned = {n: torch.tensor(v, dtype=every.dtype) for n, v in TABLE[name].learned.items()}
        some = torch.cat([(every.abs() < 200).nonzero().flatten()[::count], *(places(every, e))])
        # Of all at once: for a handful of numbers torch has other code, which rounds otherwise.
        x, got = every[some], value(name, e.way, every, learned)[some]
        with mpmath.workdps(40):
            exact = [exactly(name, v, learned) for v in x.double().tolist()]
        errors = [abs(a - b) for a, b in zip(got.double().tolist(), exact, strict=True)]
        ulps = [error / ulp(b, DTYPES[dtype]) for error, b in zip(errors, exact, strict=True)]
        assert max(ulps) == pytest.approx(e.max_ulps, rel=1e-6)
        assert ulps[-2] == pytest.approx(e.max_ulps, rel=1e-6)
        assert errors[-1] == pytest.approx(e.max_error, rel=1e-6)
        assert all(
            error <= e.max_error * (1 + 1e-9) for error, v in zip(errors, x.tolist(), strict=True) if abs(v) <= 10
        )
        assert (e.value, e.exact) == (got[-2].item(), pytest.approx(exact[-2], rel=1e-12))


def places(every: torch.Tensor, e: RoundingError) -> list[torch.Tensor]:
    return [(every == x).nonzero().flatten() for x in (e.at, e.max_error_at)]


def value(name: str, way: str, x: torch.Tensor, learned: dict[str, torch.Tensor]) -> torch.Tensor:
    """Written out for what is tested, apart from the table."""
    if way == "native":
        native = {
            "gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
            "silu": functional.silu, "mish": functional.mish,
        }  # fmt: skip
        return native[name](x)
    from ffncli.block.formulas import with_learned

    return TABLE[name].f(x, with_learned(torch, learned))


def exactly(name: str, x: float, learned: dict[str, torch.Tensor]) -> float:
    if name == "xielu":  # what is learned is rounded to the dtype as well
        plus, minus = (mpmath.log1p(mpmath.exp(mpmath.mpf(v.item()))) for v in learned.values())
        v = mpmath.mpf(x)
        curve = plus * v * v if x > 0 else (mpmath.expm1(min(v, mpmath.mpf(-1e-6))) - v) * (minus + mpmath.mpf("0.5"))
        return float(curve + v / 2)
    return float(EXACT[name](mpmath.mpf(x)))


def test_share_that_is_correctly_rounded():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for way, y in (("native", functional.gelu(x)), ("formula", TABLE["gelu"].f(x, torch))):
        exact = functional.gelu(x.double())
        right = (y.double() - exact).abs() <= 0.5 * ulp_each(exact, torch.bfloat16)
        assert one("gelu", "bf16", way).correctly_rounded_share == pytest.approx(right.double().mean().item(), abs=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rounding_does_not_touch(dtype):
    for name in ("relu", "relu6", "identity"):
        for e in rounding_errors([name], [dtype]):
            assert (e.max_ulps, e.max_error, e.lost, e.infinite_from) == (0, 0, 0, None)
            assert e.correctly_rounded_share == pytest.approx(1, abs=1e-12)


def test_one_multiplication_is_rounded_once():
    """relu2 is one product: never more than half an ulp; in fp16 it overflows at 256."""
    e = one("relu2", "fp16", "formula")
    assert 0.499 < e.max_ulps <= 0.5
    assert (e.infinite_from, e.lost) == (256.0, 0)
    assert e.correctly_rounded_share == pytest.approx(1, abs=1e-12)


def test_what_is_lost_is_counted():
    """torch's hardswish multiplies before it divides by 6: far out it is infinite where x is the answer."""
    e = one("hardswish", "bf16", "native")
    x = numbers("bf16")
    y = functional.hardswish(x)
    assert e.lost == ((x > 3) & y.isinf()).sum()
    assert e.lost_at == e.infinite_from == x[y.isinf()].min().item()
    assert math.isfinite(e.max_ulps)


def test_every_row_and_way():
    found = rounding_errors(list(TABLE), ["bf16"], 2.0)
    assert [(e.name, e.way) for e in found] == [
        (name, way) for name, row in TABLE.items() for way in (("native", "formula") if row.native else ("formula",))
    ]
    for e in found:
        assert 0 <= e.correctly_rounded_share <= 1 + 1e-12
        assert all(map(math.isfinite, (e.max_ulps, e.at, e.value, e.exact, e.max_error, e.max_error_at)))
        assert abs(e.max_error_at) <= 20


def test_threads_are_left_as_they_were():
    torch.set_num_threads(3)
    rounding_errors(["relu"], ["bf16"])
    assert torch.get_num_threads() == 3
