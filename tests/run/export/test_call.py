"""`ffncli.export`: what it takes, what it writes, what it loads."""

from __future__ import annotations

import pytest

import ffncli
from ffncli.errors import ExitCode, FFNError
from ffncli.run.export.call import FORMS


def test_text_and_files(tmp_path):
    made = ffncli.export("8x16:swiglu", form="torch", tokens=[1, 7], dtype="bf16")
    assert made.text == made.files["block.py"]
    assert [one.tokens for one in made.problem.workloads] == [1, 7]
    assert made.write(tmp_path / "a.py") == (str(tmp_path / "a.py"),)
    assert (tmp_path / "a.py").read_text("utf-8") == made.text
    with pytest.raises(FFNError, match=r"a\.py exists already; choose another out FILE, or give --force"):
        made.write(tmp_path / "a.py")
    made.write(tmp_path / "a.py", force=True)


def test_a_data_set_takes_several_blocks(tmp_path):
    for source in ("8x16:swiglu", "8x16:geglu"):
        made = ffncli.export(source, form="flashinfer-trace")
        paths = made.write(tmp_path / "set")
        assert len(paths) == len(made.files) == 4
        with pytest.raises(FFNError, match="is not a text; write it: out='PATH'"):
            assert made.text
    assert len(list((tmp_path / "set" / "definitions" / "ffn").glob("*.json"))) == 2
    with pytest.raises(FFNError, match=r"swiglu|silu.*exists already; choose another folder, or give force"):
        ffncli.export("8x16:swiglu", form="flashinfer-trace").write(tmp_path / "set")
    (tmp_path / "file").write_text("")
    with pytest.raises(FFNError, match="cannot write") as caught:
        made.write(tmp_path / "file")
    assert caught.value.code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"form": "tensorflow"}, "form: unknown form 'tensorflow'; use torch, flashinfer-trace, onnx, latex"),
        ({"form": 3}, "form must be text"),
        ({"part": "half"}, "part: unknown choice 'half'"),
        ({"seed": 1}, "form='torch' writes no weights; give seed and large with form='onnx'"),
        ({"form": "latex", "large": True}, "form='latex' writes no weights"),
        ({"tokens": 0}, "tokens must be a whole number from 1, or several"),
        ({"source": None}, "d_model is missing"),
        ({"dtype": "q4_0"}, "counts bytes only"),
    ],
)
def test_what_it_refuses(arguments, why):
    with pytest.raises(FFNError) as caught:
        ffncli.export(**{"source": "8x16", **arguments})
    assert str(caught.value).startswith(why) or why in str(caught.value)


def test_a_source_that_does_not_say_what_it_computes(tmp_path):
    from tests.oracles.checkpoints import folder, tensors

    bare = folder(tmp_path / "m", None, tensors("llama"))
    with pytest.raises(FFNError, match="does not say its activation, so it cannot be run"):
        ffncli.export(bare)
    assert "F.silu" in ffncli.export(bare, activation="silu").text


def test_a_module_of_the_users(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)\n\n"
        "    def forward(self, x):\n        return self.b(nn.functional.gelu(self.a(x)))\n"
    )
    assert "F.gelu(up)" in ffncli.export(f"{tmp_path}/mine.py:Net").text


def test_every_form_has_its_default_part():
    assert {name: form.part for name, form in FORMS.items()} == {
        "torch": "block", "flashinfer-trace": "ffn", "onnx": "block", "latex": "block",
    }  # fmt: skip
    assert "x + down" not in ffncli.export("llama-2-7b", part="ffn").text
    assert "x + down" in ffncli.export("llama-2-7b").text
