"""Operations per element: by hand from the formulas, and as the stream of ATen calls that torch makes of them."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ffncli.block.activations import TABLE
from ffncli.block.analysis.operations import COUNTING, Operations, counted, operations
from ffncli.block.formulas import with_learned

_PLUS = "1 add, 1 compare, 1 select, 2 sign, 1 exp, 1 log1p"  # softplus: where(x > 0, x, 0) + log1p(exp(-|x|))
HAND = {  # name: (f, slope), counted by reading
    "identity": ("none", "none"),
    "relu": ("1 compare, 1 select", "1 compare, 1 select"),
    "relu2": ("1 mul, 1 compare, 1 select", "1 mul, 1 compare, 1 select"),
    "relu6": ("2 compare, 2 select", "3 compare, 1 select"),
    "leaky_relu": ("1 mul, 1 compare, 1 select", "1 compare, 1 select"),
    "prelu": ("1 mul, 1 compare, 1 select", "1 compare, 1 select"),
    "gelu": ("3 mul, 1 add, 1 erf", "6 mul, 2 add, 1 erf, 1 exp"),
    "gelu_tanh": ("6 mul, 2 add, 1 tanh", "12 mul, 5 add, 1 tanh"),
    "quick_gelu": ("2 mul, 1 sigmoid", "3 mul, 2 add, 1 sigmoid"),
    "gelu_10": ("3 mul, 1 add, 1 compare, 1 select, 1 erf", "7 mul, 2 add, 1 compare, 1 select, 1 erf, 1 exp"),
    "silu": ("1 mul, 1 sigmoid", "2 mul, 2 add, 1 sigmoid"),
    "sigmoid": ("1 sigmoid", "1 mul, 1 add, 1 sigmoid"),
    "tanh": ("1 tanh", "1 mul, 1 add, 1 tanh"),
    "mish": (f"1 mul, {_PLUS}, 1 tanh", "3 mul, 3 add, 1 compare, 1 select, 2 sign, 1 exp, 1 log1p, 1 tanh, 1 sigmoid"),
    "hardswish": ("1 mul, 1 add, 1 div, 2 compare, 2 select", "1 mul, 1 add, 1 div, 2 compare, 2 select"),
    "softplus": (_PLUS, "1 sigmoid"),
    "sqrtsoftplus": (
        f"{_PLUS}, 1 sqrt",
        "1 mul, 1 add, 1 div, 2 compare, 2 select, 2 sign, 1 exp, 1 log1p, 1 sqrt, 1 sigmoid",
    ),
    "elu": ("1 compare, 2 select, 1 expm1", "1 compare, 2 select, 1 exp"),
    "selu": ("2 mul, 1 compare, 2 select, 1 expm1", "2 mul, 1 compare, 2 select, 1 exp"),
    "laplace": ("1 mul, 2 add, 1 div, 1 erf", "1 mul, 1 add, 2 div, 1 sign, 1 exp"),
    "xielu": ("4 mul, 2 add, 2 compare, 2 select, 1 expm1", "3 mul, 2 add, 3 compare, 4 select, 1 exp"),
}


@pytest.mark.parametrize("name", TABLE)
def test_by_hand(name):
    assert (operations(name).text, operations(name, slope=True).text) == HAND[name]


# --- torch ------------------------------------------------------------------------------------------------------------

KINDS = {
    "mul": "multiply", "add": "add", "sub": "add", "rsub": "add", "div": "divide", "neg": "sign", "abs": "sign",
    "where": "select", "bitwise_and": "compare", **dict.fromkeys(("gt", "ge", "lt", "le", "eq"), "compare"),
}  # fmt: skip
FREE = ("scalar_tensor", "_to_copy", "lift_fresh", "detach")
FUNCTIONS = ("exp", "expm1", "log1p", "erf", "tanh", "sqrt", "sigmoid")


class Stream(TorchDispatchMode):
    """Counts ATen calls on the elements of x: each distinct one once, those on constants not at all."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.words: dict[int, object] = {id(x): "x"}
        self.kept: list[Tensor] = [x]
        self.calls: set[object] = set()

    def word(self, value: object) -> object:
        if isinstance(value, Tensor):
            return self.words[id(value)] if value.numel() > 1 else ("constant", float(value))
        return ("constant", float(value))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in FREE:
            return out
        words = tuple(map(self.word, args))
        self.words[id(out)] = self.meaning(name, words, out)
        self.kept.append(out)  # or its id would be given again
        return out

    def meaning(self, name, words, out):
        constant = [word[1] if isinstance(word, tuple) and word[0] == "constant" else None for word in words]
        if name == "eq" and words[0] == words[1]:
            return ("constant", 1.0)  # of numbers
        if name == "where" and constant[0] is not None:
            return words[1] if constant[0] else words[2]
        if None not in constant:
            return ("constant", float(out.flatten()[0]))
        unit = {"mul": 1.0, "add": 0.0}.get(name)
        for one, other in ((0, 1), (1, 0)):
            if unit is not None and constant[one] == unit:
                return words[other]
        self.calls.add((name, *words))
        return (name, *words)

    def counts(self) -> Operations:
        names = [call[0] for call in self.calls]
        assert set(names) <= {*KINDS, *FUNCTIONS}
        kinds = [KINDS.get(name, name) for name in names]
        return Operations(
            **{kind: kinds.count(kind) for kind in set(KINDS.values())},
            functions={name: names.count(name) for name in set(names) & set(FUNCTIONS)},
        )


@pytest.mark.parametrize("slope", [False, True], ids=["f", "slope"])
@pytest.mark.parametrize("name", TABLE)
def test_by_torch(name, slope):
    row = TABLE[name]
    learned = {key: torch.tensor([value], dtype=torch.float64) for key, value in row.learned.items()}
    x = torch.linspace(-4, 4, 7, dtype=torch.float64)
    with Stream(x) as stream:
        (row.slope if slope else row.f)(x, with_learned(torch, learned))
    assert operations(name, slope) == stream.counts()


# --- rules ------------------------------------------------------------------------------------------------------------


def test_totals_and_records():
    found = operations("gelu")
    assert (found.total, found.transcendental) == (5, 1)
    assert found.record() == {
        "multiply": 3, "add": 1, "divide": 0, "compare": 0, "select": 0, "sign": 0, "functions": {"erf": 1},
        "total": 5, "text": "3 mul, 1 add, 1 erf",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: 1.0 * x * 1.0 / 1.0 + 0.0 - 0.0, "none"),
        (lambda x: 0.0 + x, "none"),
        (lambda x: 0.0 - x, "1 add"),
        (lambda x: 1.0 / x, "1 div"),
        (lambda x: (x + 1.0) * (x + 1.0), "1 mul, 1 add"),
        (lambda x: (x + 1.0) * (x + 2.0), "1 mul, 2 add"),
        (lambda x: COUNTING.where(x == x, 0.0, x), "none"),
        (lambda x: COUNTING.where(x == 0.0, 1.0, x), "1 compare, 1 select"),
        (lambda x: COUNTING.exp(2.0) * x, "1 mul"),
        (lambda x: COUNTING.abs(-3.0) * COUNTING.abs(x), "1 mul, 1 sign"),
        (lambda x: COUNTING.where(x > 0.0, COUNTING.exp(x), COUNTING.tanh(x)), "1 compare, 1 select, 1 exp, 1 tanh"),
    ],
)
def test_what_is_an_operation(function, text):
    assert counted(function).text == text


def test_two_inputs_are_two():
    assert counted(lambda x, y: (x + 1.0) * (y + 1.0), inputs=2).text == "1 mul, 2 add"


def test_a_formula_that_branches_in_python_cannot_be_counted():
    with pytest.raises(TypeError, match="where"):
        counted(lambda x: 0.0 if x > 0 else x)


def test_what_is_learned_costs_nothing_per_element():
    """xielu's softplus of α is one number per tensor."""
    alone = partial(TABLE["softplus"].f, m=COUNTING)
    assert counted(alone).functions == {"exp": 1, "log1p": 1}
    assert set(operations("xielu").functions) == {"expm1"}
