"""docs/schema/: outputs that the schemas were not made from."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from docs import blocks, schemas
from ffncli.cli.main import COMMANDS

PROMPT = '--prompt "cat on mat"'
OTHERS = [
    "trace 6x12:geglu --tokens 3", "trace 8x16:gelu --explain up[0,0,0],down[0,1,1] --batch 2 --seq-len 2",
    f"trace my-model --layer 3 {PROMPT} --position 0", f"trace my-model --layer all {PROMPT}",
    "trace --example conv", "trace --d-model 4 --vocab 9", "params llama-3.1-8b gpt-oss-120b",
    "params qwen3-30b-a3b --tokens 1,8 --tp 4 --dtype bf16", "params my-model --ridge 50",
    "params bert-base --sweep tokens=1,2", "params 64x128:gelu --iso-params", "activations silu quick_gelu",
    "plan llama-2-7b --device a100,b200 --dtype fp8", "plan 8x16:swiglu --experts 4 --tp 1 --ep 2 --simulate -n 3",
    "activations relu6 --against relu --dtype bf16", "activations geglu --iso-params", "activations silu --rounding",
    "activations relu --expect 1=1", f"activations gelu --source my-model --layer 1 {PROMPT}",
    "approximate --target abs --d-ff 2,4 --activation relu --seeds 2 --steps 10", "verify 6x12:gelu",
    "verify my-model --layer 2", "models qwen", "compare c.json d.json", "doctor --no-noise",
    "export gpt-oss-20b --as latex", "export 4x8:swiglu --as flashinfer-trace --dtype bf16 --part block",
    "bench 32x64:gelu --kernel eager --quick --threads 1 --save here.csv",
]  # fmt: skip


def strict(schema: Any) -> Any:
    """The same schema, without room for keys that it does not name."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(inner) for key, inner in schema.items()}
    return {**closed, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else closed


def schema(name: str) -> Any:
    return json.loads((schemas.SCHEMAS / f"{name}.schema.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def folder():
    with blocks.page_folder() as run:
        run("ffn trace 4x8:gelu --save c.json; ffn trace 4x8:gelu --no-bias --seed 1 --save d.json")
        yield Path.cwd()


@pytest.mark.parametrize("line", OTHERS)
def test_what_a_command_prints_is_as_its_schema_says(call, folder, monkeypatch, line):
    monkeypatch.chdir(folder)
    name, *rest = shlex.split(line)
    code, out, err = call(name, *rest, "--json")
    assert code in (0, 1), err
    jsonschema.validate(json.loads(out), strict(schema(name)), jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_schema_that_refuses_something_else(name):
    assert name in schemas.SAMPLES
    jsonschema.Draft202012Validator.check_schema(schema(name))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": 1, "command": name}, schema(name))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": 1, "command": "other", "conventions": {}}, schema(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_meanings_are_those_of_the_page(name):
    """Of keys with one meaning; `make docs-update` writes them anew."""

    def described(properties: dict[str, Any]) -> list[tuple[str, str]]:
        pairs = []
        for key, inner in properties.items():
            pairs += [(key, inner["description"])] if "description" in inner else []
            for place in (inner, inner.get("items", {})):
                pairs += described(place.get("properties", {}))
        return pairs

    meanings = schemas.meanings(name)
    found = described(schema(name)["properties"])
    assert len(found) > 3
    assert all(meanings.get(key) == [text] for key, text in found)


def test_the_shape_of_values():
    answers = [{"a": 1, "b": [[1, 2]], "c": "x"}, {"a": None, "b": [3.5], "d": [{"e": True}]}]
    made = schemas.schema_of("nothing", answers)["properties"]
    assert made["a"] == {"type": ["null", "number"]}
    assert made["b"] == {"$ref": "#/$defs/numbers"}
    assert made["c"] == {"type": "string"}
    assert made["d"]["items"]["required"] == ["e"]
    assert schemas.schema_of("nothing", answers)["required"] == ["a", "b"]
