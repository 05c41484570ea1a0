"""The referee refuses every wrong backward pass, names the first wrong gradient, and accuses no right one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels import BUILT_IN, built_in
from ffncli.kernels.choice import parse
from ffncli.run.user.hosted import hosted
from ffncli.run.verify import referee
from ffncli.run.verify.checks import gradients
from ffncli.run.verify.checks.trial import KernelTrial
from tests.run.verify.test_referee import block_of, few_drawn_calls  # noqa: F401  # a fixture

pytestmark = pytest.mark.cheats

HERE = Path(__file__).parent
BLOCKS = {"gated": FFNSpec(12, 24, "swiglu"), "plain": FFNSpec(12, 24, "gelu"), "mixture": FFNSpec(
    12, 24, "swiglu", moe=MoE(4, 2)
)}  # fmt: skip
KERNEL = re.compile(r"^# ([^\n]*)\n(?:@kernel\n)?def (\w+)", re.M)
WRONG = [(block, name, wrong) for block in BLOCKS for wrong, name in KERNEL.findall((HERE / f"{block}.py").read_text())]
HONEST = re.findall(r"\w+", (HERE / "honest.py").read_text().split("HONEST = (")[1].split(")")[0])


@pytest.fixture(scope="module")
def host():
    with hosted(parse(f"{HERE / 'gated.py'}:kernel"), threads=1) as running:
        yield running


def rows_of(host, kernel: str, spec: FFNSpec, dtype: torch.dtype = torch.float32, passes=None):
    host.choice = parse(kernel)
    return tuple(
        referee._rows(KernelTrial(host, block_of(spec, dtype), torch.Generator().manual_seed(1), False, passes))
    )


def test_the_corpus_is_read():
    assert len(WRONG) == 45
    assert len(HONEST) == 15


@pytest.mark.parametrize(("block", "name", "wrong"), WRONG, ids=[name for _, name, _ in WRONG])
def test_a_wrong_backward_pass_is_refused(host, block, name, wrong):
    """The output is right, so that without its gradients the kernel would be certified."""
    rows = rows_of(host, f"{HERE / block}.py:{name}", BLOCKS[block])
    failed = [row for row in rows if row.passed is False]
    assert {row.check for row in failed} <= {"gradients", "gradient-class", "untouched", "widths"}
    first = failed[0]
    if "." in wrong or wrong == "x":  # the first wrong gradient, and its worst element
        assert first.check == "gradients"
        assert re.match(rf"gradient of {re.escape(wrong)}(;|$)", first.note), first.note
        assert "worst at [" in first.note
    else:
        assert (first.check, first.subject) == ("gradients", wrong)
    forward = rows_of(host, f"{HERE / block}.py:{name}", BLOCKS[block], passes="forward")
    assert [row for row in forward if row.passed is False] == []


def test_sums_of_weights_gradients_in_16_bits(host):
    """In bf16 each value is near enough, and all together are not."""
    rows = rows_of(host, f"{HERE / 'gated.py'}:sums_in_bf16", BLOCKS["gated"], torch.bfloat16)
    failed = [(row.check, row.subject) for row in rows if row.passed is False]
    assert failed == [("gradient-class", "down.weight: lower")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", HONEST)
def test_a_right_backward_pass_is_not_accused(host, name, dtype):
    rows = rows_of(host, f"{HERE / 'honest.py'}:{name}", FFNSpec(48, 136, "swiglu"), dtype, "forward+backward")
    assert [row for row in rows if row.passed is False] == []
    assert len([row for row in rows if row.check == "gradient-class"]) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("block", ["gated", "plain", "mixture"])
def test_no_built_in_kernel_is_accused(host, block, dtype):
    judged = set()
    for name, kernel in ((name, built_in(name)) for name in BUILT_IN if name not in ("max_autotune", "frozen", "gemv")):
        host.choice = parse(name)
        spec = replace(BLOCKS[block], d_model=48, d_ff=136)
        trial = KernelTrial(host, block_of(spec, dtype), torch.Generator().manual_seed(1))
        compiles = name == "compiled" and (block, dtype) != ("gated", torch.float32)  # takes 15 s
        if not kernel.trains or compiles or trial.load() is not None:
            continue
        rows = [*gradients.values(trial), *gradients.error_class(trial)]
        assert [row for row in rows if row.passed is False] == [], name
        if any(row.check == "gradient-class" for row in rows):
            judged.add(name)
    always = {"eager", "grouped"} if block == "mixture" else {"eager", "module", "conv1x1"}
    assert always <= judged, judged
