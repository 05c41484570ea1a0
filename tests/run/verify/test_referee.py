"""The referee certifies kernels that are right, and refuses each that is not by the check that looks at it."""

import hashlib
import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import ffncli
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.kernels.choice import parse
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.model import Layer, block_model
from ffncli.run.engine.weights import random_weights
from ffncli.run.user.hosted import Gradients, hosted
from ffncli.run.verify import referee
from ffncli.run.verify.certificate import first_reason
from ffncli.run.verify.checks import drawn
from ffncli.run.verify.checks import precision as of_kernels
from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.trial import KernelTrial
from ffncli.run.verify.question import REFEREE_STATEMENTS

pytestmark = pytest.mark.cheats

FILE = Path(__file__).with_name("kernels_to_judge.py")
EXPECTED = {
    name: check
    for check, name in re.findall(r"^# (\w+)[^\n]*\n(?:def|class)? ?(\w+)", FILE.read_text(), re.M)
    if name != "_build"
} | {"packing": "right"}
GATED = FFNSpec(12, 24, "swiglu")
MIXTURE = FFNSpec(12, 24, "swiglu", moe=MoE(4, 2))


@pytest.fixture(scope="module", autouse=True)
def few_drawn_calls():
    """Leaves out most calls at drawn numbers, and the other process: tests/wrong_certificates is about these checks."""

    def skipped(trial):
        yield trial.judge("elsewhere").skips("another process", "left out")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn, "_SECONDS", 0.0)
        patch.setitem(referee.REFEREE_CHECKS, "elsewhere", skipped)
        yield


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """One process for all kernels: torch takes seconds to start."""
    log = tmp_path_factory.mktemp("host") / "pids"
    os.environ["FFN_TEST_LOG"] = str(log)
    try:
        with hosted(parse(f"{FILE}:mlp"), threads=1) as running:
            yield running
    finally:
        del os.environ["FFN_TEST_LOG"]
    assert str(os.getpid()) not in log.read_text().split()  # the judging process has not run the file


def block_of(spec: FFNSpec, dtype: torch.dtype = torch.float32, tolerance: float | None = None) -> CheckedBlock:
    ffn = kernel_steps(steps(spec))
    weights = random_weights(ffn, torch.Generator().manual_seed(0), dtype)
    return CheckedBlock(
        block_model(spec, "test"), Layer("block", 0, spec), ffn, weights, {}, dtype, tolerance=tolerance
    )


def judged(host, name: str, block: CheckedBlock, batch_invariant: bool = False):
    host.choice = parse(f"{FILE}:{name}")
    trial = KernelTrial(host, block, torch.Generator().manual_seed(1), batch_invariant)
    return tuple(referee._rows(trial))


def failed(rows) -> list[str]:
    return list(dict.fromkeys(row.check for row in rows if row.passed is False))


@pytest.mark.parametrize(("name", "check"), EXPECTED.items())
def test_every_kernel_gets_its_verdict(host, name, check):
    rows = judged(host, name, block_of(GATED), batch_invariant=check == "batch")
    backward = all(row.passed is not None for row in rows if row.check == "gradients")
    checks = [name for name in REFEREE_STATEMENTS if backward or not name.startswith("gradient-")]
    assert list(dict.fromkeys(row.check for row in rows)) == checks
    if check == "right":
        assert [row for row in rows if row.passed is False] == []
        assert [row.subject for row in rows if row.check == "precision"] == ["fp32-true"]
    else:
        assert failed(rows)[0] == check
        assert first_reason(rows).startswith(f"{check}, ")


def test_the_corpus_is_read():
    assert len(EXPECTED) == 28
    others = {"precision", "experts", "replay", "gradients", "gradient-class", "gradient-batch"}
    others |= {"drawn", "calls", "elsewhere"}
    assert set(EXPECTED.values()) == {*REFEREE_STATEMENTS, "right"} - others


def test_one_more_token_count_is_tried_on_demand(host):
    host.choice = parse(f"{FILE}:wrong_for_40")
    trial = KernelTrial(host, block_of(GATED), torch.Generator().manual_seed(1), tokens=(40,))
    assert trial.token_counts == (1, 2, 3, 5, 17, 40, 64, 127)
    rows = [row for row in referee._rows(trial) if row.passed is False]
    assert {row.subject for row in rows} == {"40 tokens"}
    assert rows[0].relative_error == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "more"),
    [({"tokens": 200}, [200]), ({"batch": 4, "seq_len": 50}, [200]), ({"tokens": [200, 1, 33]}, [33, 200])],
)
def test_the_referee_tries_the_tokens_that_are_asked_for(options, more):
    verdict = ffncli.verify("8x24:swiglu", kernel="eager", referee=True, **options)
    assert verdict.certificate.verdict == "certified"
    subjects = [row.subject for row in verdict.rows if row.check == "shapes"]
    assert subjects == ["1 token", *(f"{count} tokens" for count in sorted([2, 3, 5, 17, 64, 127, *more]))]


def test_hidden_nan_are_counted(host):
    """A NaN in one value of x is in every product, so in all 12 values of the token's output."""
    rows = [row for row in judged(host, "mlp", block_of(GATED)) if row.subject == "nan in the token itself"]
    assert [(row.passed, row.note) for row in rows] == [(True, "12 NaN in its output")]
    rows = [row for row in judged(host, "hides_nan_in_its_output", block_of(GATED)) if row.passed is False]
    assert [(row.subject, row.note) for row in rows] == [
        ("nan in the token itself", "12 of 12 values that must be NaN are not")
    ]


def test_batch_invariance_is_a_figure_unless_it_is_demanded(host):
    rows = [row for row in judged(host, "by_batch", block_of(GATED)) if row.check == "batch"]
    assert [(row.subject, row.passed) for row in rows if row.max_error] == [("1 token of 127", None)]
    same = [row.passed for row in judged(host, "row_by_row", block_of(GATED)) if row.check == "batch"]
    assert set(same) == {True}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(host, dtype):
    rows = judged(host, "mlp", block_of(GATED, dtype))
    assert [row for row in rows if row.passed is False] == []
    assert [row.subject for row in rows if row.check == "precision"] == [f"{of_kernels.dtype_name(dtype)}-true"]


def test_experts_in_another_order(host):
    rows = judged(host, "mixture", block_of(MIXTURE))
    assert [row for row in rows if row.passed is False] == []
    assert next(row.passed for row in rows if row.check == "experts")
    assert failed(judged(host, "first_expert_kept", block_of(replace(MIXTURE, d_ff=40)))) == ["weights", "experts"]
    dense = judged(host, "mlp", block_of(GATED))[-1]
    assert (dense.check, dense.passed, dense.note) == ("experts", None, "the block has no experts")


# --- precision --------------------------------------------------------------------------------------------------------


def test_rounding_is_that_of_the_formats():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for bits, dtype in ((24, torch.float32), (8, torch.bfloat16), (11, torch.float16)):
        large = x[x.abs() > 1e-3]  # smaller ones are subnormal in fp16
        assert torch.equal(of_kernels.rounded(large, bits), large.to(dtype).double())


def products(x, w, dtype: torch.dtype) -> torch.Tensor:
    """x · Wᵀ with factors of a dtype and sums in float64."""
    return functional.linear(x.to(dtype).double(), w.to(dtype).double())


@pytest.mark.parametrize(("bits", "dtype"), [(11, torch.float16), (8, torch.bfloat16)])
def test_the_emulated_error_is_that_of_products_in_that_format(bits, dtype):
    """Written out for the gated block, with factors rounded by torch."""
    block = block_of(FFNSpec(64, 256, "swiglu"))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    trial = KernelTrial(None, block, torch.Generator())
    w = block.ffn_weights
    hidden = functional.silu(products(x, w["gate.weight"], dtype)) * products(x, w["up.weight"], dtype)
    out = products(hidden, w["down.weight"], dtype)
    expected = float((out - trial.reference(x)).norm() / trial.reference(x).norm())
    assert of_kernels.emulated(trial, x, bits) == pytest.approx(expected, rel=1e-6)


CLASSES = {
    "fp32-true": lambda t: t,
    "tf32-like": lambda t: t.half().float(),
    "bf16-like": lambda t: t.bfloat16().float(),
    "lower": lambda t: t.to(torch.float8_e4m3fn).float(),
}


@pytest.mark.parametrize("spec", [FFNSpec(64, 256, "swiglu"), FFNSpec(96, 33, "relu2"), FFNSpec(200, 512, "gelu"),
                                  FFNSpec(32, 64, "swiglu", moe=MoE(4, 2))], ids=str)  # fmt: skip
def test_classes_of_known_arithmetic(spec):
    """Products of torch's own float32, and with factors rounded to 11, 8 and 4 bits."""
    block = block_of(spec)
    trial = KernelTrial(None, block, torch.Generator().manual_seed(0))
    x = trial.draw(64)
    bounds = of_kernels.error_bounds(trial, x)
    real = functional.linear
    for name, cast in CLASSES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "linear", lambda a, w, b=None, cast=cast: real(cast(a), cast(w), b))
            out, went = referee_run(block, x)
        reference, there = of_kernels.in_float64(block.ffn, block.ffn_weights, {block.entry: x})
        same = of_kernels.same_experts(went, there, len(x))[0]
        error = of_kernels.rms_error(out[same], reference[same])
        assert next((of for of, bound in bounds.items() if error <= bound), of_kernels.LOWER) == name, (error, bounds)


def referee_run(block: CheckedBlock, x: torch.Tensor):
    return of_kernels.output_and_experts(block.ffn, block.ffn_weights, {block.entry: x})


def test_weights_of_8_bits_are_not_bf16():
    block = block_of(FFNSpec(64, 256, "swiglu"), torch.bfloat16)
    trial = KernelTrial(None, block, torch.Generator().manual_seed(0))
    x = trial.draw(64)
    (bound,) = of_kernels.error_bounds(trial, x).values()

    def eight(w):
        step = w.double().abs().amax(-1, keepdim=True) / 127
        return ((w.double() / step).round() * step).bfloat16()

    for change, inside in ((lambda w: w, True), (eight, False)):
        weights = {name: change(w) for name, w in block.ffn_weights.items()}
        out, _ = of_kernels.output_and_experts(block.ffn, weights, {block.entry: x})
        assert (of_kernels.rms_error(out, trial.reference(x)) <= bound) is inside


def test_a_lower_precision_passes_where_the_user_allows_its_error(host):
    rows = judged(host, "in_bf16", block_of(GATED, tolerance=0.1))
    assert failed(rows) == []
    assert [row.subject for row in rows if row.check == "precision"] == ["bf16-like"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_certificate(stdout_of, tmp_path):
    """From a real process; the judging one has not run the file."""
    path = tmp_path / "certificate.json"
    stdout_of("verify", "12x24:swiglu", "-k", f"{FILE}:mlp", "--referee", "--threads", "1", "-o", str(path), notes=True)
    certificate = json.loads(path.read_text())["certificate"]
    assert (certificate["verdict"], certificate["reason"]) == ("certified", "")
    assert (certificate["kernel"], certificate["attribute"]) == ("kernels_to_judge.py:mlp", "mlp")
    assert certificate["sha256"] == hashlib.sha256(FILE.read_bytes()).hexdigest()
    assert (certificate["error_class"], certificate["threads"]) == ("fp32-true", 1)
    assert certificate["environment"]["torch"] == torch.__version__
    assert not [name for name in sys.modules if "kernels_to_judge" in name]


@pytest.mark.parametrize(
    ("factor", "computes", "code", "last"),
    [
        (1.05, "fp8-rowwise", 0, "CERTIFIED eager  fp8-rowwise, batch-invariant, gradients fp8-rowwise"),
        (
            1.05,
            "bf16",
            1,
            "REFUSED eager  shapes, 1 token: error 0.05 (limit 0.031); every value is 1.05 times the right one; ",
        ),
        (1.2, "fp8-rowwise", 1, "REFUSED eager  precision, fp8-rowwise: error 0.2 (limit 0.12)"),
        (1.0, "fp5", 2, ""),
    ],
)
def test_declared_arithmetic_has_its_bounds(call, monkeypatch, factor, computes, code, last):
    host = FakeHost(factor)
    host.computes = computes
    monkeypatch.setattr(referee, "hosted", lambda *args: host)
    exit_code, out, err = call("verify", "12x24:swiglu", "-k", "eager", "--referee")
    assert exit_code == code, err
    assert last == "" or out.splitlines()[-1].startswith(last)
    assert code < 2 or "computes: 'fp5' is not a known format" in err


def test_the_call_answers_as_the_command_does(call, monkeypatch):
    monkeypatch.setattr(referee, "hosted", lambda *args: FakeHost())
    answer = json.loads(call("verify", "12x24:swiglu", "-k", "eager", "--referee", "--seed", "3", "--json")[1])
    verdict = ffncli.verify("12x24:swiglu", kernel="eager", referee=True, seed=3)
    certificate = asdict(verdict.certificate) | {"started_utc": answer["certificate"]["started_utc"]}
    assert json.loads(json.dumps(certificate)) == answer["certificate"]
    assert json.loads(json.dumps([asdict(row) for row in verdict.rows])) == answer["rows"]
    seeds = {ffncli.verify("4x8:swiglu", kernel="eager", referee=True).certificate.seed for _ in range(2)}
    assert len(seeds) == 2  # a kernel cannot know its inputs


def test_the_page(call, monkeypatch):
    """A line per check, the verdict last; a kernel that is refused has exit code 1 and its reason."""
    monkeypatch.setattr(referee, "hosted", lambda *args: FakeHost())
    code, out, _ = call("verify", "12x24:swiglu", "-k", "eager", "--referee")
    assert (code, out.splitlines()[-1]) == (0, "CERTIFIED eager  fp32-true, batch-invariant, gradients fp32-true")
    lines = [line.split() for line in out.splitlines() if line.startswith("  ")][1:]
    assert [name for _, name, *_ in lines] == list(REFEREE_STATEMENTS)
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setattr(referee, "hosted", lambda *args: FakeHost(1.0003))
    code, out, _ = call("verify", "12x24:swiglu", "-k", "eager", "--referee")
    assert out.splitlines()[-1].endswith("; tf32-like")
    assert "\n  FAIL  precision       tf32-like: rms error 0.0003 (limit " in out
    monkeypatch.setattr(referee, "hosted", lambda *args: FakeHost(2.0))
    code, out, err = call("verify", "12x24:swiglu", "-k", "eager", "--referee")
    assert code == 1
    assert out.splitlines()[-1].startswith("REFUSED eager  shapes, 1 token: error 1 (limit ")
    assert err.startswith("error: refused: eager: shapes, 1 token: error 1 (limit ")
    assert len(err.splitlines()) == 1


class FakeHost:
    """A host in this process whose kernel is the reference, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.changed, self.choice, self.name = factor, set(), parse("eager"), "eager"
        self.device, self.computes, self.trains, self.reads_memory, self.isolated = "none", "", True, None, ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def load(self, spec, ffn, weights, dtype, tokens, backward):
        self.block = ffn, weights

    def take_weights(self, weights):
        self.block = self.block[0], weights

    def call(self, x, place=0, grad=False):
        from ffncli.run.engine.reference import in_float64

        return (self.factor * torch.cat([in_float64(*self.block, {"x": row[None]})[0] for row in x])).to(x.dtype)

    def gradients(self, x, g, trained, layout="rows", passes=1, then=None, place=0):
        from ffncli.run.engine.reference import gradients_in_float64

        alone = [gradients_in_float64(*self.block, {"x": row[None]}, of[None])[1] for row, of in zip(x, g, strict=True)]
        more = gradients_in_float64(*self.block, {"x": then}, g)[1] if then is not None else {}
        given = {name: sum(one[name] for one in alone) + more.get(name, 0) for name in trained if name != "x"}
        given |= {"x": torch.cat([one["x"] for one in alone])}
        scaled = {name: (self.factor * given[name]).to(x.dtype) for name in trained}
        return Gradients(self.call(x if then is None else then), scaled)

    def threads(self):
        return 1

    def inspect(self):
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"referee": True}, "referee judges one kernel, not 0"),
        ({"referee": True, "kernel": "eager,packed"}, "referee judges one kernel, not 2"),
        ({"referee": True, "kernel": "eager", "check": "module"}, "referee contradicts check"),
        ({"referee": True, "kernel": "eager", "input": "zeros"}, "referee contradicts input"),
        ({"referee": True, "kernel": "slowed:1.05:eager"}, "can only be timed"),
        ({"referee": True, "kernel": "nowhere.py:mlp"}, "cannot read nowhere.py"),
        ({"batch_invariant": True}, "batch_invariant needs referee"),
        ({"passes": "forward"}, "passes needs referee"),
        ({"referee": True, "kernel": "eager", "passes": "backward"}, "unknown value 'backward'"),
        ({"call_time": 3.0}, "call_time needs referee"),
        ({"referee": True, "kernel": "eager", "call_time": 0}, "call_time must be a time up to a day"),
    ],
)
def test_what_the_referee_refuses(options, words):
    with pytest.raises(FFNError, match=re.escape(words)):
        ffncli.verify("8x24:swiglu", **options)


def test_an_answer_that_is_kept_by_its_content_shows_in_the_work_of_a_call(host):
    """Its numbers are right in every call. In a block whose calls are short nobody can tell."""
    wide = FFNSpec(512, 2048, "swiglu")  # some 10 ms of a core in each call, where 2 ms can be judged
    for name, passed in (("replays_by_content", False), ("mlp", True), ("row_by_row", True)):
        rows = {row.check: row for row in judged(host, name, block_of(wide))}
        assert (name, rows["replay"].passed) == (name, passed)
        assert "of the work of a new input" in rows["replay"].note
    short = next(row for row in judged(host, "replays_by_content", block_of(GATED)) if row.check == "replay")
    assert (short.passed, short.note.endswith("too short to tell whether answers are cached")) == (None, True)
