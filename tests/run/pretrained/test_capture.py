"""What is captured from a live model is what hooks on modules named by hand see; tokens and positions."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ffncli.errors import ExitCode, FFNError
from ffncli.models.model import Layer
from ffncli.models.source import load
from ffncli.run.engine.execute import run
from ffncli.run.pretrained import capture as live
from ffncli.run.pretrained import loading as pretrained_module
from ffncli.run.pretrained.capture import capture, run_model
from ffncli.run.pretrained.loading import offline, read_config
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import positions, token_text, tokenizer_of, tokens_of
from tests.oracles.prompted import IDS, PROMPT, WORDS, built, give_tokenizer, ids, made, through

# What enters and what leaves the FFN of a layer, written down from each family's published code.
_MLP = ("model.layers.{i}.mlp", "model.layers.{i}.mlp")
_FC = ("model.decoder.layers.{i}.fc1", "model.decoder.layers.{i}.fc2")
PLACES = {
    "llama": ("decoder", _MLP), "gemma2": ("decoder", _MLP), "mixtral": ("decoder", _MLP),
    "qwen3_moe": ("decoder", _MLP), "deepseek_v3": ("decoder", _MLP), "gpt_oss": ("decoder", _MLP),
    "olmo2": ("decoder", _MLP), "opt": ("decoder", _FC), "opt-post-norm": ("decoder", _FC),
    "gpt2": ("decoder", ("transformer.h.{i}.mlp", "transformer.h.{i}.mlp")),
    "gpt_neox": ("decoder", ("gpt_neox.layers.{i}.mlp", "gpt_neox.layers.{i}.mlp")),
    "bert": ("encoder", ("bert.encoder.layer.{i}.intermediate.dense", "bert.encoder.layer.{i}.output.dense")),
    "t5-gated-gelu": ("encoder", ("encoder.block.{i}.layer.1.DenseReluDense",) * 2),
}  # fmt: skip


def by_hand(name: str, index: int) -> tuple[Tensor, Tensor]:
    start, end = PLACES[name][1]
    given: dict[str, Any] = {"input_ids": ids()}
    if name.startswith("t5"):
        given["decoder_input_ids"] = torch.tensor([[0]])
    names = {"input": start.format(i=index), "output": end.format(i=index)}
    seen = through(made(name).model, names, **given)
    return seen["input"], seen["output"]


def close(ours: Tensor, theirs: Tensor, most: float = 1e-6) -> bool:
    return ours.shape == theirs.shape and float((ours - theirs).abs().max()) <= most * float(theirs.abs().max())


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("index", [0, 1])
def test_what_enters_and_leaves_is_what_hooks_see(name: str, index: int) -> None:
    model = load(str(made(name).path))
    ready = capture(model, Prompt(PROMPT), f"{PLACES[name][0]}.{index}")
    entering, leaving = by_hand(name, index)
    (ours,) = ready.inputs.values()
    assert ready.reference is not None
    assert close(ours, entering)
    assert close(ready.reference, leaving)
    assert close(run(ready.steps, ready.weights, ready.inputs), leaving)
    assert [token.id for token in ready.tokens] == list(IDS)
    assert [token.text for token in ready.tokens] == PROMPT.split()


def test_the_residual_stream_says_the_same() -> None:
    """GPT-2 by its hidden states: after a layer is what was there after attention, plus what the FFN gives."""
    model = made("gpt2").model
    ready = capture(load(str(made("gpt2").path)), Prompt(PROMPT), layer="0")
    with torch.no_grad():
        after = model(ids(), output_hidden_states=True).hidden_states[1][0]
        assert ready.reference is not None
        middle = after - ready.reference
        assert close(ready.inputs["norm"], model.transformer.h[0].ln_2(middle), 1e-5)  # type: ignore[union-attr,index]


def test_a_decoder_gets_its_start_token() -> None:
    name = "decoder.block.1.layer.2.DenseReluDense"
    start = torch.tensor([[0]])  # T5's padding
    seen = through(
        made("t5-gated-gelu").model, {"input": name, "output": name}, input_ids=ids(), decoder_input_ids=start
    )
    ready = capture(load(str(made("t5-gated-gelu").path)), Prompt(PROMPT), layer="decoder.1")
    assert close(ready.inputs["norm"], seen["input"])
    assert ready.reference is not None
    assert close(ready.reference, seen["output"])
    assert [token.id for token in ready.tokens] == start[0].tolist()
    assert ready.notes == ("the prompt goes to the encoder; the decoder gets only its start token",)


def test_bart_starts_with_what_its_config_says(tmp_path: Path) -> None:
    built("bart", tmp_path, decoder_start_token_id=2, bos_token_id=0)
    tokens = capture(load(str(tmp_path)), Prompt(PROMPT), layer="decoder.0").tokens
    assert [token.id for token in tokens] == [2]
    (tmp_path / "generation_config.json").unlink()  # older ones say it in config.json
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "decoder_start_token_id": 5}), "utf-8")
    tokens = capture(load(str(tmp_path)), Prompt(PROMPT), layer="decoder.0").tokens
    assert [token.id for token in tokens] == [5]


def test_t5_starts_with_what_its_generation_config_says(tmp_path: Path) -> None:
    folder = shutil.copytree(made("t5-relu").path, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 4}), "utf-8")
    tokens = capture(load(str(folder)), Prompt(PROMPT), layer="decoder.0").tokens
    assert [token.id for token in tokens] == [4]


def test_a_head_that_is_also_an_embedding_stays(tmp_path: Path) -> None:
    module: Any = built("fsmt", tmp_path)
    seen = through(
        module, {"input": "model.decoder.layers.0.fc1", "output": "model.decoder.layers.0.fc2"},
        input_ids=ids(), decoder_input_ids=torch.tensor([[module.generation_config.decoder_start_token_id]]),
    )  # fmt: skip
    ready = capture(load(str(tmp_path)), Prompt(None, IDS), layer="decoder.0")
    assert ready.reference is not None
    assert close(ready.reference, seen["output"])


def test_a_block_that_layers_share_is_recognised_once_it_has_weights(tmp_path: Path) -> None:
    module = built("zamba", tmp_path)
    model = load(str(tmp_path))
    ready = capture(model, Prompt(None, IDS), layer=f"{model.model.groups[0].stack}.0")
    (name,) = {
        n.rpartition(".")[0] for n, _ in module.named_parameters() if n.endswith("feed_forward.down_proj.weight")
    }
    seen = through(module, {"output": name}, input_ids=ids())
    assert ready.reference is not None
    assert close(ready.reference, seen["output"])
    assert close(run(ready.steps, ready.weights, ready.inputs), seen["output"])


def test_a_class_of_another_model_is_not_taken(tmp_path: Path) -> None:
    """A file may name any class of transformers."""
    folder = shutil.copytree(made("llama").path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for wrong in ("GPT2LMHeadModel", "pipeline", "nothing", "AutoModel"):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [wrong]}), "utf-8")
        ready = capture(load(str(folder)), Prompt(PROMPT), layer="1")
        assert ready.reference is not None
        assert close(ready.reference, by_hand("llama", 1)[1])


def test_whisper_reads_the_prompt_with_its_decoder() -> None:
    config: Any = made("whisper").model.config
    silence = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
    names = {"input": "model.decoder.layers.1.fc1", "output": "model.decoder.layers.1.fc2"}
    seen = through(made("whisper").model, names, input_features=silence, decoder_input_ids=ids())
    ready = capture(load(str(made("whisper").path)), Prompt(PROMPT), layer="decoder.1")
    assert close(next(iter(ready.inputs.values())), seen["input"])
    assert ready.reference is not None
    assert close(ready.reference, seen["output"])
    with pytest.raises(FFNError, match="takes input_features, not text"):
        capture(load(str(made("whisper").path)), Prompt(PROMPT), layer="encoder.1")


def test_pictures_are_no_text() -> None:
    with pytest.raises(FFNError, match="vit takes pixel_values, not text"):
        capture(load(str(made("vit").path)), Prompt(None, (1, 2)))


def test_positions_choose_rows() -> None:
    model = load(str(made("llama").path))
    every = capture(model, Prompt(PROMPT), layer="1")
    some = capture(model, Prompt(PROMPT, None, "-1,0"), layer="1")
    assert torch.equal(some.inputs["norm"], every.inputs["norm"][[3, 0]])
    assert every.reference is not None
    assert torch.equal(some.reference, every.reference[[3, 0]])
    assert [(token.position, token.text) for token in some.tokens] == [(3, "sat"), (0, "Hello")]


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5-gated-gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_asked_dtype_is_what_runs(name: str, dtype: torch.dtype) -> None:
    text = str(dtype).removeprefix("torch.")
    stack = PLACES[name][0]
    ready = capture(load(str(made(name).path)), Prompt(PROMPT), layer=f"{stack}.1", dtype=text)
    ours = run(ready.steps, ready.weights, ready.inputs)
    assert ready.reference is not None
    assert {t.dtype for t in (ours, ready.reference, *ready.weights.values(), *ready.inputs.values())} == {dtype}
    assert close(ours.double(), ready.reference.double(), 2e-2 if dtype == torch.bfloat16 else 1e-12)


# --- what is loaded and computed --------------------------------------------------------------------------------------


@dataclass
class Loaded:
    """The module that was loaded, and the names of its modules that ran."""

    module: Any
    ran: list[str]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Loaded]:
    """Capture a layer, and see what of the model was there."""

    def run_it(name: str, layer: str) -> Loaded:
        found: list[Any] = []
        ran: list[str] = []
        load_it = live.load

        def noted(*args: Any, **kwargs: Any) -> Any:
            found.append(load_it(*args, **kwargs))
            for name, module in found[-1].module.named_modules():
                module.register_forward_pre_hook(lambda m, a, name=name: ran.append(name))
            return found[-1]

        monkeypatch.setattr(live, "load", noted)
        capture(load(str(made(name).path)), Prompt(PROMPT), layer=layer)
        return Loaded(found[-1].module, ran)

    return run_it


def test_the_layers_behind_are_neither_loaded_nor_run(loaded: Callable[[str, str], Loaded]) -> None:
    found = loaded("llama", "0")
    assert len(found.module.model.layers) == 1
    assert not any(p.is_meta for p in found.module.parameters())
    assert not isinstance(found.module.lm_head, torch.nn.Linear) or found.module.config.tie_word_embeddings
    assert "model.layers.0.mlp" in found.ran
    assert "model.norm" not in found.ran
    assert "lm_head" not in found.ran


def test_an_encoders_layer_needs_no_decoder(loaded: Callable[[str, str], Loaded]) -> None:
    found = loaded("t5-gated-gelu", "encoder.0")
    assert (len(found.module.encoder.block), len(found.module.decoder.block)) == (1, 0)
    whole = loaded("t5-gated-gelu", "decoder.1")
    assert (len(whole.module.encoder.block), len(whole.module.decoder.block)) == (2, 2)


def test_one_run_sees_all_layers() -> None:
    model = load(str(made("llama").path))
    layers = [Layer("decoder", i, model.model.main.spec) for i in (1, 0)]
    order: list[int] = []
    run_model(model, layers, Prompt(PROMPT), lambda layer, *_: order.append(layer.index))
    assert order == [0, 1]


def test_memory_is_asked_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def short(size: int, what: str, advice: str) -> None:
        asked.append(size)
        raise FFNError("short", code=ExitCode.ENVIRONMENT)

    monkeypatch.setattr(pretrained_module, "require_memory", short)
    with pytest.raises(FFNError, match="short"):
        capture(load(str(made("llama").path)), Prompt(PROMPT), layer="0", dtype="bf16")
    model: Any = made("llama").model
    layers = model.model.layers
    rest = (p for n, p in model.named_parameters() if ".layers." not in n and "lm_head" not in n)
    assert asked == [2 * sum(p.numel() for p in (*layers[0].parameters(), *rest))]


def test_nothing_asks_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    def refuse(*args: Any) -> None:
        raise AssertionError(f"connects to {args}")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    capture(load(str(made("llama").path)), Prompt(PROMPT), layer="1")
    assert not huggingface_hub.constants.is_offline_mode()  # as before
    with offline():
        assert huggingface_hub.constants.is_offline_mode()
    assert "HF_HUB_OFFLINE" not in os.environ


def test_remote_code_never_runs(tmp_path: Path) -> None:
    """Code that lies beside a known model_type is not what is run."""
    folder = shutil.copytree(made("llama").path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\nclass Words: pass\n"
    (folder / "evil.py").write_text(code)
    words = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    words["auto_map"] = {"AutoTokenizer": ["evil.Words", "evil.Words"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(words), "utf-8")
    ready = capture(load(str(folder)), Prompt(PROMPT), layer="1")
    assert ready.reference is not None
    assert not (tmp_path / "ran").exists()


def test_what_the_files_lack_is_not_made_up(tmp_path: Path) -> None:
    """transformers draws a missing embedding at random; that would be garbage that agrees with itself."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(made("llama").path, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.0.self_attn.q_proj.weight"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(FFNError, match=r"has no 'model\.layers\.0\.self_attn\.q_proj\.weight', which the"):
        capture(load(str(folder)), Prompt(PROMPT), layer="1")


def test_a_part_that_never_runs_may_be_missing(tmp_path: Path) -> None:
    """BERT's pooler is not in the files of a masked language model."""
    folder = shutil.copytree(made("bert").path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["architectures"]  # then it is transformers' BertModel, with a pooler
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    ready = capture(load(str(folder)), Prompt(PROMPT), layer="1")
    assert ready.reference is not None
    assert close(ready.reference, by_hand("bert", 1)[1])


def test_eight_bit_weights_run_as_what_they_mean(tmp_path: Path) -> None:
    """DeepSeek's FP8 with block scales, beside the same model with its weights written out."""
    from safetensors.torch import load_file, save_file

    packed, plain = (shutil.copytree(made("llama").path, tmp_path / name) for name in ("packed", "plain"))
    stored = load_file(packed / "model.safetensors")
    meant = dict(stored)
    for name in [n for n in stored if n.endswith("_proj.weight")]:
        scale = stored[name].abs().max() / 448
        stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
        meant[name] = stored[name].float() * scale
    save_file(stored, packed / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    config = json.loads((packed / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (packed / "config.json").write_text(json.dumps(config), "utf-8")
    seen: list[tuple[Tensor, Tensor]] = []
    for folder in (packed, plain):
        model = load(str(folder))
        layer = model.model.layer("1")
        run_model(model, [layer], Prompt(PROMPT), lambda _, __, *pair: seen.append(pair))
    with offline() as transformers:  # a GPU would round activations too
        assert read_config(transformers, packed).quantization_config["dequantize"] is True
    assert close(seen[0][0], seen[1][0])
    assert close(seen[0][1], seen[1][1])


def test_a_wrong_weight_shows() -> None:
    """The agreement compares two readings of the file: spoil ours, and it says so."""
    from ffncli.run.measure.gap import agreement

    ready = capture(load(str(made("llama").path)), Prompt(PROMPT), layer="1")
    swapped = {**ready.weights, "gate.weight": ready.weights["up.weight"], "up.weight": ready.weights["gate.weight"]}
    assert ready.reference is not None
    assert agreement(run(ready.steps, ready.weights, ready.inputs), ready.reference).relative_error <= 1e-6
    assert agreement(run(ready.steps, swapped, ready.inputs), ready.reference).relative_error > 1e-2


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (None, (0, 1, 2, 3, 4)), ("all", (0, 1, 2, 3, 4)), ("-1", (4,)), ("0", (0,)), ("3,0", (3, 0)), ("1:3", (1, 2)),
        ("-2:", (3, 4)), (":2", (0, 1)), ("0,4,-1,0", (0, 4)), (" 1 , 2 ", (1, 2)), ("3:99", (3, 4)),
        (":", (0, 1, 2, 3, 4)),
    ],
)  # fmt: skip
def test_positions(text: str | None, meant: tuple[int, ...]) -> None:
    assert positions(text, 5) == meant


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "position 5 is out of range; the 5 tokens have positions 0 to 4"),
        ("-6", "position -6 is out of range"),
        ("x", "position must be a number, a list 0,3 or a range 2:5, got 'x'"),
        ("", "must be a number"), ("1.5", "must be a number"), ("1:2:3", "must be a number"), ("²", "must be a number"),
        ("3:3", "position 3:3 is empty"), ("9" * 10, "must be a number"),
    ],
)  # fmt: skip
def test_positions_that_are_none(text: str, said: str) -> None:
    with pytest.raises(FFNError) as error:
        positions(text, 5)
    assert said in str(error.value)


def test_a_range_of_any_size_costs_nothing() -> None:
    assert positions("0:999999999", 2) == (0, 1)


def test_texts_are_what_the_tokenizer_says(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(transformers, give_tokenizer(tmp_path))
    found = tokens_of(Prompt("Hello naïve 日本 nobody"), tokenizer, tmp_path)
    assert [(t.position, t.id, t.text) for t in found] == [
        (0, 3, "Hello"),
        (1, 11, "naïve"),
        (2, 12, "日本"),
        (3, 0, "[UNK]"),
    ]
    assert token_text(tokenizer, len(WORDS)) is None
    assert token_text(None, 0) is None


@pytest.mark.parametrize("space", ["▁", "Ġ"])
def test_a_leading_space_is_part_of_a_token(tmp_path: Path, space: str) -> None:
    """SentencePiece's and byte-level BPE's marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({"a": 0, f"{space}b": 1, space: 2, "b": 3}, [(space, "b")]))
    if space == "▁":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace()
    else:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = tokenizer_of(transformers, tmp_path)
    assert [t.text for t in tokens_of(Prompt("a b"), tokenizer, tmp_path)] == ["a", " b"]


def test_numbers_need_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_of(transformers, tmp_path) is None
    assert [(t.id, t.text) for t in tokens_of(Prompt(None, (7, 3)), None, tmp_path)] == [(7, None), (3, None)]


def test_a_prompt_needs_one(tmp_path: Path) -> None:
    with pytest.raises(FFNError, match=r"has no tokenizer \(tokenizer.json\); input_ids accepts token ids"):
        tokens_of(Prompt("Hello"), None, tmp_path)


def test_a_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    give_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(FFNError, match="its tokenizer cannot be loaded") as error:
        tokenizer_of(transformers, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", ["", "   "])
def test_an_empty_prompt(tmp_path: Path, prompt: str) -> None:
    tokenizer = tokenizer_of(transformers, give_tokenizer(tmp_path))
    with pytest.raises(FFNError, match=r"prompt (is empty|'   ' has no tokens)"):
        tokens_of(Prompt(prompt), tokenizer, tmp_path)
