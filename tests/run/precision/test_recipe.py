"""Recipes of a choice: formats as the libraries' own presets have them, names as they find them."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import ffncli
from ffncli.block.formats import FORMATS
from ffncli.errors import FFNError
from tests.oracles.checkpoints import LLAMA, MIXTRAL, folder, sensitive

yaml = pytest.importorskip("yaml")
SIZES = {"hidden_size": 128, "intermediate_size": 128}


def model(path: Path, config: dict[str, Any] = LLAMA) -> str:
    """Write a model of two layers whose matrices fit every format of blocks of up to 128 values."""
    import torch

    shape, stored = (128, 128), {}
    for i in range(2):
        stem, names = f"model.layers.{i}.", [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        if config is MIXTRAL:
            names = [f"block_sparse_moe.experts.{e}.{w}" for e in range(4) for w in ("w1", "w3", "w2")]
            stored[f"{stem}block_sparse_moe.gate.weight"] = torch.randn(4, 128)
        stored |= {f"{stem}{name}.weight": torch.randn(shape) / 11 for name in names}
        stored[f"{stem}post_attention_layernorm.weight"] = torch.ones(128)
    return folder(path, {**config, **SIZES}, stored)


def written(tmp_path: Path, target: str, dtype: Any, budget: float, what: str = "weights", source: str = "") -> Any:
    """Return the choice and the text of its recipe."""
    file = tmp_path / "recipe"
    found = ffncli.precision(
        source or model(tmp_path / "model"), layer="all", tokens=4, dtype=dtype, budget=budget, what=what,
        recipe=f"{target}:{file}", force=True,
    )  # fmt: skip
    assert found.notes[-1] == f"wrote {file}" or "vLLM runs them as one matrix" in found.notes[-1]
    return found.budget, file.read_text()


PRESETS = {
    "nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "fp8": "FP8_DYNAMIC", "fp8:block128": "FP8_BLOCK",
    "int8": "W8A8", "int4": "W4A16", "int4:asymmetric": "W4A16_ASYM",
}  # fmt: skip


@pytest.mark.parametrize(("form", "preset"), PRESETS.items())
def test_llm_compressor_s_schemes_are_its_presets(tmp_path, form, preset):
    from compressed_tensors.quantization.quant_scheme import QuantizationScheme, preset_name_to_scheme

    what = "weights" if form.startswith("int4") else "both"
    _, text = written(tmp_path, "llm-compressor", form, 20, what)
    (group,) = yaml.safe_load(text)["default_stage"]["default_modifiers"]["QuantizationModifier"][
        "config_groups"
    ].values()
    ours, theirs = QuantizationScheme(**group), preset_name_to_scheme(preset, group["targets"])
    for side in ("weights", "input_activations"):
        a, b = getattr(ours, side), getattr(theirs, side)
        if b is None:
            assert a is None
            continue
        differ = {name for name in type(a).model_fields if getattr(a, name) != getattr(b, name)}
        assert differ <= {"observer", "zp_dtype"} | ({"scale_dtype"} if form == "nvfp4" else set()), differ


@pytest.mark.models
def test_llm_compressor_finds_the_modules(tmp_path):
    from compressed_tensors.utils import match_named_modules

    from tests.oracles.prompted import made

    llama = made("llama")
    budget, text = written(tmp_path, "llm-compressor", ("fp8", "bf16", "int8"), 13, source=str(llama.path))
    modifier = yaml.safe_load(text)["default_stage"]["default_modifiers"]["QuantizationModifier"]
    parts = {"W1": "gate", "W3": "up", "W2": "down"}
    chosen: dict[str, set[str]] = {}
    for one in budget.choices:
        chosen.setdefault(one.format, set()).add(f"model.layers.{one.layer}.mlp.{parts[one.tensor]}_proj")
    assert "bf16" in chosen
    found = {
        frozenset(name for name, _ in match_named_modules(llama.model, group["targets"], modifier["ignore"]))
        for group in modifier["config_groups"].values()
    }
    assert found == {frozenset(names) for form, names in chosen.items() if form != "bf16"}
    assert {name for name, _ in match_named_modules(llama.model, modifier["ignore"])} == {
        "lm_head", *chosen.get("bf16", set()),
    }  # fmt: skip


# The attributes in ModelOpt 0.47's own presets: modelopt_recipes/configs/numerics and .../ptq/presets/model.
ATTRIBUTES: dict[str, tuple[Any, Any]] = {
    "nvfp4": ({"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}},) * 2,
    "mxfp8": ({"num_bits": "e4m3", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e8m0"}},) * 2,
    "fp8": (
        {"num_bits": "e4m3", "axis": 0},
        {"num_bits": "e4m3", "type": "dynamic", "block_sizes": {-1: None}},
    ),
    "fp8:tensor": ({"num_bits": "e4m3", "axis": None}, {"num_bits": "e4m3", "axis": None, "type": "dynamic"}),
    "fp8:block128": (
        {"num_bits": "e4m3", "block_sizes": {-1: 128, -2: 128}},
        {"num_bits": "e4m3", "block_sizes": {-1: 128, "type": "dynamic"}},
    ),
    "int4": ({"num_bits": 4, "block_sizes": {-1: 128}}, {"num_bits": 4, "block_sizes": {-1: 128, "type": "dynamic"}}),
    "int8": ({"num_bits": 8, "axis": 0}, {"num_bits": 8, "type": "dynamic", "block_sizes": {-1: None}}),
}  # fmt: skip


@pytest.mark.parametrize(("form", "attributes"), ATTRIBUTES.items())
def test_modelopt_s_attributes_are_its_own(tmp_path, form, attributes):
    _, text = written(tmp_path, "modelopt", form, 20, "both")
    recipe = yaml.safe_load(text)
    first, *entries = recipe["quantize"]["quant_cfg"]
    assert (recipe["metadata"]["recipe_type"], recipe["quantize"]["algorithm"]) == ("ptq", "max")
    assert first == {"quantizer_name": "*", "enable": False}
    assert len(entries) == 2 * 6
    for one in entries:
        assert one["cfg"] == attributes[one["quantizer_name"].endswith(".input_quantizer")]


def test_modelopt_s_wildcards_name_every_expert(tmp_path):
    budget, text = written(tmp_path, "modelopt", ("fp8", "bf16"), 10, source=model(tmp_path / "m", MIXTRAL))
    names = {one["quantizer_name"] for one in yaml.safe_load(text)["quantize"]["quant_cfg"][1:]}
    parts = {"W1": "w1", "W3": "w3", "W2": "w2"}
    for one in budget.choices:
        stem = f"model.layers.{one.layer}.block_sparse_moe.experts.3.{parts[one.tensor]}.weight_quantizer"
        assert any(fnmatch(stem, name) for name in names) == (one.format == "fp8")


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL])
def test_llama_cpp_s_names_and_types_are_gguf_s(tmp_path, config):
    import gguf

    source = model(tmp_path / "m", config)
    budget, text = written(tmp_path, "llama.cpp", ("q8_0", "q4_0", "bf16"), 8, source=source)
    parts = {"W1": "gate", "W3": "up", "W2": "down"}
    words = text.split()
    assert len(words) == 6
    assert len({one.format for one in budget.choices}) > 1
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for one in budget.choices:
        stem = f"model.layers.{one.layer}.mlp.{parts[one.tensor]}_proj"
        if config is MIXTRAL:  # the converter joins the experts under this name
            stem = f"layers.{one.layer}.feed_forward.experts.{ {'W1': 'w1', 'W3': 'w3', 'W2': 'w2'}[one.tensor] }"
        tensor = f"{names.get_name(stem)}.weight"
        (kind,) = [word.rpartition("=")[2] for word in words if re.search(word.rpartition("=")[0], tensor)]
        assert gguf.GGMLQuantizationType[kind.upper()].name.lower() == one.format


def test_every_ggml_type_is_gguf_s():
    import gguf

    from ffncli.run.precision.recipe import _GGML

    assert {one.upper() for one in _GGML.values()} <= {one.name for one in gguf.GGMLQuantizationType}
    assert {name for name, row in FORMATS.items() if "gguf" in row.rules} <= {*_GGML}


@pytest.mark.parametrize(
    ("target", "form", "message"),
    [
        (
            "llm-compressor",
            "q4_0",
            r"recipe: llm-compressor has no q4_0; it has bf16, fp16, fp8, mxfp8, mxfp4, nvfp4, ",
        ),
        ("llm-compressor", "fp8:block128:pow2", "llm-compressor has no fp8:block128:pow2"),
        ("modelopt", "int4:asymmetric", "modelopt has no int4:asymmetric"),
        ("llama.cpp", "nvfp4", "llama.cpp has no nvfp4; it has bf16, fp16, mxfp4, q8_0, q4_0, q4_1, q5_0, q5_1, tq1_0"),
    ],
)
def test_a_format_that_a_target_lacks_is_refused(tmp_path, target, form, message):
    with pytest.raises(FFNError, match=message):
        written(tmp_path, target, ["fp16", form], 20)


def test_a_file_is_kept_and_a_missing_directory_is_said_before_anything_runs(tmp_path):
    source, file = sensitive(tmp_path / "nan", float("nan"), 0, 0), tmp_path / "kept"
    file.write_text("kept")
    asked = {"layer": "all", "dtype": "fp8", "budget": 9}
    with pytest.raises(FFNError, match="exists already; choose another recipe FILE"):
        ffncli.precision(source, recipe=f"llama.cpp:{file}", **asked)
    with pytest.raises(FFNError, match="there is no directory"):
        ffncli.precision(source, recipe=f"llama.cpp:{tmp_path}/none/file", **asked)
    assert file.read_text() == "kept"
    for bad in ("llama.cpp", "llama.cpp:", "tensorrt:file"):
        with pytest.raises(FFNError, match="recipe must be a target and a file"):
            ffncli.precision(source, recipe=bad, **asked)


def test_a_block_without_files_has_no_names(tmp_path):
    with pytest.raises(FFNError, match="recipe names tensors, so it needs a model's files"):
        ffncli.precision("64x64:relu", dtype="q8_0", budget=9, recipe=f"llama.cpp:{tmp_path}/file")


def test_matrices_in_one_tensor_are_refused(tmp_path):
    import torch

    stem = "model.layers.{}."
    stored = {
        f"{stem.format(i)}{name}": torch.randn(shape)
        for i in range(2)
        for name, shape in (
            ("mlp.gate_up_proj.weight", (256, 128)), ("mlp.down_proj.weight", (128, 128)),
            ("post_attention_layernorm.weight", (128,)),
        )
    }  # fmt: skip
    source = folder(tmp_path / "phi3", {**LLAMA, **SIZES, "model_type": "phi3"}, stored)
    with pytest.raises(
        FFNError, match=r"cannot give W1 a format of its own: the model's files have it in .*gate_up_proj"
    ):
        written(tmp_path, "llama.cpp", ("q8_0", "q4_0"), 8, source=source)


def test_a_gguf_file_has_its_own_names(tmp_path):
    from tests.oracles.gguf_files import LAYERS, llama, write

    source = str(write(tmp_path / "m.gguf", llama()))
    _, text = written(tmp_path, "llama.cpp", "q8_0", 9, source=source)
    parts = ("gate", "up", "down")
    assert {word.replace("\\", "") for word in text.split()} == {
        f"^blk.{i}.ffn_{part}.weight$=q8_0" for i in range(LAYERS) for part in parts
    }
    for target in ("modelopt", "llm-compressor"):
        with pytest.raises(
            FFNError, match=f"a GGUF file has no names of {target}; give the directory it was made from"
        ):
            written(tmp_path, target, "fp8", 9, source=source)
