"""Saved traces: read back bit for bit by others' readers, and files that were never written by us."""

import io
import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ffncli
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import Experts
from ffncli.errors import FFNError
from ffncli.run.engine.trace import trace
from ffncli.run.engine.weights import random_weights
from ffncli.run.saved import containers
from ffncli.run.saved.compare import compare
from ffncli.run.saved.saved import fingerprint, kept_for_saving, open_saved, save
from tests.oracles.checkpoints import raw_safetensors

KINDS = (".safetensors", ".npz", ".json")


GATED = FFNSpec(4, 6, "swiglu")


def saved(path: Path, spec: FFNSpec = GATED, dtype=torch.float32, x=None, inside=frozenset()) -> dict:
    """Save a trace; the tensors that it must hold."""
    block = steps(spec)
    weights = random_weights(block, torch.Generator().manual_seed(0), dtype)
    inputs = {"x": (torch.randn(5, 4, generator=torch.Generator().manual_seed(1)) if x is None else x).to(dtype)}
    keep = kept_for_saving(block, inputs, inside)
    result = trace(block, weights, inputs, keep=keep, inside=inside)
    save(path, block, result, {"name": "b", "dtype": str(dtype)}, weights)
    return {**result.tensors, **{f"weights/{name}": tensor for name, tensor in weights.items()}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_comes_back(tmp_path, kind, dtype):
    path = tmp_path / f"t{kind}"
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    x[0, 0] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    x[0, 1, 0] = torch.finfo(dtype).smallest_normal / 4
    expected = saved(path, dtype=dtype, x=x)
    found = open_saved(path)
    for name, tensor in expected.items():
        got = found.weight(name.removeprefix("weights/")) if "/" in name else found.tensor(name)
        assert (got.dtype, got.shape) == (dtype, tensor.shape)
        assert torch.equal(got.isnan(), tensor.isnan())
        whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
        assert torch.equal(got.nan_to_num(7).view(whole), tensor.nan_to_num(7).view(whole))  # NaN's payload may go
    assert found.fingerprint == fingerprint(steps(FFNSpec(4, 6, "swiglu")))
    assert [s.name for s in found.steps] == ["x", "gate", "up", "act", "hidden", "down"]


def test_other_programs_read_them(tmp_path):
    for kind in KINDS:
        expected = saved(tmp_path / f"t{kind}")
    theirs = load_file(tmp_path / "t.safetensors")
    arrays = np.load(tmp_path / "t.npz", allow_pickle=False)
    texts = json.loads((tmp_path / "t.json").read_text())
    assert set(theirs) == set(expected) == set(arrays) - {"ffn_trace"} == set(texts["tensors"])
    for name, tensor in expected.items():
        assert torch.equal(theirs[name], tensor)
        assert np.array_equal(arrays[name], tensor.numpy())
        assert np.array_equal(np.array(texts["tensors"][name]["values"], np.float32), tensor.numpy())
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        record = json.loads(file.metadata()["ffn_trace"])
    assert record == json.loads(str(arrays["ffn_trace"])) == texts["ffn_trace"]
    assert (record["format"], record["steps"][1]["formula"]) == (1, "x · W1")
    assert record["steps"][1]["detail"] == {"into": "d_model 4", "out": "d_ff 6", "bias": "False"}


@pytest.mark.parametrize("kind", KINDS)
def test_inside_experts(tmp_path, kind):
    spec = FFNSpec(4, 6, "swiglu", moe=MoE(3, 2))
    expected = saved(tmp_path / f"t{kind}", spec, inside=None)
    found = open_saved(tmp_path / f"t{kind}")
    inner = [step for step in found.steps if step.inner]
    assert {step.name for step in inner} == {name for name in expected if name.startswith("experts.")}
    route = found.tensor("route")
    for step in inner:
        assert found.tokens(step.name) == route[:, int(step.name.split(".")[1])].nonzero().flatten().tolist()
    assert found.tokens("router") is None
    closed = saved(tmp_path / f"c{kind}", spec)
    assert not any(name.startswith("experts.") for name in closed)


def test_a_mixture_says_what_its_experts_compute(tmp_path):
    spec = FFNSpec(4, 6, "swiglu", moe=MoE(3, 2, expert_norm=True))  # one norm for all experts
    saved(tmp_path / "t.npz", spec)
    (step,) = (step for step in open_saved(tmp_path / "t.npz").steps if step.op == "experts")
    program = next(s.op for s in steps(spec) if isinstance(s.op, Experts)).program
    assert [(one.name, one.inputs) for one in step.program] == [(s.output, s.inputs) for s in program]
    assert [one.op for one in step.program] == ["linear", "linear", "activation", "multiply", "linear", "norm"]
    assert (step.program[0].formula, step.program[0].detail["out"]) == ("x · W1", "d_ff 6")
    assert step.detail["common"] == "expert_norm"
    assert not open_saved(tmp_path / "t.npz").steps[1].program


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_are_read_back_and_compared(tmp_path, kind):
    block = steps(FFNSpec(4, 6, "swiglu", moe=MoE(8, 3, score="sqrtsoftplus", lookup=20)))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    for number, name in ((19, "a"), (3, "b")):
        inputs = {"x": torch.ones(2, 4), "token_ids": torch.tensor([[number], [7]])}
        save(tmp_path / f"{name}{kind}", block, trace(block, weights, inputs, keep=None), {}, weights)
    a, b = (open_saved(tmp_path / f"{name}{kind}") for name in ("a", "b"))
    assert a.tensor("token_ids").tolist() == [[19], [7]]
    assert torch.equal(a.weight("route.lookup"), weights["route.lookup"])  # numbers of experts, in whole numbers
    row = next(row for row in compare(a, b).rows if row.step == "token_ids")
    assert (row.max_error, row.worst, row.base, row.new) == (16, "token_ids[0,0]", 19, 3)
    assert compare(a, a).first is None


@pytest.mark.parametrize(("change", "words"), [
    ({"program": "drop"}, "has a program that does not read one input"),
    ({"program": "twice"}, "has a program that does not read one input"),
    ({"op": "route"}, "has an impossible step 'gate' in its program"),
    ({"out": "d_ff"}, "has an impossible step 'gate' in its program"),
    ({"experts": "experts"}, "does not specify the number of its experts"),
    ({"experts": "experts 2"}, "'experts.2.gate' is inside no expert"),
    ({"inside": "router"}, "'router' is inside no expert"),
])  # fmt: skip
def test_a_mixture_that_was_changed(tmp_path, change, words):
    saved(tmp_path / "t.json", FFNSpec(4, 6, "swiglu", moe=MoE(3, 2)), inside=None)
    values = json.loads((tmp_path / "t.json").read_text())
    by = {step["name"]: step for step in values["ffn_trace"]["steps"]}
    program, detail = by["experts"]["program"], by["experts"]["detail"]
    match change:
        case {"program": "drop"}:
            del program[0]
        case {"program": "twice"}:
            program.append(program[0])
        case {"op": op}:
            program[0]["op"] = op
        case {"out": out}:
            program[0]["detail"]["out"] = out
        case {"experts": experts}:
            detail["experts"] = experts
        case {"inside": name}:
            by[name]["detail"]["inside"] = "expert"
    (tmp_path / "t.json").write_text(json.dumps(values))
    with pytest.raises(FFNError) as error:
        open_saved(tmp_path / "t.json")
    assert words in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "changed", "words"), [
    ("weights/router.weight", torch.zeros(3, 0), "weight 'router.weight' has shape [3, 0], expected [3, 4]"),
    ("weights/router.weight", torch.zeros(4, 3), "weight 'router.weight' has shape [4, 3], expected [3, 4]"),
    ("weights/norm.weight", torch.zeros(0), "weight 'norm.weight' has the impossible shape [0]"),
    ("weights/gate.weight", torch.zeros(2, 6, 4), "weight 'gate.weight' has shape [2, 6, 4], expected [3, 6, 4]"),
    ("weights/down.weight", torch.zeros(3, 6, 4), "weight 'down.weight' has shape [3, 6, 4], expected [3, 4, 6]"),
    ("tokens/experts.0", torch.tensor([0, 5, 2]), "'experts.0.gate' is for tokens that 'norm' does not have"),
    ("tokens/experts.0", torch.tensor([0, -1, 2]), "'experts.0.gate' is for tokens that 'norm' does not have"),
    ("tokens/experts.0", torch.tensor([0, 1]), "'experts.0.gate' does not have a row for each token"),
    ("tokens/experts.0", torch.zeros(3), "'experts.0.gate' does not have a row for each token"),
    ("tokens/experts.0", None, "'experts.0.gate' does not have a row for each token"),
    ("experts.1.down", torch.zeros(3, 5), "'experts.1.down' is not as wide as 'experts'"),
    ("route", torch.zeros(5, 2), "'route' has no entry for each expert of 'experts'"),
    ("router", torch.zeros(4, 3), "'router' does not have the tokens of 'norm', which it reads"),
    ("router", torch.zeros(5, 3, dtype=torch.int64), "'router' holds whole numbers, which only an input does"),
])  # fmt: skip
def test_tensors_that_do_not_fit_the_steps_are_refused_by_every_reader(tmp_path, kind, name, changed, words):
    base, new = tmp_path / f"base{kind}", tmp_path / f"new{kind}"
    saved(base, FFNSpec(4, 6, "swiglu", norm="rmsnorm", moe=MoE(3, 2)), inside=None)
    opened = containers.open_container(base)
    tensors = {one: opened.tensor(one) for one in opened.shapes if one != name or changed is not None}
    if changed is not None:
        tensors[name] = changed
        for step in opened.record["steps"]:
            if step["name"] == name:
                step |= {"shape": [*changed.shape], "dtype": str(changed.dtype).removeprefix("torch.")}
    with new.open("wb") as file:
        containers.write(file, kind, tensors, opened.record)
    for read in (lambda: ffncli.compare(base, new), lambda: ffncli.report(new, tmp_path / "page.html")):
        with pytest.raises(FFNError) as error:
            read()
        assert words in str(error.value)


def test_a_step_reads_only_what_stands_before_it(tmp_path):
    saved(tmp_path / "t.json")
    values = json.loads((tmp_path / "t.json").read_text())
    values["ffn_trace"]["steps"].reverse()
    (tmp_path / "t.json").write_text(json.dumps(values))
    with pytest.raises(FFNError, match="step 'down' reads 'hidden', which is not a step before it"):
        open_saved(tmp_path / "t.json")


def test_blocks_have_fingerprints_of_their_own():
    specs = [
        FFNSpec(4, 6, "silu"), FFNSpec(4, 6, "swiglu"), FFNSpec(4, 7, "silu"), FFNSpec(4, 6, "silu", bias=False),
        FFNSpec(4, 6, "silu", norm="rmsnorm"), FFNSpec(4, 6, "silu", norm="rmsnorm", norm_eps=1e-6),
        FFNSpec(4, 6, "swiglu", moe=MoE(3, 2)), FFNSpec(4, 6, "geglu", moe=MoE(3, 2)),
    ]  # fmt: skip
    assert len({fingerprint(steps(spec)) for spec in specs}) == len(specs)


def test_the_fingerprint_of_a_mixture_is_that_of_files_from_before_experts_could_be_split():
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(4, 2)))
    assert fingerprint(block).startswith("717a600bc7f5e4a8")


def test_nothing_is_copied_whole_for_writing(tmp_path, monkeypatch):
    """What reaches the file are the tensor's own bytes, in .safetensors and .npz alike."""
    tensor = torch.arange(6.0)
    assert np.shares_memory(np.asarray(containers._bytes(tensor)), tensor.numpy())


def test_a_json_of_too_many_values_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "MOST_JSON_VALUES", 10)
    with pytest.raises(FFNError, match=r"too many for a \.json \(the limit is 10\)"):
        saved(tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(tmp_path, kind):
    (tmp_path / f"t{kind}").symlink_to("/dev/full")
    with pytest.raises(FFNError, match="No space left on device") as error:
        saved(tmp_path / f"t{kind}", x=torch.randn(2000, 4))
    assert error.value.code == 3


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    path.write_text("old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(containers, "_bytes", fail)
    with pytest.raises(FFNError, match="No space left"):
        saved(path)
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]
    assert path.read_text() == "old"


# --- files that nobody vouches for ------------------------------------------------------------------------------------


def edited(path: Path, change) -> Path:
    """A saved .json with its record changed."""
    saved(path)
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("ffn_trace"), "is not a saved trace"),
        (lambda w: w.pop("tensors"), "is not a saved trace"),
        (lambda w: w["ffn_trace"].update(format=2), "of format 2; this version reads format 1"),
        (lambda w: w["ffn_trace"].pop("steps"), "it has no field steps"),
        (lambda w: w["ffn_trace"].update(steps=[]), "a step is duplicated, or there is none"),
        (lambda w: w["ffn_trace"].update(steps=[3]), "steps[0] must be an object, got 3"),
        (lambda w: w["ffn_trace"]["steps"][0].update(shape=None), "steps[0].shape must be a list, got None"),
        (lambda w: w["ffn_trace"]["steps"][0].update(name=["x"]), "steps[0].name must be a string, got ['x']"),
        (lambda w: w["ffn_trace"]["steps"][0].update(dtype="int8"), "steps[0].dtype must be one of float64, "),
        (lambda w: w["ffn_trace"]["steps"][0].update(shape=[20]), "not [..., features]"),
        (lambda w: w["ffn_trace"]["steps"][0].update(shape=[5, 5]), "its tensor has another"),
        (lambda w: w["ffn_trace"]["steps"].append(w["ffn_trace"]["steps"][0]), "a step is duplicated"),
        (lambda w: w["tensors"].pop("x"), "its tensor has another"),
        (lambda w: w["tensors"]["x"].pop("shape"), "has no shape or no values"),
        (lambda w: w["tensors"]["x"].update(shape=[-1, 4]), "has no shape or no values"),
        (lambda w: w["tensors"]["x"].update(dtype="object"), "has dtype 'object'"),
        (lambda w: w["tensors"]["x"].update(dtype=["float32"]), "has dtype ['float32']"),
        (lambda w: w["tensors"]["x"]["values"][0].__setitem__(0, 10**400), "a value of 'x' is too large"),
        (lambda w: w["tensors"]["x"]["values"][0].pop(), "do not fill its shape"),
        (lambda w: w["tensors"]["x"]["values"][0].__setitem__(0, "zero"), "do not fill its shape"),
        (lambda w: w["tensors"]["x"]["values"][0].__setitem__(0, True), "do not fill its shape"),
        (lambda w: w["tensors"]["x"].update(values={}), "do not fill its shape"),
        (lambda w: w["tensors"]["x"].update(values=[[1] * 5] * 4), "do not fill its shape"),
    ],
)  # fmt: skip
def test_json_that_was_changed(tmp_path, change, words):
    path = edited(tmp_path / "t.json", change)
    with pytest.raises(FFNError) as error:
        open_saved(path).tensor("x")
    assert words in str(error.value)
    assert str(path) in str(error.value)


def zipped(path: Path, members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def npy(array: np.ndarray, **header) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=True)
    raw = out.getvalue()
    if header:
        out = io.BytesIO()
        plain = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(out, plain | header)
        raw = out.getvalue() + array.tobytes()
    return raw


RECORD = npy(np.array(json.dumps({"format": 1})))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"x.npy": npy(np.zeros(3))}, "is not a saved trace"),
        ({"ffn_trace.npy": npy(np.zeros(3))}, "which no trace uses"),
        ({"ffn_trace.npy": npy(np.array([{}], dtype=object))}, "array 'ffn_trace'"),
        ({"ffn_trace.npy": RECORD, "x.npy": b"no array"}, "is not an array"),
        ({"ffn_trace.npy": RECORD, "x.npy": b""}, "is not an array"),
        ({"ffn_trace.npy": RECORD, "x.npy": npy(np.zeros(3), shape=(10**12,))}, "24 bytes of data"),
        ({"ffn_trace.npy": RECORD, "x.npy": npy(np.zeros(3), shape=(-3,))}, "24 bytes of data"),
        ({"ffn_trace.npy": RECORD, "x.npy": npy(np.zeros(3), fortran_order=True)}, "24 bytes of data"),
        ({"ffn_trace.npy": RECORD, "x.npy": npy(np.zeros(3), descr="|O")}, "bytes of data"),
        ({"ffn_trace.npy": npy(np.array("{}"))}, "of format None"),
        ({"ffn_trace.npy": npy(np.array("["))}, "is not JSON"),
    ],
)
def test_npz_of_others(tmp_path, members, words):
    with pytest.raises(FFNError) as error:
        open_saved(zipped(tmp_path / "t.npz", members))
    assert words in str(error.value)


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    path = zipped(tmp_path / "t.npz", {"ffn_trace.npy": RECORD, "x.npy": bytes(10**7)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**5
    with pytest.raises(FFNError, match="is compressed"):
        open_saved(path)
    noise = np.random.default_rng(0).bytes(1000)  # no smaller when compressed
    zipped(path, {"ffn_trace.npy": RECORD, "x.npy": noise}, zipfile.ZIP_DEFLATED)
    with pytest.raises(FFNError, match="is compressed"):
        open_saved(path)


def test_a_zip_with_a_name_twice_or_damage(tmp_path):
    path = tmp_path / "t.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ffn_trace.npy", RECORD)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("ffn_trace.npy", RECORD)
    with pytest.raises(FFNError, match="is duplicated"):
        open_saved(path)
    saved(path)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"\x93NUMPY", raw.index(b"x.npy")) + 130
    raw[at] ^= 255
    path.write_bytes(raw)
    with pytest.raises(FFNError, match="is damaged: Bad CRC-32"):
        open_saved(path).tensor("x")
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(FFNError, match=r"is not a \.npz file"):
        open_saved(path)


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"ffn_trace": "["}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"ffn_trace": "{}"}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"ffn_trace": "{}"}, "x": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}},
        {"__metadata__": {"ffn_trace": "{}"}, "x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}},
    ],
)
def test_safetensors_of_others(tmp_path, header):
    path = tmp_path / "t.safetensors"
    path.write_bytes(raw_safetensors(header))
    with pytest.raises(FFNError, match=r"t\.safetensors"):
        open_saved(path)
