"""The table of activations, through both namespaces, against torch and transformers."""

import math
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import diff, mpf, workdps
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import CANONICAL, GATED, TABLE, known_names, resolve
from ffncli.block.formulas import SCALAR, with_learned
from ffncli.errors import FFNError
from ffncli.run.engine import execute
from tests.oracles import activations as oracles
from tests.oracles.exact import EXACT

every_row = pytest.mark.parametrize("name", TABLE)
few = settings(max_examples=20)

KINKS = (0.0, 6.0, -3.0, 3.0, -1e-6)  # relu and kin; relu6; hardswish; xielu's eps. gelu_10's edge, 10, is in the grid
FAR = (1e-300, 1e-9, 1e-6, 15.0, 19.9, 20.5, 30.0, 37.0, 41.0, 89.0, 100.0, 700.0, 709.5, 744.0, 1000.0)
GRID = torch.tensor(
    [*(i / 16 for i in range(-160, 161)), *(s * v for v in FAR for s in (1, -1)), -0.0]
    + [v for k in KINKS for v in (k, math.nextafter(k, -math.inf), math.nextafter(k, math.inf))],
    dtype=torch.float64,
)
NARROW = torch.linspace(-10, 10, 2001, dtype=torch.float64)

OTHER = {"prelu": {"weight": -0.7}, "xielu": {"alpha_p": -1.5, "alpha_n": 2.25}}  # learned values off the initial ones
CASES = [(name, row.learned) for name, row in TABLE.items()] + list(OTHER.items())
every_case = pytest.mark.parametrize(("name", "learned"), CASES, ids=[*TABLE, *(f"{n}-learned" for n in OTHER)])
points = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30).map(lambda v: torch.tensor(v, dtype=torch.float64))


def tensors(learned: dict[str, float], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {n: torch.tensor([v], dtype=dtype) for n, v in learned.items()}


def by_scalar(f: Callable[..., float], learned: dict[str, float], x: Tensor) -> Tensor:
    """`f` on Python floats, one by one."""
    m = with_learned(SCALAR, learned)
    return torch.tensor([f(v, m) for v in x.tolist()], dtype=torch.float64)


def check(actual: Tensor, expected: Tensor, x: Tensor, tolerance: float = 1e-12) -> None:
    """Equal to `tolerance`, relative above 1; infinities and NaN must be in the same places."""
    assert actual.dtype == expected.dtype == torch.float64
    same = torch.isclose(actual, expected, rtol=0, atol=0, equal_nan=True)
    same |= (actual - expected).abs() <= tolerance * expected.abs().clamp(min=1)
    wrong = torch.stack([x.double(), actual, expected], dim=1)[~same].tolist()
    assert not wrong, f"[x, is, should be]: {wrong[:5]}, {len(wrong)} in all"


# --- values and slopes ------------------------------------------------------------------------------------------------


def test_every_row_has_an_oracle():
    assert set(oracles.ORACLES) == set(TABLE)


@every_row
def test_learned_parameters_start_as_torch_starts_them(name):
    assert dict(TABLE[name].learned) == pytest.approx(oracles.initial(name), abs=1e-14)


def check_values(name: str, learned: dict[str, float], x: Tensor) -> None:
    expected = oracles.oracle(name, learned)(x).detach()
    check(by_scalar(TABLE[name].f, learned, x), expected, x)
    check(execute.function(name, tensors(learned))(x), expected, x)
    check(TABLE[name].f(x, with_learned(torch, tensors(learned))), expected, x)  # even if execution has a native call


@every_case
def test_values_on_the_grid(name, learned):
    check_values(name, learned, GRID)


@every_case
@few
@given(x=points)
def test_values_anywhere(name, learned, x):
    check_values(name, learned, x)


def check_slopes(name: str, learned: dict[str, float], x: Tensor) -> None:
    expected = oracles.autograd_slope(oracles.oracle(name, learned), x)
    if name == "sqrtsoftplus":  # its softplus is 0 below -745: autograd divides 0 by 0 where the slope is below 1e-161
        expected = torch.where(x < -745, 0.0, expected)
    check(by_scalar(TABLE[name].slope, learned, x), expected, x)
    check(execute.slope(name, tensors(learned))(x), expected, x)


@every_case
def test_slopes_on_the_grid_and_at_the_kinks(name, learned):
    check_slopes(name, learned, GRID)


@every_case
@few
@given(x=points)
def test_slopes_anywhere(name, learned, x):
    check_slopes(name, learned, x)


@pytest.mark.parametrize(
    ("name", "x", "slope"),
    [("relu", 0, 0), ("relu6", 0, 0), ("relu6", 6, 0), ("leaky_relu", 0, 0.01), ("prelu", 0, 0.25), ("relu2", 0, 0),
     ("hardswish", -3, 0), ("hardswish", 3, 1), ("elu", 0, 1), ("selu", 0, 1.7580993408473766)],
)  # fmt: skip
def test_slopes_at_kinks_in_numbers(name, x, slope):
    learned = TABLE[name].learned
    for zero in (float(x), -float(x)) if x == 0 else (float(x),):
        assert TABLE[name].slope(zero, with_learned(SCALAR, learned)) == pytest.approx(slope, abs=1e-15)


@pytest.mark.parametrize("name", oracles.TRANSFORMERS_NAMES)
def test_transformers_names(name):
    canonical, gated = resolve(name)
    learned = TABLE[canonical].learned
    expected = oracles.module(name)(NARROW).detach()
    assert gated is None
    check(execute.function(canonical, tensors(learned))(NARROW), expected, NARROW)
    check(by_scalar(TABLE[canonical].f, learned, NARROW), expected, NARROW)


@pytest.mark.parametrize("name", oracles.TRANSFORMERS_NAMES)
def test_slopes_of_transformers_names(name):
    canonical, _ = resolve(name)
    learned = TABLE[canonical].learned
    x = torch.cat([NARROW, torch.tensor(KINKS, dtype=torch.float64)])
    expected = oracles.autograd_slope(oracles.module(name), x)
    # gelu_fast spells √(2/π) with ten digits: its slope is 1.1e-12 off the one with all of them
    check(by_scalar(TABLE[canonical].slope, learned, x), expected, x, 2e-12 if name == "gelu_fast" else 1e-12)


def test_softplus_is_torchs_default_up_to_its_threshold():
    x = NARROW * 2
    check(execute.function("softplus")(x), functional.softplus(x), x)


# --- worked values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "digits"),
    [(0.12, 0.066, 3), (-0.08, -0.037, 3), (0.25, 0.150, 3), (0.18, 0.103, 3), (0.19, 0.109, 3),
     (0.21, 0.1225, 4), (-0.15, -0.0661, 4), (0.28, 0.1709, 4)],
)  # fmt: skip
def test_worked_gelu_values(x, y, digits):
    assert round(TABLE["gelu"].f(x, SCALAR), digits) == y
    assert round(execute.function("gelu")(torch.tensor(x, dtype=torch.float64)).item(), digits) == y


@pytest.mark.parametrize(("name", "gap", "at"), [("gelu_tanh", "4.73e-04", 2.70), ("quick_gelu", "2.03e-02", None)])
def test_how_far_the_approximations_of_gelu_are_off(name, gap, at):
    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    off = (execute.function("gelu")(x) - execute.function(name)(x)).abs()
    assert f"{off.max().item():.2e}" == gap
    if at is not None:
        assert round(abs(x[off.argmax()].item()), 2) == at


# --- names ------------------------------------------------------------------------------------------------------------

ALIASES = {
    "linear": "identity", "relu_squared": "relu2", "squared_relu": "relu2", "gelu_erf": "gelu", "gelu_exact": "gelu",
    "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "gelu_sigmoid": "quick_gelu",
    "gelu_clipped": "gelu_10", "swish": "silu", "swish1": "silu", "logistic": "sigmoid", "hard_swish": "hardswish",
    "hardsilu": "hardswish", "sqrt_softplus": "sqrtsoftplus",
}  # fmt: skip
UNITS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid", "bilinear": "identity",
         "geglu_tanh": "gelu_tanh"}  # fmt: skip
OAI = ("swiglu_oai", "swigluoai", "swiglu_clamped", "clamped_swiglu", "gpt_oss_swiglu")
LIMITED_SILU = (
    "deepseek_v4", "deepseek_v4_swiglu", "silu_clamp", "silu_clamped", "clamped_silu", "swiglustep", "swiglu_step",
    "step_swiglu", "situ", "situ_glu", "situglu", "softcapped_swiglu", "swiglu_softcap",
)  # fmt: skip
EXPECTED = {
    **{n: (n, None) for n in TABLE}, **{n: (c, None) for n, c in ALIASES.items()},
    **{n: (f, True) for n, f in UNITS.items()},
    **dict.fromkeys(OAI, ("quick_gelu", True)), **dict.fromkeys(LIMITED_SILU, ("silu", True)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_resolve(name):
    spellings = (name, name.upper(), name.title(), name.replace("_", "-"), f" {name}\t")
    assert {resolve(s) for s in spellings} == {EXPECTED[name]}


def test_no_name_is_untested_or_means_two_things():
    assert set(known_names()) == set(EXPECTED)
    spellings = [n for row in TABLE.values() for n in (row.name, *row.aliases)] + list(GATED)
    assert len(spellings) == len(set(spellings)) == len(CANONICAL) + len(GATED)
    assert all(row.name == name for name, row in TABLE.items())


@pytest.mark.parametrize(
    ("typed", "meant"), [("gelo", "gelu"), ("Swiglo", "swiglu"), ("relu_6", "relu6"), ("gelu-tan", "gelu_tanh")]
)
def test_near_names_are_suggested(typed, meant):
    with pytest.raises(FFNError) as error:
        resolve(typed, "hidden_act")
    assert error.value.message == f"hidden_act: unknown activation '{typed}'"
    assert error.value.hint.startswith("did you mean ")
    assert f"'{meant}'" in error.value.hint


@pytest.mark.parametrize(
    "text",
    ['__import__("os")', "", " ", "-", "x" * 1_000_000, "gelu" * 250_000, "gelu\0", "\x1b[31mgelu\x1b[0m", "ge\nlu",
     "\ud800", "{0.__class__}", "%s%n", "../gelu", "lambda x: x", "__class__", "name", "gelu,silu", "\u202egelu"],
    ids=lambda text: ascii(text[:16]),
)  # fmt: skip
def test_hostile_names_are_refused_in_one_short_line(text):
    with pytest.raises(FFNError) as error:
        resolve(text)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


@settings(max_examples=300)
@given(st.one_of(st.text(), st.text("gelu-_ SWI10", max_size=8)))
def test_any_text_resolves_or_is_refused(text):
    with suppress(FFNError):
        canonical, gated = resolve(text)
        assert canonical in TABLE
        assert gated in (None, True)


# --- NaN, infinity, the sign of zero ----------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_stays_nan_in_torch(name, learned, dtype):
    x = torch.tensor([1.0, math.nan, -1.0] * 11, dtype=dtype)  # long enough for vectorised and single-element code
    y = execute.function(name, tensors(learned, dtype))(x)
    assert torch.equal(y.isnan(), x.isnan())


@every_case
def test_nan_stays_nan_on_floats(name, learned):
    assert math.isnan(TABLE[name].f(math.nan, with_learned(SCALAR, learned)))


INFINITE = torch.tensor([math.inf, -math.inf], dtype=torch.float64)


@every_case
def test_infinity(name, learned):
    # gelu(-inf) and its kin are -inf · 0, NaN in torch: there any answer will do, but never an exception.
    expected = oracles.oracle(name, learned)(INFINITE).detach()
    told = ~expected.isnan()
    for actual in (by_scalar(TABLE[name].f, learned, INFINITE), execute.function(name, tensors(learned))(INFINITE)):
        check(actual[told], expected[told], INFINITE[told])


@pytest.mark.parametrize("name", ["relu", "relu6", "leaky_relu", "prelu", "sigmoid", "tanh", "softplus", "elu", "selu"])
def test_slopes_at_infinity(name):
    learned = TABLE[name].learned
    expected = oracles.autograd_slope(oracles.oracle(name), INFINITE)
    check(by_scalar(TABLE[name].slope, learned, INFINITE), expected, INFINITE)
    check(execute.slope(name, tensors(learned))(INFINITE), expected, INFINITE)


@every_row
def test_slopes_at_infinity_and_nan_do_not_raise(name):
    m = with_learned(SCALAR, TABLE[name].learned)
    assert all(isinstance(TABLE[name].slope(x, m), float) for x in (math.inf, -math.inf, math.nan))


@every_row
def test_no_zero_is_negative_where_torchs_is_not(name):
    """A table would print it as -0."""
    expected = oracles.oracle(name)(GRID).detach()
    positive_zero = (expected == 0) & ~torch.signbit(expected)
    for actual in (
        by_scalar(TABLE[name].f, TABLE[name].learned, GRID),
        execute.function(name, tensors(TABLE[name].learned))(GRID),
    ):
        assert not (positive_zero & (actual == 0) & torch.signbit(actual)).any()


# --- execution --------------------------------------------------------------------------------------------------------


@every_row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (2, 3, 4)], ids=str)
def test_dtype_and_shape_are_kept(name, dtype, shape):
    x = torch.linspace(-4, 4, math.prod(shape), dtype=dtype).reshape(shape)
    before = x.clone()
    for make in (execute.function, execute.slope):
        y = make(name, tensors(TABLE[name].learned, dtype))(x)
        assert (y.dtype, y.shape) == (dtype, x.shape)
    assert torch.equal(x, before)


@every_row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_in_low_precision(name, dtype):
    """No overflow on the way to a result that the type can hold, and no more than a few roundings."""
    far = torch.tensor([-200.0, -100.0, -20.0, 20.0, 90.0, 100.0, 200.0])
    x = torch.cat([torch.linspace(-8, 8, 129), far]).to(dtype)
    y = execute.function(name, tensors(TABLE[name].learned, dtype))(x).double()
    check(y, oracles.oracle(name)(x.double()).detach(), x, 8 * torch.finfo(dtype).eps)


TAILS = (-30.0, -15.0, -8.71, -8.3, -6.78, 6.78, 15.0, 30.0, 38.4, 100.0)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "sigmoid", "silu", "quick_gelu"])
@pytest.mark.parametrize("at", TAILS)
def test_slopes_keep_their_digits_in_the_tails(name, at):
    """Against mpmath's derivative of the definition, with 400 digits."""
    with workdps(400):
        exact = float(diff(EXACT[name], mpf(at)))
    assert TABLE[name].accurate_slope(at, SCALAR) == pytest.approx(exact, rel=1e-11, abs=1e-300)
