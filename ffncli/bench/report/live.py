"""A small block as a page computes it: its inputs, its weights, and its steps in order, each expert's among them.

An expert becomes assignments like all others: `received` takes the rows of the tokens that go to it, the steps of its
program follow under the names that a trace prints (`experts.3.gate`), and `experts` adds the results up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ffncli.block.activations import TABLE
from ffncli.errors import FFNError
from ffncli.run.saved.saved import Saved, SavedAssignment, SavedStep

MOST_WEIGHTS = 4096
_MOST_VALUES = 32_768  # of all steps, each expert's counted for every token
_OPS = ("input", "linear", "activation", "multiply", "add", "norm", "dropout", "route", "experts")
_FUNCTIONS = tuple(name for name, row in TABLE.items() if not row.learned)
_AGAIN = "ffn trace ... --save t.safetensors, then ffn report t.safetensors -o page.html"

_Step = dict[str, Any]


def live_block(saved: Saved) -> dict[str, Any]:
    """For the script of a page: `steps`, `weights`, `inputs`, and the `functions` to choose from.

    Raises FFNError for a block that is too large to be changed number by number, or that a page cannot compute.
    """
    weights = {name: saved.weight(name).double() for name in saved.weights}
    inputs = {step.name: _matrix(saved.tensor(step.name)) for step in saved.steps if step.op == "input"}
    _require_small(sum(tensor.numel() for tensor in weights.values()), "weights", MOST_WEIGHTS)
    _require_computable(saved, {**weights, **inputs})
    steps = _Unrolled(weights).steps(saved)
    tokens = max(len(rows) for rows in inputs.values())
    _require_small(tokens * sum(step["width"] for step in steps), "values", _MOST_VALUES)
    return {
        "steps": steps,
        "functions": _FUNCTIONS,
        "weights": {name: tensor.tolist() for name, tensor in _of_steps(steps, weights)},
        "inputs": {name: rows.tolist() for name, rows in inputs.items()},
    }


def _require_small(count: int, what: str, most: int) -> None:
    if count > most:
        raise FFNError(
            f"the block has {count:,} {what}, a page to change numbers in (-o page.html) holds {most:,}", _AGAIN
        )


def _require_computable(saved: Saved, numbers: Mapping[str, Tensor]) -> None:
    if not saved.weights:
        raise FFNError(f"{saved.where} has no weights", "add --save-weights")
    if saved.block.get("mode") != "eval" and any(step.op == "dropout" for step in saved.steps):
        raise FFNError("the page computes without dropout", "add --eval")
    for step in saved.steps:
        if step.op not in _OPS:
            raise FFNError(f"the page cannot compute {step.name} = {step.formula}", "ffn report shows a saved trace")
        if step.op == "experts" and not step.program:
            raise FFNError(f"{saved.where} does not say what its experts compute", "save it again with this version")
    if odd := next((name for name, tensor in numbers.items() if not bool(torch.isfinite(tensor).all())), None):
        raise FFNError(f"{odd} has values that are not finite", "ffn report shows a saved trace")


class _Unrolled:
    """The steps of a block one by one, each with its width and with the weights it reads."""

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
            self._width[step.name] = out[-1]["width"] = step.shape[-1]
        return out

    def _parameters(self, prefix: str) -> dict[str, str]:
        """What a step calls its weights → their names in the file."""
        return {
            name.rpartition(".")[2]: name for name in self._weights if name.rpartition(".")[0] == prefix
        }  # fmt: skip

    def _step(
        self, step: SavedStep | SavedAssignment, name: str, inputs: list[str], weights: Mapping[str, str]
    ) -> _Step:
        return {
            "name": name, "op": step.op, "formula": step.formula, "inputs": inputs, "detail": dict(step.detail),
            "weights": dict(weights),
        }  # fmt: skip

    def _experts(self, step: SavedStep) -> Iterator[_Step]:
        x, route = step.inputs
        count, common = _size(step.detail["experts"]), step.detail["common"].split(", ")
        always = step.detail["always"] == "True"
        first = self._width[route] - count if always else 0
        outputs = []
        for e in range(count):
            program = self._expert(step, e, x, route, first + e, f"{step.name}." if always else "", common)
            yield from program
            outputs.append(program[-1]["name"])
        yield {
            **self._step(step, step.name, [x, route, *outputs], {}),
            "first": first,
            "identity": int(step.detail["identity"]),
        }

    def _expert(
        self, step: SavedStep, e: int, x: str, route: str, entry: int, prefix: str, common: list[str]
    ) -> list[_Step]:
        """The steps of one expert, from the rows of its tokens on."""
        inner = {one.name for one in step.program}
        start = next(name for one in step.program for name in one.inputs if name not in inner)
        place, weighed = f"{step.name}.{e}", step.detail["weigh"] == "input"
        rows = f"{x} of the tokens with {route}[{entry}] ≠ 0"
        received = {
            "name": f"{place}.{start}", "op": "received", "formula": f"{route}[{entry}] · {rows}" if weighed else rows,
            "inputs": [x, route], "detail": {"entry": entry, "weighed": weighed}, "weights": {}, "expert": e,
            "width": self._width[x],
        }  # fmt: skip
        out, width = [received], {start: self._width[x]}
        for one in step.program:
            parameters = self._parameters(prefix + one.name)
            names = {part: name if one.name in common else f"{name}[{e}]" for part, name in parameters.items()}
            into = [f"{place}.{name}" for name in one.inputs]
            width[one.name] = _size(one.detail["out"]) if one.op == "linear" else max(width[n] for n in one.inputs)
            part = self._step(one, f"{place}.{one.name}", into, names)
            choice = {"choice": f"{step.name}.{one.name}"} if one.op == "activation" else {}
            out.append(part | {"expert": e, "width": width[one.name]} | choice)
        return out


def _of_steps(steps: list[_Step], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights by the names under which the steps read them: `gate.weight[3]` is the third expert's."""
    for key in dict.fromkeys(name for step in steps for name in step["weights"].values()):
        name, _, expert = key.partition("[")
        yield key, weights[name] if not expert else weights[name][int(expert.removesuffix("]"))]


def _size(axis: str) -> int:
    """8 of `d_ff 8`."""
    return int(axis.rpartition(" ")[2])


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).double()
