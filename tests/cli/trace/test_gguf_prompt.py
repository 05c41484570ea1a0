"""`ffn trace model.gguf --prompt`: transformers runs the file, and our FFN is held to it and to the original model."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q

import ffncli
from tests.oracles import gguf_files
from tests.oracles.prompted import through

pytestmark = pytest.mark.models

PROMPT = "Hi cat"
LAYER = 1


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return gguf_files.llama()


@pytest.fixture(scope="module")
def files(tmp_path_factory, model) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {kind.name: gguf_files.write(folder / f"{kind.name}.gguf", model, kind) for kind in (Q.F32, Q.Q8_0)}


def ids(words: str) -> list[int]:
    return [gguf_files.tokens().index({" ": "Ġ"}.get(letter, letter)) for letter in words]


def test_the_input_and_the_output_are_the_original_models(files, model):
    session = ffncli.trace(files["F32"], layer=LAYER, prompt=PROMPT)
    assert [token.id for token in session.tokens] == ids(PROMPT)
    assert [token.text for token in session.tokens] == list(PROMPT)
    at = f"model.layers.{LAYER}.mlp"
    seen = through(model, {"input": at, "output": at}, input_ids=torch.tensor([ids(PROMPT)]))
    torch.testing.assert_close(session[session.ffn_input], seen["input"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(session[session.ffn_output], seen["output"], rtol=1e-4, atol=1e-4)
    assert session.model_run.agreement.relative_error <= 1e-6


def test_quantized_weights_are_transformers_own(files, model, call):
    code, out, err = call("trace", str(files["Q8_0"]), "--layer", str(LAYER), "--prompt", PROMPT, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["model_run"]["agreement"]["relative_error"] <= 1e-6
    assert "unpacked from Q8_0" in found["block"]["weights"]
    original = ffncli.trace(files["F32"], layer=LAYER, prompt=PROMPT)
    assert found["steps"][0]["max"] == pytest.approx(original.steps[0].max, rel=0.1)
    assert found["steps"][0]["max"] != original.steps[0].max
    kept = [
        parameter.numel() for name, parameter in model.named_parameters()
        if "layers.2." not in name and "lm_head" not in name
    ]  # fmt: skip
    size = f"{sum(kept) * 4 / 1e3:#.4g} KB"
    assert (
        err == f"note: transformers dequantizes the GGUF file to run the prompt: {size} of memory in fp32, about 1 s\n"
    )


def test_all_layers_and_the_tokens_that_one_promotes(files, model, call):
    out = call("trace", str(files["F32"]), "--layer", "all", "--prompt", PROMPT, "--json")[1]
    rows = json.loads(out)["layers"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert all(row["relative_error"] <= 1e-6 for row in rows)
    session = ffncli.trace(files["F32"], layer=2, prompt=PROMPT, unembed=True, top_tokens=3)
    at = "model.layers.2.mlp"
    output = through(model, {"output": at}, input_ids=torch.tensor([ids(PROMPT)]))["output"][-1]
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(output))
    assert [token.id for token in session.unembed[0].promoted] == logits.topk(3).indices.tolist()


def test_a_file_without_a_tokenizer_takes_token_numbers(model, tmp_path, call):
    path = gguf_files.write(tmp_path / "m.gguf", model, with_tokens=False)
    code, _, err = call("trace", str(path), "--prompt", PROMPT)
    assert (code, "has no tokenizer (tokenizer.ggml.model); --input-ids accepts" in err) == (2, True)
    numbers = ",".join(map(str, ids(PROMPT)))
    code, out, _ = call("trace", str(path), "--input-ids", numbers, "--json")
    assert json.loads(out)["model_run"]["agreement"]["relative_error"] <= 1e-6


def test_what_transformers_cannot_load_is_one_line(model, tmp_path, call, files, monkeypatch):
    path = gguf_files.write(tmp_path / "m.gguf", model, architecture="olmo2")
    code, _, err = call("trace", str(path), "--prompt", PROMPT)
    assert code == 3
    assert "cannot load it: ValueError: GGUF model with architecture olmo2 is not supported yet" in err
    assert "give the directory with safetensors that it was made from, or trace without a prompt" in err
    for number in (1, 2):
        (tmp_path / f"s-0000{number}-of-00002.gguf").write_bytes(files["F32"].read_bytes())
    monkeypatch.setattr("ffncli.run.pretrained.loading.installed", lambda name: None)
    code, _, err = call("trace", str(files["F32"]), "--prompt", PROMPT)
    assert (code, err.splitlines()[-1].endswith("in a clone of ffn: pip install -e '.[models]'")) == (3, True)
    assert "needs the accelerate library" in err


def test_the_file_is_parsed_once_and_only_the_layers_that_run_are_dequantized(files, monkeypatch):
    parsed, unpacked = [], []

    class Counted(gguf.GGUFReader):
        def __init__(self, *arguments):
            parsed.append(arguments)
            super().__init__(*arguments)

    original = gguf.dequantize
    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: unpacked.append(data.shape) or original(data, kind))
    ffncli.trace(files["Q8_0"], layer=0, prompt=PROMPT)
    tensors = gguf.GGUFReader(files["Q8_0"]).tensors
    assert len(parsed) == 2  # this line's is the second
    assert len(unpacked) == sum("blk.1" not in t.name and "blk.2" not in t.name for t in tensors) < len(tensors)
    assert gguf.GGUFReader is Counted  # and the library is left as it was
