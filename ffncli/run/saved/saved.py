"""Saved traces: every step's whole tensor in one file, with the block's description, so that two can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ffncli.block.steps import Axis, Experts, Step, right_hand_side
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.json_records import Count, record_of
from ffncli.run.engine.trace import Trace
from ffncli.run.saved.containers import Container, open_container, write
from ffncli.system.files import written_whole
from ffncli.version import __version__

SMALL_WEIGHTS = 64_000_000  # bytes of weights that are saved by default
_FORMAT = 1
_WEIGHTS, _TOKENS = "weights/", "tokens/"
_MOST_WEIGHT_DIMS = 3  # experts, rows, columns


@dataclass(frozen=True)
class SavedAssignment:
    """One assignment of an expert's program; `detail` are the op's fields in words."""

    name: str
    op: str
    formula: str
    inputs: tuple[str, ...]
    detail: Mapping[str, str]


@dataclass(frozen=True)
class SavedStep:
    """A saved step: its op and formula, its tensor's shape and dtype. `detail` are the op's fields in words, `flops`
    those of the run (None in older files), `program` what each of its experts runs (empty in older files)."""

    name: str
    op: str
    formula: str
    inputs: tuple[str, ...]
    shape: tuple[Count, ...]
    dtype: Literal["float64", "float32", "bfloat16", "float16", "int64"]  # int64: token ids
    detail: Mapping[str, str]
    flops: Count | None = None
    program: tuple[SavedAssignment, ...] = ()

    @property
    def inner(self) -> bool:
        """Whether it is inside an expert: such steps are saved with --expert."""
        return self.detail.get("inside") == "expert"


@dataclass(frozen=True)
class _TraceRecord:
    """What a file says of its tensors, as `save` writes it."""

    format: int
    ffncli: str
    block: Mapping[str, Any]
    ffn_input: str
    ffn_output: str
    fingerprint: str
    steps: tuple[SavedStep, ...]


@dataclass(frozen=True)
class Saved:
    """An open saved trace. Values are read on demand.

    `block` is the block that ran (docs/json.md: trace, `block`), with its `seed` and `dtype`.
    """

    where: str
    block: Mapping[str, Any]
    fingerprint: str
    steps: tuple[SavedStep, ...]
    container: Container

    def tensor(self, step: str) -> Tensor:
        """A step's values in its dtype."""
        dtype: torch.dtype = getattr(torch, next(s.dtype for s in self.steps if s.name == step))
        return self.container.tensor(step).to(dtype)

    @property
    def weights(self) -> tuple[str, ...]:
        """The canonical names of the weights in the file."""
        return tuple(name.removeprefix(_WEIGHTS) for name in self.container.shapes if name.startswith(_WEIGHTS))

    def weight(self, name: str) -> Tensor:
        """A weight by its canonical name, in the dtype of the block's inputs, as in the run."""
        dtype: torch.dtype = getattr(torch, self.steps[0].dtype)
        return self.container.tensor(_WEIGHTS + name).to(dtype)

    def tokens(self, step: str) -> list[int] | None:
        """The tokens that a step's expert received; None for a step outside of experts."""
        name = _TOKENS + step.rpartition(".")[0]
        return self.container.tensor(name).tolist() if name in self.container.shapes else None


def kept_for_saving(
    steps: Sequence[Step], inputs: Mapping[str, Tensor], inside: frozenset[int] | None
) -> frozenset[str]:
    """The tensors that a trace must keep to be saved: all of the block, and those inside requested experts."""
    names = {*inputs, *(step.output for step in steps)}
    for step in steps:
        if isinstance(step.op, Experts):
            numbers = range(step.op.experts.size) if inside is None else inside
            names |= {f"{step.output}.{e}.{inner.output}" for e in numbers for inner in step.op.program}
    return frozenset(names)


def save(
    path: Path, steps: Sequence[Step], result: Trace, block: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write the complete trace or nothing, with these weights. `result` must have every recorded tensor.

    Raises FFNError (exit 3) if it cannot be written.
    """
    tensors = {record.name: result.tensors[record.name] for record in result.steps}
    for record in result.steps:
        if record.tokens is not None:
            expert = record.name.rpartition(".")[0]
            tensors[_TOKENS + expert] = torch.tensor(record.tokens, dtype=torch.int64)
    tensors |= {_WEIGHTS + name: tensor for name, tensor in weights.items()}
    details = {**_details(steps), **{r.name: {"inside": "expert"} for r in result.steps if r.tokens is not None}}
    programs = {step.output: _program(step.op.program) for step in steps if isinstance(step.op, Experts)}
    about = {
        "format": _FORMAT,
        "ffncli": __version__,
        "block": dict(block),
        "ffn_input": result.ffn_input,
        "ffn_output": result.ffn_output,
        "fingerprint": fingerprint(steps),
        "steps": [
            {
                "name": r.name, "op": r.op, "formula": r.formula, "inputs": list(r.inputs), "shape": list(r.shape),
                "dtype": r.dtype, "detail": details.get(r.name, {}), "flops": r.flops,
                **({"program": programs[r.name]} if r.name in programs else {}),
            }
            for r in result.steps
        ],
    }  # fmt: skip
    with written_whole(path) as file:
        write(file, path.suffix, tensors, about)


_OF_A_RANK = ("first", "ranks")


def fingerprint(steps: Sequence[Step]) -> str:
    """An identifier of the block: a sha256 over its steps as text, sizes included."""
    text = "\n".join(f"{s.output} = {right_hand_side(s, steps)} {s.inputs} {_fields(s)}" for s in steps)
    return hashlib.sha256(text.encode()).hexdigest()


def _details(steps: Sequence[Step]) -> dict[str, dict[str, str]]:
    return {step.output: _fields(step) for step in steps}


def _program(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [
        {
            "name": step.output, "op": step.op.name, "formula": right_hand_side(step, steps),
            "inputs": list(step.inputs), "detail": _fields(step),
        }
        for step in steps
    ]  # fmt: skip


def _fields(step: Step) -> dict[str, str]:
    """An op's fields in words: `{"into": "d_model 4", "out": "d_ff 8", "bias": "True"}`; without those of a rank's
    experts, as in files of earlier versions: a saved block is whole."""
    named = [f.name for f in fields(step.op) if f.name not in _OF_A_RANK]  # type: ignore[arg-type]
    return {name: _field_text(getattr(step.op, name)) for name in named}


def _field_text(value: Any) -> str:
    if isinstance(value, Axis):
        return f"{value.name} {value.size}"
    if isinstance(value, tuple):  # a program, or names of steps in it
        steps = [s for s in value if isinstance(s, Step)]
        return "; ".join(f"{s.output} = {right_hand_side(s, steps)} {_fields(s)}" for s in steps) or ", ".join(value)
    return str(value)


# --- reading ----------------------------------------------------------------------------------------------------------


def open_saved(path: Path) -> Saved:
    """A file that `save` wrote. Raises FFNError, naming it and what is wrong, for anything else."""
    where = shown_path(path)
    container = open_container(path)
    if container.record.get("format") != _FORMAT:
        version = shown(container.record.get("format"))
        raise FFNError(f"{where} is a saved trace of format {version}", f"this version reads format {_FORMAT}")
    record: _TraceRecord = record_of(_TraceRecord, container.record, where, "make it again with ffn trace --save FILE")
    names = [step.name for step in record.steps]
    if not names or len({*names}) != len(names):
        raise FFNError(f"{where}: a step is duplicated, or there is none")
    for step in record.steps:
        _check_step(step, container, {*names}, where)
    for name, shape in container.shapes.items():
        if (name.startswith(_WEIGHTS) and len(shape) > _MOST_WEIGHT_DIMS) or (
            name.startswith(_TOKENS) and len(shape) != 1
        ):
            raise FFNError(f"{where}: {shown(name, 120)} has the impossible shape {shown(list(shape))}")
    return Saved(where, record.block, record.fingerprint, record.steps, container)


def _check_step(step: SavedStep, container: Container, names: set[str], where: str) -> None:
    """FFNError if a step's entry does not fit the tensor of that name, or reads a step that is not there."""
    label = f"{where}: step {shown(step.name, 120)}"
    if len(step.shape) < 2 or (0 in step.shape and not step.inner):
        raise FFNError(f"{label} has the shape {shown(list(step.shape))}, not [..., features]")
    if container.shapes.get(step.name) != step.shape:
        raise FFNError(f"{label} has shape {shown(list(step.shape))}, its tensor has another")
    if not step.inner and (missing := next((name for name in step.inputs if name not in names), None)):
        raise FFNError(f"{label} reads {shown(missing, 120)}, which is not a step")
