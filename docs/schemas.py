"""Write a JSON Schema of each command's `--json` output to docs/schema/.

    python -m docs.schemas [COMMAND ...]      write the schemas; `bench`, `merge` and `doctor` measure for some seconds

`make docs` and `make wheel` write the schemas; they are not committed. A schema describes what the samples below have
in common: a key is required if every sample has it. Descriptions come from docs/commands. tests/test_schemas.py checks
other outputs against the schemas, and accepts no key that they lack.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from docs.blocks import in_process, page_folder
from ffncli.bench.records import Status, Verdict

DOCS = Path(__file__).parent
SCHEMAS = DOCS / "schema"
PROMPT = '--prompt "The cat sat on the mat"'
SAMPLES = {
    "trace": [
        "4x8:relu --tokens 2 --top-units 2", "8x16:swiglu --experts 4 --expert all --explain experts[0,1],route[0,0]",
        "--example notebook --explain dropout[0,0,0]", "--example llama", "--d-model 8 --vocab 20 --tokens 2",
        "4x8:relu --input nan,0,1,2", f"./my-model --layer 2 {PROMPT} --unembed", f"./my-model --layer all {PROMPT}",
        "./my-model --layer 1 --unembed --neuron 3", f"./my-model --layer 1 {PROMPT} --unembed --neuron 3",
        f"./my-model --layer 1 {PROMPT} --promotes Paris", "./my-model --promotes Paris",
        "gpt2 --d-model 4 --d-ff 8 --layer all", "mixtral-8x7b --d-model 4 --d-ff 8 --layer all",
        "4x8:relu --set W1[0,3]=5", f"./my-model --layer 2 {PROMPT} --ablate unit:3",
        "./my-model --prompts texts.txt --top-contexts 2 --outliers 2 --similar 0.1",
        "./my-model --prompt Paris --prompt cat",
        "./my-model --prompts texts.txt --layer 1 --neuron 3",
        "./my-model --layer 1 --prompt 'The cat' --patch-from 'The mat'",
        "8x16:swiglu --experts 4 --explain route[0,0] --depth 2", "8x16:swiglu --experts 4 --tp 2 --ep 2", "4x8 --tp 2",
        "4x8:relu --backward --loss mse --lr 0.1 --explain dW1[0,3]", "8x16:swiglu --experts 4 --expert all --backward",
        f"./my-model --layer 2 {PROMPT} --backward", f"./my-model --layer all {PROMPT} --backward",
    ],
    "params": [
        "gpt2", "mixtral-8x7b --tokens 1,32", "deepseek-v3 --tp 8 --ridge 100", "mixtral-8x7b --ep 4",
        "gpt2 --sweep d_ff=1x,2x", "gpt2 --iso-params", "./my-model", "4x8:relu", "./edited", "./unknown",
        "t5-v1.1-xxl", "gpt2 --ridge h100,apple-m1", "--ridge list", "tables.json",
        "mixtral-8x7b --training adamw --ep 8 --zero 1 --tokens 32 --recompute act",
    ],
    "plan": [
        "mixtral-8x7b --device h100,v100 --tp 1,3 --ep 1,8 --simulate", "4x8:relu", "--device list",
        "768x3072:gelu --tp 1 --measured a.csv", "mixtral-8x7b --tp 1 --ep 8 --nodes 2 --price 2",
        "4096x4096:relu --dtype bf16 --tp 1 -n 1 --measured aiconfigurator:.",
    ],
    "activations": [
        "gelu relu", "gelu_tanh --against gelu", "gelu --rounding --dtype bf16", "swiglu swiglu_oai --iso-params",
        "situ deepseek_v4 --against swiglu",
        "gelu --expect 1=1,0=0", f"relu --source ./my-model --layer all {PROMPT}",
        "--all --against gelu --dtype bf16", "silu --rounding",
    ],
    "approximate": [
        "--target sin --d-ff 1,4 --activation gelu,swiglu --seeds 2 --steps 20",
        "--noise 0.3 --samples 16 --d-ff 1x,4x --activation gelu --seeds 2 --steps 20",
    ],
    "verify": [
        "", "4x8:relu", "./my-model --layer 1", "8x16:swiglu --experts 4", "4x8:swiglu --kernel eager --referee",
    ],
    "bench": [
        "64x256:swiglu --kernel eager,packed --processes 2 --max-time 1s --fail-if-slower 500% --save s.csv --force",
        "32x64:relu --kernel eager,packed --processes 1 --max-time 1s --threads 1 --save c.csv",
        "32x64:swiglu --experts 4 --kernel eager --routing uniform --processes 1 --max-time 1s "
        "--threads 1 --save r.csv",
    ],
    "models": ["", "llama"],
    "compare": ["a.json b.json", "a.json a.json", "a.json c.json", "a.csv b.csv --fail-if-slower 900%", "a.csv b.csv",
                "a.csv --plot", "--history [ab].csv", "a.safetensors b.safetensors", f"my-model my-tuned {PROMPT}",
                "my-model my-model"],
    "merge": ["part-1.csv -o one.csv", "part-1.csv part-2.csv -o both.csv"],
    "report": ["a.json -o one.html", "a.json b.json -o two.html"],
    "doctor": ["", "--no-noise"],
    "export": [
        "4x8:relu --as torch", "gpt2 --as latex --tokens 1,4", "mixtral-8x7b --as flashinfer-trace",
        "4x8:gelu --as torch -o block.py",
    ],
    "experts": ["./my-mixture -p Paris -p 'the cat sat on the mat'", "./my-mixture -p Paris --ablate-texts 0",
                "./my-mixture -p Paris -p cat --ep 2 --redundant 2 --cache lru,best --similar 0.01", "a.safetensors"],
    "precision": [
        "4x8:relu --dtype fp8 --sums", "64x128:swiglu --dtype nvfp4,int4:g64 --explain W1[0,3]",
        f"./my-model --layer 1 {PROMPT}", f"./my-model --layer all {PROMPT} --in-model", "64x64:relu --budget 6",
        f"./my-model --layer all {PROMPT} --dtype nvfp4,fp8 --budget 6",
    ],
    "explain": ["", "gelu", "swiglu", "4x", "moe", "neuron", "activation"],
}  # fmt: skip
_PREPARE = """
echo '{"model_type": "gemma4_text", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,' > tables.json
echo '"hidden_size_per_layer_input": 4}' >> tables.json
cp -r my-model unknown && sed -i 's/"model_type": "llama"/"model_type": "llamb"/' unknown/config.json
cp -r my-model edited && sed -i 's/"intermediate_size": 176/"intermediate_size": 192/' edited/config.json
printf 'The cat sat on the mat\\nParis is the capital\\n' > texts.txt"""
_TRACES = ("8x16:swiglu --save a.json", "8x16:geglu --save b.json", "8x16:swiglu --seed 1 --save c.json")
_ROUTES = [
    f"./my-mixture -p 'the cat sat' --ablate-texts 0 --save-routes {rest}"
    for rest in ("a.safetensors", "b.safetensors --dtype bf16")
]
_GRID = "64x256:swiglu --kernel eager,packed --tokens 1,2"
_SHORT = "--processes 2 --max-time 1s"
_MEASURE = f"[ -e b.csv ] || {{ ffn bench {_GRID} {_SHORT} --save a.csv -q && cp a.csv b.csv; }}"
_SHARDS = " && ".join(
    f"ffn bench {_GRID} --processes 1 --max-time 2s --shard {part}/2 --save part-{part}.csv -q" for part in (1, 2)
)
_MEASURED = {"compare": _MEASURE, "plan": _MEASURE, "merge": _SHARDS}  # write files that samples read
_BY_NAME = {"conventions", "sweep"}  # objects whose keys are data, not field names
_NUMBERS = {"anyOf": [{"type": ["null", "number"]}, {"type": "array", "items": {"$ref": "#/$defs/numbers"}}]}


@dataclass
class Shape:
    """What the values at one place in the samples have in common."""

    types: set[str] = field(default_factory=set)
    keys: dict[str, Shape] = field(default_factory=dict)
    required: set[str] | None = None
    items: Shape | None = None

    def add(self, value: Any) -> None:
        """Take one more value into account."""
        self.types.add(_type(value))
        if isinstance(value, dict):
            self.required = set(value) if self.required is None else self.required & set(value)
            for key, inner in value.items():
                self.keys.setdefault(key, Shape()).add(inner)
        elif isinstance(value, list):
            self.items = self.items or Shape()
            for inner in value:
                self.items.add(inner)

    def schema(self, meanings: Mapping[str, list[str]], name: str = "") -> dict[str, Any]:
        """Return the JSON Schema of these values; any number may also be null, for unknown or not finite."""
        meaning = meanings.get(name, [])
        types = self.types | ({"null"} if "number" in self.types or any("null" in text for text in meaning) else set())
        if types == {"null"}:  # no sample has a value
            types = set()
        if self.items and self._is_nested_numbers():
            return {"$ref": "#/$defs/numbers"}
        result: dict[str, Any] = {"type": sorted(types)[0] if len(types) == 1 else sorted(types)} if types else {}
        if len(meaning) == 1:  # docs/commands alone explains keys with several meanings
            result["description"] = meaning[0]
        if "object" in types and name in _BY_NAME:
            whole = Shape(set().union(*(inner.types for inner in self.keys.values())))
            result["additionalProperties"] = whole.schema({})
        elif "object" in types:
            result["properties"] = {key: inner.schema(meanings, key) for key, inner in self.keys.items()}
            result["required"] = [key for key in self.keys if key in (self.required or ())]
        if self.items:
            result["items"] = self.items.schema(meanings)
        return result

    def _is_nested_numbers(self) -> bool:
        inner = self.items
        while inner and "array" in inner.types and inner.types <= {"array", "number", "null"}:
            inner = inner.items
            if inner is None or (inner.types <= {"number", "null"} and not inner.items):
                return True
        return False


def _type(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def schema_of(command: str, answers: list[Any]) -> dict[str, Any]:
    """Return one schema for all of these answers of a command."""
    shape = Shape()
    for answer in answers:
        shape.add(answer)
    result = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"ffn {command} --json",
        **shape.schema(meanings(command)),
        "$defs": {"numbers": _NUMBERS},
    }
    result["properties"]["schema_version"] = {"const": 1}
    result["properties"]["command"] = {"const": command}
    if command in ("bench", "merge"):
        row = result["properties"]["rows"]["items"]["properties"]
        row["verdict"]["enum"] = [*get_args(Verdict), None]
        row["status"]["enum"] = list(get_args(Status))
    return result


def keys_text(command: str) -> str:
    """Return what a command's page says about its keys and columns; without a name, about those of all commands."""
    return (DOCS / f"{Path('commands', command)}.md").read_text("utf-8").partition("\n## JSON and CSV\n")[2]


def meanings(command: str) -> dict[str, list[str]]:
    """Return a mapping from each key to its meanings, from the tables in the command's page."""
    others = {"models": "params", "merge": "bench"}  # commands that add keys to another's rows
    text = "".join(keys_text(name) for name in (others.get(command), command) if name)
    found: dict[str, list[str]] = {}
    for keys, meaning in re.findall(r"^\| ([^|]+) \| (.+) \|$", text, re.M):
        for key in re.findall(r"`(\w+)`", keys):
            found.setdefault(key, []).append(f"{keys}: {meaning}".replace("&#124;", "|").replace("`", ""))
    return found


def answers(command: str, run: Callable[[str], None]) -> list[Any]:
    """Run the command with each sample's arguments in the current folder, and return its parsed outputs; `run` is the
    function that `folder` yielded."""
    found = []
    if command in _MEASURED:
        run(_MEASURED[command])
    if command == "plan":
        _write_times()
    for sample in SAMPLES[command]:
        out, err, code = in_process([command, *shlex.split(sample), "--json"])
        if code not in (0, 1):
            raise RuntimeError(f"ffn {command} {sample} --json: exit {code}: {err}")
        found.append(json.loads(out))
    return found


@contextmanager
def folder() -> Iterator[Callable[[str], None]]:
    """Enter the folder of `page_folder`, with the files that samples of several commands read."""
    with page_folder() as run:
        run(_PREPARE.strip())
        for line in _TRACES:
            in_process(["trace", *shlex.split(line)])
        for line in _ROUTES:
            in_process(["experts", *shlex.split(line)])
        yield run


def _write_times() -> None:
    """Write made-up times of products on an H200 as a parquet file."""
    from pyarrow import Table, parquet

    sizes = [(m, n, k) for n in (2048, 4096, 8192) for k in (2048, 4096, 8192) for m in (1, 1024)]
    rows = [
        {"device": "NVIDIA H200", "gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": 3e-3 + 3e-12 * m * n * k}
        for m, n, k in sizes
    ]
    parquet.write_table(Table.from_pylist(rows), "gemm_perf.parquet")


def main() -> None:
    """Write the schemas of the commands given as arguments, or of all commands."""
    SCHEMAS.mkdir(exist_ok=True)
    with folder() as run:
        for name in sys.argv[1:] or SAMPLES:
            text = json.dumps(schema_of(name, answers(name, run)), indent=1, ensure_ascii=False)
            (SCHEMAS / f"{name}.schema.json").write_text(text + "\n", "utf-8")
            print(f"docs/schema/{name}.schema.json")


if __name__ == "__main__":
    main()
