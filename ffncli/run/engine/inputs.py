"""The input tensor of a block: from the name of a pattern, a list of numbers, a file, stdin, or a caller's array."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ffncli.block.steps import Step, block_inputs, feature_axis, id_inputs, input_shapes, parameters, state_inputs
from ffncli.errors import FFNError, did_you_mean, option, shown, shown_path
from ffncli.models.model import Example
from ffncli.run.engine.weights import require_memory
from ffncli.system.files import open_to_read

if TYPE_CHECKING:
    from numpy.typing import NDArray

InputSource: TypeAlias = "str | os.PathLike[str] | Sequence[Any] | NDArray[Any] | Tensor"  # a typed string, or values
NAMED = ("arange", "randn", "zeros", "ones")
MOST_TEXT_BYTES = 1_000_000_000
_LIST = re.compile(r"[-+\d.eEnaifN,;\s\[\]]+")


def block_tensors(
    block: Sequence[Step], d_model: int, source: InputSource | None, leading: tuple[int, ...] | None,
    example: Example | None, generator: torch.Generator, dtype: torch.dtype, device: str,
) -> tuple[dict[str, Tensor], tuple[str, ...]]:  # fmt: skip
    """Return (all inputs of a block by name, the main input first; notes on inputs that other parts of a model
    compute).

    If `source` is None, the main input is the example's input, or random if there is no example.
    """
    example = example if source is None else None
    leading = leading or (example.shape[:-1] if example else None)
    default = example.input if example else "randn"
    _require_working_memory(math.prod(leading or (4,)), block, dtype)
    first = make_input(default if source is None else source, leading, d_model, dtype, generator).to(device)
    # Check again, because a file may have more tokens than assumed above.
    _require_working_memory(math.prod(first.shape[:-1]), block, dtype)
    if example and (example.scale != 1 or example.given):
        first = first * example.scale
        for (token, unit), value in example.given.items():
            first.flatten(0, -2)[token, unit] = value
    inputs, notes = {block_inputs(block)[0]: first}, []
    for name, vocab in id_inputs(block).items():
        ids = torch.arange(math.prod(first.shape[:-1]), device=device)
        inputs[name] = ids.reshape(*first.shape[:-1], 1) % vocab
        notes.append(f"'{name}', which choose the experts, are 0, 1, 2, ...; with a prompt, the prompt's token ids")
    # The remaining inputs are computed by other parts of a model.
    for name, shape in input_shapes(block, tuple(first.shape[:-1])).items():
        if name in inputs:
            continue
        inputs[name] = torch.randn(shape, generator=generator).to(device, dtype)
        of = "router in the previous layer" if name in state_inputs(block) else "layer's other branch"
        notes.append(f"'{name}', the output of the {of}, is random")
    return inputs, tuple(notes)


def _require_working_memory(tokens: int, block: Sequence[Step], dtype: torch.dtype) -> None:
    """Raise FFNError (exit 3) if two of the widest intermediates and three [tokens, d_model] exceed free memory."""
    axis = feature_axis(block)
    widest = max(axis.size for axes in parameters(block).values() for axis in axes)
    size = tokens * (2 * widest + 3 * (axis.size if axis else widest)) * dtype.itemsize
    require_memory(size, "the input and its intermediates", "give fewer tokens")


def make_input(
    source: InputSource, leading: tuple[int, ...] | None, d_model: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return the input [*leading, d_model] from `source`: a pattern's name, a file, a string of numbers, or an array.

    If `leading` is None, a file or an array keeps its own shape. Raises FFNError for an unknown name, for values that
    do not fill whole tokens of d_model, and for a file without values.
    """
    if isinstance(source, str) and source in NAMED:
        return _named(source, (*(leading or (4,)), d_model), generator).to(dtype)
    return _shaped(given_values(source, "input"), leading, d_model).to(dtype)


def given_values(source: InputSource, field: str) -> Tensor:
    """Return the values of an array, a string of numbers, a file or standard input (`-`), in their own shape. Errors
    name the option `field`."""
    if not isinstance(source, (str, os.PathLike)):
        return _copied(source, field)
    text = os.fspath(source)
    if text == "-":
        return _parse(_stdin(field), "standard input")
    if _LIST.fullmatch(text) and not os.path.exists(text):
        return _parse(text, option(field))
    return _file(Path(os.path.expanduser(text)), text, field)


def _named(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name == "arange":
        return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    if name == "randn":
        return torch.randn(shape, generator=generator)
    return torch.zeros(shape) if name == "zeros" else torch.ones(shape)


def _stdin(field: str) -> str:
    if sys.stdin is None:
        raise FFNError(f"{option(field, '-')}: standard input is closed")
    no_text = FFNError("standard input is not text", "give numbers or JSON; name .npy and .safetensors files")
    try:
        text = sys.stdin.read(MOST_TEXT_BYTES)
        if not text.isascii():
            text.encode()  # fails on lone surrogates, which replace bytes that are not text in the C locale
    except UnicodeError:
        raise no_text from None
    except OSError as error:
        raise FFNError(f"cannot read standard input: {error.strerror}") from None
    if "\0" in text:
        raise no_text
    return text


def _shaped(values: Tensor, leading: tuple[int, ...] | None, d_model: int) -> Tensor:
    if values.dim() > 1 and values.shape[-1] != d_model:
        raise FFNError(
            f"{option('input')} has shape {list(values.shape)}, but its last axis must be d_model = {d_model}"
        )
    if values.numel() == 0 or values.numel() % d_model:
        raise FFNError(f"{option('input')} has {values.numel()} values, which is not a multiple of d_model = {d_model}")
    if leading is None:
        return (values if values.dim() > 1 else values.reshape(-1, d_model)).contiguous()
    if values.numel() != math.prod(leading) * d_model:
        wanted = " × ".join(map(str, (*leading, d_model)))
        raise FFNError(
            f"{option('input')} has {values.numel()} values, but {wanted} needs {math.prod(leading) * d_model}"
        )
    return values.reshape(*leading, d_model)


def _parse(text: str, where: str) -> Tensor:
    """Parse numbers from JSON (nested lists, or an object with an entry x or a single entry) or from plain text
    (separated by commas, semicolons, spaces).

    In plain text, each line is a row; if each line has one number, the numbers are a flat list. A byte order mark and a
    first line without numbers (a table's header) are skipped.
    """
    text = text.removeprefix("\ufeff")
    if text.lstrip()[:1] in ("[", "{"):
        return _nested(_input_entry(_json(text, where), where), where)
    rows = [words for line in text.splitlines() if (words := [w for w in re.split(r"[,;\s]+", line) if w])]
    if len(rows) > 1 and not any(map(_is_float, rows[0])):
        del rows[0]
    if wrong := next((word for words in rows for word in words if not _is_float(word)), None):
        raise FFNError(f"{where}: {shown(wrong)} is not a number")
    if len({len(words) for words in rows}) > 1:
        raise FFNError(
            f"{where}: its lines have different numbers of values (the first has {len(rows[0])})",
            "give one token per line",
        )
    numbers = torch.tensor([[float(word) for word in words] for words in rows], dtype=torch.float64)
    return numbers if len(rows) > 1 and len(rows[0]) > 1 else numbers.flatten()


def _input_entry(value: object, where: str) -> object:
    """Return the value itself if it is a list; for an object, its entry x or its only entry."""
    if not isinstance(value, dict):
        return value
    if "x" not in value and len(value) != 1:
        raise FFNError(f"{where} is an object of {len(value)} entries", "it should have one entry, or an entry named x")
    return value["x"] if "x" in value else next(iter(value.values()))


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FFNError(f"{where} is not JSON: {str(error)[:80]}") from None


def _copied(values: Sequence[Any] | NDArray[Any] | Tensor, field: str) -> Tensor:
    """Copy a caller's values, so that later changes do not matter; raise FFNError for anything but numbers."""
    if isinstance(values, Tensor):
        if values.is_complex():
            raise FFNError(f"{field} contains complex numbers, not real numbers")
        return values.detach().to_dense().clone() if values.is_sparse else values.detach().clone()
    import numpy

    try:
        return _from_numpy(numpy.array(values), field)
    except (ValueError, TypeError, RuntimeError):
        raise FFNError(f"{field} is not a regular array of numbers", "give [tokens, d_model] or [d_model]") from None


def _from_numpy(array: NDArray[Any], where: str) -> Tensor:
    """Return the array as a tensor in float64, or in its own dtype if that is float16 or float32."""
    import numpy

    if array.dtype.kind not in "fiub":
        raise FFNError(f"{where} contains {array.dtype}, not real numbers")
    exact = array.dtype in (numpy.float16, numpy.float32)
    return torch.from_numpy(array if exact and array.flags.writeable else array.astype(numpy.float64))


def _nested(values: object, where: str) -> Tensor:
    try:
        return torch.tensor(values, dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError):
        raise FFNError(f"{where} is not a regular array of numbers", "give nested lists of equal lengths") from None


def _is_float(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _file(path: Path, text: str, field: str) -> Tensor:
    where = shown_path(path)
    if not text or not os.path.isfile(path):
        if "/" in text or path.suffix in (".npy", ".json", ".csv", ".safetensors", ".txt"):
            raise FFNError(
                f"{option(field)}: {shown(text)} does not exist"
                + (", or is not a file" if os.path.exists(path) else "")
            )
        names = list(NAMED) if field == "input" else []
        hint = did_you_mean(text, names, f"use {', '.join([*names, 'numbers like 0.1,0.2, a file, or -'])}")
        raise FFNError(f"{option(field)}: {shown(text)} is neither a name nor a file", hint)
    try:
        if path.suffix == ".npy":
            return _npy(path, where)
        if path.suffix == ".safetensors":
            return _safetensors(path, where)
        if path.stat().st_size > MOST_TEXT_BYTES:
            raise FFNError(f"{where} is larger than {MOST_TEXT_BYTES:,} bytes", "use .npy or .safetensors")
        return _parse(path.read_text("utf-8"), where)
    except OSError as error:
        raise FFNError(f"cannot read {where}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise FFNError(f"{where} is not text", "supported: .npy, .safetensors, .json, .csv") from None


def _npy(path: Path, where: str) -> Tensor:
    import numpy

    try:
        with open_to_read(path) as file, warnings.catch_warnings(action="ignore"):
            array = numpy.lib.format.read_array(file, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy raises a dozen exception types for a malformed header
        raise FFNError(f"{where} is not a .npy array: {str(error)[:60]}") from None
    return _from_numpy(array, where)


def _safetensors(path: Path, where: str) -> Tensor:
    from ffncli.models.files.headers import read_header
    from ffncli.models.files.rows import named_tensor

    names = list(read_header(path))
    if len(names) != 1 and "x" not in names:
        raise FFNError(f"{where} contains {len(names)} tensors", "it should contain one tensor, or a tensor named x")
    tensor = named_tensor(path, "x" if "x" in names else names[0])
    if tensor.is_complex():
        raise FFNError(f"{where} contains complex numbers, not real numbers")
    return tensor
