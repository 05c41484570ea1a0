"""`import ffncli`: the names that the package promises, each loaded at its first use."""

import doctest
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ffncli
from ffncli.bench import suite
from ffncli.bench.public.admission import Admission
from ffncli.bench.results.csv_file import ResultRows, read_rows
from ffncli.bench.results.merge import Merged
from ffncli.errors import FFNError
from ffncli.run.trace import call
from ffncli.run.trace.loaded import load
from tests.oracles.prompted import PROMPT, made

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "ffn-1" / "xeon-avx512-2cpu.csv"


def test_every_name_is_there_and_is_what_its_module_has():
    assert set(dir(ffncli)) == {*ffncli.__all__, "__version__"}
    assert all(callable(getattr(ffncli, name)) for name in ffncli.__all__)
    assert (ffncli.load, ffncli.trace, ffncli.FFNError) == (load, call.trace, FFNError)
    assert "load" in vars(ffncli)  # looked up once
    assert not hasattr(ffncli, "no_such_name")
    with pytest.raises(ImportError):
        from ffncli import no_such_name  # noqa: F401


def test_a_trace_takes_the_models_own_unless_told():
    found = ffncli.trace(ffncli.load("4x8:relu"))
    assert (found["x"].shape, found.step("x").dtype, found.block.device) == ((4, 4), "float32", "cpu")
    assert (found.block.weights, found.block.mode) == ("random weights, seed 0", "eval")


@pytest.mark.parametrize("name", [name for name in ffncli.__all__ if ">>>" in (getattr(ffncli, name).__doc__ or "")])
def test_examples_of_docstrings_run(name: str):
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(ffncli, name), name, globs={})
    assert doctest.DocTestRunner().run(test).failed == 0


def test_a_call_is_named_without_torch():
    code = "import sys; from ffncli import read_results, benchmark, trace, survey, verify, approximate, export\n"
    code += "print(sorted({'torch', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_benchmark_as_a_call_gives_the_rows_of_the_csv(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    fake = (sys.executable, "-m", "tests.bench.fake_worker")
    monkeypatch.setattr(suite.run, "__defaults__", (suite.run.__defaults__[0], fake))
    path = tmp_path / "a.csv"
    rows = ffncli.benchmark("8x16:relu", tokens=(4,), kernel="packed", processes=2, save=path)
    assert [(row.kernel, row.baseline, row.status) for row in rows] == [
        ("eager", "eager", "ok"),
        ("packed", "eager", "ok"),
    ]
    frame = ffncli.read_results(path)
    assert list(frame["ratio"]) == [row.ratio for row in rows]
    assert ffncli.benchmark("8x16:relu", tokens=(4,), kernel="packed", processes=2)[1].ratio


def test_a_count_takes_what_a_trace_takes():
    assert ffncli.count("gpt2") == ffncli.count(ffncli.load("gpt2"))
    assert ffncli.count("llama-2-7b", "fp32").weight_bytes == 4 * 3 * 4096 * 11008 * 32
    assert ffncli.count("64x256:gelu", tokens=3).matmul_flops_total == 3 * 4 * 64 * 256
    assert ffncli.count(d_model=64, d_ff="4x", gated=True).ffn_params_total == 3 * 64 * 256
    assert ffncli.count("gpt2", d_ff=100).d_ff == 100
    for wrong in (
        {"source": 3},
        {"source": "no-such-model"},
        {"tokens": 0},
        {"dtype": 5},
        {"layers": 3},
        {"dtype": "f"},
    ):
        with pytest.raises(FFNError):
            ffncli.count(**wrong)


def test_what_a_call_refuses_is_one_kind_of_error():
    for wrong in ({"source": "x"}, {"source": 3}, {"layer": "a.b.c"}, {"input": object()}, {"tokens": "x"}):
        with pytest.raises(FFNError):
            ffncli.trace(**{"source": "4x8:relu", **wrong})


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ({"source": 3}, "source must be a string such as"),
        ({"tokens": "many"}, "tokens must be one or more whole numbers from 1"),
        ({"kernel": 3}, "kernel must be names such as"),
        ({"precision": 0.9}, "precision must be a percentage above 0 and at most 50%"),
        ({"precision": 3}, "write 3%"),
        ({"processes": 0}, "processes must be a whole number from 1"),
        ({"method": "quick"}, "method must be a Method"),
        ({"kernels": ["eager"]}, "no argument 'kernels'"),
        ({"d_modle": 8}, "no argument 'd_modle'"),
    ],
)
def test_a_benchmark_names_what_it_accepts(arguments: dict, accepted: str):
    with pytest.raises(FFNError) as caught:
        ffncli.benchmark(**arguments)
    assert accepted in str(caught.value)


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_what_a_call_returns_is_a_table_in_a_notebook(tmp_path):
    """Every public call, or why it returns no record."""
    llama, mixtral = str(made("llama").path), str(made("mixtral").path)
    texts = ["Hello cat sat", "the cat"]
    session = ffncli.trace("4x8:relu", save=tmp_path / "t.npz")
    records = {
        "activation": ffncli.activation("gelu"), "compare": ffncli.compare(RESULTS, RESULTS),
        "corpus": ffncli.corpus(llama, prompts=texts), "cost": ffncli.cost(ffncli.steps(ffncli.FFNSpec(4, 8, "relu"))),
        "count": ffncli.count("gpt2"), "experts": ffncli.experts(mixtral, prompts=texts, ablate_texts=0),
        "explain": ffncli.explain("gelu"), "export": ffncli.export("4x8:relu", form="torch"),
        "plan": ffncli.plan("gpt2", device="h100"), "precision": ffncli.precision("4x8:relu", dtype="fp8"),
        "quantize": ffncli.quantize(torch.ones(2, 32), "q8_0"), "read_results": ffncli.read_results(RESULTS),
        "report": ffncli.report(tmp_path / "t.npz", tmp_path / "p.html"), "survey": ffncli.survey(llama, prompt="cat"),
        "trace": session, "unit": ffncli.unit(llama, prompts=texts, layer=1, neuron=3),
        "verify": ffncli.verify("4x8:relu", check=["module"]),
    }  # fmt: skip
    for name, record in records.items():
        assert "<table" in record._repr_html_(), name
    classes = {"admit": Admission, "benchmark": ResultRows, "merge": Merged}  # they take seconds
    assert all(hasattr(one, "_repr_html_") for one in classes.values())
    others = {"FFNError", "FFNSpec", "MoE", "approximate", "kernel", "kernel_names", "load", "replace", "steps"}
    assert {*records, *classes, *others} == {*ffncli.__all__}
    assert list(records["plan"].frame()["tp"]) == [row.tp for row in records["plan"].rows]
    assert list(records["survey"].frame()["layer"]) == [row.layer for row in records["survey"].rows]
    assert list(records["verify"].frame()["check"]) == [row.check for row in records["verify"].rows]


def test_figures_show_what_the_pages_show(monkeypatch):
    llama = str(made("llama").path)
    session = ffncli.trace(llama, prompt=PROMPT, layer=1)
    axes, _ = session.plot("act").axes
    (image,) = axes.images
    assert torch.allclose(torch.tensor(image.get_array().tolist()), session["act"], atol=1e-6)
    names = [f"{at} {word}" for at, word in enumerate(PROMPT.split())]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    limit = float(session["act"].abs().flatten().sort().values[math.ceil(0.99 * session["act"].numel()) - 1])
    assert image.get_clim() == pytest.approx((-limit, limit))
    corpus = ffncli.corpus(llama, prompts=[PROMPT, "cat"])
    drawn = {line.get_label(): line.get_ydata() for axes in corpus.plot().axes for line in axes.lines}
    for name, key in (("min", "min"), ("max", "max"), ("active share", "active_share")):
        assert list(drawn[name]) == [getattr(row, key) for row in corpus.rows]
    rows = ResultRows(row for row in read_rows(RESULTS) if row.source == "bert-base")
    dots = [float(line.get_xdata()[0]) for line in rows.plot().axes[0].lines if line.get_marker() == "o"]
    assert dots == [row.ratio for row in rows if row.ratio is not None and row.kernel != row.baseline]
    assert session.plot()._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FFNError, match="a picture needs matplotlib"):
        corpus.plot()
