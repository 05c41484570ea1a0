"""The referee refuses every wrong backward pass, names the first wrong gradient, and accuses no right one. Of two saved
traces, `compare` names the first wrong gradient and its place."""

import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ffncli
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels import BUILT_IN, built_in
from ffncli.kernels.choice import parse
from ffncli.models.model import block_model
from ffncli.run.saved.compare import compare
from ffncli.run.saved.saved import Saved, open_saved
from ffncli.run.user import hosted as hosting
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


# What one backward pass of one input cannot show; the referee tries more than one.
NOT_IN_A_TRACE = {
    "contiguous_dy_assumed": "a trace's dy is contiguous",
    "kept_by_the_address_of_x": "its first pass is right, and later ones repeat it",
    "written_over_saved_tensors": "only a second pass reads what the first has changed",
    "written_over_dy": "only a second pass reads what the first has changed",
    "weights_only_with_x": "a trace asks for the gradient of x too",
    "dx_only_with_weights": "a trace asks for the weights' gradients too",
    "noise_in_every_pass": "a repetition differs, but by less than the tolerance of float32",
    "overwrites_what_was_accumulated": "nothing is there before the first pass",
}
# A trace lists a weight before its bias, a certificate the bias first.
WEIGHT_FIRST = {"slope_of_the_tanh_form", "slope_without_the_bias"}
CAUSES = {
    "every_row_in_row_0": "rows of d x differ", "up_half_of_dx_lost": "all rows of d x differ",
    "dx_counted_twice": "2 times", "last_tile_of_tokens_dropped": "1 of the 33 rows of d x differ: 32",
    "transposed_dw": "all rows", "last_tile_of_units_dropped": "8 of the 24 rows of d gate.weight differ: 16, 17",
    "mean_over_tokens": "0.030303 times", "gate_detached": "zero everywhere", "bias_forgotten": "zero everywhere",
    "last_expert_not_trained": "24 of the 96 rows of d gate.weight differ: 72, 73",
}  # fmt: skip


def saved(path: Path, block: str, **options: Any) -> Saved:
    model = block_model(BLOCKS[block], "a block")
    ffncli.trace(model, tokens=33, backward=True, loss="mse", save=str(path), **options)
    return open_saved(path)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right")
    return {block: saved(folder / f"{block}.safetensors", block) for block in BLOCKS}


@pytest.fixture
def one_host(host, monkeypatch):
    """Load every kernel in the same process, because starting one takes seconds."""

    @contextmanager
    def reused(choice, *_):
        host.choice = choice
        yield host

    monkeypatch.setattr(hosting, "hosted", reused)


@pytest.mark.parametrize(("block", "name", "wrong"), WRONG, ids=[name for _, name, _ in WRONG])
def test_a_wrong_backward_pass_is_found_by_comparing_two_traces(one_host, right, tmp_path, block, name, wrong):
    found = compare(right[block], saved(tmp_path / "a.safetensors", block, kernel=f"{HERE / block}.py:{name}"))
    if name in NOT_IN_A_TRACE:
        assert found.first is None
        return
    first = "d " + (wrong.replace("bias", "weight") if name in WEIGHT_FIRST else wrong)
    assert found.first == first
    assert found.row(first).worst.startswith(f"{first}[")
    assert CAUSES.get(name, "d") in found.causes[0]


def test_the_gradients_of_a_right_backward_pass_agree(right, tmp_path):
    assert compare(right["gated"], saved(tmp_path / "a.safetensors", "gated", kernel="eager")).first is None


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
