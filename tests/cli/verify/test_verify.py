"""`ffn verify` as a user asks it."""

import json
import shutil
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file

from ffncli.kernels import BUILT_IN
from ffncli.run.verify.checks.case import CheckRow
from ffncli.run.verify.verify import CHECKS as EVERY_CHECK
from tests.oracles.checkpoints import LLAMA, expect_refusal, folder, tensors
from tests.oracles.own_modules import MODULES
from tests.oracles.prompted import made

KEYS = ["check", "subject", "max_error", "relative_error", "ulps", "tolerance", "passed", "note"]

CHECKS = {name: check for name, check in EVERY_CHECK.items() if name != "ranks"}  # which takes several processes


def rows(call, *arguments: str) -> list[dict]:
    code, out, _ = call("verify", *arguments, "--json")
    found = json.loads(out)["rows"]
    assert code == (1 if any(row["passed"] is False for row in found) else 0)
    return found


@pytest.fixture
def checkpoint(tmp_path):
    return folder(tmp_path / "llama", LLAMA, tensors("llama"))


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODULES + "\ndef mlp(x, gate, up, down):\n    return F.linear(F.silu(F.linear(x, gate)), down)\n")
    return path


def test_without_a_source_the_built_in_block_is_verified(stdout_of):
    out = stdout_of("verify", "-v")
    assert out.startswith("a small built-in block  fixed weights\n")
    assert all(f"\n{name}  {check.states}" in out for name, check in CHECKS.items())
    assert "collectives: 1 (all-reduce of down)" in out
    assert "3 ranks: d_ff = 8 does not divide over 3 ranks" in out
    assert " failed" not in out
    assert "\x1b" not in out


def lines_of(out: str) -> dict[str, tuple[str, str]]:
    """The short page: check or kernel → (PASS, FAIL or SKIP, the text)."""
    found = [line.split(None, 2) for line in out.splitlines() if line.startswith("  ")]
    return {line[1]: (line[0], line[2]) for line in found if line[0] in ("PASS", "FAIL", "SKIP")}


def test_the_short_page_has_a_line_for_every_check(call):
    out = call("verify", "16x40:swiglu")[1]
    found = lines_of(out)
    assert list(found) == list(CHECKS)
    judged = {check: [row for row in rows(call, "16x40:swiglu") if row["check"] == check] for check in CHECKS}
    for check, (word, text) in found.items():
        skipped = not any(row["passed"] for row in judged[check])
        assert word == ("SKIP" if skipped else "PASS")
        assert text == (judged[check][0]["note"] if skipped else CHECKS[check].states)
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) == len(CHECKS) + 4
    every = [row for found in judged.values() for row in found]
    passed = sum(row["passed"] is True for row in every)
    figures = sum(row["passed"] is None and row["max_error"] is not None for row in every)
    skipped = len(every) - passed - figures
    last = f"{passed} passed, {skipped} skipped, {figures} for information  -v shows every row"
    assert out.splitlines()[-1] == last


def test_a_users_kernel_has_its_line_with_its_error(call, mine):
    """What --kernel asks about, not 21 activations."""
    asked = ("8x24:swiglu", "--no-bias", "--kernel", f"{mine}:right,{mine}:mlp")
    mine.write_text(mine.read_text() + """
def right(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
""")  # fmt: skip
    found = lines_of(call("verify", *asked)[1])
    exact = {row["subject"]: row for row in rows(call, *asked)}
    assert list(found)[-4:] == ["kernels", "mine.py:right", "mine.py:mlp", "layout"]
    assert found["kernels"] == ("PASS", "the built-in kernels = the reference in float64")
    for name, word in (("mine.py:right", "PASS"), ("mine.py:mlp", "FAIL")):
        row = exact[name]
        text = f"error {row['relative_error']:.2g} (limit {row['tolerance']:.2g})"
        assert found[name] == (word, text)
    alone = lines_of(call("verify", "8x24:swiglu", "--kernel", "packed", "--check", "kernels")[1])
    assert list(alone) == ["packed"]
    refused = lines_of(call("verify", "8x24", "--kernel", "packed", "--check", "kernels")[1])
    assert refused == {"packed": ("SKIP", "a plain block has no gate to pack")}


def test_what_fails_has_a_line_for_every_row(call, checkpoint, tmp_path):
    stored = tensors("llama")
    stored["model.layers.0.mlp.up_proj.weight"][2, 1] = float("nan")
    found = lines_of(call("verify", folder(tmp_path / "nan", LLAMA, stored))[1])
    assert found["finite"] == ("FAIL", "weights: up.weight has 1 NaN")
    assert found["tokens"] == ("SKIP", "not run: weights with NaN or Inf")


def test_rows_have_the_contracts_keys(call, csv_of):
    found = rows(call)
    assert all(list(row) == KEYS for row in found)
    assert [f.name for f in fields(CheckRow)] == KEYS
    assert list(dict.fromkeys(row["check"] for row in found)) == list(CHECKS)
    lines = csv_of("verify")
    assert list(lines[0]) == KEYS
    assert {line["passed"] for line in lines} == {"true", ""}
    assert [line["subject"] for line in lines] == [row["subject"] for row in found]


@pytest.mark.parametrize(
    "source",
    [
        ["16x40:swiglu"],
        ["--d-model", "16", "--activation", "gelu", "--norm", "layernorm", "--residual", "--dropout", "0.1"],
        ["16x40:swiglu", "--experts", "4", "--shared-experts", "1"],
        ["palm-540b", "--d-model", "16", "--d-ff", "24"],
        ["deepseek-v3", "--d-model", "16", "--d-ff", "24", "--layer", "4"],
    ],
)
def test_any_source_is_verified(call, source):
    assert all(row["passed"] is not False for row in rows(call, *source))


def test_a_checkpoints_layer(call, stdout_of, checkpoint):
    found = rows(call, checkpoint, "--layer", "1")
    layout = {row["subject"]: row for row in found if row["check"] == "layout"}
    assert layout["with gate and up swapped"]["relative_error"] > 0.1
    assert layout["gate.weight"]["note"].startswith("model.layers.1.mlp.gate_proj.weight [6, 4]")
    assert "not checked against its module" in layout["transformers"]["note"]  # the file has an FFN and nothing else
    out = stdout_of("verify", checkpoint, "--layer", "1", "--check", "module,layout")
    assert out.startswith("llama, decoder layer 1  weights of decoder layer 1\n")
    assert list(lines_of(out)) == ["module", "layout"]


def test_a_failure_shows_the_answer_first_and_names_it(call, mine):
    code, out, err = call("verify", "8x24:swiglu", "--kernel", f"bad={mine}:mlp", "--check", "kernels")
    assert code == 1
    assert "9 passed, 1 failed, 15 skipped" in out
    assert err.startswith("error: not verified: kernels, bad (relative error ")
    assert len(err.splitlines()) == 1
    found = {row["subject"]: row for row in rows(call, "8x24:swiglu", "--kernel", f"{mine}:mlp")}
    assert found["mine.py:mlp"]["passed"] is False


def test_ones_own_module(call, mine):
    found = rows(call, f"{mine}:FeedForwardBlock", "--d-model", "8", "--d-ff", "24", "--dropout", "0.2")
    module = {row["subject"]: row["passed"] for row in found if row["check"] == "module"}
    assert module == {
        "torch.nn, eval": True,
        "torch.nn, train, same mask": True,
        "torch.nn, train, called twice": None,
        "FeedForwardBlock, eval": True,
        "FeedForwardBlock, train, same mask": True,
        "FeedForwardBlock, train, called twice": None,
    }
    found = rows(call, f"{mine}:Needs3D", "--d-model", "8", "--dropout", "0.2", "--check", "module")
    last = found[-1]
    assert (last["subject"], last["passed"]) == ("Needs3D, train", None)  # its dropout follows down
    assert "dropout in a place other" in last["note"]


def test_a_module_that_does_not_run_in_a_dtype_is_a_failed_row(call, tmp_path):
    path = tmp_path / "hard.py"
    path.write_text(MODULES + """
class Hard(SwiGLU):
    def forward(self, x):
        return super().forward(x + torch.zeros(1))
""")  # fmt: skip
    fine = rows(call, f"{path}:Hard", "--d-model", "8", "--d-ff", "24", "--check", "module")
    assert [row["passed"] for row in fine if row["subject"] == "Hard, eval"] == [True]
    found = rows(call, f"{path}:Hard", "--d-model", "8", "--d-ff", "24", "--check", "module", "--dtype", "bf16")
    failed = found[-1]
    assert (failed["subject"], failed["passed"]) == ("Hard", False)
    assert "hard.py, line" in failed["note"]


def test_against_another_checkpoint(call, checkpoint, tmp_path):
    swapped = {
        name.replace("gate_proj", "@").replace("up_proj", "gate_proj").replace("@", "up_proj"): tensor
        for name, tensor in tensors("llama").items()
    }
    port = folder(tmp_path / "port", LLAMA, swapped)
    code, out, err = call("verify", port, "--against", checkpoint, "--layer", "1", "--check", "layout")
    assert code == 1
    assert f"read with gate and up swapped, it agrees with {checkpoint}" in out
    assert "error: not verified: layout, as read = " in err
    assert err.endswith(f"): read with gate and up swapped, it agrees with {checkpoint}\n")
    assert call("verify", checkpoint, "--against", checkpoint, "--check", "layout")[0] == 0


def test_nan_in_weights_fails_once(call, tmp_path):
    stored = tensors("llama")
    stored["model.layers.0.mlp.up_proj.weight"][2, 1] = float("nan")
    source = folder(tmp_path / "nan", LLAMA, stored)
    code, out, err = call("verify", source)
    assert code == 1
    assert "error: not verified: finite, weights (up.weight has 1 NaN)" in err
    assert "not run: weights with NaN or Inf" in out


@pytest.mark.parametrize(
    ("file", "why"), [("pytorch_model.bin", "has only pickled weights"), (None, "has no safetensors")]
)
def test_a_directory_without_tensors_is_not_verified(call, stdout_of, tmp_path, file, why):
    """Random weights agree with themselves, whatever the directory was to hold."""
    here = folder(tmp_path / "model", LLAMA)
    if file:
        (tmp_path / "model" / file).write_bytes(b"cos\nsystem\n")
    config = f"{here}/config.json"
    expect_refusal(call("verify", here), "nothing to verify", why, f"{config} can be verified with random weights")
    out = stdout_of("verify", config, "--check", "tokens")
    assert "random weights, seed 0" in out


def test_what_compiles_is_run_where_it_is_named(call, monkeypatch):
    seen: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(options) or function)
    found = {row["subject"]: row for row in rows(call, "8x24:swiglu", "--check", "kernels")}
    assert list(found) == list(BUILT_IN)
    assert (found["compiled"]["passed"], seen) == (None, [])
    assert found["compiled"]["note"].startswith("not run by default")
    (named,) = rows(call, "8x24:swiglu", "--check", "kernels", "--kernel", "compiled")
    assert (named["subject"], named["passed"], len(seen)) == ("compiled", True, 1)
    (former,) = rows(call, "8x24:swiglu", "--check", "kernels", "--kernel", "conv")
    assert (former["subject"], former["passed"]) == ("conv1x1", True)


def test_checks_as_a_list_and_one_by_one(call):
    found = rows(call, "--check", "tokens, fused", "--check", "shards")
    assert list(dict.fromkeys(row["check"] for row in found)) == ["tokens", "shards", "fused"]


def test_another_width_cannot_be_compared(call, checkpoint):
    expect_refusal(call("verify", "8x16", "--against", checkpoint), "has d_model 4, '8x16' has 8", code=2)


def test_options_reach_the_run(call, monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert rows(call, "--threads", "3", "--check", "kernels") == rows(call, "--check", "kernels")
    assert threads == [3]
    wide = rows(call, "16x40", "--dtype", "fp64", "--check", "kernels")
    assert wide[0]["tolerance"] == pytest.approx(4 * 2.0**-52 * (1 + 40**0.5))
    assert rows(call, "16x40", "--tolerance", "0.5", "--check", "kernels")[0]["tolerance"] == 0.5
    assert rows(call, "16x40", "--seed", "1", "--check", "kernels") != rows(call, "16x40", "--check", "kernels")
    alone = rows(call, "16x40", "--tokens", "1", "--check", "tokens")
    assert alone[0]["note"] == "only one token: give --tokens 2 or more"


def test_a_terminal_of_80_columns_cuts_nothing(call):
    """The page's tables fit: the check's name is a heading, not a column."""
    out = call("verify", "-v")[1]
    table = [line for line in out.splitlines() if line.endswith(("yes", "passed", "-"))]
    assert max(map(len, table)) <= 80


def test_against_a_module_of_ones_own(call, stdout_of, mine):
    """It is run at the width that is compared; of one seed, its weights are those that a block of dimensions has."""
    out = stdout_of("verify", "8x32:gelu", "--against", f"{mine}:Needs3D", "--check", "layout", "--csv")
    assert out.splitlines()[1].startswith(f"layout,as read = {mine}:Needs3D,")
    code, _, err = call("verify", "8x32:relu", "--against", f"{mine}:Needs3D", "--check", "layout")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: not verified: layout, as read = ")
    same = f"{mine}:built"
    assert call("verify", same, "--against", same, "--check", "layout")[0] == 0


def test_a_layer_with_nan_is_told_apart_from_nothing(call, tmp_path):
    broken = shutil.copytree(made("llama").path, tmp_path / "broken")
    stored = load_file(broken / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(stored, broken / "model.safetensors", {"format": "pt"})
    found = {row["subject"]: row for row in rows(call, str(broken), "--layer", "1", "--check", "layout")}
    assert found["with gate and up swapped"]["note"] == "the output has NaN or Inf, so readings cannot be compared"
    assert found["as read = transformers' llama"]["note"].startswith("no other reading agrees; the reference has ")


def test_a_kernel_that_ends_its_process_fails(call, tmp_path):
    """Before, the command ended with the kernel's exit code 0 and printed nothing."""
    (tmp_path / "ends.py").write_text("import os\ndef exits(x, gate, up, down): os._exit(0)\n")
    code, out, err = call("verify", "8x24:swiglu", "--check", "kernels", "-k", f"{tmp_path}/ends.py:exits")
    assert (code, "ends its process, with exit code 0" in out + err) == (1, True)


def test_an_output_of_zero_proves_nothing(call, tmp_path):
    """A down projection that starts at zero, as many recipes do: a kernel that computes nothing gives the same."""
    (tmp_path / "zero.py").write_text(
        "import torch\nfrom torch import nn\nclass Block(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)\n"
        "        nn.init.zeros_(self.down.weight)\n    def forward(self, x):\n"
        "        return self.down(torch.relu(self.up(x)))\ndef mlp(x, up, down): return torch.zeros_like(x)\n"
    )
    code, out, _ = call("verify", f"{tmp_path}/zero.py:Block", "--check", "kernels", "-k", f"{tmp_path}/zero.py:mlp")
    assert (code, "the block's output is 0" in out) == (1, True)
    code, out, _ = call("verify", f"{tmp_path}/zero.py:Block", "--check", "kernels", "--json")
    assert (code, {row["passed"] for row in json.loads(out)["rows"]}) == (0, {None})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(("--kernel", "eager", "--referee"), "eager is certified", marks=pytest.mark.runs),
        (("--check", "convolution"), "3 passed"),
    ],
)
def test_a_verdict_in_a_file_is_said(options, says, call, tmp_path):
    path = tmp_path / "answer.json"
    code, out, err = call("verify", "4x8:relu", *options, "-o", str(path))
    assert (code, out, err) == (0, "", f"note: wrote {path}: {says}\n")
    assert json.loads(path.read_text("utf-8"))["command"] == "verify"
    assert call("verify", "4x8:relu", *options, "-o", str(path), "--force", "-q")[2] == ""
