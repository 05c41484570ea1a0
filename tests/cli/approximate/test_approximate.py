"""`ffn approximate`: its answer in every format, what it says of overfitting, interruptions, what cannot be asked."""

import json
import re
from dataclasses import replace
from itertools import islice

import pytest

from docs.schemas import keys_text
from ffncli.cli.approximate import _overfitting_text, plots
from ffncli.errors import Terminated
from ffncli.run.approximate import approximate as module
from ffncli.run.approximate.approximate import overfitting
from ffncli.run.approximate.call import approximate
from tests.cli.test_main import HEAVY, loaded_by

CONTRACT = {"target", "activation", "d_ff", "params", "rmse", "median_rmse", "max_error"}
QUICK = ("--seeds", "2", "--steps", "30")
SMALL = ("approximate", "--d-ff", "1,4", "--activation", "relu,swiglu", *QUICK)


def test_json_csv_and_table_say_the_same(call, csv_of):
    code, out, err = call(*SMALL, "--target", "sin,and", "--json")
    found = json.loads(out)
    rows = found["rows"]
    assert (code, err, found["command"], found["complete"], len(rows)) == (0, "", "approximate", True, 8)
    assert all(set(row) >= CONTRACT for row in rows)
    assert [(r["target"], r["activation"], r["d_ff_plain"]) for r in rows][:3] == [
        ("sin", "relu", 1), ("sin", "relu", 4), ("sin", "swiglu", 1)]  # fmt: skip
    assert found["targets"][1]["domain"] == [0.0, 1.0]
    lines = csv_of(*SMALL, "--target", "sin,and")
    assert [float(line["rmse"]) for line in lines] == [row["rmse"] for row in rows]
    table = call(*SMALL, "--target", "sin,and")[1]
    for row in rows:
        cells = [f"{row[key]:.4g}" for key in ("rmse", "median_rmse", "max_error", "floor")]
        assert re.search(rf"^{row['activation']} .* {row['params']} +{' +'.join(map(re.escape, cells))}$", table, re.M)
    assert max(map(len, table.splitlines())) <= 100
    assert "| activation |" in call(*SMALL, "--format", "md")[1]


def test_every_key_is_described(call):
    found = json.loads(call(*SMALL, "--noise", "0.3", "--json")[1])
    told = set(re.findall(r"`(\w+)`", keys_text("approximate")))
    assert {*found["rows"][0], *found["targets"][0], *found["overfitting"][0]} <= told
    assert set(found) - {"schema_version", "command", "conventions"} <= told
    assert found["conventions"]


def test_the_same_bytes_again(call):
    assert call(*SMALL, "--json") == call(*SMALL, "--json")


def test_noise_is_judged_by_what_was_held_out(call):
    command = ("approximate", "--noise", "0.3", "--samples", "12", "--d-ff", "1x,4x,64x", "--activation", "tanh")
    command += ("--steps", "500", "--seeds", "2")
    code, out, _ = call(*command, "--json")
    found = json.loads(out)
    (said,) = found["overfitting"]
    errors = {row["d_ff"]: row["held_out_rmse"] for row in found["rows"]}
    assert code == 0
    assert said["best_rmse"] == min(errors.values()) == errors[said["best_d_ff"]]
    assert said["wider_rmse"] == max(e for d_ff, e in errors.items() if d_ff > said["best_d_ff"])
    assert said["overfits"] == (said["wider_rmse"] > 1.1 * said["best_rmse"])
    table = call(*command)[1]
    assert "Does a wider block overfit?" in table
    assert f"({said['best_rmse']:.3g})" in table


@pytest.mark.parametrize(
    ("held_out", "train", "overfits"),
    [((0.5, 0.2, 0.3), (0.5, 0.3, 0.1), True), ((0.5, 0.2, 0.21), (0.5, 0.3, 0.1), False),
     ((0.5, 0.2, 0.3), (0.5, 0.3, 0.4), False), ((0.5, 0.3, 0.2), (0.5, 0.3, 0.1), False)],
)  # fmt: skip
def test_what_counts_as_overfitting(held_out, train, overfits):
    fits = approximate(activations=("relu",), widths=("1", "4", "8"), noise=0.1, seeds=1, steps=2)
    rows = [replace(f.row, held_out_rmse=h, train_rmse=t) for f, h, t in zip(fits, held_out, train, strict=True)]
    (said,) = overfitting(rows)
    assert (said.best_d_ff, said.overfits) == ((8 if held_out[2] == 0.2 else 4), overfits)
    assert ("badly trained" in _overfitting_text(said)) == (held_out[2] == 0.3 and not overfits)


@pytest.mark.parametrize(
    ("domain", "said"),
    [("-pi:pi", "[-3.142, 3.142]"), ("0:1", "[0, 1]"), ("999999.5:1000000", "[999999.5, 1000000]"),
     ("0:1e-6", "[0, 1e-06]"), ("1000:1000.25", "[1000, 1000.25]")],
)  # fmt: skip
def test_the_ends_of_a_domain_are_told_apart(domain, said, call):
    quick = ("--d-ff", "1", "--activation", "identity", "--seeds", "1", "--steps", "1")
    assert f"x in {said}, " in call("approximate", "--domain", domain, *quick)[1]


def test_curves_of_error_against_width(call):
    fits = approximate(activations=("relu", "swiglu"), widths=("4", "1"), seeds=1, steps=2)
    rows = [fit.row for fit in fits]
    (plot,) = plots(rows)
    assert (plot.log_x, plot.log_y) == (True, True)
    assert [line.name for line in plot.lines] == ["relu", "swiglu", "best line"]
    for line in plot.lines[:2]:
        own = {row.d_ff_plain: row.rmse for row in rows if row.activation == line.name}
        assert list(line.points) == [(1.0, own[1]), (4.0, own[4])]
    assert {y for _, y in plot.lines[2].points} == {rows[0].floor}
    assert "error against width" in call(*SMALL, "--plot")[1]


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signal", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
@pytest.mark.parametrize("to_file", [False, True])
def test_finished_rows_are_kept(signal, code, to_file, call, monkeypatch, tmp_path):
    def interrupted(*arguments):
        yield from islice(real(*arguments), 3)
        raise signal

    whole = json.loads(call(*SMALL, "--json")[1])
    real = module.fits
    monkeypatch.setattr(module, "fits", interrupted)
    path = tmp_path / "rows.json"
    found, out, err = call(*SMALL, "--json", *(("-o", str(path)) if to_file else ()))
    answer = json.loads(path.read_text() if to_file else out)
    assert found == code
    assert "3 of 4 rows" in err
    assert answer["rows"] == whole["rows"][:3]
    assert (answer["complete"], answer["rows_asked"]) == (False, 4)


def test_nothing_finished_is_no_answer(call, monkeypatch, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(module, "fits", interrupted)
    assert call(*SMALL, "--json", "-o", str(tmp_path / "rows.json")) == (130, "", "interrupted\n")
    assert not any(tmp_path.iterdir())


def test_what_diverged_is_said(call, monkeypatch):
    def broken(*arguments):
        trained = real(*arguments)
        for own in trained:
            own["up.bias"] = own["up.bias"] / 0
        return trained

    real = module.train
    monkeypatch.setattr(module, "train", broken)
    code, out, err = call("approximate", "--d-ff", "1,2", "--activation", "relu", *QUICK, "--json", "--plot")
    found = json.loads(out)
    assert code == 0
    assert "4 of 4 training runs diverged" in err
    assert [(row["diverged"], row["rmse"]) for row in found["rows"]] == [(2, None)] * 2
    assert call("approximate", "--d-ff", "1,2", "--activation", "relu", "--noise", "1", *QUICK, "--plot")[0] == 0


# --- what cannot be asked ---------------------------------------------------------------------------------------------


def test_a_pipe_gets_no_progress(ffn):
    done = ffn("approximate", "--d-ff", "1", "--activation", "identity", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


def test_help_loads_no_tensor_library():
    assert not loaded_by("approximate --help") & HEAVY
