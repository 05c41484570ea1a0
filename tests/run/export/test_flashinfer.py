"""--as flashinfer-trace: a schema of ours, the arena's own loader where it is installed, and the sources, run.

The loader needs neither CUDA nor flashinfer: `make test-arenas` installs it without its dependencies.
"""

import ast
import inspect
import json

import jsonschema
import pytest
import torch

import ffncli
from ffncli.block.steps import parameters
from ffncli.errors import FFNError
from ffncli.models.source import load
from ffncli.run.export.flashinfer import notes, trace_files
from ffncli.run.export.problem import problem_of
from tests.run.export.blocks import DENSE, MIXTURES, close, drawn, expected, problem

BLOCKS = {name: spec for name, spec in (DENSE | MIXTURES).items() if name != "by ids"}
_NAME = {"type": "string", "minLength": 1}
_TENSOR = {
    "type": "object",
    "required": ["shape", "dtype"],
    "properties": {"shape": {"type": "array", "items": _NAME}, "dtype": {"enum": ["float32", "bfloat16", "float16"]}},
}
_TENSORS = {"type": "object", "minProperties": 1, "additionalProperties": _TENSOR}
_AXIS = {
    "oneOf": [
        {"type": "object", "required": ["type", "value"],
         "properties": {"type": {"const": "const"}, "value": {"type": "integer", "minimum": 0}}},
        {"type": "object", "required": ["type"], "not": {"required": ["value"]},
         "properties": {"type": {"const": "var"}}},
    ]
}  # fmt: skip
DEFINITION = {
    "type": "object",
    "required": ["name", "op_type", "axes", "inputs", "outputs", "reference"],
    "properties": {
        "name": _NAME, "op_type": _NAME, "reference": _NAME, "inputs": _TENSORS, "outputs": _TENSORS,
        "axes": {"type": "object", "additionalProperties": _AXIS}, "tags": {"type": "array", "items": _NAME},
    },
}  # fmt: skip
WORKLOAD = {
    "type": "object",
    "required": ["definition", "workload", "solution", "evaluation"],
    "properties": {
        "workload": {
            "type": "object",
            "required": ["uuid", "axes", "inputs"],
            "properties": {
                "axes": {"type": "object", "required": ["tokens"], "additionalProperties": {"type": "integer"}},
                "inputs": {"type": "object", "additionalProperties": {"properties": {"type": {"const": "random"}}}},
            },
        },
        "solution": {"const": None},
        "evaluation": {"const": None},
    },
}
SOLUTION = {
    "type": "object",
    "required": ["name", "definition", "author", "spec", "sources"],
    "properties": {
        "spec": {"required": ["language", "target_hardware", "entry_point"]},
        "sources": {"type": "array", "minItems": 1, "items": {"required": ["path", "content"]}},
    },
}


def files(block):
    """(definition, workloads, solution, figures) as read from the files."""
    texts = trace_files(block)
    first, lines, solution, figures = texts.values()
    return (
        json.loads(first),
        [json.loads(line) for line in lines.splitlines()],
        json.loads(solution),
        json.loads(figures),
    )


def run_of(source: str):
    """The function `run` of a source."""
    names: dict = {}
    exec(compile(source, "main.py", "exec"), names)
    return names["run"]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_sources_compute_the_block(name):
    """The reference to all digits, and rounded once; the solution in the dtype of its inputs."""
    block = problem(BLOCKS[name], dtype="fp32")
    definition, workloads, solution, _ = files(block)
    jsonschema.validate(definition, DEFINITION)
    jsonschema.validate(solution, SOLUTION)
    for workload in workloads:
        jsonschema.validate(workload, WORKLOAD)
        assert list(workload["workload"]["inputs"]) == list(definition["inputs"])
    weights, inputs = drawn(block)
    given = [*inputs.values(), *(weights[key] for key in parameters(block.steps))]
    sizes = {axis: made.get("value", 5) for axis, made in definition["axes"].items()}
    shapes = [[sizes[axis] for axis in tensor["shape"]] for tensor in definition["inputs"].values()]
    assert shapes == [list(tensor.shape) for tensor in given]
    want = expected(name, block, weights, inputs)
    run, plain = run_of(definition["reference"]), run_of(solution["sources"][0]["content"])
    assert list(inspect.signature(run).parameters) == list(definition["inputs"])  # SOL-ExecBench asks for that
    assert list(inspect.signature(plain).parameters) == list(definition["inputs"])
    assert not set(definition["inputs"]) & {*definition["axes"], *definition["outputs"]}
    close(run(*given), want)
    close(plain(*given), want)
    if name not in MIXTURES:  # rounding sends no token to another expert
        narrow = [tensor.float() for tensor in given]
        exact = run(*(tensor.double() for tensor in narrow))
        assert torch.equal(run(*narrow), exact.float())
        close(plain(*narrow), exact, block.tolerance)


def test_one_experts_weights_are_widened_at_a_time():
    definition, *_ = files(problem(MIXTURES["mixtral"], dtype="bf16"))
    last = ast.parse(definition["reference"]).body[-1]
    assert ast.unparse(last.body[-1]) == (
        "return block(x.double(), norm.double(), router.double(), gate, up, down).to(x.dtype)"
    )
    assert "expert(flat[token], gate[e].double(), up[e].double(), down[e].double())" in definition["reference"]


def test_the_solution_is_a_kernel_of_ffn_bench(tmp_path):
    _, _, solution, _ = files(problem(DENSE["gated"], "ffn", dtype="fp32"))
    (tmp_path / "main.py").write_text(solution["sources"][0]["content"])
    verdict = ffncli.verify("8x12:swiglu", check="kernels", kernel=f"{tmp_path}/main.py:run")
    assert verdict.failed == ()
    assert any("main.py:run" in row.subject for row in verdict.rows)


def test_names_and_figures():
    block = problem_of(load("mixtral-8x7b"), "ffn", tokens=(1, 32))
    texts = trace_files(block)
    name = "ffn_mixtral_8x7b_e8_k2_d4096_f14336_bf16"
    assert list(texts) == [
        f"definitions/moe/{name}.json", f"workloads/moe/{name}.jsonl", f"solutions/moe/{name}/{name}_torch.json",
        f"figures/moe/{name}.json",
    ]  # fmt: skip
    definition, workloads, _, figures = files(block)
    assert [one["workload"]["axes"]["tokens"] for one in workloads] == [1, 32]
    assert len({one["workload"]["uuid"] for one in workloads}) == 2
    assert definition["inputs"]["gate"] == {"shape": ["experts", "d_ff", "d_model"], "dtype": "bfloat16"}
    assert definition["tags"] == ["status:draft", "model:mixtral-8x7b"]
    assert figures["workloads"] == [vars(one) for one in block.workloads]
    assert figures["tolerance"] == block.tolerance
    bare = trace_files(problem_of(load("8x16:geglu"), "block"))
    assert "definitions/ffn/block_gelu_gated_d8_f16_fp32.json" in bare
    assert trace_files(block) == texts


def test_what_the_arena_cannot_say_is_refused():
    with pytest.raises(FFNError, match=r"fp64 is not a dtype of its schema; choose fp32 or bf16 or fp16 as dtype"):
        trace_files(problem(DENSE["gated"]))
    with pytest.raises(FFNError, match=r"chooses experts by token ids.*form='torch' writes it"):
        trace_files(problem(MIXTURES["by ids"], dtype="bf16"))
    assert "0.031 times the largest output" in notes(problem(DENSE["gated"], dtype="bf16"))[0]
    assert "fp16 may overflow" in notes(problem(DENSE["gated"], dtype="fp16"))[1]


def test_the_arena_loads_and_runs_it(tmp_path):
    """Its loader, its random inputs, its builder of references and solutions."""
    data = pytest.importorskip("flashinfer_bench.data", exc_type=ImportError)
    from flashinfer_bench.bench.utils import gen_inputs
    from flashinfer_bench.compile import BuilderRegistry

    blocks = {name: problem(BLOCKS[name], "ffn", "fp32") for name in ("gated", "deepseek", "shared gate", "latent")}
    for block in blocks.values():
        for path, text in trace_files(block).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, "utf-8")
    loaded = data.TraceSet.from_path(str(tmp_path))
    assert len(loaded.definitions) == len(loaded.workloads) == len(loaded.solutions) == len(blocks)
    build = BuilderRegistry.get_instance()
    for name, definition in loaded.definitions.items():
        (solution,) = loaded.solutions[name]
        for trace in loaded.workloads[name]:
            inputs = gen_inputs(definition, trace.workload, "cpu")
            exact = build.build_reference(definition)(*inputs)
            assert tuple(exact.shape) == tuple(definition.get_output_shapes(trace.workload.axes)[0])
            close(build.build(definition, solution)(*inputs), exact, 1e-4)
