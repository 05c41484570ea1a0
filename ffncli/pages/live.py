"""Prepare the inputs, weights and steps of a small block for the page's script, which computes the block. The steps are
in order and include the steps of each expert.

An expert becomes ordinary steps: `received` selects the rows of the expert's tokens, the steps of its program follow
under the names that a trace prints (`experts.3.gate`), and `experts` adds up the results.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ffncli.block.activations import TABLE
from ffncli.errors import FFNError
from ffncli.run.saved.saved import Saved, SavedAssignment, SavedStep, axis_size

MOST_WEIGHTS = 4096
_MOST_VALUES = 32_768  # limit over all steps, with each expert's steps counted for every token
_OPS = ("input", "linear", "activation", "multiply", "add", "norm", "dropout", "route", "experts")
_FUNCTIONS = tuple(name for name, row in TABLE.items() if not row.learned)
_PAGE = "an editable page (-o page.html)"
_AGAIN = "ffn trace ... --save t.safetensors, then ffn report t.safetensors -o page.html"

_Step = dict[str, Any]


def live_block(saved: Saved) -> dict[str, Any]:
    """Return the data for the page's script: `steps`, `weights`, `inputs`, and the activation `functions` to choose
    from.

    Raises FFNError for a block that is too large to edit value by value, or that the script cannot compute.
    """
    _require_small(saved.weight_count, "weights", MOST_WEIGHTS, _AGAIN)
    _require_computable(saved)
    weights = {name: saved.weight(name).double() for name in saved.weights}
    entered = {step.name: saved.tensor(step.name) for step in saved.steps if step.op == "input"}
    inputs = {name: tensor.reshape(-1, tensor.shape[-1]).double() for name, tensor in entered.items()}
    for name, tensor in {**weights, **inputs}.items():
        if not bool(torch.isfinite(tensor).all()):
            raise FFNError(f"{_PAGE} needs finite numbers, but {name} has NaN or infinity", _AGAIN)
    steps = _Unrolled(weights).steps(saved)
    tokens = max(len(rows) for rows in inputs.values())
    values = tokens * sum(step["width"] for step in steps)
    _require_small(values, "values", _MOST_VALUES, f"use fewer tokens, or {_AGAIN}")
    read = {}  # keys are the names that the steps use: `gate.weight[3]` is the weight of expert 3
    for key in dict.fromkeys(name for step in steps for name in step["weights"].values()):
        name, _, expert = key.partition("[")
        read[key] = (weights[name] if not expert else weights[name][int(expert.removesuffix("]"))]).tolist()
    return {
        "steps": steps,
        "functions": _FUNCTIONS,
        "weights": read,
        "inputs": {name: rows.tolist() for name, rows in inputs.items()},
    }


def _require_small(count: int, what: str, most: int, hint: str) -> None:
    if count > most:
        raise FFNError(f"{_PAGE} is limited to {most:,} {what}; this block has {count:,}", hint)


def _require_computable(saved: Saved) -> None:
    if not saved.weights:
        raise FFNError(f"{_PAGE} needs the weights; {saved.where} has none", "add --save-weights")
    outer = [step for step in saved.steps if not step.inner]
    ops: list[SavedStep | SavedAssignment] = [*outer, *(one for step in outer for one in step.program)]
    if saved.block.get("mode") != "eval" and any(step.op == "dropout" for step in ops):
        raise FFNError(f"{_PAGE} computes without dropout", "add --eval")
    for step in outer:
        if step.op not in _OPS:
            raise FFNError(f"{_PAGE} cannot compute {step.name} = {step.formula}", _AGAIN)
        if step.op == "experts" and not step.program:
            why = f"{saved.where} does not say what its experts compute"
            raise FFNError(f"{_PAGE} computes all steps; {why}", "save the trace again with this version")
    for one in ops:
        if one.op == "activation" and one.detail.get("function") not in TABLE:
            raise FFNError(f"{_PAGE} does not know the function of {one.name} = {one.formula}", _AGAIN)


class _Unrolled:
    """Unrolls a block into single steps, each with its width and the weights that it reads."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._width: dict[str, int] = {}

    def steps(self, saved: Saved) -> list[_Step]:
        out: list[_Step] = []
        for step in saved.steps:
            if step.inner:
                continue
            if step.op == "experts":
                out += self._experts(step)
            else:
                out.append(self._step(step, step.name, list(step.inputs), self._parameters(step.name)))
            if step.op == "route":
                out[-1]["names"] = entry_names(saved, step.name, step.shape[-1])
            self._width[step.name] = out[-1]["width"] = step.shape[-1]
        return out

    def _parameters(self, prefix: str) -> dict[str, str]:
        """Map a step's own names for its weights to their names in the file."""
        return {name.rpartition(".")[2]: name for name in self._weights if name.rpartition(".")[0] == prefix}

    def _step(
        self, step: SavedStep | SavedAssignment, name: str, inputs: list[str], weights: Mapping[str, str]
    ) -> _Step:
        return {
            "name": name, "op": step.op, "formula": step.formula, "inputs": inputs, "detail": dict(step.detail),
            "weights": dict(weights),
        }  # fmt: skip

    def _experts(self, step: SavedStep) -> Iterator[_Step]:
        x, route = step.inputs
        entries = step.entries(self._width[route])
        outputs = []
        for e in range(step.experts):
            program = self._expert(step, e, entries[e])
            yield from program
            outputs.append(program[-1]["name"])
        yield {
            **self._step(step, step.name, [x, route, *outputs], {}),
            "first": entries[0],
            "identity": step.identities,
        }

    def _expert(self, step: SavedStep, e: int, entry: int) -> list[_Step]:
        """Return the steps of one expert, starting with the selection of its tokens' rows."""
        x, route = step.inputs
        inner, common = {one.name for one in step.program}, step.detail.get("common", "").split(", ")
        start = next(name for one in step.program for name in one.inputs if name not in inner)
        place, rows = f"{step.name}.{e}", f"{x} of the tokens with {route}[{entry}] ≠ 0"
        received = {
            "name": f"{place}.{start}", "op": "received", "inputs": [x, route], "weights": {}, "expert": e,
            "formula": f"{route}[{entry}] · {rows}" if step.weighs_input else rows, "width": self._width[x],
            "detail": {"entry": entry, "weighs_input": step.weighs_input},
        }  # fmt: skip
        out, width = [received], {start: self._width[x]}
        for one in step.program:
            parameters = self._parameters(step.parameter(one.name).rpartition(".")[0])
            names = {part: name if one.name in common else f"{name}[{e}]" for part, name in parameters.items()}
            width[one.name] = axis_size(one.detail["out"]) if one.op == "linear" else max(width[n] for n in one.inputs)
            part = self._step(one, f"{place}.{one.name}", [f"{place}.{name}" for name in one.inputs], names)
            choice = {"choice": f"{step.name}.{one.name}"} if one.op == "activation" else {}
            out.append(part | {"expert": e, "width": width[one.name]} | choice)
        return out


def entry_names(saved: Saved, route: str, width: int) -> list[str]:
    """Return the name of each entry of a route."""
    readers = [step for step in saved.steps if step.op == "experts" and step.inputs[1] == route]
    if not readers:
        return []
    names = ["no expert"] * width
    for step in readers:
        for e in range(step.identities):
            names[width - 1 - e] = "an identity"
        for e, entry in enumerate(step.entries(width)):
            names[entry] = f"{'shared ' if step.always else ''}expert {e}"
    return names
