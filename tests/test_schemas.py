"""The schemas of docs/schemas.py, checked with outputs that they were not made from."""

import fcntl
import html
import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import ffncli
from docs import blocks, schemas
from ffncli.cli.main import COMMANDS

pytestmark = pytest.mark.docs

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
    "verify my-model --layer 2", "models qwen", "compare e.json f.json", "doctor --no-noise",
    "export gpt-oss-20b --as latex", "export 4x8:swiglu --as flashinfer-trace --dtype bf16 --part block",
    "bench 32x64:gelu --kernel eager --processes 1 --max-time 1s --threads 1 --save here.csv",
]  # fmt: skip


def strict(schema: Any) -> Any:
    """Return the same schema, but without additional keys."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(inner) for key, inner in schema.items()}
    return {**closed, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else closed


@pytest.fixture(scope="module")
def folder() -> Iterator[Callable[[str], None]]:
    """Enter the folder in which the samples and the commands in OTHERS run."""
    with schemas.folder() as run:
        for line in ("4x8:gelu --save e.json", "4x8:gelu --no-bias --seed 1 --save f.json"):
            blocks.in_process(["trace", *line.split()])
        yield run


@pytest.fixture(scope="module")
def samples(folder: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Return a function from a command to its samples' outputs, made by the first pytest process that needs them."""
    shared, place = tmp_path_factory.getbasetemp(), Path.cwd()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    @cache
    def made(name: str) -> list[Any]:
        path = shared / f"{name}.answers.json"
        with (shared / f"{name}.lock").open("w") as lock, chdir(place):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(schemas.answers(name, folder)), "utf-8")
        found: list[Any] = json.loads(path.read_text("utf-8"))
        return found

    return made


@pytest.fixture(scope="module")
def schema(samples: Callable[[str], list[Any]]) -> Callable[[str], Any]:
    """Return a function from a command to the schema of its samples."""
    return cache(lambda name: schemas.schema_of(name, samples(name)))


@pytest.mark.parametrize("line", OTHERS)
def test_what_a_command_prints_is_as_its_schema_says(call, schema, line):
    name, *rest = shlex.split(line)
    code, out, err = call(name, *rest, "--json")
    assert code in (0, 1), err
    jsonschema.validate(json.loads(out), strict(schema(name)), jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_schema_that_refuses_something_else(schema, name):
    assert name in schemas.SAMPLES
    jsonschema.Draft202012Validator.check_schema(schema(name))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": 1, "command": name}, schema(name))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": 1, "command": "other", "conventions": {}}, schema(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_answer_becomes_a_page(samples, name, tmp_path):
    """With every text and figure of its records, in a table or a list."""
    for at, answer in enumerate(samples(name)):
        (tmp_path / f"{at}.json").write_text(json.dumps(answer), "utf-8")
        written = ffncli.report(tmp_path / f"{at}.json", tmp_path / f"{at}.html")
        assert written.bytes <= 500_000
        page = html.unescape((tmp_path / f"{at}.html").read_text("utf-8"))
        for code, character in (("003c", "<"), ("003e", ">"), ("0026", "&")):
            page = page.replace(f"\\u{code}", character)
        for text in texts_of({key: value for key, value in answer.items() if key != "command"}):
            assert json.dumps(text)[1:-1] in page or text in page, (name, at, text)


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts of an answer up to 200 characters, those in lists aside, which a cell may cut."""
    if isinstance(value, str) and len(value) <= 200:
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list) and all(isinstance(one, dict) for one in value):
        for inner in value:
            yield from texts_of(inner)


@pytest.mark.parametrize("name", COMMANDS)
def test_meanings_are_those_of_the_page(schema, name):
    """The description of a key with one meaning is that meaning."""

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


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_of_the_page_is_printed(schema, name):
    """Some sample prints each key; `models` shares its section with `params`, which has more keys."""

    def keys(part: Any) -> set[str]:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return set(part.get("properties", ()) if isinstance(part, dict) else ()).union(*map(keys, inner))

    shown = keys(schema(name)) | (keys(schema("params")) if name == "models" else set())
    assert set(schemas.meanings(name)) <= shown


def test_the_shape_of_values():
    answers = [{"a": 1, "b": [[1, 2]], "c": "x"}, {"a": None, "b": [3.5], "d": [{"e": True}]}]
    made = schemas.schema_of("doctor", answers)["properties"]
    assert made["a"] == {"type": ["null", "number"]}
    assert made["b"] == {"$ref": "#/$defs/numbers"}
    assert made["c"] == {"type": "string"}
    assert made["d"]["items"]["required"] == ["e"]
    assert schemas.schema_of("doctor", answers)["required"] == ["a", "b"]
