"""What was done to a checkpoint: planted edits are named, equal pairs are equal, and rows are torch's figures."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ffncli
from ffncli.block.formats import FORMATS
from ffncli.errors import FFNError
from ffncli.run.checkpoints.call import is_expected
from ffncli.run.checkpoints.lattice import PLAIN, keeps_order
from ffncli.run.checkpoints.spectra import SHOWN, RoundingNoise, singular_values, spectrum_of
from ffncli.run.quantize.quantized import quantize
from tests.oracles import edited as ed

FAMILIES = tuple(ed.CONFIGS)


@pytest.fixture
def compared(tmp_path):
    """A function that writes both checkpoints, and perhaps C, and compares them."""

    def run(family, base, new, container="safetensors", third=None, config=(), changed=(), **options):
        if third is not None:
            options["with_"] = ed.write(tmp_path / "c", family, third)
        both = dict(config)
        a = ed.write(tmp_path / "a", family, base, **both)
        b = ed.write(tmp_path / "b", family, new, container, **both, **dict(changed))
        return ffncli.compare(str(a), str(b), **options)

    return run


def half(w: Tensor) -> Tensor:
    limit = w.abs().flatten().kthvalue(w.numel() // 2).values
    return torch.where(w.abs() <= limit, 0, w)


def two_of_four(w: Tensor) -> Tensor:
    groups = w.view(-1, 4)
    best = groups.abs().topk(2, 1).indices
    return torch.zeros_like(groups).scatter(1, best, groups.gather(1, best)).view_as(w)


def halves(family, base):
    return ed.exchanged(base, dict(zip(*(
        [name for i in range(ed.LAYERS) for name in ed.matrices(family, i, which)] for which in ("gate", "up")
    ), strict=True)))  # fmt: skip


def plus_one(family, base):
    return {name: t + 1 if "post_attention_layernorm.weight" in name else t for name, t in base.items()}


EDITS = {
    "rounding": lambda f, b: {name: t.bfloat16() for name, t in b.items()},
    "norm_plus_one": plus_one,
    "permuted": ed.units_permuted,
    "copied": lambda f, b: ed.moved(f, b, lambda i: 0 if i == 2 else None),
    "shifted": lambda f, b: ed.moved(f, b, lambda i: min(i + 1, 3)),
    "scaled": lambda f, b: ed.every(f, b, lambda w: w * 1.5),
    "lora": lambda f, b: ed.lora(f, b, 4),
    "pruned": lambda f, b: ed.every(f, b, half),
    "finetuned": lambda f, b: ed.noisy(b, 0.01),
    "none": lambda f, b: ed.tensors(f, 7),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("edit", EDITS)
def test_a_planted_edit_is_named(compared, family, edit):
    base = ed.tensors(family)
    container = ed.CONTAINERS[(len(edit) + len(family)) % 3]
    result = compared(family, base, EDITS[edit](family, base), container)
    assert result.first.finding == edit, result
    assert not result.passed


@pytest.mark.parametrize("family", ["gated", "mixture"])
@pytest.mark.parametrize(("edit", "change"), [("swapped", halves), ("interleaved", ed.interleaved)])
def test_gate_and_up_in_another_place(compared, family, edit, change):
    base = ed.tensors(family)
    assert compared(family, base, change(family, base)).first.finding == edit


def test_experts_in_another_order(compared):
    base = ed.tensors("mixture")
    first = compared("mixture", base, ed.experts_moved(base)).first
    assert (first.finding, first.evidence["orders"]) == ("permuted", [{"layer": 1, "permutation": [2, 0, 3, 1]}])


def test_an_expert_copied_over_another(compared):
    base = ed.tensors("mixture")
    new = ed.experts_moved(base, (0, 1, 0, 3))
    first, *others = compared("mixture", base, new).findings
    assert (first.finding, first.evidence["orders"]) == ("copied", [{"layer": 1, "of": [0, 1, 0, 3]}])
    assert not others  # the router's row went with it


def test_experts_of_one_dense_ffn_that_were_trained_further_are_not_copies(compared):
    base = ed.experts_moved(ed.tensors("mixture"), (0, 0, 0, 0))
    assert compared("mixture", base, ed.noisy(base, 0.01)).first.finding == "finetuned"


def test_the_permutation_of_units_is_given(compared):
    base = ed.tensors("plain")
    order = compared("plain", base, ed.units_permuted("plain", base)).first.evidence["orders"][0]
    wanted = torch.randperm(ed.D_FF, generator=torch.Generator().manual_seed(3)).tolist()
    assert (order["layer"], order["permutation"]) == (1, wanted)


def test_square_matrices_transposed(compared):
    base = ed.tensors("gated", f=ed.D_MODEL)
    config = {"intermediate_size": ed.D_MODEL}
    new = {name: t.T if "down_proj" in name else t for name, t in base.items()}
    assert compared("gated", base, new, config=config).first.finding == "transposed"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_dropped(compared, family):
    base = ed.tensors(family)
    new = ed.moved(family, base, lambda i: i + (i > 0), 3)
    result = compared(family, base, new, changed={"num_hidden_layers": 3})
    assert (result.first.finding, result.first.evidence["layers"]) == ("dropped", [1])
    assert {row.base_layer for row in result.rows} == {0, 2, 3}
    assert not result.passed


@pytest.mark.parametrize("form", ["q4_0", "q8_0", "q4_1", "int8", "int4:g64", "nvfp4", "mxfp4", "fp8", "fp16"])
@pytest.mark.parametrize("reverse", [False, True])
def test_rounding_is_recognised_by_its_lattice(compared, form, reverse):
    base = ed.tensors("gated")
    new = ed.every("gated", base, lambda w: quantize(w, form).dequantize())
    first = compared("gated", *((new, base) if reverse else (base, new))).first
    assert (first.finding, first.evidence["side"]) == ("rounding", "BASE" if reverse else "NEW")
    assert is_expected(first, f"rounding:{form}"), first


@pytest.mark.parametrize("form", [name for name in FORMATS if name not in PLAIN])
def test_no_format_exchanges_neighbours_and_noise_does(form):
    w = torch.distributions.StudentT(3).sample((64, 256))
    rounded = quantize(w, form).dequantize()
    assert keeps_order(w, rounded, 1)
    assert keeps_order(w.T, rounded.T, 0)
    assert not keeps_order(w, rounded + 0.5 * torch.randn_like(w), 1)


def by_largest(w: Tensor, largest: float, axis: int | None) -> Tensor:
    """Round to integers times a scale for each row or column, or for all: the largest magnitude divided by a number."""
    scale = (w.abs().max() if axis is None else w.abs().amax(axis, keepdim=True)) / largest
    return (w / scale).round() * scale


ROUNDINGS = {
    "fp8:cast": lambda w: w.to(torch.float8_e4m3fn).float(),
    "fp8_e5m2:cast": lambda w: w.to(torch.float8_e5m2).float(),
    "int8:channel": lambda w: by_largest(w, 127, 1).bfloat16(),
    "int8:channel:transposed": lambda w: by_largest(w, 127, 0),
    "int8:tensor": lambda w: by_largest(w, 127, None),
    "int4:g32": lambda w: by_largest(w.view(-1, 32), 7, 1).view_as(w),
    "nvfp4:transposed": lambda w: quantize(w.T.contiguous(), "nvfp4").dequantize().T,
}


@pytest.mark.parametrize("form", ROUNDINGS)
def test_rounding_by_other_libraries_is_recognised(compared, form):
    base = ed.tensors("gated")
    result = compared("gated", base, ed.every("gated", base, ROUNDINGS[form]))
    assert is_expected(result.first, f"rounding:{form}"), result
    assert len(result.findings) == 1


def test_units_removed(compared):
    base = ed.tensors("gated")
    kept = torch.arange(ed.D_FF)[torch.arange(ed.D_FF) % 8 != 3]
    new = {name: (t[:, kept] if "down_proj" in name else t[kept]) if ".mlp." in name else t for name, t in base.items()}
    result = compared("gated", base, new, changed={"intermediate_size": len(kept)})
    assert (result.first.finding, result.first.evidence["units"]) == ("pruned", 16)
    gate = base["model.layers.0.mlp.gate_proj.weight"]
    lost = gate[torch.arange(ed.D_FF) % 8 == 3]
    row = next(row for row in result.rows if (row.layer, row.matrix) == (0, "gate"))
    assert row.relative_change == pytest.approx(float(lost.norm() / gate.norm()), rel=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_the_pattern_two_of_four(compared, turned):
    base = ed.tensors("gated")
    pattern = (lambda w: two_of_four(w.T.contiguous()).T) if turned else two_of_four
    first = compared("gated", base, ed.every("gated", base, pattern)).first
    assert (first.finding, first.evidence["two_of_four"], first.evidence["share"]) == ("pruned", True, 0.5)


def test_training_comes_before_rounding_that_it_exceeds(compared):
    base = ed.tensors("gated")
    names = ed.matrices("gated", 1)
    new = {name: (ed.noisy({name: t}, 0.05)[name] if name in names else t).half() for name, t in base.items()}
    assert [one.finding for one in compared("gated", base, new).findings] == ["finetuned", "rounding"]


def test_an_expert_of_zeros_is_pruned(compared):
    base = ed.tensors("mixture")
    names = [ed.matrix("mixture", 1, which, 2) for which in ("gate", "up", "down")]
    first = compared("mixture", base, base | {name: torch.zeros_like(base[name]) for name in names}).first
    assert (first.finding, first.evidence["share"], first.evidence["two_of_four"]) == ("pruned", 1, False)
    assert "of expert 2 in layer 1" in first.detail


def test_rows_of_a_router_in_another_order(compared):
    base = ed.tensors("mixture")
    name = "model.layers.2.block_sparse_moe.gate.weight"
    first = compared("mixture", base, base | {name: base[name][[1, 0, 2, 3]]}).first
    assert (first.finding, first.evidence["orders"]) == ("permuted", [{"layer": 2, "permutation": [1, 0, 2, 3]}])
    assert first.detail.startswith("rows of the router")


def test_many_factors_are_one_finding(compared):
    base = ed.tensors("gated")
    factors = {name: 1.1 + 0.1 * at for at, name in enumerate(n for n in base if ".mlp." in n)}
    result = compared("gated", base, {name: t * factors.get(name, 1) for name, t in base.items()})
    assert [one.finding for one in result.findings] == ["scaled"]
    assert [*result.first.evidence["factors"].values()] == pytest.approx([*factors.values()])


@pytest.mark.parametrize(("kind", "t"), [("linear", 0.3), ("linear", 1.25), ("slerp", 0.4)])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_coefficient_of_a_merge(compared, kind, t, bf16):
    base, other = ed.tensors("gated"), ed.tensors("gated", 7)
    merge = ed.slerp if kind == "slerp" else lambda a, c, t: (1 - t) * a + t * c
    new = {name: merge(tensor, other[name], t) for name, tensor in base.items()}
    new = {name: tensor.bfloat16() for name, tensor in new.items()} if bf16 else new
    first = compared("gated", base, new, third=other).first
    assert (first.finding, first.evidence["kind"]) == ("merged", kind)
    assert abs(first.evidence["t"] - t) < 1e-3


@pytest.mark.parametrize("container", ["sharded", "pt", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_checkpoints_are_equal(compared, tmp_path, family, container):
    base = ed.tensors(family)
    if container != "fused":
        result = compared(family, base, base, container)
    elif family == "gated":
        new = {name: t for name, t in base.items() if "gate_proj" not in name and "up_proj" not in name}
        for i in range(ed.LAYERS):
            both = [base[ed.matrix(family, i, which)] for which in ("gate", "up")]
            new[f"model.layers.{i}.mlp.gate_up_proj.weight"] = torch.cat(both)
        result = compared(family, base, new, changed={"model_type": "phi3"})
    else:
        wide = {name: t.bfloat16() for name, t in base.items()}
        result = compared(family, wide, {name: t.float() for name, t in wide.items()})
    assert (result.first.finding, result.passed) == ("same", True)


def test_rows_are_torchs_figures(compared):
    base = ed.tensors("gated")
    new = ed.noisy(base, 0.02)
    result = compared("gated", base, new)
    assert len(result.frame()) == len(result.rows) == 4 * ed.LAYERS
    row = next(row for row in result.rows if (row.layer, row.matrix) == (2, "up"))
    a, b = (one[ed.matrix("gated", 2, "up")].double() for one in (base, new))
    values = torch.linalg.svdvals((b.float() - a.float()).double())
    shares = values.square() / values.square().sum()
    assert row.relative_change == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-6)
    assert row.changed_share == float((a != b).double().mean())
    assert abs(row.max_change) == pytest.approx(float((b - a).abs().max()), rel=1e-6)
    assert b[row.max_at] - a[row.max_at] == pytest.approx(row.max_change)
    assert row.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0)))
    wanted = [float(shares[:k].sum()) for k in SHOWN if k <= len(shares)]
    assert row.energy == pytest.approx(wanted, rel=1e-4)
    assert row.rank_90 == int((shares.cumsum(0) < 0.9).sum()) + 1


def test_the_most_changed_unit_is_named(compared):
    base = ed.tensors("gated")
    name = ed.matrix("gated", 3, "down")
    new = dict(base) | {name: base[name].clone()}
    new[name][:, 17] += 0.5
    unit = max(compared("gated", base, new).units, key=lambda one: one.relative_change)
    assert (unit.layer, unit.unit) == (3, 17)
    whole = sum(float(base[ed.matrix("gated", 3, w)].select(0 if w != "down" else 1, 17).square().sum())
                for w in ("gate", "up", "down"))  # fmt: skip
    assert unit.relative_change == pytest.approx((ed.D_MODEL * 0.25 / whole) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("shape", [(96, 160), (200, 200), (128, 64)])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("low_rank", [0.0, 100.0])
def test_singular_values_are_torchs(monkeypatch, shape, small, low_rank):
    if not small:
        monkeypatch.setattr("ffncli.run.checkpoints.spectra._SMALL", 0)
    g = torch.Generator().manual_seed(1)
    change = torch.randn(shape, generator=g)
    change += low_rank * torch.randn(shape[0], 2, generator=g) @ torch.randn(2, shape[1], generator=g)
    wanted = torch.linalg.svdvals(change.double())
    for exact in (False, True):
        given = [change]
        values = singular_values(given, exact)
        assert not given  # so that the caller does not keep the matrix
        assert float(((values - wanted).abs() / wanted)[wanted > 1e-4 * wanted[0]].max()) < (1e-9 if exact else 0.01)


@pytest.mark.parametrize("rank", [1, 4, 32])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_rank_of_a_lora_is_recovered(rank, dtype):
    w = torch.randn(512, 512, generator=torch.Generator().manual_seed(rank)) * 0.02
    w = w if dtype is None else w.to(dtype).float()
    ranks = {size: _rank(w, rank, size, dtype) for size in (1e-1, 1e-2, 1e-4)}
    assert (ranks[1e-1].rank, ranks[1e-2].rank) == (rank, rank)
    hidden = ranks[1e-4].blurred and not ranks[1e-4].rank
    assert hidden if dtype else ranks[1e-4].rank == rank


def _rank(w, rank, size, dtype):
    g = torch.Generator().manual_seed(rank)
    delta = torch.randn(512, rank, generator=g) @ torch.randn(rank, 512, generator=g)
    new = w + delta * (size * w.norm() / delta.norm())
    new = new if dtype is None else new.to(dtype).float()
    noise = RoundingNoise(0.0, torch.zeros(512))
    noise.add(new, "fp32" if dtype is None else "bf16")
    return spectrum_of(singular_values([new - w]), noise)


def test_not_resolvable_is_said(compared):
    base = {name: t.bfloat16() for name, t in ed.tensors("gated").items()}
    new = {name: t.bfloat16() for name, t in ed.lora("gated", {n: t.float() for n, t in base.items()}, 4, 1e-3).items()}
    first = compared("gated", base, new).first
    assert first.finding == "finetuned"
    assert "not resolvable from rounding to bf16" in first.detail


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapter(path, base, rank=3, alpha=12.0, rslora=False, dora=False):
    """Write an adapter in PEFT's layout on all matrices of a Llama; return the tensors of the merged model."""
    g, stored, merged = torch.Generator().manual_seed(5), {}, dict(base)
    for i in range(ed.LAYERS):
        for name in ed.matrices("gated", i):
            w, key = base[name], f"base_model.model.{name.removesuffix('.weight')}"
            a, b = torch.randn(rank, w.shape[1], generator=g) * 0.1, torch.randn(w.shape[0], rank, generator=g) * 0.1
            stored |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            merged[name] = w + b @ a * (alpha / (rank**0.5 if rslora else rank))
            if dora:
                stored[f"{key}.lora_magnitude_vector"] = 1 + torch.rand(w.shape[0], generator=g)
                size = merged[name].norm(dim=1, keepdim=True)
                merged[name] = merged[name] * (stored[f"{key}.lora_magnitude_vector"][:, None] / size)
    path.mkdir()
    save_file(stored, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rslora, "use_dora": dora}
    (path / "adapter_config.json").write_text(json.dumps(about))
    return merged


@pytest.mark.parametrize("how", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"])
def test_an_adapter_is_merged_and_its_rank_named(tmp_path, how):
    base = ed.tensors("gated")
    merged = adapter(tmp_path / "adapter", base, **how)
    paths = [ed.write(tmp_path / "a", "gated", base), ed.write(tmp_path / "b", "gated", merged)]
    first = ffncli.compare(str(paths[0]), str(tmp_path / "adapter")).first
    scaling = 12 / (3**0.5 if how.get("rslora") else 3)
    assert (first.finding, first.evidence["rank"]) == ("lora", 3), first
    assert first.evidence["scaling"] == pytest.approx(scaling)
    both = ffncli.compare(str(paths[1]), f"{paths[0]}+{tmp_path / 'adapter'}")
    assert both.first.finding == "same" or is_expected(both.first, "rounding:fp32"), both.first
    if how:
        return
    assert ffncli.compare(*map(str, paths)).first.evidence["rank"] == 3


@pytest.mark.parametrize("how", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_an_adapter_written_by_peft(tmp_path, how):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = ed.write(tmp_path / "base", "gated", ed.tensors("gated"))
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "whole")
    names = ["gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=names, init_lora_weights=False, **how)
    tuned = peft.get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    first = ffncli.compare(str(tmp_path / "whole"), str(tmp_path / "adapter")).first
    assert (first.finding, first.evidence["rank"], first.evidence["alpha"]) == ("lora", 4, 16)
    both = ffncli.compare(str(tmp_path / "merged"), f"{tmp_path / 'whole'}+{tmp_path / 'adapter'}").first
    assert both.finding == "same" or is_expected(both, "rounding:fp32")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_hostile_pairs_are_one_line(compared, tmp_path):
    base = ed.tensors("gated")
    bad = dict(base) | {ed.matrix("gated", 1, "up"): base[ed.matrix("gated", 1, "up")].clone()}
    bad[ed.matrix("gated", 1, "up")][5, 7] = float("nan")
    with pytest.raises(FFNError, match=r"NEW .*up of decoder layer 1 holds nan at \[5, 7\]"):
        compared("gated", base, bad)
    with pytest.raises(FFNError, match=r"d_model is 64 in BASE .*, 32 in NEW"):
        compared("gated", base, ed.tensors("gated", d=32), changed={"hidden_size": 32})
    with pytest.raises(FFNError, match="BASE has 4 layers and NEW 2, and 2 of these are not among BASE's"):
        compared("gated", base, ed.tensors("gated", 3, layers=2), changed={"num_hidden_layers": 2})
    with pytest.raises(FFNError, match="names no finding"):
        compared("gated", base, base, expect="lorra")
    sharded = ed.write(tmp_path / "shards", "gated", base, "sharded")
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FFNError, match="model-00002-of-00003"):
        ffncli.compare(str(tmp_path / "a"), str(sharded))


def test_a_side_whose_packed_values_are_only_counted_is_one_line(tmp_path):
    base, bits, group = ed.tensors("gated"), 4, 32
    packed = {}
    for name, tensor in base.items():
        if ".mlp." in name:  # as MLX packs
            rows, columns = tensor.shape
            packed[name] = torch.zeros(rows, columns * bits // 32, dtype=torch.int32).view(torch.uint32)
            for end in ("scales", "biases"):
                packed[name.replace("weight", end)] = torch.ones(rows, columns // group)
        else:
            packed[name] = tensor
    a, b = ed.write(tmp_path / "a", "gated", base), ed.write(tmp_path / "b", "gated", packed)
    config = json.loads((b / "config.json").read_text())
    (b / "config.json").write_text(json.dumps({**config, "quantization": {"bits": bits, "group_size": group}}))
    assert ffncli.count(str(b)).ffn_params_stored == ffncli.count(str(a)).ffn_params_stored
    for pair in ((a, b), (b, a)):
        with pytest.raises(FFNError, match=r"is packed as .*, which is not supported here"):
            ffncli.compare(*map(str, pair))


def test_a_resized_embedding_is_a_note(compared):
    base = ed.tensors("gated")
    new = base | {"model.embed_tokens.weight": torch.randn(40, ed.D_MODEL)}
    result = compared("gated", base, new, changed={"vocab_size": 40})
    assert result.passed
    assert any("32×64 became 40×64" in note for note in result.notes)


def test_a_tolerance_and_an_expectation_decide(compared):
    base = ed.tensors("gated")
    new = ed.noisy(base, 0.01)
    assert not compared("gated", base, new, tolerance=1e-3).passed
    assert compared("gated", base, new, tolerance=0.1).passed
    assert compared("gated", base, new, expect="finetuned").passed
    assert not compared("gated", base, base, expect="finetuned").passed


def test_no_byte_is_read_twice(compared, monkeypatch):
    """Reads the FFNs once, and little of what is outside them."""
    from ffncli.models.files.rows import OpenFiles

    count, fill = [0], OpenFiles._fill

    def counted(self, path, start, into):
        count[0] += len(into)
        fill(self, path, start, into)

    monkeypatch.setattr(OpenFiles, "_fill", counted)
    base = ed.tensors("mixture")
    compared("mixture", base, ed.noisy(base, 0.01))
    size = sum(4 * t.numel() for name, t in base.items() if "q_proj" not in name and "embed" not in name)
    assert 2 * size <= count[0] <= 1.1 * 2 * size
