"""The bytes of quantised models outside their FFNs, from the config alone: every family's projections against the
modules of transformers on the meta device. transformers also says what a list of modules leaves out."""

import json
import re
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ffncli.errors import FFNError
from ffncli.models.config.packed_model import packed_model, unknown_packing
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.model import Resolved
from tests.oracles.architectures import build, cases, towers
from tests.oracles.architectures.tiny import statement

CASES = {**cases(), **towers()}
TOWER = re.compile(r"vision|visual|audio|tower|projector|connector|encoder\.")
SIZE = 8  # of a tile, a group: every tiny matrix has several
FP8 = {"quant_method": "fp8", "weight_block_size": [SIZE, SIZE]}
INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"all": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": SIZE, "symmetric": True}}},
}  # fmt: skip
LEAVES = ["in_proj_ba", "in_proj_a", "kv_b_proj", "weights_proj", "o_proj"]  # modules that published configs leave out


def read(model: nn.Module, name: str, quantization: dict[str, Any] | None = None) -> Resolved:
    values = json.loads(json.dumps(model.config.to_dict(), default=str)) | {"dtype": "bfloat16"}
    return from_config(values | ({"quantization_config": quantization} if quantization else {}), name, name)


def linears(model: nn.Module, name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the text model's projections outside its FFNs, by name."""
    ffn = re.compile(CASES[name].ffn)
    return {
        at: tuple(module.weight.shape)
        for at, module in model.named_modules()
        if isinstance(module, nn.Linear) and not ffn.fullmatch(f"{at}.weight") and not TOWER.search(at)
    }


def made(name: str) -> nn.Module:
    try:
        return build(name, CASES[name], meta=True)
    except Exception as error:
        pytest.skip(f"{name} is not built: {error}")


@statement
@pytest.mark.parametrize("name", CASES)
def test_projections_are_those_of_the_modules(name: str) -> None:
    """Their names and shapes, layer by layer; what is not known by name is never packed in silence."""
    model = made(name)
    try:
        resolved = read(model, name, FP8)
    except FFNError:
        pytest.skip("ffn does not count it")
    rest = resolved.model.non_ffn
    if rest is None or rest.parts is None:
        assert count(resolved).model_weight_bytes is None
        pytest.skip("the whole model is not counted")
    if not (rest.named and rest.listed):
        assert count(resolved).model_weight_bytes is None
        assert "are not known, so those of the whole model are not counted" in unknown_packing(resolved)
        return
    (layers, *_) = rest.layers.values()
    ours = {
        f"{i}.{m.name}": (m.rows, m.columns) for i, one in {**layers, **rest.between}.items() for m in one.projections
    }
    theirs = {
        match[1]: shape
        for at, shape in linears(model, name).items()
        if (match := re.search(r"(?:layers|\.h|blocks)\.(\d+\..*)", at))
    }
    assert ours == theirs


def by_hand(model: nn.Module, name: str, packed: Any, bytes_of: Any) -> int:
    """The bytes of all parameters outside the FFNs: those of packed projections, and 2 for every other number."""
    ffn, projections = re.compile(CASES[name].ffn), linears(model, name)
    total = 0
    for at, tensor in model.named_parameters():
        module = at.rpartition(".")[0]
        if ffn.fullmatch(at):
            continue
        is_packed = module in projections and at.endswith(".weight") and packed(module)
        total += bytes_of(*tensor.shape) if is_packed else 2 * tensor.numel()
    return total


def tiles(rows: int, columns: int) -> int:
    return rows * columns + 4 * ceil(rows / SIZE) * ceil(columns / SIZE)


def groups(rows: int, columns: int) -> int:
    return ceil(rows * columns / 2) + 2 * rows * ceil(columns / SIZE)


HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bamba", "granitemoehybrid", "jamba", "nemotron_h", "lfm2",
           "lfm2_moe", "lfm3", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "deepseek_v2", "deepseek_v3",
           "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "minicpm3", "mimo_v2_flash", "llama",
           "afmoe", "phi3", "falcon", "gpt_neox", "opt")  # fmt: skip


@statement
@pytest.mark.parametrize("some", [False, True], ids=["all", "some left out"])
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name in CASES])
def test_bytes_outside_the_ffns_are_those_of_the_modules(name: str, some: bool) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = made(name)
    counted = count(read(model, name))
    outside = sum(p.numel() for at, p in model.named_parameters() if not re.fullmatch(CASES[name].ffn, at))
    assert counted.model_params_total - counted.ffn_params_total == outside  # the module is the text model alone
    left_out = [at for at, part in model.named_modules() if part is model.get_output_embeddings()]
    if some:
        layer = next(at for at, _ in model.named_modules() if re.search(r"(layers|\.h)\.1$", at))
        left_out += [layer, *LEAVES]

    def packed(at: str) -> bool:
        return should_convert_module(at, left_out)

    ignored = [f"re:(.*\\.)?{re.escape(name)}(\\..*)?$" for name in left_out]
    for more, bytes_of in ((FP8 | {"modules_to_not_convert": left_out}, tiles), (INT4 | {"ignore": ignored}, groups)):
        found = count(read(model, name, more))
        assert found.model_weight_bytes is not None
        assert found.model_weight_bytes - found.weight_bytes == by_hand(model, name, packed, bytes_of)


@pytest.mark.parametrize("listed", [None, ["lm_head"], ["model.layers.0.self_attn"], []])
def test_a_head_is_packed_where_transformers_packs_it(listed: list[str] | None) -> None:
    """Without a list it leaves the head out by itself; a list leaves out what it names, and nothing else."""
    import transformers
    from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear
    from transformers.quantizers.base import HfQuantizer

    values = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64,
              "num_attention_heads": 2, "tie_word_embeddings": False}  # fmt: skip
    config = transformers.LlamaConfig(**values)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    left_out = HfQuantizer.get_modules_to_not_convert(model, listed)
    quantization = transformers.FineGrainedFP8Config(modules_to_not_convert=listed, weight_block_size=(SIZE, SIZE))
    replace_with_fp8_linear(model, left_out, quantization)
    packed = {at for at, part in model.named_modules() if isinstance(part, FP8Linear)}
    more = FP8 if listed is None else {**FP8, "modules_to_not_convert": listed}
    said = {"model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16", "quantization_config": more}
    ours = count(from_config({**values, **said}, "m", "c"))
    theirs = sum(
        tiles(*part.weight.shape) if at in packed else sum(2 * prod(p.shape) for p in part.parameters(recurse=False))
        for at, part in model.named_modules()
        if ".mlp" not in at
    )
    assert ours.model_weight_bytes - ours.weight_bytes == theirs
    assert ("lm_head" in packed) == (listed in (["model.layers.0.self_attn"], []))


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "hidden_act": "silu",
    "num_attention_heads": 4, "vocab_size": 256, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("quantization", "packed"), [
    (INT4, True), ({**INT4, "ignore": ["lm_head"]}, False), ({"quant_method": "gptq", "bits": 4}, False),
    ({"quant_method": "gptq", "bits": 4, "lm_head": True}, True), ({"quant_method": "awq", "bits": 4}, False),
    ({"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 4}}}, True),
])  # fmt: skip
def test_a_head_is_packed_where_the_config_says_so(quantization: dict[str, Any], packed: bool) -> None:
    read_whole = packed_model(from_config({**LLAMA, "quantization_config": quantization}, "m", "c"))
    assert read_whole is not None
    assert read_whole.other_bytes is not None
    without = 2 * (2 * 256 * 64 + 5 * 64) + 2 * 4 * (64 * 64 // 2)  # tables and norms, values of attention
    assert (read_whole.other_bytes < without) == packed


def test_gptq_packs_what_its_config_lists() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    inside = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]
    found = packed_model(
        from_config({**LLAMA, "quantization_config": {**config, "modules_in_block_to_quantize": inside}}, "m", "c")
    )
    matrix = 64 * 64 // 2 + 64 * 5 // 2 + 4 * 64  # values; a scale and a zero of 4 bits for each row; g_idx
    up = 128 * 64 // 2 + 128 * 5 // 2 + 4 * 64
    assert found.ffn_bytes == 2 * (up + 2 * 2 * 64 * 128)
    assert found.other_bytes == 2 * (2 * matrix + 2 * 2 * 64 * 64) + 2 * (2 * 256 * 64 + 5 * 64)


@pytest.mark.parametrize(("name", "quantization", "what"), [
    ("qwen3_next", {"quant_method": "gptq", "bits": 4, "group_size": 4}, "linear_attn.in_proj_qkvz"),
    ("jamba", {"quant_method": "awq", "bits": 4, "group_size": 4}, "mamba.in_proj"),
    ("gpt2", FP8, "the attention of gpt2"),
    ("gemma3n_text", FP8, "the projections of gemma3n_text that belong to neither attention nor FFN"),
])  # fmt: skip
def test_what_is_not_known_is_null_with_a_note(
    name: str, quantization: dict[str, Any], what: str, call, tmp_path: Path
) -> None:
    """GPTQ and AWQ pack what their libraries list for a family, which no config says."""
    values = json.loads(json.dumps(made(name).config.to_dict(), default=str)) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}), "utf-8")
    note = f"the bytes of {what} are not known, so those of the whole model are not counted"
    for command in (("params",), ("plan", "--device", "h100", "--tp", "1", "-n", "1")):
        code, out, err = call(*command, str(tmp_path), "--json")
        row = json.loads(out)["rows"][0]
        assert (code, row["model_weight_bytes"], note in err) == (0, None, True)
        assert row.get("weight_bytes", row.get("ffn_weight_bytes")) > 0
        code, out, err = call(*command, str(tmp_path), "--strict", "--json")
        assert (code, bool(out), note in err.splitlines()[-1]) == (4, True, True)


def test_what_packs_only_experts_leaves_the_rest_plain() -> None:
    """gpt-oss and other formats of experts alone: the names of other modules do not matter."""
    model = made("longcat_flash")
    experts = {"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"], "config_groups": {"a": {
        "targets": ["re:.*mlp\\.experts\\..*"], "weights": INT4["config_groups"]["all"]["weights"]}}}  # fmt: skip
    found = count(read(model, "longcat_flash", experts))
    plain = count(read(model, "longcat_flash"))
    assert found.model_weight_bytes - found.weight_bytes == plain.model_weight_bytes - plain.weight_bytes
