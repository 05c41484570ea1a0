"""Checkpoints: what is read is what was stored, what does not fit is named; the inventory; `.pt` files."""

import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ffncli
from ffncli.errors import FFNError
from ffncli.models.files.checkpoint import open_checkpoint, read_pickled
from ffncli.models.source import load
from ffncli.run.engine.weights import stored_layer
from tests.oracles.checkpoints import (
    GPT2,
    INDEX,
    LLAMA,
    MIXTRAL,
    T5,
    expect_difference,
    expect_refusal,
    folder,
    harmful,
    tensors,
)
from tests.oracles.modules import Plain

CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}
UP = "model.layers.0.mlp.up_proj.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
HOSTILE = "\x1b[31m[/x]\n\x9b2J"


# --- values -----------------------------------------------------------------------------------------------------------


def _layer(source: str, text: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load(source)
    found = stored_layer(model, model.model.layer(text), dtype)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16])
def test_a_layer_is_read_as_it_was_stored(stored: torch.dtype, asked: torch.dtype, tmp_path: Path):
    llama, gpt2, mixtral = (tensors(name, stored) for name in CONFIGS)
    stem = "model.layers.1.mlp."
    same = {f"{n}.weight": llama[f"{stem}{n}_proj.weight"] for n in ("gate", "up", "down")}
    _assert_equal(_layer(folder(tmp_path / "l", LLAMA, llama), "1", asked), same, asked)

    stem = "transformer.h.1.mlp."
    turned = {"up.weight": gpt2[f"{stem}c_fc.weight"].T, "down.weight": gpt2[f"{stem}c_proj.weight"].T}
    biases = {"up.bias": gpt2[f"{stem}c_fc.bias"], "down.bias": gpt2[f"{stem}c_proj.bias"]}
    _assert_equal(_layer(folder(tmp_path / "g", GPT2, gpt2), "1", asked), turned | biases, asked)

    stem = "model.layers.1.block_sparse_moe."
    stacked = {
        f"{name}.weight": torch.stack([mixtral[f"{stem}experts.{e}.{w}.weight"] for e in range(4)])
        for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    }
    found = _layer(folder(tmp_path / "m", MIXTRAL, mixtral), "1", asked)
    router = {"router.weight": mixtral[f"{stem}gate.weight"]}
    _assert_equal({n.removeprefix("experts."): t for n, t in found.items()}, stacked | router, asked)


def _assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, tensor in wanted.items():
        assert found[name].dtype == dtype
        assert found[name].is_contiguous()
        assert torch.equal(found[name], tensor.to(dtype))
    assert {name for name in found if "norm" not in name} == set(wanted)


def _shards(path: Path, config: dict[str, Any], stored: dict[str, Any], **changes: Any) -> str:
    """Layer 0 in one shard, layer 1 in another, and the index; `changes` go into the index's weight_map."""
    folder(path, config)
    names = {name: f"model-0000{1 + ('.1.' in name)}-of-00002.safetensors" for name in stored}
    for shard in set(names.values()):
        save_file({n: t for n, t in stored.items() if names[n] == shard}, path / shard)
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {**names, **changes}}))
    return str(path)


def test_only_the_shard_of_the_layer_is_opened(call, tmp_path: Path):
    stored = tensors("llama")
    source = _shards(tmp_path, LLAMA, stored)
    assert torch.equal(_layer(source, "0")["up.weight"], stored[UP])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(_layer(source, "0")["up.weight"], stored[UP])
    expect_refusal(
        call("trace", source, "--layer", "1"), "model-00002-of-00002.safetensors", "is the download complete?"
    )


def test_files_without_an_index_are_read_together(call, tmp_path: Path):
    source = _shards(tmp_path, LLAMA, tensors("llama"))
    (tmp_path / INDEX).unlink()
    assert set(_layer(source, "1")) >= {"gate.weight", "up.weight", "down.weight"}
    save_file({UP: torch.zeros(6, 4)}, tmp_path / "again.safetensors")
    expect_refusal(call("params", source), tmp_path, UP, "two files")


def test_a_directory_without_tensors_has_no_checkpoint(tmp_path: Path):
    assert open_checkpoint(tmp_path) is None


# --- checkpoints that do not hold what they should --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "weight_map"), ({"weight_map": None}, "weight_map"), ({"weight_map": []}, "weight_map"),
        ({"weight_map": {}}, "weight_map"), ({"weight_map": "model.safetensors"}, "weight_map"), ([], "array"),
        *[
            ({"weight_map": {UP: shard}}, shown)
            for shard, shown in {
                "../model.safetensors": "'../model.safetensors'", "/etc/passwd": "'/etc/passwd'", "a\\b": r"'a\\b'",
                "": "''", ".": "'.'", "..": "'..'", "sub/a.safetensors": "'sub/a.safetensors'", "C:a": "'C:a'",
                "\x1b[31m": r"'\x1b[31m'", "a\0b": r"'a\x00b'", "a\n": r"'a\n'", "~": "'~'",
            }.items()
        ],
        *[({"weight_map": {UP: shard}}, repr(shard)) for shard in (5, None, True, [])],
    ],
)  # fmt: skip
def test_an_index_that_cannot_be(index: Any, says: str, call, tmp_path: Path):
    source = folder(tmp_path / "m", LLAMA, tensors("llama"))
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "model.safetensors")  # what "../" would reach
    (tmp_path / "m" / INDEX).write_text(json.dumps(index))
    expect_refusal(call("params", source), tmp_path / "m" / INDEX, says)
    expect_refusal(call("trace", source), tmp_path / "m" / INDEX, says)


def test_an_index_that_promises_too_much(call, tmp_path: Path):
    stored = tensors("llama")
    missing = stored.pop(UP)
    source = _shards(tmp_path, LLAMA, stored, **{UP: "model-00002-of-00002.safetensors"})
    expect_refusal(call("trace", source), "model-00002-of-00002.safetensors", UP, "not in this file")
    source = _shards(tmp_path / "no", LLAMA, {**stored, UP: missing}, **{UP: "x" * 300})
    expect_refusal(call("trace", source), "xxx", "too long")


@pytest.mark.parametrize(
    ("family", "tensor"),
    [("llama", UP), ("llama", "model.layers.0.mlp.down_proj.weight"), ("mixtral", EXPERT),
     ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"), ("gpt2", "transformer.h.0.mlp.c_proj.bias")],
)  # fmt: skip
def test_a_missing_tensor_is_named(family: str, tensor: str, call, tmp_path: Path):
    stored = tensors(family)
    del stored[tensor]
    source = folder(tmp_path, CONFIGS[family], stored)
    for command in ("params", "trace"):
        expect_refusal(call(command, source), tmp_path / "model.safetensors", tensor, "missing")


def test_a_missing_norm_matters_to_what_is_run_alone(call, tmp_path: Path):
    stored, norm = tensors("llama"), "model.layers.0.post_attention_layernorm.weight"
    del stored[norm]
    source = folder(tmp_path, LLAMA, stored)
    expect_refusal(call("trace", source), norm, "missing")
    assert call("params", source)[::2] == (0, "")


def test_fewer_experts_or_layers_than_the_config_says(call, tmp_path: Path):
    source = folder(tmp_path, {**MIXTRAL, "num_local_experts": 100_000}, tensors("mixtral"))
    expect_difference(call("params", source), "num_local_experts: the config says 100000, the tensors 4", "experts.0.")
    expect_refusal(call("trace", source), "model.safetensors", "layers.0.block_sparse_moe.experts.4.", "missing")
    source = folder(tmp_path, {**LLAMA, "num_hidden_layers": 3}, tensors("llama"))
    expect_difference(call("params", source), "num_hidden_layers: the config says 3, the tensors 2", "model.layers.2 ")
    expect_refusal(call("trace", source, "--layer", "2"), "model.safetensors", "model.layers.2.")
    assert "num_hidden_layers" in call("trace", source)[2]  # a layer that is there runs, with a note


def test_a_file_of_another_model(call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, tensors("gpt2"))
    says = "gated (by model_type llama): the config says True, the tensors False"
    expect_difference(call("params", source), says, "transformer.h.0.mlp.c_fc.weight", "and 1 more")
    code, out, err = call("trace", source)  # what is there is run, and what differs is said
    assert (code, says in err, "this file does not describe the norm before the FFN" in err) == (0, True, True)
    assert "the tensors override model_type llama, which is gated" in out


@pytest.mark.parametrize(
    ("family", "changes", "says", "tensor"),
    [
        ("llama", {"intermediate_size": 5}, "intermediate_size: the config says 5, the tensors 6", "gate_proj.weight"),
        ("llama", {"hidden_size": 6}, "hidden_size: the config says 6, the tensors 4", "model.layers.0."),
        ("gpt2", {"n_inner": 5}, "n_inner: the config says 5, the tensors 6", "mlp.c_fc.weight"),
        ("gpt2", {"n_inner": None}, "n_inner: the config says 16, the tensors 6", "mlp.c_fc.weight"),
        ("mixtral", {"intermediate_size": 7}, "intermediate_size: the config says 7, the tensors 6", "experts.0."),
        ("mixtral", {"num_local_experts": 3}, "num_local_experts: the config says 3, the tensors 4", "moe."),
    ],
)
def test_shapes_that_contradict_the_config(
    family: str, changes: dict[str, Any], says: str, tensor: str, call, tmp_path: Path
):
    source = folder(tmp_path, {**CONFIGS[family], **changes}, tensors(family))
    expect_difference(call("params", source), says, tensor)
    expect_refusal(call("trace", source), tmp_path / "model.safetensors", "tensor", "has shape", "expected")


@pytest.mark.parametrize("expert", [0, 2])
def test_one_tensor_of_another_shape_is_named(expert: int, call, tmp_path: Path):
    name = f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"
    source = folder(tmp_path, MIXTRAL, {**tensors("mixtral"), name: torch.zeros(5, 4)})
    for command in ("params", "trace"):
        expect_refusal(call(command, source), tmp_path / "model.safetensors", name, "[5, 4], expected [6, 4]")


def test_experts_of_two_dtypes_are_experts_all_the_same(json_of, tmp_path: Path):
    stored = tensors("mixtral")
    stored[EXPERT] = stored[EXPERT].bfloat16()
    (row,) = json_of("params", folder(tmp_path, MIXTRAL, stored))["rows"]
    ffn = {name: tensor for name, tensor in stored.items() if "norm" not in name}
    assert row["ffn_params_stored"] == sum(tensor.numel() for tensor in ffn.values())
    assert row["ffn_stored_bytes"] == sum(tensor.nbytes for tensor in ffn.values())
    assert row["stored_bytes"] == sum(tensor.nbytes for tensor in stored.values())


def test_a_family_without_a_row_of_its_own_is_read(call, tmp_path: Path):
    spelled = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    stored = {}
    for name, tensor in tensors("mixtral").items():
        for theirs, ours in spelled.items():
            name = name.replace(theirs, ours)
        stored[name] = tensor
    config = {**MIXTRAL, "model_type": "olmoe", "num_experts": 4}
    source = folder(tmp_path, config, stored)
    assert call("params", source)[::2] == (0, "")
    found = _layer(source, "1")
    assert torch.equal(found["up.weight"][3], stored["model.layers.1.mlp.experts.3.up_proj.weight"])
    assert torch.equal(found["router.weight"], stored["model.layers.1.mlp.gate.weight"])


def test_experts_asked_of_a_dense_checkpoint(call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, tensors("llama"))
    expect_refusal(call("trace", source, "--experts", "4"), "no experts under", "a llama checkpoint has no such layers")


def test_a_transposed_matrix_is_not_taken_for_the_other(call, tmp_path: Path):
    stored = tensors("llama")
    stored[UP] = stored[UP].T.contiguous()
    expect_refusal(call("trace", folder(tmp_path, LLAMA, stored)), UP, "[4, 6], expected [6, 4]")


@pytest.mark.parametrize(
    ("dtype", "code", "shape"),
    [(torch.float8_e4m3fn, "F8_E4M3", (6, 4)), (torch.uint8, "U8", (6, 4)), (torch.uint8, "U8", (12, 1)),
     (torch.int8, "I8", (6, 4)), (torch.int32, "I32", (6, 1))],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_bytes_and_words_alone_are_refused_by_name(
    family: str, dtype: torch.dtype, code: str, shape: tuple[int, int], call, tmp_path: Path
):
    name = UP if family == "llama" else EXPERT
    stored = {**tensors(family), name: torch.zeros(shape).to(dtype)}
    source = folder(tmp_path, CONFIGS[family], stored)
    says = "its scales" if code == "F8_E4M3" else f"is stored as {code}"
    expect_refusal(call("trace", source), tmp_path / "model.safetensors", name, says)


def test_packed_weights_are_counted_as_stored(call, json_of, tmp_path: Path):
    """GPTQ, 4 bits in groups of 32: eight values to a word, a scale and a zero for each group and output."""
    config = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    stored = {"model.layers.0.post_attention_layernorm.weight": torch.zeros(64)}
    for n, (outs, ins) in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
        stem = f"model.layers.0.mlp.{n}_proj."
        stored[f"{stem}qweight"] = torch.zeros(ins // 8, outs, dtype=torch.int32)
        stored[f"{stem}qzeros"] = torch.zeros(ins // 32, outs // 8, dtype=torch.int32)
        stored[f"{stem}scales"] = torch.zeros(ins // 32, outs, dtype=torch.float16)
    (row,) = json_of("params", folder(tmp_path, config, stored))["rows"]
    packed = sum(tensor.nbytes for name, tensor in stored.items() if "norm" not in name)
    assert row["ffn_params_stored"] == row["ffn_params_total"] == 3 * 64 * 96
    assert row["ffn_stored_bytes"] == row["weight_bytes"] == packed == 3 * 64 * 96 * (4 + 20 / 32) / 8
    assert row["ffn_bits_per_weight"] == 4 + 20 / 32
    torn = {**stored, "model.layers.0.mlp.down_proj.qweight": torch.zeros(1, dtype=torch.int32)}
    for command in ("params", "trace"):
        expect_refusal(call(command, folder(tmp_path, config, torn)), "down_proj.qweight", "not a matrix")


def test_mxfp4_experts_are_counted(json_of, tmp_path: Path):
    """gpt-oss: blocks of 32 values in 16 bytes, a scale of one byte for each."""
    d_model, d_ff, experts = 64, 96, 4
    config = {**MIXTRAL, "model_type": "gpt_oss", "hidden_size": d_model, "intermediate_size": d_ff}
    config |= {"num_hidden_layers": 1, "quantization_config": {"quant_method": "mxfp4"}}
    stem = "model.layers.0.mlp."
    stored = {f"{stem}router.weight": torch.zeros(experts, d_model), f"{stem}router.bias": torch.zeros(experts)}
    for n, outs, ins in (("gate_up_proj", 2 * d_ff, d_model), ("down_proj", d_model, d_ff)):
        stored[f"{stem}experts.{n}_blocks"] = torch.zeros(experts, outs, ins // 32, 16, dtype=torch.uint8)
        stored[f"{stem}experts.{n}_scales"] = torch.zeros(experts, outs, ins // 32, dtype=torch.uint8)
        stored[f"{stem}experts.{n}_bias"] = torch.zeros(experts, outs)
    (row,) = json_of("params", folder(tmp_path, config, stored))["rows"]
    biases = experts * (2 * d_ff + d_model) + experts
    wanted = experts * 3 * d_model * d_ff + biases + experts * d_model
    assert row["ffn_params_total"] == row["ffn_params_stored"] == wanted
    assert row["ffn_stored_bytes"] == sum(tensor.nbytes for tensor in stored.values())


def test_a_gated_family_without_a_gate_is_plain(call, tmp_path: Path):
    stored = {name: tensor for name, tensor in tensors("llama").items() if "gate_proj" not in name}
    source = folder(tmp_path, LLAMA, stored)
    out = expect_difference(call("params", source), "gated (by model_type llama): the config says True", "up_proj")
    assert "plain: tensor 'model.layers.0.mlp.up_proj.weight'" in out
    assert "the tensors override model_type llama, which is gated" in out
    code, out, err = call("trace", source)
    assert (code, len(err.splitlines())) == (0, 1)
    assert "plain" in out.splitlines()[1]


def test_a_missing_gate_is_missing_where_another_layer_has_one(call, tmp_path: Path):
    stored = {name: tensor for name, tensor in tensors("llama").items() if "layers.0.mlp.gate" not in name}
    expect_refusal(call("params", folder(tmp_path, LLAMA, stored)), "layers.0.mlp.gate_proj.weight", "missing")


@pytest.mark.parametrize(("stored", "dtype", "size"), [(torch.bfloat16, "bf16", 2), (torch.float64, "fp64", 8)])
def test_the_dtype_is_the_stored_one(stored: torch.dtype, dtype: str, size: int, call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, {name: tensor.to(stored) for name, tensor in tensors("llama").items()})
    (row,) = json.loads(call("params", source, "--json")[1])["rows"]
    assert (row["dtype"], row["weight_bytes"]) == (dtype, size * row["ffn_params_total"])


def test_a_dtype_that_nothing_is_computed_in_counts_what_is_stored(call, tmp_path: Path):
    stored = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors("llama").items()}
    (row,) = json.loads(call("params", folder(tmp_path, LLAMA, stored), "--json")[1])["rows"]
    assert (row["dtype"], row["weight_bytes"]) == ("fp8", 2 * 3 * 4 * 6)


def test_hostile_names_of_other_tensors_do_no_harm(call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, {**tensors("llama"), HOSTILE: torch.zeros(1), "[/x]": torch.zeros(1)})
    for command in ("params", "trace"):
        code, out, err = call(command, source)
        assert code == 0
        assert harmful(out + err) == []


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", ["2", "99", "-1", "x", "1.5", "", "³", "1e0", "9" * 5000, "decoder.2", "encoder.0", "."]
)
def test_a_layer_that_is_not_there(layer: str, call, tmp_path: Path):
    expect_refusal(call("trace", folder(tmp_path, LLAMA, tensors("llama")), "--layer", layer), "--layer", layer[:50])


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ("1", ["'1' is ambiguous", "encoder.1 or decoder.1"]),
        ("0", ["encoder.0", "decoder.0"]),
        ("decoder.99", ["99", "decoder", "0 to 1"]),
        ("encoder.-1", ["encoder.-1"]),
        ("middle.0", ["middle", "encoder layers 0 to 1 and decoder layers 0 to 1"]),
        ("decoder.", ["decoder."]),
    ],
)
def test_a_layer_of_two_stacks(layer: str, says: list[str], call, tmp_path: Path):
    expect_refusal(call("trace", folder(tmp_path, T5), "--layer", layer), "--layer", *says)


def layers(count: int = 2) -> dict[str, torch.Tensor]:
    """The weights of a model of two layers under GPT-2's names, [out, in]."""
    torch.manual_seed(3)
    out = {}
    for i in range(count):
        for name, linear in (("c_fc", nn.Linear(8, 32)), ("c_proj", nn.Linear(32, 8))):
            out |= {f"h.{i}.mlp.{name}.{key}": value.detach() for key, value in linear.named_parameters()}
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", ["", "state_dict", "model"])
def test_bytes_are_those_that_torch_reads(tmp_path: Path, dtype: torch.dtype, inside: str) -> None:
    path = tmp_path / "raw.pt"
    weights = {name: tensor.to(dtype) for name, tensor in layers().items()}
    torch.save({inside: weights, "step": 3} if inside else weights, path)
    columns, raw = read_pickled(path), path.read_bytes()
    assert columns.names == [*weights]
    for name, shape, size, start in zip(columns.names, columns.shapes, columns.bytes, columns.starts, strict=True):
        ours = torch.frombuffer(bytearray(raw[start : start + size]), dtype=dtype).view(shape)
        assert torch.equal(ours, weights[name])


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_layer_is_traced_with_its_weights(tmp_path: Path, suffix: str) -> None:
    path, weights = tmp_path / f"raw{suffix}", layers()
    torch.save(weights, path)
    session = ffncli.trace(path, layer=1, activation="gelu", tokens=3)
    x = session["x"]
    up = nn.functional.linear(x, weights["h.1.mlp.c_fc.weight"], weights["h.1.mlp.c_fc.bias"])
    down = nn.functional.linear(
        nn.functional.gelu(up), weights["h.1.mlp.c_proj.weight"], weights["h.1.mlp.c_proj.bias"]
    )
    assert torch.allclose(session["down"], down, atol=1e-6)
    assert ffncli.count(path).ffn_params_total == sum(t.numel() for t in weights.values())
    with pytest.raises(FFNError, match="does not specify its activation"):
        ffncli.trace(path, layer=1)
    with pytest.raises(FFNError, match="is pickled, but transformers is given only safetensors"):
        ffncli.trace(path, layer=1, prompt="Hello")


@pytest.mark.parametrize("parent", ["", "mlp.", "_orig_mod.ffn."])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_bare_ffn_has_one_layer(tmp_path: Path, parent: str, suffix: str) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weights = {f"{parent}fc1.weight": torch.randn(32, 8), f"{parent}fc2.weight": torch.randn(8, 32)}
    path = tmp_path / f"bare{suffix}"
    torch.save(weights, path) if suffix == ".pt" else save_file(weights, path)
    session = ffncli.trace(path, activation="relu", tokens=2)
    up, down = weights.values()
    assert torch.allclose(session["down"], (session["x"] @ up.T).relu() @ down.T, atol=1e-5)
    assert (session.block.d_model, session.block.d_ff, session.block.layer) == (8, 32, 0)
    assert any(f"{parent}fc1.weight" in text for text in session.block.evidence)


def test_only_tensors_are_unpickled(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "planted"),)

    for name, value in (("planted", {"x": Planted()}), ("module", Plain(4, 8))):
        torch.save(value, tmp_path / f"{name}.pt")
        with pytest.raises(FFNError, match="contains more than tensors"):
            ffncli.count(tmp_path / f"{name}.pt")
    assert not (tmp_path / "planted").exists() or not (tmp_path / "planted").is_dir()


def changed_archive(path: Path, change: Any) -> None:
    """The archive written again, its entries through `change`."""
    with zipfile.ZipFile(path) as old:
        entries = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        change(new, entries)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.pt"
    torch.save(layers(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(FFNError, match=r"is not a file of torch\.save since"):
        ffncli.count(path)
    torch.save(layers(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FFNError, match=r"is not a file of torch\.save since"):
        ffncli.count(path)
    path.write_bytes(whole)
    changed_archive(path, lambda new, entries: [
        new.writestr(name, data, zipfile.ZIP_DEFLATED) for name, data in entries.items()])  # fmt: skip
    with pytest.raises(FFNError, match="are compressed"):
        ffncli.count(path)
    for value, why in (
        ([1, 2], "contains no dictionary"),
        ({"a": 1}, "contains no dictionary"),
        ({}, "contains no dictionary"),
    ):
        torch.save(value, path)
        with pytest.raises(FFNError, match=why):
            ffncli.count(path)
    torch.save({"fc1.weight": torch.randn(8, 32).T, "fc2.weight": torch.randn(8, 32)}, path)
    with pytest.raises(FFNError, match="is not stored contiguously in the file"):
        ffncli.count(path)


def test_tensors_of_torchs_own_kinds_are_refused_without_its_warnings(tmp_path: Path):
    with warnings.catch_warnings(action="ignore"):  # of torch, about what it writes here
        quantized = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)
    for tensor, message in (
        (quantized, "contains quantized tensors of torch"),
        (torch.eye(4).to_sparse(), "is sparse"),
    ):
        torch.save({"a": tensor}, tmp_path / "m.pt")
        torch.storage._reset_warn_typed_storage_removal()  # torch warns once per process
        told = warnings.catch_warnings(record=True, action="always", category=UserWarning)
        with told as shown, pytest.raises(FFNError, match=message):
            read_pickled(tmp_path / "m.pt")
        assert not shown
