import io
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ffncli.errors import FFNError
from ffncli.run.engine import inputs as inputs_module
from ffncli.run.engine.inputs import make_input

WANTED = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4) / 8


def made(text, leading=None, d_model=4, dtype=torch.float64):
    return make_input(str(text), leading, d_model, dtype, torch.Generator().manual_seed(0))


def test_names():
    assert torch.equal(made("arange", (2, 3)), torch.arange(24.0).reshape(2, 3, 4).double())
    assert torch.equal(made("zeros", (2,)), torch.zeros(2, 4).double())
    assert torch.equal(made("ones"), torch.ones(4, 4).double())
    torch.manual_seed(0)
    assert torch.equal(made("randn", (5,)), torch.randn(5, 4).double())


def test_lists():
    assert made("0.5,1,-2,3e2").tolist() == [[0.5, 1, -2, 300]]
    assert made("1 2 3 4 5 6 7 8", (2, 1)).shape == (2, 1, 4)
    assert made("[[1,2,3,4],[5,6,7,8]]").shape == (2, 4)


@pytest.mark.parametrize("suffix", ["npy", "json", "csv", "safetensors"])
def test_files(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    flat = WANTED.reshape(6, 4)
    match suffix:
        case "npy":
            np.save(path, WANTED.numpy())
        case "json":
            path.write_text(json.dumps(WANTED.tolist()))
        case "csv":
            path.write_text("\n".join(",".join(map(repr, row)) for row in flat.tolist()) + "\n")
        case "safetensors":
            save_file({"x": WANTED}, path)
    found = made(path)
    assert torch.equal(found.reshape(6, 4), flat)
    assert found.shape == ((6, 4) if suffix == "csv" else (2, 3, 4))
    assert torch.equal(made(path, (3, 2)), WANTED.reshape(3, 2, 4))


def test_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("1,2,3,4\n5,6,7,8\n"))
    assert made("-").tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_one_number_per_line_is_a_flat_list(monkeypatch, tmp_path):
    lines = "".join(f"{n}\n" for n in range(1, 25))
    wanted = torch.arange(1, 25.0).double().reshape(6, 4)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert torch.equal(made("-"), wanted)
    (tmp_path / "x.csv").write_text("x\n" + lines)
    assert torch.equal(made(tmp_path / "x.csv", (2, 3)), wanted.reshape(2, 3, 4))
    assert made(tmp_path / "x.csv", d_model=1).shape == (24, 1)
    (tmp_path / "x.csv").write_text("1\n2\n3\n")
    with pytest.raises(FFNError, match="3 values, which is not a multiple of d_model = 4"):
        made(tmp_path / "x.csv")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("head", [b"\x93NUMPY\x01\x00", b"@\x00\x00\x00\x00\x00\x00\x00{"])
def test_stdin_that_is_not_text(monkeypatch, errors, head):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(head), "utf-8", errors))
    with pytest.raises(FFNError, match="standard input is not text"):
        made("-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3", "3 values, which is not a multiple of d_model = 4"),
        ("", "is neither a name nor a file"),
        ("rand", "did you mean 'randn'"),
        ("1,2,x,4", "is neither a name nor a file"),
        ("1,2,e,4", "'e' is not a number"),
        ("[[1,2],[3]]", "not a regular array"),
        ("[1,2", "not JSON"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(FFNError, match=message):
        made(text)


def test_wrong_number_of_values():
    with pytest.raises(FFNError, match="input has 8 values, but 3 × 4 needs 12"):
        made("1,2,3,4,5,6,7,8", (3,))


def test_files_keep_their_rows(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 2)))
    with pytest.raises(FFNError, match=r"shape \[4, 2\], but its last axis must be d_model = 4"):
        made(tmp_path / "x.npy")
    (tmp_path / "x.csv").write_text("1,2,3\n4,5,6,7,8\n")
    with pytest.raises(FFNError, match=r"lines have different numbers of values \(the first has 3\)"):
        made(tmp_path / "x.csv")


def test_a_file_of_several_tensors_is_read_at_x(tmp_path):
    save_file({"a": WANTED[:1].clone(), "x": WANTED}, tmp_path / "x.safetensors")
    assert torch.equal(made(tmp_path / "x.safetensors"), WANTED)
    save_file({"other": WANTED}, tmp_path / "y.safetensors")
    assert torch.equal(made(tmp_path / "y.safetensors"), WANTED)


def test_where_a_file_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "12").write_text("5;6;7;8")
    assert made("12").tolist() == made("~/12").tolist() == [[5, 6, 7, 8]]  # a file before a number


def test_values_are_not_rounded(tmp_path):
    np.save(tmp_path / "x.npy", np.full(4, 0.1))
    assert made(tmp_path / "x.npy").tolist() == [[0.1] * 4]
    assert made("arange", (2**24 + 2,), 1)[-1].item() == 2**24 + 1


def test_rows_of_a_file_are_tokens_of_d_model(tmp_path):
    (tmp_path / "x.csv").write_text("1,2\n3,4\n5,6\n7,8\n")
    with pytest.raises(FFNError, match="last axis must be d_model = 4"):
        made(tmp_path / "x.csv")


def test_a_text_file_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs_module, "MOST_TEXT_BYTES", 6)
    (tmp_path / "x.csv").write_text("1,2,3,4")
    with pytest.raises(FFNError, match="is larger than 6 bytes"):
        made(tmp_path / "x.csv")


def test_json_may_name_its_list(tmp_path):
    (tmp_path / "x.json").write_text('{"about": 1, "x": [[1, 2, 3, 4]]}')
    assert made(tmp_path / "x.json").tolist() == [[1, 2, 3, 4]]
    (tmp_path / "x.json").write_text('{"hidden": [1, 2, 3, 4]}')
    assert made(tmp_path / "x.json").tolist() == [[1, 2, 3, 4]]
    for text, message in (
        ('{"a": 1, "b": 2}', "object of 2 entries"),
        ('{"x": {"y": 1}}', "not a regular array"),
        ("{}", "0"),
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(FFNError, match=message):
            made(tmp_path / "x.json")


def test_csv_as_spreadsheets_write_it(tmp_path):
    (tmp_path / "x.csv").write_text("a,b,c,d\n1,2,3,4\n", "utf-8-sig")
    assert made(tmp_path / "x.csv").tolist() == [[1, 2, 3, 4]]
    (tmp_path / "x.csv").write_text("1,2,3,4\na,b,c,d\n")
    with pytest.raises(FFNError, match="'a' is not a number"):
        made(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text("a,b,3,4\n1,2,3,4\n")
    with pytest.raises(FFNError, match="'a' is not a number"):
        made(tmp_path / "x.csv")


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", ">f4", "i4", "u1", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_any_number(tmp_path, kind, order):
    values = (np.arange(8).reshape(2, 4) % 2).astype(kind)
    np.save(tmp_path / "x.npy", np.asarray(values, order=order))
    found = made(tmp_path / "x.npy")
    assert (found.tolist(), found.is_contiguous()) == (values.astype(float).tolist(), True)
