"""`ffn activations --source` as a user asks it."""

import json
import re
import shutil
import subprocess
import sys

import gguf
import numpy
import pytest

from docs.schemas import keys_text
from tests.oracles.checkpoints import expect_refusal
from tests.oracles.gguf_files import finish
from tests.oracles.prompted import ACTS, PROMPT, made, run
from tests.test_docs import keys

pytestmark = pytest.mark.models


def source(name: str) -> str:
    return str(made(name).path)


def test_a_layers_page_has_the_figures_of_its_own_gates(call):
    code, out, err = call("activations", "relu", "--source", source("llama"), "--layer", "1", "--prompt", PROMPT)
    (recorder,), _ = run(made("llama"), ACTS["llama"], "decoder", 1)
    z = recorder.entered[0].double()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("decoder layer 1: input of silu  weights of decoder layer 1")
    assert lines[1].strip() == '4 tokens: 0 "Hello", 1 "the", 2 "cat", 3 "sat"'
    said = f"min {z.min():.4g}  max {z.max():.4g}  mean {z.mean():.4g}  std {z.std(correction=0):.4g}"
    assert said in out
    assert f"160 values of 40 units, {100 * (z < 0).double().mean():.3g} % negative" in out
    assert f"ffn activations --std {z.square().mean().sqrt():.4g}" in out
    dead = int((z <= 1e-3).all(0).sum())
    assert [line.split()[5] for line in lines if line.startswith("relu")] == [str(dead)]
    assert max(map(len, lines[1:])) <= 80  # the first has the directory's name


def test_the_nearest_normal_says_how_far_its_mean_is(call, json_of):
    asked = ("activations", "--source", "8x16:relu", "--input", "ones", "--tokens", "3")
    out = call(*asked)[1]
    d = json_of(*asked, notes=True)["data"]["layers"][0]["activations"][0]
    mean, std = d["input"]["mean"], d["input"]["std"]
    assert abs(mean) > 0.1 * std
    assert f"--std {(mean**2 + std**2) ** 0.5:.4g} (the mean is {mean / std:+.2g} std off)" in out


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
@pytest.mark.parametrize("layer", ["1", "all"])
def test_every_format(stdout_of, style, layer):
    asked = ("--source", source("deepseek_v3"), "--prompt", PROMPT, "--layer", layer, "--format", style)
    out = stdout_of("activations", *asked)
    assert "\x1b" not in out
    assert "nan" not in out.replace("nan,inf", "").replace('"nan"', "")


def test_every_json_key_is_described(json_of):
    found = json_of("activations", "--source", source("deepseek_v3"), "--prompt", PROMPT, "--layer", "all")
    found["data"]["tokens"] = list(found["data"]["tokens"].values())  # stacks by name
    section = keys_text("activations")
    assert keys(found) <= set(re.findall(r"`(\w+)`", section)) | {"schema_version", "command", "conventions"} | {
        "position", "id", "text", "kind",
    }  # fmt: skip
    assert found["command"] == "activations"
    assert found["conventions"]


def test_csv_has_a_line_per_activation_and_place(csv_of, json_of):
    asked = ("--source", source("deepseek_v3"), "--prompt", PROMPT, "--layer", "all")
    lines = csv_of("activations", "gelu", "relu", *asked)
    assert [(line["layer"], line["step"], line["name"], line["own"]) for line in lines] == [
        (layer, step, name, "true" if name == "silu" else "false")
        for layer, step in (("0", "act"), ("1", "experts.act"), ("1", "shared.act"), ("2", "experts.act"),
                            ("2", "shared.act"))
        for name in ("silu", "gelu", "relu")
    ]  # fmt: skip
    rows = json_of("activations", "gelu", "relu", *asked)["rows"]
    assert [float(line["output_change"]) for line in lines] == [row["output_change"] for row in rows]


def test_names_are_any_spelling_and_the_own_one_comes_once(json_of):
    asked = ("swish", "gelu_new", "silu", "--source", "8x16:swiglu")
    assert [row["name"] for row in json_of("activations", *asked, notes=True)["rows"]] == ["silu", "gelu_tanh"]


def test_the_layers_of_a_model_beside_each_other(call, json_of):
    out = call("activations", "--source", source("gpt2"), "--prompt", PROMPT, "--layer", "all")[1]
    assert "2 layers, each with its own weights" in out
    changes = out[out.index("Change of the FFN's output") :].splitlines()[1:4]
    assert changes[0].split() == ["layer", "relu", "relu2", "gelu", "quick_gelu", "silu", "xielu"]
    rows = json_of("activations", "--source", source("gpt2"), "--prompt", PROMPT, "--layer", "all")["rows"]
    for layer, line in enumerate(changes[1:]):
        said = [float(word) for word in line.split()[1:]]
        assert said == pytest.approx(
            [100 * row["output_change"] for row in rows if row["layer"] == layer and not row["own"]], rel=0.006
        )


def gguf_file(path):
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in (("embedding_length", 8), ("feed_forward_length", 12), ("block_count", 1)):
        writer.add_uint32(f"llama.{key}", value)
    for name, shape in (("ffn_gate", (12, 8)), ("ffn_up", (12, 8)), ("ffn_down", (8, 12)), ("ffn_norm", (8,))):
        writer.add_tensor(f"blk.0.{name}.weight", numpy.ones(shape, numpy.float32))
    finish(writer)


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        (["8x16:gelu"], ["weights and input drawn at random: --prompt TEXT shows the model's actual input, if the"]),
        (["GGUF"], ["input drawn at random: --prompt TEXT shows the model's actual input\n"]),
        (["8x16:gelu", "--input", "ones"], ["weights drawn at random"]),
        (["LLAMA"], ["decoder layer 0 of", "input drawn at random: --prompt TEXT shows the model's actual input\n"]),
        (["LLAMA", "--layer", "1", "--input", "ones"], []),
        (["8x16:gelu", "--input", "nan,1,2,3,4,5,6,7"], ["note: input x has 1 NaN"]),
    ],
)
def test_what_is_drawn_or_not_finite_is_said(call, tmp_path, arguments, notes):
    if "GGUF" in arguments:
        gguf_file(tmp_path / "m.gguf")
    named = {"LLAMA": source("llama"), "GGUF": f"{tmp_path}/m.gguf"}
    given = [named.get(word, word) for word in arguments]
    code, _, err = call("activations", "--source", *given)
    assert code == 0
    assert [note for note in notes if note not in err] == []
    assert err.count("note:") == len(notes) + ("nan" in str(arguments))


def test_the_seed_draws_what_trace_draws(call, json_of):
    """The same generator: the gates of `ffn trace` are what enters here."""
    gate = next(
        step for step in json.loads(call("trace", "8x16:swiglu", "--seed", "5", "--json")[1])["steps"]
        if step["name"] == "gate"
    )  # fmt: skip
    (layer,) = json_of("activations", "--source", "8x16:swiglu", "--seed", "5", notes=True)["data"]["layers"]
    found = layer["activations"][0]["input"]
    assert found["mean"] == pytest.approx(gate["mean"], rel=1e-6)
    assert (found["min"], found["max"], found["histogram"]) == (gate["min"], gate["max"], gate["histogram"])


def test_numbers_that_are_not_finite_leave_json_whole(json_of):
    found = json_of("activations", "relu", "--source", "8x16:relu", "--input", "inf," * 7 + "nan", notes=True)
    (entered,) = found["data"]["layers"][0]["activations"]
    assert (entered["input"]["nan"], entered["input"]["mean"], entered["input"]["histogram"]) == (16, None, [])
    assert (found["rows"][0]["nan"], found["rows"][0]["output_change"]) == (16, None)


def test_a_users_own_module_is_run(call, json_of, tmp_path):
    code = (
        "import torch\nclass Block(torch.nn.Module):\n    def __init__(self, d_model=8):\n        super().__init__()\n"
    )
    code += "        self.up = torch.nn.Linear(d_model, 16)\n        self.down = torch.nn.Linear(16, d_model)\n"
    code += "    def forward(self, x):\n        return self.down(torch.nn.functional.silu(self.up(x)))\n"
    (tmp_path / "my.py").write_text(code)
    rows = json_of("activations", "relu", "--source", f"{tmp_path}/my.py:Block", notes=True)["rows"]
    assert [row["name"] for row in rows] == ["silu", "relu"]
    (tmp_path / "my.py").write_text(code.replace("=8", ""))
    refused = call("activations", "--source", f"{tmp_path}/my.py:Block")
    expect_refusal(refused, "needs d_model", "give it a default")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--prompt", "hi"], ["--prompt needs --source", "--source DIR"]),
        (["--input-ids", "1"], ["--input-ids needs --source"]),
        (["--layer", "3"], ["--layer needs --source"]),
        (["--seed", "3"], ["--seed needs --source"]),
        (["--tokens", "3"], ["--tokens needs --source"]),
        (["--device", "cuda"], ["--device needs --source or --rounding"]),
        (["swiglu", "--source", "8x16:swiglu"], ["swiglu is a gated unit", "silu"]),
        (["--source", "LLAMA", "gelu", "swiglu"], ["swiglu is a gated unit", "silu"]),
        (["--source", "LLAMA", "--at", "1"], ["--at contradicts --source"]),
        (["--source", "LLAMA", "--std", "2"], ["--std contradicts --source"]),
        (["--source", "LLAMA", "--layer", "9"], ["--layer 9 is out of range", "layers 0 to 1"]),
        (["--source", "LLAMA", "--layer", "x"], ["--layer must be a whole number"]),
        (["--source", "LLAMA", "--prompt", ""], ["--prompt is empty"]),
        (["--source", "LLAMA", "--prompt", "a", "--tokens", "3"], ["--tokens contradicts --prompt"]),
        (["--source", "LLAMA", "--prompt", "a", "--input", "ones"], ["--input contradicts --prompt"]),
        (["--source", "LLAMA", "--prompt", "a", "--input-ids", "1"], ["--prompt contradicts --input-ids"]),
        (["--source", "LLAMA", "--input-ids", "999"], ["token 999", "60 tokens"]),
        (["--source", "LLAMA", "--position", "0"], ["--position needs --prompt"]),
        (["--source", "LLAMA", "--prompt", "a", "--position", "7"], ["--position 7 is out of range"]),
        (["--source", "LLAMA", "gleu"], ["unknown activation 'gleu'", "did you mean"]),
        (["--source", "gpt2", "--prompt", "a"], ["--prompt: 'gpt2' is not a directory with weights"]),
        (["--source", "8x16", "--input-ids", "1"], ["--input-ids: '8x16' is not a directory with weights"]),
        (["--source", "8x16", "--layer", "all"], ["8x16 is one block and has no layers"]),
        (["--source", "8x16", "--tokens", "1" + "0" * 11], ["--tokens"]),
        (["--source", "lama-2-7b"], ["'lama-2-7b'", "did you mean 'llama-2-7b'"]),
        (["--source", "./none"], ["none does not exist"]),
        (["--source", ""], ["unknown model ''"]),
        (["--source", "WHISPER", "--layer", "encoder.0", "--prompt", "a"], ["whisper takes input_features, not text"]),
    ],
)
def test_what_cannot_be_is_one_line(call, words, parts):
    given = [source(word.lower()) if word in ("LLAMA", "WHISPER") else word for word in words]
    expect_refusal(call("activations", *given), *parts)


def test_a_config_alone_is_looked_at_and_not_run(call, tmp_path):
    shutil.copy(made("llama").path / "config.json", tmp_path)
    assert "random weights" in call("activations", "relu", "--source", str(tmp_path))[1]
    refused = call("activations", "--source", str(tmp_path), "--input-ids", "3")
    expect_refusal(refused, f"--input-ids: {tmp_path} has no safetensors", "give a directory with config.json")


@pytest.mark.parametrize("given", [["--input-ids", "3"], []])
def test_an_activation_that_nobody_knows_is_not_an_option_away(call, tmp_path, given):
    config = json.loads((made("llama").path / "config.json").read_text("utf-8"))
    config |= {"model_type": "zorgl", "hidden_act": "wobble"}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    shutil.copy(made("llama").path / "model.safetensors", tmp_path)
    refused = call("activations", "--source", str(tmp_path), *given)
    expect_refusal(refused, "does not specify its activation, so it cannot be run", "add it to its config.json")


def test_without_a_source_nothing_of_torch_is_loaded():
    probe = "import sys; sys.argv[1:] = ['activations', 'gelu']\nfrom ffncli.cli.main import main\n"
    probe += "try:\n    main()\nexcept SystemExit:\n    sys.stderr.write(str({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "set()"


def test_a_missing_extra_is_said(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    asked = ("activations", "--source", source("llama"), "--prompt", PROMPT)
    expect_refusal(call(*asked), "models", code=3)
