"""Saved traces: the tensor of every step in one file, with the block's description, so that traces can be compared."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ffncli.block.steps import Axis, Experts, Step
from ffncli.block.symbols import right_hand_side
from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.json_records import Count, record_of
from ffncli.run.engine.prepare import Token
from ffncli.run.engine.trace import Trace
from ffncli.run.saved.containers import Container, open_container, write
from ffncli.system.files import written_whole
from ffncli.version import __version__

SMALL_WEIGHTS = 64_000_000  # maximum bytes of weights that are saved by default
_FORMAT = 1
_WEIGHTS, _TOKENS, _GRADIENTS = "weights/", "tokens/", "gradients/"
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_MOST_WEIGHT_DIMS = 3  # experts, rows, columns


@dataclass(frozen=True)
class SavedAssignment:
    """One step of an expert's program; `detail` are the op's fields as strings."""

    name: str
    op: str
    formula: str
    inputs: tuple[str, ...]
    detail: Mapping[str, str]


@dataclass(frozen=True)
class SavedStep:
    """A saved step: its op and formula, and its tensor's shape and dtype. `detail` are the op's fields as strings,
    `flops` the FLOPs of the run (None in older files), `program` the steps of each expert (empty in older files)."""

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
        """Whether the step is inside an expert; such steps are saved with --expert."""
        return self.detail.get("inside") == "expert"

    @property
    def place(self) -> tuple[str, int, str]:
        """For a step in an expert: (the experts step's name, the expert's index, the step's name in the program)."""
        outer, expert, name = self.name.split(".", 2)
        return outer, int(expert), name

    @property
    def experts(self) -> int:
        """For an experts step: the number of experts."""
        return axis_size(self.detail["experts"])

    @property
    def identities(self) -> int:
        """For an experts step: the number of route entries that return the token unchanged."""
        return int(self.detail.get("identity", 0))

    @property
    def always(self) -> bool:
        """For an experts step: whether all of its experts receive every token (shared experts in the route)."""
        return self.detail.get("always") == "True"

    @property
    def weighs_input(self) -> bool:
        """For an experts step: whether the route multiplies the experts' input instead of their output."""
        return self.detail.get("weigh") == "input"

    def entries(self, width: int) -> range:
        """Return the columns of a route of `width` entries that belong to these experts."""
        return range(width - self.experts, width) if self.always else range(self.experts)

    def parameter(self, step: str, name: str = "weight") -> str:
        """Return the canonical name of a parameter of a step in the experts' program."""
        return f"{self.name}.{step}.{name}" if self.always else f"{step}.{name}"


@dataclass(frozen=True)
class SavedGradient:
    """A saved gradient: the name of its tensor (`up`, `x`, `up.weight`), the formula's left-hand side and formula."""

    name: str
    symbol: str
    formula: str
    shape: tuple[Count, ...]
    dtype: str


@dataclass(frozen=True)
class _TraceRecord:
    """The record in a file, as `save` writes it; files of earlier versions have no `prompt` and no `tokens`, and only
    those of a backward pass have `gradients`."""

    format: int
    ffncli: str
    block: Mapping[str, Any]
    ffn_input: str
    ffn_output: str
    fingerprint: str
    steps: tuple[SavedStep, ...]
    prompt: str | None = None
    tokens: tuple[Token, ...] = ()
    gradients: tuple[SavedGradient, ...] = ()


@dataclass(frozen=True)
class Saved:
    """An open saved trace; values are read on demand.

    `block` describes the block that ran, as in docs/commands/trace.md, with its `seed` and `dtype`. `prompt` and its
    `prompt_tokens`, one per row of the input, are there if a model ran on text or on token ids.
    """

    where: str
    block: Mapping[str, Any]
    fingerprint: str
    steps: tuple[SavedStep, ...]
    container: Container
    prompt: str | None = None
    prompt_tokens: tuple[Token, ...] = ()
    gradients: tuple[SavedGradient, ...] = ()

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of a tensor in its dtype."""
        dtype: torch.dtype = getattr(torch, next(one.dtype for one in self.gradients if one.name == name))
        return self.container.tensor(_GRADIENTS + name).to(dtype)

    def tensor(self, step: str) -> Tensor:
        """Return a step's values in its dtype."""
        dtype: torch.dtype = getattr(torch, next(s.dtype for s in self.steps if s.name == step))
        return self.container.tensor(step).to(dtype)

    @property
    def weights(self) -> tuple[str, ...]:
        """The canonical names of the weights in the file."""
        return tuple(name.removeprefix(_WEIGHTS) for name in self.container.shapes if name.startswith(_WEIGHTS))

    def weight(self, name: str) -> Tensor:
        """Return a weight by its canonical name, in the dtype of the block's inputs; integers stay integers."""
        tensor = self.container.tensor(_WEIGHTS + name)
        dtype: torch.dtype = getattr(torch, self.steps[0].dtype)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    @property
    def weight_count(self) -> int:
        """The number of values in all weights of the file."""
        return sum(math.prod(self.container.shapes[_WEIGHTS + name]) for name in self.weights)

    def tokens(self, step: str) -> list[int] | None:
        """Return the tokens that a step's expert received; None for a step outside experts, and for other contents."""
        name = _TOKENS + step.rpartition(".")[0]
        tensor = self.container.tensor(name) if name in self.container.shapes else torch.zeros(())
        return tensor.tolist() if tensor.dtype == torch.int64 and tensor.dim() == 1 else None


def kept_for_saving(
    steps: Sequence[Step], inputs: Mapping[str, Tensor], inside: frozenset[int] | None
) -> frozenset[str]:
    """Return the names of the tensors to keep for saving a trace: the block's, and those inside requested experts."""
    names = {*inputs, *(step.output for step in steps)}
    for step in steps:
        if isinstance(step.op, Experts):
            numbers = range(step.op.experts.size) if inside is None else inside
            names |= {f"{step.output}.{e}.{inner.output}" for e in numbers for inner in step.op.program}
    return frozenset(names)


def save(
    path: Path,
    steps: Sequence[Step],
    result: Trace,
    block: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    prompt: str | None = None,
    tokens: Sequence[Token] = (),
    gradients: Sequence[tuple[SavedGradient, Tensor]] = (),
) -> None:
    """Write the trace with these weights, atomically. `result` must have every recorded tensor; `tokens` are those of
    the prompt, one per row of the input; `gradients` are those of a backward pass, last step first."""
    tensors = {record.name: result.tensors[record.name] for record in result.steps}
    for record in result.steps:
        if record.tokens is not None:
            expert = record.name.rpartition(".")[0]
            tensors[_TOKENS + expert] = torch.tensor(record.tokens, dtype=torch.int64)
    tensors |= {_WEIGHTS + name: tensor for name, tensor in weights.items()}
    tensors |= {_GRADIENTS + one.name: tensor for one, tensor in gradients}
    details = {step.output: _fields(step) for step in steps}
    details |= {r.name: {"inside": "expert"} for r in result.steps if r.tokens is not None}
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
        **({"prompt": prompt, "tokens": [asdict(token) for token in tokens]} if tokens else {}),
        **({"gradients": [asdict(one) for one, _ in gradients]} if gradients else {}),
    }  # fmt: skip
    with written_whole(path) as file:
        write(file, path.suffix, tensors, about)


_OF_A_RANK = ("first", "ranks")
_LATER = ("expert_scale", "tied", "inside")  # fields that earlier versions did not have, left out where they are off


def fingerprint(steps: Sequence[Step]) -> str:
    """Return the sha256 of the block's steps written as a string, including sizes, which identifies the block."""
    text = "\n".join(f"{s.output} = {right_hand_side(s, steps)} {s.inputs} {_fields(s)}" for s in steps)
    return hashlib.sha256(text.encode()).hexdigest()


def _program(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [
        {
            "name": step.output, "op": step.op.name, "formula": right_hand_side(step, steps),
            "inputs": list(step.inputs), "detail": _fields(step),
        }
        for step in steps
    ]  # fmt: skip


def _fields(step: Step) -> dict[str, str]:
    """Return an op's fields as strings: `{"into": "d_model 4", "out": "d_ff 8", "bias": "True"}`.

    The fields of a rank's share of experts are left out, as in files of earlier versions: a saved block is always
    whole.
    """
    values = {f.name: getattr(step.op, f.name) for f in fields(step.op)}  # type: ignore[arg-type]
    return {
        name: _field_text(value)
        for name, value in values.items()
        if name not in _OF_A_RANK and (name not in _LATER or value)
    }


def _field_text(value: Any) -> str:
    if isinstance(value, Axis):
        return f"{value.name} {value.size}"
    if isinstance(value, tuple):  # a program, or names of steps in it
        steps = [s for s in value if isinstance(s, Step)]
        return "; ".join(f"{s.output} = {right_hand_side(s, steps)} {_fields(s)}" for s in steps) or ", ".join(value)
    return str(value)


# --- reading ----------------------------------------------------------------------------------------------------------


def axis_size(axis: str) -> int:
    """Return the size of an axis given as a string: 8 for `d_ff 8`."""
    return int(axis.rpartition(" ")[2])


def open_saved(path: Path) -> Saved:
    """Open a file that `save` wrote; raise FFNError with the fault for any other file."""
    where = shown_path(path)
    container = open_container(path)
    if container.record.get("format") != _FORMAT:
        version = shown(container.record.get("format"))
        raise FFNError(f"{where} is a saved trace of format {version}", f"this version reads format {_FORMAT}")
    record: _TraceRecord = record_of(_TraceRecord, container.record, where, "make it again with ffn trace --save FILE")
    names = [step.name for step in record.steps]
    if not names or len({*names}) != len(names):
        raise FFNError(f"{where}: a step is duplicated, or there is none")
    saved = Saved(
        where, record.block, record.fingerprint, record.steps, container, record.prompt, record.tokens, record.gradients
    )
    for one in record.gradients:
        if not one.shape or one.dtype not in _FLOATS or container.shapes.get(_GRADIENTS + one.name) != one.shape:
            raise FFNError(
                f"{where}: the gradient of {shown(one.name, 120)} has another shape or dtype than its tensor"
            )
    for step in record.steps:
        _check_step(step, container, where)
    _check_experts(record.steps, where)
    rows = math.prod(record.steps[0].shape[:-1])
    if record.tokens and len(record.tokens) != rows:
        raise FFNError(f"{where} has {len(record.tokens):,} tokens for {rows:,} rows of {shown(names[0], 120)}")
    before: dict[str, SavedStep] = {}
    for step in record.steps:
        if not step.inner:
            _check_inputs(step, before, where)
            before[step.name] = step
    every = {step.name: step for step in record.steps}
    for step in record.steps:
        if step.inner:
            _check_tokens(step, saved, every)
        elif step.op == "experts":
            _check_mixture(step, saved, before)
        elif step.op == "linear":
            _check_weight(saved, f"{step.name}.weight", (step.shape[-1], before[step.inputs[0]].shape[-1]))
    for name in saved.weights:
        shape = container.shapes[_WEIGHTS + name]
        if len(shape) > _MOST_WEIGHT_DIMS or 0 in shape:
            raise FFNError(f"{where}: weight {shown(name, 120)} has the impossible shape {shown(list(shape))}")
    return saved


def _check_step(step: SavedStep, container: Container, where: str) -> None:
    """Refuse a step if its entry does not match its tensor."""
    label = f"{where}: step {shown(step.name, 120)}"
    if len(step.shape) < 2 or (0 in step.shape and not step.inner):
        raise FFNError(f"{label} has the shape {shown(list(step.shape))}, not [..., features]")
    if container.shapes.get(step.name) != step.shape:
        raise FFNError(f"{label} has shape {shown(list(step.shape))}, but its tensor has another shape")
    if step.dtype == "int64" and step.op != "input":
        raise FFNError(f"{label} holds whole numbers, which only an input does")


def _check_inputs(step: SavedStep, before: Mapping[str, SavedStep], where: str) -> None:
    """Refuse a step outside experts if it reads what no step before it computes, or a step with other tokens."""
    label = f"{where}: step {shown(step.name, 120)}"
    if bool(step.inputs) == (step.op == "input"):
        raise FFNError(f"{label} is {shown(step.op)} and reads {len(step.inputs)} steps")
    for name in step.inputs:
        if name not in before:
            raise FFNError(f"{label} reads {shown(name, 120)}, which is not a step before it")
        if math.prod(before[name].shape[:-1]) != math.prod(step.shape[:-1]):
            raise FFNError(f"{label} does not have the tokens of {shown(name, 120)}, which it reads")


def _check_weight(saved: Saved, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a weight that is in the file in another shape than its step needs."""
    stored = saved.container.shapes.get(_WEIGHTS + name, shape)
    if stored != shape:
        what = f"weight {shown(name, 120)} has shape {shown(list(stored))}, expected {shown(list(shape))}"
        raise FFNError(f"{saved.where}: {what}")


def _check_mixture(step: SavedStep, saved: Saved, before: Mapping[str, SavedStep]) -> None:
    """Refuse experts whose route is too narrow, or whose weights are not those of that many experts."""
    x, route = (before[name] for name in step.inputs)
    if step.experts + step.identities > route.shape[-1] or (step.identities and x.shape != step.shape):
        raise FFNError(
            f"{saved.where}: {shown(route.name, 120)} has no entry for each expert of {shown(step.name, 120)}"
        )
    common = step.detail.get("common", "").split(", ")
    of_experts = {step.parameter(one.name, ""): one.name for one in step.program if one.name not in common}
    for name in saved.weights:
        stem, dot, _ = name.rpartition(".")
        if stem + dot in of_experts and saved.container.shapes[_WEIGHTS + name][:1] != (step.experts,):
            raise FFNError(f"{saved.where}: weight {shown(name, 120)} is not that of {step.experts} experts")


def _check_tokens(step: SavedStep, saved: Saved, every: Mapping[str, SavedStep]) -> None:
    """Refuse a step inside an expert if its rows are not the expert's tokens, or its widths do not fit."""
    label = f"{saved.where}: step {shown(step.name, 120)}"
    place, expert, name = step.place
    mixture, tokens = every[place], saved.tokens(step.name)
    x = every[mixture.inputs[0]]
    if tokens is None or step.shape[:-1] != (len(tokens),):
        raise FFNError(f"{label} does not have a row for each token of its expert")
    if not all(0 <= token < math.prod(x.shape[:-1]) for token in tokens):
        raise FFNError(f"{label} is for tokens that {shown(x.name, 120)} does not have")
    if mixture.program and name == mixture.program[-1].name and step.shape[-1] != mixture.shape[-1]:
        raise FFNError(f"{label} is not as wide as {shown(place, 120)}")
    sources = [every[one] for one in step.inputs if one in every]
    if not sources or len(sources) < len(step.inputs):
        raise FFNError(f"{label} reads what is not a step")
    if any(one.inner and one.place[:2] != (place, expert) for one in sources):
        raise FFNError(f"{label} reads a step of another expert")
    if step.op == "linear":
        _check_weight(saved, mixture.parameter(name), (mixture.experts, step.shape[-1], sources[0].shape[-1]))


_SIZED = re.compile(r"\w+ [1-9]\d{0,8}")  # an axis as a string
_NUMBER = re.compile(r"\d{1,9}")
_PROGRAM_OPS = ("linear", "activation", "multiply", "add", "norm", "dropout")


def _check_experts(steps: Sequence[SavedStep], where: str) -> None:
    """Refuse experts, or a step inside an expert, if the record describes them inconsistently."""
    outer = {step.name: step for step in steps if step.op == "experts"}
    for step in outer.values():
        label = f"{where}: step {shown(step.name, 120)}"
        sized = _SIZED.fullmatch(step.detail.get("experts", "")) and _NUMBER.fullmatch(step.detail.get("identity", "0"))
        if not sized or len(step.inputs) != 2:
            raise FFNError(f"{label} does not specify the number of its experts")
        known: set[str] = set()
        entries: set[str] = set()
        for one in step.program:
            entries |= {name for name in one.inputs if name not in known}
            known.add(one.name)
            fits = one.inputs and one.op in _PROGRAM_OPS
            if not fits or (one.op == "linear" and not _SIZED.fullmatch(one.detail.get("out", ""))):
                raise FFNError(f"{label} has an impossible step {shown(one.name, 120)} in its program")
        if step.program and (len(entries) != 1 or len(known) != len(step.program) or entries & known):
            raise FFNError(f"{label} has a program that does not read one input")
    for step in steps:
        name, _, rest = step.name.partition(".")
        expert, _, inner = rest.partition(".")
        if step.inner and not (
            name in outer and _NUMBER.fullmatch(expert) and int(expert) < outer[name].experts and inner
        ):
            raise FFNError(f"{where}: step {shown(step.name, 120)} is inside no expert")
