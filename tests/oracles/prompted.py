"""Tiny models with a tokenizer, run by hand: the inputs and outputs of modules; dense families' FFNs in float64."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.oracles.architectures import build, cases
from tests.oracles.huggingface import Made, make

WORDS = ("[UNK]", "<s>", "</s>", "Hello", "world", "the", "cat", "sat", "on", "mat", "\x1b[31mred", "naïve", "日本")
PROMPT = "Hello the cat sat"
IDS = (3, 5, 6, 7)


def give_tokenizer(path: Path, words: Sequence[str] = WORDS) -> Path:
    """Save a tokenizer of whole words in a model's folder; `words` have the ids 0, 1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (path / "tokenizer_config.json").write_text(json.dumps(said), "utf-8")
    return path


@cache
def made(name: str) -> Made:
    """Return one of the oracle's models on disk, with a tokenizer."""
    found = make(name, Path(mkdtemp(prefix=f"ffn-{name}-")))
    give_tokenizer(found.path)
    return found


def built(name: str, path: Path, **values: Any) -> nn.Module:
    """Build an architecture's tiny model with random weights, and save it in `path` with a tokenizer."""
    from dataclasses import replace

    case = cases()[name]
    model = build(name, replace(case, values={**case.values, **values})).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            tensor.copy_(0.4 * torch.randn(tensor.shape, generator=generator) + (0.8 if "norm" in parameter else 0))
    model.save_pretrained(path)  # type: ignore[operator]
    give_tokenizer(path)
    return model


def through(model: nn.Module, names: Mapping[str, str], **given: Any) -> dict[str, Tensor]:
    """Run the whole model and record tensors: for a name `up` the module's input, for `down=` the module's output."""
    seen: dict[str, Tensor] = {}

    def first(value: Any) -> Tensor:
        return (value[0] if isinstance(value, tuple) else value).detach().clone().flatten(0, -2)

    hooks = []
    for key, name in names.items():
        module = model.get_submodule(name)
        if key.endswith("output"):
            hooks.append(module.register_forward_hook(lambda m, a, out, key=key: seen.update({key: first(out)})))
        else:
            hooks.append(module.register_forward_pre_hook(lambda m, a, key=key: seen.update({key: first(a)})))
    try:
        with torch.no_grad():
            model(**given)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def ids(numbers: Sequence[int] = IDS) -> Tensor:
    """Return token ids as a batch of one prompt."""
    return torch.tensor([list(numbers)])


Function = Callable[[Tensor], Tensor]
_GELU_TANH: Function = lambda x: functional.gelu(x, approximate="tanh")  # noqa: E731
_LLAMA = ("model.layers.{i}.mlp.down_proj", "model.layers.{i}.mlp.gate_proj", functional.silu)
_GEMMA = (*_LLAMA[:2], _GELU_TANH)
_FUSED = ("model.layers.{i}.mlp.down_proj", "model.layers.{i}.mlp.gate_up_proj/0", functional.silu)
# The module whose input the units are and, for gated blocks, the activation's input: `/0` is an output's first half.
DENSE: Mapping[str, tuple[str, str | None, Function | None]] = {
    **dict.fromkeys(("llama", "mistral", "smollm3", "qwen3", "olmo2", "granite", "cohere", "stablelm"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
    **dict.fromkeys(("phi3", "glm", "glm4"), _FUSED),
    "gpt2": ("transformer.h.{i}.mlp.c_proj", None, None),
    "gpt_neo": ("transformer.h.{i}.mlp.c_proj", None, None),
    **dict.fromkeys(("gptj", "codegen"), ("transformer.h.{i}.mlp.fc_out", None, None)),
    **dict.fromkeys(("bloom", "falcon"), ("transformer.h.{i}.mlp.dense_4h_to_h", None, None)),
    "gpt_neox": ("gpt_neox.layers.{i}.mlp.dense_4h_to_h", None, None),
    "phi": ("model.layers.{i}.mlp.fc2", None, None),
    "opt": ("model.decoder.layers.{i}.fc2", None, None),
    "xglm": ("model.layers.{i}.fc2", None, None),
    "biogpt": ("biogpt.layers.{i}.fc2", None, None),
    "starcoder2": ("model.layers.{i}.mlp.c_proj", None, None),
    "nemotron": ("model.layers.{i}.mlp.down_proj", None, None),
    "mpt": ("transformer.blocks.{i}.ffn.down_proj", None, None),
    "bert": ("bert.encoder.layer.{i}.output.dense", None, None),
    "roberta": ("roberta.encoder.layer.{i}.output.dense", None, None),
    "electra": ("electra.encoder.layer.{i}.output.dense", None, None),
    "distilbert": ("distilbert.transformer.layer.{i}.ffn.lin2", None, None),
    "xlnet": ("transformer.layer.{i}.ff.layer_2", None, None),
    "t5-gated-gelu": ("encoder.block.{i}.layer.1.DenseReluDense.wo", "encoder.block.{i}.layer.1.DenseReluDense.wi_0",
                      _GELU_TANH),
    "t5-relu": ("encoder.block.{i}.layer.1.DenseReluDense.wo", None, None),
}  # fmt: skip
SINGLE = {"xglm", "xlnet"}  # models whose code refuses float64
_MADE = {"llama", "gemma2", "olmo2", "gpt2", "opt", "gpt_neox", "bert", "t5-gated-gelu", "t5-relu"}


@cache
def in_double(name: str) -> tuple[Path, Any]:
    """Return a model's directory, and the model, in float64 if its code allows that."""
    if name in _MADE:
        path, model = made(name).path, made(name).model
    else:
        path = Path(mkdtemp(prefix=f"ffn-{name}-"))
        model = built(name, path)
    dtype = torch.float32 if name in SINGLE else torch.float64
    return path, type(model).from_pretrained(path, dtype=dtype).eval()


# Where a family's FFN has its activation: a module of the layer ("" for the layer itself) and the attribute.
ACTS = {
    "llama": ("mlp.act_fn",), "gemma2": ("mlp.act_fn",), "gpt2": ("mlp.act",), "opt": ("activation_fn",),
    "bert": ("intermediate.intermediate_act_fn",), "t5-gated-gelu": ("DenseReluDense.act",),
    "mixtral": ("mlp.experts.act_fn",), "deepseek_v3": ("mlp.experts.act_fn", "mlp.shared_experts.act_fn"),
    "qwen2_moe": ("mlp.experts.act_fn", "mlp.shared_expert.act_fn"), "gpt_oss": ("mlp.experts",),
}  # fmt: skip


class Recorder(nn.Module):
    """An activation that records its inputs and outputs, call by call (one call for each expert)."""

    def __init__(self, f: Function) -> None:
        super().__init__()
        self.f, self.entered, self.left = f, list[Tensor](), list[Tensor]()

    def forward(self, z: Tensor) -> Tensor:
        """Compute f(z), and record z and f(z)."""
        out = self.f(z)
        self.entered.append(z.detach().clone().flatten(0, -2))
        self.left.append(out.detach().clone().flatten(0, -2))
        return out


def ffn_input(made: Made, stack: str, index: int) -> Tensor:
    """Return the input of a layer's FFN, [tokens, d_model], when the model reads the tests' prompt."""
    name = f"{made.case.at[stack].format(i=index)}.{made.case.ffn[0]}"
    given: dict[str, Any] = {"input_ids": ids()}
    if made.model.config.is_encoder_decoder:  # type: ignore[union-attr]
        given["decoder_input_ids"] = torch.tensor([[0]])
    return through(made.model, {"input": name}, **given)["input"]


def run(made: Made, acts: tuple[str, ...], stack: str, index: int, other: Function | None = None) -> tuple[Any, Tensor]:
    """Run a layer's FFN with `other` as its activation; return a Recorder for each activation, and the FFN's output."""
    model = copy.deepcopy(made.model)
    layer = model.get_submodule(made.case.at[stack].format(i=index))
    found = []
    for path in acts:
        owner, _, name = path.rpartition(".")
        module = layer.get_submodule(path)
        if hasattr(module, "_apply_gate"):  # gpt-oss has no module for it
            found.append(_listen(module, other))
            continue
        found.append(Recorder(other or module))
        setattr(layer.get_submodule(owner) if owner else layer, name, found[-1])
    x = ffn_input(made, stack, index)
    with torch.no_grad():
        return found, replace(made, model=model).ffn(stack, index, x)


def _listen(experts: Any, other: Function | None) -> Recorder:
    recorder = Recorder(other or (lambda z: z * torch.sigmoid(experts.alpha * z)))

    def gate(self: Any, both: Tensor) -> Tensor:
        z, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        out: Tensor = (up + 1) * recorder(z)
        return out

    experts._apply_gate = MethodType(gate, experts)
    return recorder
