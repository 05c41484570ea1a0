"""The fixtures of the pytest plugin; tests/test_ci.py tries them in another project's tests, from the wheel."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, silu

from ffncli import pytest_plugin
from ffncli.bench import suite
from ffncli.errors import FFNError
from tests.cli.test_main import HEAVY, loaded

pytest_plugins = ["ffncli.pytest_plugin"]

BLOCK = "8x24:swiglu"


def mlp(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def swapped(x, gate, up, down):
    return linear(silu(linear(x, up)) * linear(x, gate), down)


def detached(x, gate, up, down):
    return linear(silu(linear(x, gate)).detach() * linear(x, up), down)


def wrong_for_33(x, gate, up, down):
    return mlp(x, gate, up, down) * (2 if len(x) == 33 else 1)


class Holder:
    mlp = staticmethod(mlp)


wrapped = torch.no_grad()(mlp)
nameless = partial(mlp)


def refusal(judge, *arguments, **options) -> str:
    with pytest.raises(pytest.fail.Exception) as failed:
        judge(*arguments, **options)
    assert failed.value.pytrace is False
    return failed.value.msg


def test_the_module_that_pytest_imports_loads_nothing_else():
    modules = loaded("import pytest, ffncli.pytest_plugin")
    assert {name for name in modules if name.startswith("ffncli")} == {"ffncli", "ffncli.pytest_plugin"}
    assert not modules & {*HEAVY, "rich", "typer"}


@pytest.mark.runs
def test_a_right_kernel_passes(ffn_judge):
    verdict = ffn_judge(BLOCK, mlp, tokens=[1, 33], backward=False, seed=0)
    assert (verdict.certificate.kernel, verdict.certificate.passes) == ("test_pytest_plugin.py:mlp", "forward")
    assert "33 tokens" in {row.subject for row in verdict.rows if row.check == "shapes"}


@pytest.mark.parametrize(
    ("kernel", "options", "first"),
    [
        (swapped, {}, "shapes, 1 token: error"),
        (wrong_for_33, {"tokens": 33}, "shapes, 33 tokens: error 1 "),
        (detached, {"backward": True}, "gradients, 1 token: error 1 (limit"),
    ],
)
@pytest.mark.runs
def test_a_wrong_kernel_fails_with_the_lines_of_the_referee(ffn_judge, kernel, options, first):
    text = refusal(ffn_judge, BLOCK, kernel, seed=0, **{"backward": False} | options)
    name = f"test_pytest_plugin.py:{kernel.__name__}"
    assert text.startswith(f"refused: {name}: {first}")
    lines = text.splitlines()
    check = first.partition(",")[0]
    assert any(line.startswith(f"  FAIL  {check} ") for line in lines)
    assert ["PASS", "repeats", "the", "same", "input", "gives", "the", "same", "bits"] in [one.split() for one in lines]
    assert lines[-1].startswith(f"REFUSED {name}  {first}")


@pytest.mark.runs
def test_a_kernel_imports_what_its_test_can_import(ffn_judge, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kit_of_a_kernel.py").write_text(
        "from torch.nn.functional import linear, relu\n"
        "def mlp(x, up, down):\n    return linear(relu(linear(x, up)), down)\n"
    )
    (tmp_path / "kernels.py").write_text("from kit_of_a_kernel import mlp\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    ffn_judge("8x24:relu", tmp_path / "kernels.py:mlp", bias=False, backward=False)


def test_what_a_kernel_may_be():
    here = Path(__file__)
    for kernel, name in ((mlp, "mlp"), (Holder.mlp, "mlp"), (Holder, "Holder"), (wrapped, "wrapped")):
        file, _, attribute = pytest_plugin._named(kernel).rpartition(":")
        assert (Path(file).resolve(), attribute) == (here, name)
    assert pytest_plugin._named("mine.py:mlp") == "mine.py:mlp"
    assert pytest_plugin._named(Path("kernels", "mine.py")) == "kernels/mine.py"
    assert pytest_plugin._labelled("base/mine.py:mlp", "old") == "old=base/mine.py:mlp"
    assert pytest_plugin._labelled("packed", "old") == "packed"

    def local(x, up, down):
        return linear(linear(x, up), down)

    for kernel in (local, lambda x: x, nameless, len, 3, object()):
        with pytest.raises(FFNError, match=r"is not at the top of a Python file, .*; move it there"):
            pytest_plugin._named(kernel)


def test_a_wrong_request_fails_in_one_line(ffn_judge, ffn_faster):
    assert refusal(ffn_judge, BLOCK, lambda x: x).startswith("ffn_judge: 'test_a_wrong_request")
    assert (
        refusal(ffn_judge, BLOCK, mlp, tokns=3) == "ffn_judge: no argument 'tokns'; did you mean 'tokens' or 'top_k'?"
    )
    assert refusal(ffn_judge, BLOCK, "fast").startswith("ffn_judge: --kernel: unknown kernel 'fast'")
    assert refusal(ffn_faster, BLOCK, mlp, "eager", by=3) == (
        "ffn_faster: by must be a percentage from 0 and at most 99%, such as 3%, got 3; that would be 300%: write 3%"
    )


@pytest.fixture
def made_up(monkeypatch):
    """Let tests/bench/fake_worker.py measure: packed takes 0.95 of eager's time, numpy 1.10."""
    fake = (sys.executable, "-m", "tests.bench.fake_worker")
    monkeypatch.setattr(suite.run, "__defaults__", (suite.run.__defaults__[0], fake))


def test_a_faster_kernel_passes(ffn_faster, made_up):
    rows = ffn_faster("8x16:relu", "packed", "eager", by="3%", tokens=[4, 8], processes=2)
    assert [(row.kernel, row.tokens) for row in rows] == [("eager", 4), ("packed", 4), ("eager", 8), ("packed", 8)]


def test_a_kernel_that_is_not_faster_fails_with_its_row(ffn_faster, made_up):
    text = refusal(ffn_faster, "8x16:relu", "packed", "eager", by="10%", tokens=4, processes=2)
    first, _, heading, *lines = text.splitlines()
    assert first.startswith("packed is not 10 % faster than eager: ratio 0.950 [")
    assert heading.startswith("8x16:relu  4 tokens, fp32, forward")
    assert any(line.startswith("packed  ") and "5 % faster" in line for line in lines)
    assert refusal(ffn_faster, "8x16:relu", "numpy", "eager", by=0.0, tokens=4, processes=2).startswith("numpy is not")


@pytest.mark.runs
def test_a_wrong_kernel_is_not_faster(ffn_faster):
    text = refusal(ffn_faster, BLOCK, swapped, mlp, tokens=4, threads=1, processes=2, max_time=0.1)
    assert text.startswith("wrong results: new; its output is off by ")
    assert any(line.startswith("new ") and "WRONG RESULT" in line for line in text.splitlines())


def test_without_torch_the_fixtures_skip_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(pytest.skip.Exception, match=r"torch is not installed; pip install 'torch>=2\.10'"):
        pytest_plugin._require_torch()
