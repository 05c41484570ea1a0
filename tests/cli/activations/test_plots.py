"""--plot and --plot-file of `ffn activations`: which curves, where, and what is refused."""

import math
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.cli.activations.command import curve_plots, difference_plot
from tests.oracles.checkpoints import expect_refusal


def values(plot, name):
    (line,) = [line for line in plot.lines if line.name == name]
    return line.points


@pytest.mark.parametrize(("name", "call"), [("gelu", "gelu"), ("silu", "silu"), ("hardswish", "hardswish")])
def test_curves_and_slopes_are_torchs(name, call):
    curve, slope = curve_plots([name], [-4, 4])
    xs = [x for x, y in values(slope, name) if math.isfinite(y)]
    x = torch.tensor(xs, dtype=torch.float64, requires_grad=True)
    y = getattr(torch.nn.functional, call)(x)
    y.sum().backward()
    assert [y for _, y in values(slope, name) if math.isfinite(y)] == pytest.approx(x.grad.tolist(), abs=1e-12)
    found = dict(values(curve, name))
    for at, want in zip(xs, y.tolist(), strict=True):
        # Beside a jump of the slope are two floats next to the kink; the curve has the kink itself.
        assert found.get(at, want) == pytest.approx(want, abs=1e-12)
    assert len(set(found) & set(xs)) >= 241 - 2 * len(TABLE[name].kinks)


@pytest.mark.parametrize("name", [n for n, row in TABLE.items() if row.kinks])
def test_kinks_are_met_and_jumps_are_gaps(name):
    curve, slope = curve_plots([name], [-12, 12])
    for x, order in TABLE[name].kinks:
        assert math.isnan(dict(values(slope, name))[x]) == (order <= 1)
        assert math.isnan(dict(values(curve, name))[x]) == (order == 0)
    for plot in (curve, slope):
        xs = [x for x, _ in values(plot, name)]
        assert xs == sorted(xs)
        assert (xs[0], xs[-1]) == (-12, 12)


def test_a_relu_has_no_line_from_slope_0_to_slope_1():
    ys = [y for _, y in values(curve_plots(["relu"], [-3, 3])[1], "relu")]
    assert {y for y in ys if math.isfinite(y)} == {0.0, 1.0}
    assert math.isnan(ys[ys.index(1.0) - 1])


def test_differences_of_the_gelus():
    """The worked figures: erf against tanh 4.73e-4 at 2.70, against quick 2.03e-2."""
    plot = difference_plot(["gelu", "gelu_tanh", "quick_gelu"], "gelu", [-6, 6])
    assert [line.name for line in plot.lines] == ["gelu_tanh", "quick_gelu"]
    x, y = max(values(plot, "gelu_tanh"), key=lambda p: abs(p[1]))
    assert (abs(y), abs(x)) == pytest.approx((4.73e-4, 2.70), rel=1e-2)
    assert max(abs(y) for _, y in values(plot, "quick_gelu")) == pytest.approx(2.03e-2, rel=1e-2)


def test_what_it_is_compared_with_is_drawn_too():
    plots = curve_plots(["silu"], [-3, 3], "gelu")
    assert [[line.name for line in plot.lines] for plot in plots] == [["silu", "gelu"], ["silu", "gelu"], ["silu"]]


def test_many_curves_take_several_frames():
    plots = curve_plots(list(TABLE), [-3, 3])
    assert all(len(plot.lines) <= 8 for plot in plots)
    assert [line.name for plot in plots[: len(plots) // 2] for line in plot.lines] == list(TABLE)


def test_a_few_tall_curves_leave_the_frame_and_the_title_says_so():
    curve, _ = curve_plots(["relu", "gelu", "silu", "relu2"], [-3, 3])
    assert curve.title == "Values (relu2 leaves the frame)"
    assert curve.frame[1] == 3.0
    assert curve_plots(["gelu", "relu2"], [-3, 3])[0].frame is None


# --- the command ------------------------------------------------------------------------------------------------------


def test_plot_draws_curves_and_slopes_below_the_table(stdout_of):
    out = stdout_of("activations", "gelu,silu", "--plot", "--at", "-2:2")
    table, values, slopes = out.partition("Values\n")[0], *out.partition("Values\n")[2].split("Slopes\n")
    assert "gelu" in table
    for part, name in ((values, "f(x)"), (slopes, "slope of f at x")):
        assert part.splitlines()[0].strip() == name
        assert part.rstrip().endswith("a gelu   b silu")
        assert part.rstrip().splitlines()[-3].split() == "-2.0 -1.5 -1.0 -0.5 0.0 0.5 1.0 1.5 2.0".split()
        assert any("⠀" < mark <= "⣿" for mark in part)
    assert max(map(len, (values + slopes).splitlines())) <= 80


def test_an_ascii_locale_gets_ascii(ffn):
    done = ffn("activations", "gelu", "silu", "--plot", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "?" not in done.stdout.partition("Values")[2]
    assert "aaaa" in done.stdout


@pytest.mark.parametrize("format", ["json", "csv"])
def test_machines_get_numbers_and_a_word(call, format):
    plain = call("activations", "gelu", "--format", format)
    code, out, err = call("activations", "gelu", "--format", format, "--plot")
    assert (code, out) == plain[:2]
    assert "--plot" in err


def test_plot_file(call, tmp_path):
    path = tmp_path / "curves.svg"
    code, out, err = call("activations", "gelu", "silu", "--plot-file", str(path))
    assert code == 0
    assert "Values" not in out
    assert err == f"note: wrote {path}\n"
    texts = {e.text for e in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert {"gelu", "silu", "x", "f(x)", "slope of f at x"} <= texts
    first = path.read_bytes()
    expect_refusal(call("activations", "gelu", "silu", "--plot-file", str(path)), "exists already")
    assert call("activations", "gelu", "silu", "--plot-file", str(path), "--force", "-q")[0::2] == (0, "")
    assert path.read_bytes() == first


def test_a_link_and_its_file_are_one(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").symlink_to("same.svg")
    expect_refusal(
        call("activations", "gelu", "--plot-file", "same.svg", "-o", "page.md", "--force"),
        "--plot-file and -o name the same file",
    )


def test_without_matplotlib_nothing_is_computed(call, tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    err = expect_refusal(call("activations", "gelu", "--plot-file", str(tmp_path / "a.png")), code=3)
    assert err == "error: --plot-file needs matplotlib; in a clone of ffn: pip install -e '.[plots]'\n"


@pytest.mark.parametrize("at", ["0.5", "0", "-1e9,1e9", "1e-320", "700:710"])
def test_any_range_can_be_drawn(stdout_of, at, tmp_path):
    out = stdout_of("activations", "--all", "--plot", "--at", at, "--plot-file", str(tmp_path / "a.svg"), notes=True)
    assert "Slopes" in out


def test_differences_come_last_and_gated_units_have_names_in_ascii(ffn, stdout_of):
    out = stdout_of("activations", "gelu_tanh", "--against", "gelu", "--plot", "--at", "-6:6")
    assert out.index("Values\n") < out.index("Slopes\n") < out.index("Difference from gelu\n")
    done = ffn("activations", "swiglu", "--plot", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0
    assert "dy/dgate" in done.stdout


def test_a_difference_jumps_where_either_of_the_two_does():
    """xielu jumps at 0, where relu has a mere kink: whichever of them is the other's reference."""
    for name, against in (("xielu", "relu"), ("relu", "xielu")):
        assert math.isnan(dict(values(difference_plot([name], against, [-1, 1]), name))[0.0])
