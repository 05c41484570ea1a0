"""transformers models in memory as sources: their own tensors, and what their layers compute."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import ffncli
from ffncli.errors import FFNError
from tests.oracles.prompted import DENSE, SINGLE, in_double, made

pytestmark = pytest.mark.models

NO_CONFIG = ("codegen", "bloom", "mpt", "xlnet", "xglm")  # their layers alone do not carry the config
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def layer_of(module: Any, at: str) -> tuple[nn.Module, int]:
    """(the item of a list that contains a module, its number)."""
    parts = at.split(".")
    for i, part in enumerate(parts):
        whole = module.get_submodule(".".join(parts[:i]))
        if part.isdigit() and isinstance(whole, nn.ModuleList):
            return whole[int(part)], int(part)
    raise AssertionError(at)


@pytest.mark.parametrize("name", DENSE)
def test_a_model_in_memory_is_its_directory(name: str) -> None:
    path, model = in_double(name)
    options = {"layer": "encoder.1" if name.startswith("t5") else 1, "dtype": "fp32" if name in SINGLE else "fp64"}
    ours, stored = (ffncli.trace(source, tokens=3, **options) for source in (model, path))
    assert [r.name for r in ours.steps] == [r.name for r in stored.steps]
    for record in ours.steps:  # Conv1D is stored transposed, and another memory order rounds otherwise
        torch.testing.assert_close(ours[record.name], stored[record.name], rtol=1e-12, atol=1e-14)
    names = dict(model.named_modules())
    at = next(
        at
        for at in (DENSE[name][0].format(i=1), f"{model.base_model_prefix}.{DENSE[name][0].format(i=1)}")
        if at in names
    )
    layer, number = layer_of(model, at)
    if name in NO_CONFIG:
        with pytest.raises(FFNError, match="does not carry the config") as refusal:
            ffncli.trace(layer, tokens=3)
        assert "ffncli.trace(model, layer=0)" in refusal.value.hint
        return
    alone = ffncli.trace(layer, tokens=3, dtype=options["dtype"])
    assert torch.equal(alone[alone.ffn_output], ours[ours.ffn_output])
    assert alone.block.layer == (number if any("layer_idx" in vars(m) for m in layer.modules()) else 0)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name: str) -> None:
    path = made(name).path
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ours, stored = (ffncli.trace(source, tokens=3, layer=1) for source in (model, path))
    for record in ours.steps:
        torch.testing.assert_close(ours[record.name], stored[record.name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_the_block_is_what_the_layer_computes_after_its_attention(name: str) -> None:
    _, model = in_double(name)
    layer, _ = layer_of(model, next(n for n, _ in model.named_modules() if n.endswith(DENSE[name][0].format(i=1))))
    seen: dict[str, torch.Tensor] = {}
    enters = {"bert": "intermediate", "llama": "post_attention_layernorm", "gpt2": "ln_2"}[name]
    layer.get_submodule(enters).register_forward_pre_hook(lambda _, args: seen.update(x=args[0][0]))
    layer.register_forward_hook(lambda _, args, out: seen.update(y=out[0][0] if isinstance(out, tuple) else out[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 5, 7]]))
    session = ffncli.trace(model, layer=1, dtype="fp64", input=seen["x"])
    within = 1e-5 if name == "llama" else 1e-12  # transformers' RMSNorm computes in float32
    torch.testing.assert_close(session[session.steps[-1].name], seen["y"].reshape(3, -1), rtol=within, atol=within)


def test_what_it_is_counted_and_surveyed_as() -> None:
    path, model = in_double("llama")
    assert ffncli.count(model).ffn_params_total == ffncli.count(path).ffn_params_total
    assert [row.layer for row in ffncli.survey(model).rows] == [row.layer for row in ffncli.survey(path).rows]
    with pytest.raises(FFNError, match="cannot change a module that is already built"):
        ffncli.trace(model, d_ff=7)
    with pytest.raises(FFNError, match="out of range"):
        ffncli.trace(model, layer=99)


def test_a_module_has_no_tokenizer_and_the_names_of_its_steps_are_iterated() -> None:
    _, model = in_double("llama")
    with pytest.raises(FFNError, match="is a module in memory, without a tokenizer; give the directory"):
        ffncli.trace(model, prompt="Hi")
    for argument in ({"prompts": ["a", "b"]}, {"prompt": ["a", "b"]}):
        with pytest.raises(FFNError, match=r"for several texts, use ffncli\.corpus"):
            ffncli.trace(model, **argument)
    session = ffncli.trace(model, layer=1, tokens=2)
    assert [*session] == [record.name for record in session.steps]
    assert ("down" in session, "nothing" in session, len(session)) == (True, False, len(session.steps))


def test_reprs_are_a_few_lines() -> None:
    assert len(repr(ffncli.count("gpt2")).splitlines()) == 4
    text = repr(ffncli.survey("llama-2-7b", d_model=8, d_ff=16, tokens=2))
    assert (len(text.splitlines()), text.startswith("<Survey of llama-2-7b: 32 layers")) == (9, True)


def test_what_if_leaves_the_model_as_it_is() -> None:
    _, model = in_double("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    session = ffncli.trace(model, layer=1, set=["W1[0,0]=5"], ablate=["unit:3"])
    assert session.changes is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_ffn_alone_is_still_known_by_its_outputs() -> None:
    _, model = in_double("llama")
    mlp = layer_of(model, next(n for n, _ in model.named_modules() if n.endswith("1.mlp.down_proj")))[0].mlp
    session = ffncli.trace(mlp, tokens=2, dtype="fp64")
    assert [record.name for record in session.steps] == ["x", "gate", "up", "act", "hidden", "down"]
    with torch.no_grad():
        torch.testing.assert_close(session["down"], mlp(session["x"]), rtol=1e-12, atol=1e-12)
