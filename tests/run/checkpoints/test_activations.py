"""What a change does to a text: errors of each FFN, the divergence of the next token, adapters and other tokenizers,
compared with transformers and hooks."""

import json

import pytest
import torch
from safetensors.torch import save_file

import ffncli
from ffncli.errors import FFNError
from tests.oracles.prompted import IDS, PROMPT, WORDS, built, give_tokenizer, ids, through

pytestmark = pytest.mark.models
LAYERS = range(2)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama with a tokenizer: its directory and its module."""
    folder = tmp_path_factory.mktemp("base")
    return folder, built("llama", folder, num_hidden_layers=len(LAYERS))


def tuned(base, path, layer=1):
    """Write a copy of the model in which one layer's down projection has changed; return its module."""
    model = built("llama", path, num_hidden_layers=len(LAYERS))
    with torch.no_grad():
        weight = model.model.layers[layer].mlp.down_proj.weight
        weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(path)
    return model


def expected(base, new):
    """Return by hooks: [(total, inherited) of each layer], the mean KL divergence, the number of other top tokens."""
    names = [{f"{i}{end}": f"model.layers.{i}.mlp" for i in LAYERS for end in ("", "output")} for _ in (0, 1)]
    seen = [through(model, of, input_ids=ids()) for model, of in zip((base, new), names, strict=True)]
    rows = []
    with torch.no_grad():
        for i in LAYERS:
            ours, theirs = (one[f"{i}output"] for one in seen)
            carried = base.model.layers[i].mlp(seen[1][f"{i}"])
            rows.append(tuple(float((y - ours).norm() / ours.norm()) for y in (theirs, carried)))
        p, q = (model(ids()).logits[0].double().log_softmax(-1) for model in (base, new))
    return rows, float((p.exp() * (p - q)).sum(-1).mean()), int((p.argmax(-1) != q.argmax(-1)).sum())


def check(found, base, new):
    rows, kl, differ = expected(base, new)
    for row, (total, inherited) in zip(found.rows, rows, strict=True):
        assert (row.total, row.inherited) == pytest.approx((total, inherited), abs=1e-5)
        assert row.added == pytest.approx(row.total - row.inherited)
    assert found.kl == pytest.approx(kl, rel=1e-3, abs=1e-9)
    assert (found.top_tokens_differ, found.tokens) == (differ, len(IDS))


def test_errors_are_inherited_or_added(base, tmp_path):
    new = tuned(base, tmp_path, layer=0)
    found = ffncli.compare(str(base[0]), str(tmp_path), prompt=PROMPT).activations
    check(found, base[1], new)
    assert (found.first_layer, found.first_step, found.notes) == ("decoder layer 0", "down", ())
    assert found.rows[0].inherited == 0 < found.rows[1].inherited
    same = ffncli.compare(str(base[0]), str(base[0]), prompt=PROMPT).activations
    assert (same.first_layer, same.kl, same.top_tokens_differ) == (None, 0, 0)


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_is_merged_before_the_text_is_run(base, tmp_path, alone):
    g, stored = torch.Generator().manual_seed(5), {}
    model = tuned(base, tmp_path / "unused", layer=1)
    model.load_state_dict(base[1].state_dict())
    for layer, kind in ((0, "mlp.up_proj"), (1, "mlp.down_proj"), (1, "self_attn.q_proj")):
        weight = model.get_submodule(f"model.layers.{layer}.{kind}").weight
        b, a = torch.randn(len(weight), 2, generator=g) * 0.1, torch.randn(2, weight.shape[1], generator=g)
        stored |= {f"base_model.model.model.layers.{layer}.{kind}.lora_{x}.weight": t for x, t in (("A", a), ("B", b))}
        with torch.no_grad():
            weight += 3 * b @ a
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(stored, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    new = str(adapter) if alone else f"{base[0]}+{adapter}"
    check(ffncli.compare(str(base[0]), new, prompt=PROMPT).activations, base[1], model)


def test_both_models_run_on_the_tokens_of_base(base, tmp_path):
    model = tuned(base, tmp_path)
    give_tokenizer(tmp_path, [WORDS[0], *WORDS[:0:-1]])
    found = ffncli.compare(str(base[0]), str(tmp_path), prompt=PROMPT).activations
    check(found, base[1], model)
    assert found.notes == ("NEW has a different tokenizer, which gives 4 other tokens; both models run on BASE's",)


def test_texts_are_limited_and_must_not_be_empty(base):
    with pytest.raises(FFNError, match="prompt is empty"):
        ffncli.compare(str(base[0]), str(base[0]), prompt=" ")
    long = ffncli.compare(str(base[0]), str(base[0]), prompt=["the " * 60] * 10).activations
    assert (long.prompts, long.tokens) == (8, 480)
    assert long.notes == ("8 of 10 texts are run: together they have more than 512 tokens",)
