"""GGUF files are run: values as the library unpacks them, the block as the same model's safetensors have it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from ffncli.models.evidence.from_tensors import checkpoint_of
from ffncli.models.files.gguf import read_gguf
from ffncli.models.source import load
from ffncli.models.tensors import read_weights as reader
from ffncli.models.tensors.read_weights import values
from tests.oracles.checkpoints import expect_refusal, folder
from tests.oracles.gguf_files import finish

D, F, E, LAYERS = 64, 96, 4, 2
Arrays = Mapping[str, np.ndarray]


def written(
    path: Path,
    architecture: str,
    tensors: Arrays,
    kinds: Callable[[str], Q],
    metadata: Mapping[str, Any],
    **options: Any,
) -> str:
    """A GGUF file by the library."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in {"embedding_length": D, "block_count": LAYERS, **metadata}.items():
        name = f"{architecture}.{key}"
        add = writer.add_bool if isinstance(value, bool) else writer.add_float32 if isinstance(value, float) else None
        (add or writer.add_uint32)(name, value)
    for name, array in tensors.items():
        kind = kinds(name)
        writer.add_tensor(name, array if array.dtype == np.uint8 else quantize(array, kind), raw_dtype=kind)
    finish(writer)
    return str(path)


def kinds_of(kind: Q) -> Callable[[str], Q]:
    """Matrices in `kind`; vectors and routers are never quantized."""
    return lambda name: Q.F32 if "norm" in name or "gate_inp" in name or ".bias" in name else kind


# --- values -----------------------------------------------------------------------------------------------------------

UNPACKED = [kind for kind in gguf.GGML_QUANT_SIZES if kind in gguf.quants._type_traits or kind in (Q.F16, Q.F32)]


@pytest.mark.parametrize("block", [1, 10_000])
@pytest.mark.parametrize("kind", UNPACKED, ids=lambda kind: kind.name)
def test_values_are_those_that_the_library_unpacks(
    kind: Q, block: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Any bytes, for the library does not pack all of its formats; some are not finite."""
    monkeypatch.setattr(reader, "_BLOCK", block)
    size, width = gguf.GGML_QUANT_SIZES[kind]
    rows = {"blk.0.ffn_up.weight": (3, 2 * size), "blk.0.ffn_down_exps.weight": (2, 3, 2 * size), "v": (2 * size,)}
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(0, 256, (*shape[:-1], 2 * width), dtype=np.uint8) for n, shape in rows.items()}
    path = written(tmp_path / "m.gguf", "llama", arrays, lambda _: kind, {"feed_forward_length": 3})
    with np.errstate(all="ignore"):
        theirs = {t.name: dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    checkpoint = checkpoint_of(read_gguf(Path(path)))
    for name, shape in rows.items():
        found = values(checkpoint, name)
        assert found.shape == shape
        assert np.array_equal(found.float().numpy(), theirs[name].reshape(shape), equal_nan=True)


def test_a_format_that_the_library_does_not_unpack(call, tmp_path: Path):
    size, width = gguf.GGML_QUANT_SIZES[Q.Q8_K]
    arrays = {f"blk.0.ffn_{n}.weight": np.zeros((size, width), np.uint8) for n in ("gate", "up", "down")}
    metadata = {"embedding_length": size, "block_count": 1}
    path = written(tmp_path / "m.gguf", "brand-new", arrays, lambda _: Q.Q8_K, metadata)
    expect_refusal(
        call("trace", path, "--activation", "silu"), "m.gguf", "does not unpack Q8_K", "pip install -U gguf", code=3
    )


@pytest.mark.parametrize("kind", [Q.NVFP4, Q.TQ2_0, Q.F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("named", ["{}.scale", "{}.weight.scale"])
def test_a_weight_is_multiplied_by_its_scale(kind: Q, named: str, tmp_path: Path):
    """llama.cpp multiplies the product of `X.weight` by `X.scale`: NVFP4's scale of the tensor, or of each expert."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    columns = 256 * width // size
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name, shape in (("ffn_up", (3, columns)), ("ffn_up_exps", (2, 3, columns)), ("ffn_down_exps", (2, 3, columns))):
        arrays[f"blk.0.{name}.weight"] = rng.integers(0, 64, shape, dtype=np.uint8)
    scales = {"ffn_up": [0.3], "ffn_up_exps": [0.7, 1.9], "ffn_down_exps": [1.1]}
    arrays |= {named.format(f"blk.0.{name}"): np.array(values_, np.float32) for name, values_ in scales.items()}
    arrays["blk.0.ffn_up.input_scale"] = np.ones(1, np.float32)
    kinds = lambda name: kind if arrays[name].dtype == np.uint8 else Q.F32  # noqa: E731
    path = written(tmp_path / "m.gguf", "llama", arrays, kinds, {"feed_forward_length": 3})
    checkpoint = checkpoint_of(read_gguf(Path(path)))
    for name, factors in scales.items():
        theirs = dequantize(arrays[f"blk.0.{name}.weight"], kind)
        wanted = theirs * np.array(factors, np.float32).reshape(-1, *[1] * (theirs.ndim - 1))
        assert np.array_equal(values(checkpoint, f"blk.0.{name}.weight").float().numpy(), wanted)


def test_scales_of_a_weight_are_no_parameters(call, json_of, tmp_path: Path):
    """Their bytes are the weight's; a scale of another number of experts is refused."""
    rng, width = np.random.default_rng(0), 64 // 64 * 36
    arrays: dict[str, np.ndarray] = {"blk.0.ffn_norm.weight": np.ones(64, np.float32)}
    arrays["blk.0.ffn_gate_inp.weight"] = rng.standard_normal((3, 64)).astype(np.float32)
    for name in ("gate", "up", "down"):
        arrays[f"blk.0.ffn_{name}_exps.weight"] = rng.integers(0, 64, (3, 64, width), dtype=np.uint8)
    metadata = {"block_count": 1, "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 64}
    kinds = lambda name: Q.NVFP4 if arrays[name].dtype == np.uint8 else Q.F32  # noqa: E731
    counted = []
    for count in (0, 3, 4):
        if count:
            ones = np.ones(count, np.float32)
            arrays |= {f"blk.0.ffn_{n}_exps.{s}": ones for n in ("gate", "up") for s in ("scale", "input_scale")}
        path = written(tmp_path / f"{count}.gguf", "qwen3moe", arrays, kinds, metadata)
        counted.append(json_of("params", path)["rows"][0])
    bare, scaled, _ = counted
    assert scaled["model_params_total"] == bare["model_params_total"]
    assert scaled["ffn_stored_bytes"] == bare["ffn_stored_bytes"] + 4 * 3 * 4  # four tensors of three floats
    expect_refusal(call("trace", path), "is F32 [4]", "one for each of the 3 matrices")


def test_more_experts_than_llama_cpp_used_to_take(json_of, tmp_path: Path):
    """Kimi-K3 has 896; LLAMA_MAX_EXPERTS was 512."""
    rng, experts = np.random.default_rng(0), 896
    arrays = {"blk.0.ffn_norm.weight": np.ones(32, np.float32)}
    arrays["blk.0.ffn_gate_inp.weight"] = rng.standard_normal((experts, 32)).astype(np.float32)
    for name in ("gate", "up", "down"):
        arrays[f"blk.0.ffn_{name}_exps.weight"] = rng.standard_normal((experts, 32, 32)).astype(np.float32)
    metadata = {"embedding_length": 32, "block_count": 1, "expert_count": experts, "expert_used_count": 16,
                "expert_feed_forward_length": 32}  # fmt: skip
    path = written(tmp_path / "m.gguf", "qwen3moe", arrays, kinds_of(Q.Q4_0), metadata)
    assert json_of("trace", path)["block"]["experts"] == experts


# --- the whole FFN ----------------------------------------------------------------------------------------------------


def dense(rng: np.random.Generator, layer: int, norms: Mapping[str, str], added: float = 0) -> tuple[Arrays, Arrays]:
    """A gated FFN by GGUF's names, and by Hugging Face's; `added` is what the converter adds to norms."""
    theirs, ours = {}, {}
    for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        array = rng.standard_normal(shape).astype(np.float32)
        theirs[f"blk.{layer}.ffn_{name}.weight"] = ours[f"model.layers.{layer}.mlp.{name}_proj.weight"] = array
    return with_norms(rng, layer, norms, added, theirs, ours)


def with_norms(
    rng: np.random.Generator,
    layer: int,
    norms: Mapping[str, str],
    added: float,
    theirs: dict[str, Any],
    ours: dict[str, Any],
) -> tuple[Arrays, Arrays]:
    for name, own in norms.items():
        array = rng.standard_normal(D).astype(np.float32)
        theirs[f"blk.{layer}.{name}.weight"] = array + np.float32(added)
        ours[f"model.layers.{layer}.{own}.weight"] = array
    return theirs, ours


def experts(
    rng: np.random.Generator, layer: int, stem: str, names: Mapping[str, str], norms: Mapping[str, str]
) -> tuple[Any, Any]:
    """Experts by GGUF's names, all in one tensor, and by Hugging Face's, each in its own."""
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        array = rng.standard_normal((E, *shape)).astype(np.float32)
        theirs[f"blk.{layer}.ffn_{name}_exps.weight"] = array
        ours |= {f"model.layers.{layer}.{stem}.experts.{e}.{names[name]}.weight": array[e] for e in range(E)}
    router = rng.standard_normal((E, D)).astype(np.float32)
    theirs[f"blk.{layer}.ffn_gate_inp.weight"] = ours[f"model.layers.{layer}.{stem}.gate.weight"] = router
    return with_norms(rng, layer, norms, 0, theirs, ours)


def with_shared(rng: np.random.Generator, layer: int, both: tuple[Any, Any]) -> tuple[Any, Any]:
    """Qwen2-MoE's shared expert, with a gate that converters squeeze to a vector."""
    theirs, ours = both
    for name, shape in (("gate", (32, D)), ("up", (32, D)), ("down", (D, 32))):
        array = rng.standard_normal(shape).astype(np.float32)
        theirs[f"blk.{layer}.ffn_{name}_shexp.weight"] = array
        ours[f"model.layers.{layer}.mlp.shared_expert.{name}_proj.weight"] = array
    gate = rng.standard_normal(D).astype(np.float32)
    theirs[f"blk.{layer}.ffn_gate_inp_shexp.weight"] = gate
    ours[f"model.layers.{layer}.mlp.shared_expert_gate.weight"] = gate[None]
    return theirs, ours


def gpt_oss(rng: np.random.Generator, layer: int) -> tuple[Any, Any]:
    """gpt-oss: llama.cpp's converter takes gate and up apart, which transformers has by turns, transposed."""
    theirs, ours = experts(rng, layer, "mlp", PROJ, {"post_attention_norm": "post_attention_layernorm"})
    stem, own = f"blk.{layer}.", f"model.layers.{layer}.mlp."
    ours = {name: array for name, array in ours.items() if "norm" in name}
    arrays = {n: theirs[f"{stem}ffn_{n}_exps.weight"] for n in ("gate", "up", "down")}
    ours[f"{own}router.weight"] = theirs[f"{stem}ffn_gate_inp.weight"]
    ours[f"{own}experts.gate_up_proj"] = np.stack([arrays["gate"], arrays["up"]], 2).reshape(E, 2 * F, D).swapaxes(1, 2)
    ours[f"{own}experts.down_proj"] = arrays["down"].swapaxes(1, 2)
    biases = {n: rng.standard_normal((E, D if n == "down" else F)).astype(np.float32) for n in arrays}
    theirs |= {f"{stem}ffn_{n}_exps.bias": array for n, array in biases.items()}
    ours[f"{own}experts.gate_up_proj_bias"] = np.stack([biases["gate"], biases["up"]], 2).reshape(E, 2 * F)
    ours[f"{own}experts.down_proj_bias"] = biases["down"]
    theirs[f"{stem}ffn_gate_inp.bias"] = ours[f"{own}router.bias"] = rng.standard_normal(E).astype(np.float32)
    return theirs, ours


PRE = {"ffn_norm": "post_attention_layernorm"}
AROUND = {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIX = {"gate": "w1", "up": "w3", "down": "w2"}
CONFIG = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-3,
}
MOE = {"num_experts": E, "num_local_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": F}
WIDTH, COUNT = {"feed_forward_length": F}, {"expert_count": E, "expert_used_count": 2}
EPS = {"attention.layer_norm_rms_epsilon": 1e-3}
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES: Mapping[str, tuple[Any, Any, Any]] = {  # how tensors are made, metadata, the config alike
    "llama": (lambda r, i: dense(r, i, PRE), WIDTH, {"model_type": "llama"}),
    "qwen2": (lambda r, i: dense(r, i, PRE), WIDTH, {"model_type": "qwen2"}),
    "qwen3": (lambda r, i: dense(r, i, PRE), WIDTH, {"model_type": "qwen3"}),
    "gemma": (lambda r, i: dense(r, i, PRE, 1), WIDTH, {"model_type": "gemma", **GELU}),
    "gemma2": (lambda r, i: dense(r, i, AROUND, 1), WIDTH, {"model_type": "gemma2", **GELU}),
    "gemma3": (lambda r, i: dense(r, i, AROUND, 1), WIDTH, {"model_type": "gemma3_text", **GELU}),
    "olmo2": (
        lambda r, i: dense(r, i, {"post_ffw_norm": "post_feedforward_layernorm"}), WIDTH, {"model_type": "olmo2"},
    ),
    "llama with experts": (
        lambda r, i: experts(r, i, "block_sparse_moe", MIX, PRE), {**WIDTH, **COUNT},
        {"model_type": "mixtral", **{n: v for n, v in MOE.items() if n != "moe_intermediate_size"}},
    ),
    "qwen3moe": (
        lambda r, i: experts(r, i, "mlp", PROJ, PRE),
        {"feed_forward_length": 7, "expert_feed_forward_length": F, **COUNT},
        {"model_type": "qwen3_moe", "norm_topk_prob": True, **MOE},
    ),
    "qwen2moe": (
        lambda r, i: with_shared(r, i, experts(r, i, "mlp", PROJ, PRE)),
        {"expert_feed_forward_length": F, "expert_shared_feed_forward_length": 32, **COUNT},
        {"model_type": "qwen2_moe", "norm_topk_prob": False, "shared_expert_intermediate_size": 32, **MOE},
    ),
}  # fmt: skip


def steps(result: tuple[int, str, str]) -> list[dict[str, Any]]:
    code, out, err = result
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)["steps"]
    return found


@pytest.mark.parametrize("kind", [Q.F32, Q.BF16, Q.Q4_0, Q.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_trace_is_that_of_the_same_model_in_safetensors(name: str, kind: Q, call, tmp_path: Path):
    make, metadata, config = ARCHITECTURES[name]
    rng, kinds = np.random.default_rng(0), kinds_of(kind)
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for layer in range(LAYERS):
        some, same = make(rng, layer)
        theirs |= some
        ours |= same
    rounded = {
        n: dequantize(quantize(a, kind), kind) if a.ndim > 1 and "gate.w" not in n else a for n, a in ours.items()
    }
    path = written(tmp_path / "model.gguf", name.split()[0], theirs, kinds, {**metadata, **EPS})
    source = folder(tmp_path / "m", {**CONFIG, **config}, {n: torch.from_numpy(a.copy()) for n, a in rounded.items()})
    more = ("--layer", "1", "--show", "all", "--json", *(("--expert", "all") if "expert_count" in metadata else ()))
    results = [call("trace", s, *more) for s in (path, source)]
    assert [result[2] for result in results] == ["", ""]
    found, wanted = map(steps, results)
    assert [(s["name"], s["formula"]) for s in found] == [(s["name"], s["formula"]) for s in wanted]
    for one, other in zip(found, wanted, strict=True):
        a, b = torch.tensor(one["values"], dtype=torch.float64), torch.tensor(other["values"], dtype=torch.float64)
        worst = 2e-6 if name.startswith("gemma") else 0.0  # w + 1 was rounded once more
        assert (a - b).abs().max() <= worst * b.abs().max(), one["name"]


def test_gpt_oss(call, tmp_path: Path):
    """In float32, for quantizing along the other axis would give other numbers."""
    rng, theirs, ours = np.random.default_rng(0), {}, {}
    for layer in range(LAYERS):
        some, same = gpt_oss(rng, layer)
        theirs |= some
        ours |= same
    metadata = {"feed_forward_length": F, "expert_feed_forward_length": F, **COUNT, **EPS}
    path = written(tmp_path / "model.gguf", "gpt-oss", theirs, lambda _: Q.F32, metadata)
    config = {**CONFIG, **MOE, "model_type": "gpt_oss"}
    del config["moe_intermediate_size"]  # its experts are intermediate_size wide
    source = folder(tmp_path / "m", config, {n: torch.from_numpy(a.copy()) for n, a in ours.items()})
    more = ("--layer", "1", "--show", "all", "--expert", "all", "--json")
    results = [call("trace", s, *more) for s in (path, source)]
    assert [result[2] for result in results] == ["", ""]
    assert steps(results[0]) == steps(results[1])


def llama(path: Path, **options: Any) -> str:
    make, metadata, _ = ARCHITECTURES["llama"]
    rng = np.random.default_rng(0)
    tensors = {n: a for layer in range(LAYERS) for n, a in make(rng, layer)[0].items()}
    return written(path, "llama", tensors, kinds_of(Q.Q8_0), {**metadata, **EPS}, **options)


def test_the_evidence_names_the_format(json_of, tmp_path: Path):
    """Whose blocks have their scales in them."""
    rows = json_of("verify", llama(tmp_path / "model.gguf"), "--check", "layout")["rows"]
    notes = {row["subject"]: row["note"] for row in rows}
    assert all("; stored as Q8_0, unpacked; " in f"{notes[f'{n}.weight']}; " for n in ("gate", "up", "down"))


def test_a_layer_in_the_second_shard(call, tmp_path: Path):
    whole = llama(tmp_path / "whole.gguf")
    llama(tmp_path / "part.gguf", split_max_tensors=4)
    first, second = sorted(tmp_path.glob("part-*.gguf"))
    wanted = steps(call("trace", whole, "--layer", "1", "--json"))
    assert steps(call("trace", str(first), "--layer", "1", "--json")) == wanted
    second.unlink()
    expect_refusal(call("trace", str(first)), "part-00002-of-00002.gguf is missing", "is the download complete?")


def test_only_the_layer_is_read(monkeypatch: pytest.MonkeyPatch, call, tmp_path: Path):
    path, seen = llama(tmp_path / "m.gguf"), []
    original = reader.stored
    monkeypatch.setattr(reader, "stored", lambda c, name, q: seen.append(name) or original(c, name, q))
    assert call("trace", path, "--layer", "1")[0] == 0
    assert sorted(seen) == [f"blk.1.ffn_{n}.weight" for n in ("down", "gate", "norm", "up")]


def test_what_the_architecture_says_and_the_tensors_do_not(call, tmp_path: Path):
    """A llama with biases is some other block: its norm is not taken for known."""
    rng = np.random.default_rng(0)
    tensors = {n: a for i in range(LAYERS) for n, a in dense(rng, i, PRE)[0].items()}
    tensors |= {f"blk.{i}.ffn_{n}.bias": np.zeros(s, np.float32) for i in range(LAYERS) for n, s in
                (("gate", F), ("up", F), ("down", D))}  # fmt: skip
    path = written(tmp_path / "m.gguf", "llama", tensors, kinds_of(Q.F16), WIDTH)
    code, out, err = call("trace", path, "--json")
    assert (code, json.loads(out)["steps"][1]["name"]) == (0, "gate")
    assert err == "note: unknown from this source, so not counted: norms and residuals\n"


def test_what_an_option_says_is_known(call, tmp_path: Path):
    rng = np.random.default_rng(0)
    tensors = {n: a for i in range(LAYERS) for n, a in dense(rng, i, PRE)[0].items()}
    path = written(tmp_path / "m.gguf", "brand-new", tensors, kinds_of(Q.F16), WIDTH)
    expect_refusal(call("trace", path), "does not specify its activation", "pass --activation silu, for example")
    code, out, err = call("trace", path, "--activation", "relu", "--norm", "rmsnorm", "--layer", "1", "--json")
    found = {step["name"]: step for step in json.loads(out)["steps"]}
    assert (code, found["act"]["formula"], list(found)[1]) == (0, "relu(gate)", "norm")
    assert err == ""
    gate, up, down = (
        torch.from_numpy(tensors[f"blk.1.ffn_{n}.weight"].astype(np.float16)).double() for n in ("gate", "up", "down")
    )
    x = torch.tensor(
        json.loads(call("trace", path, "--activation", "relu", "--show", "all", "--json")[1])["steps"][0]["values"]
    )
    model = load(path)
    assert model.model.unknown == {"activation", "norm"}
    plain = steps(call("trace", path, "--activation", "relu", "--layer", "1", "--show", "all", "--json"))[-1]["values"]
    wanted = (torch.relu(x.double() @ gate.T) * (x.double() @ up.T)) @ down.T
    assert (torch.tensor(plain, dtype=torch.float64) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
