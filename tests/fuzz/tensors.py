"""Cases of files with tensors: saved traces of each kind, and files that --input names."""

import copy
import io
import json
import zipfile
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import save

from ffncli.run.saved.containers import open_container, write
from tests.fuzz import changes
from tests.fuzz.models import altered
from tests.oracles.checkpoints import raw_safetensors

KINDS = (".safetensors", ".npz", ".json")


def saved(draw: Random, folder: Path) -> list[str]:
    """Two saved traces, of which one was changed: its record, its headers, or any of its bytes."""
    kind = draw.choice(KINDS)
    moe = draw.random() < 0.5
    base, new = folder / f"base{kind}", folder / f"new{kind}"
    base.write_bytes(_saved(kind, moe))
    if draw.random() < 0.5:
        _alter(base, new, draw)
    else:
        new.write_bytes(_changed(_saved(kind, moe), kind, draw))
    if draw.random() < 0.5:
        return ["report", str(new), "-o", str(folder / "page.html")]
    return ["compare", *draw.sample([str(base), str(new)], 2), *draw.choice(([], ["--json"], ["--tolerance", "0"]))]


def _alter(base: Path, new: Path, draw: Random) -> None:
    """Write the trace with some tensors of another shape, dtype or values, or without; some of the steps say so."""
    opened = open_container(base)
    tensors = {name: opened.tensor(name) for name in opened.shapes}
    record = copy.deepcopy(opened.record)
    for name in draw.sample(sorted(tensors), draw.choice((1, 1, 2))):
        if draw.random() < 0.15:
            del tensors[name]
            continue
        tensors[name] = altered(tensors[name], draw)
        if tensors[name].dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            tensors[name] = tensors[name].to(torch.int64)  # no trace has other integers
        for step in record["steps"] if draw.random() < 0.7 else ():
            if step["name"] == name:
                step |= {"shape": [*tensors[name].shape], "dtype": str(tensors[name].dtype).removeprefix("torch.")}
    with new.open("wb") as file:
        write(file, new.suffix, tensors, record)


def _changed(raw: bytes, kind: str, draw: Random) -> bytes:
    if kind == ".json":
        return changes.of_json(json.loads(raw), draw).encode("utf-8", "surrogatepass")
    if draw.random() < 0.3:
        return changes.of_bytes(raw, draw)
    if kind == ".npz":
        return _changed_npz(raw, draw)
    length = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:length])
    if draw.random() < 0.7:
        record = changes.of_json(json.loads(header["__metadata__"]["ffn_trace"]), draw)
        header["__metadata__"]["ffn_trace"] = record
        return raw_safetensors(header, raw[length:])
    return raw_safetensors(changes.of_json(header, draw).encode("utf-8", "surrogatepass"), raw[length:])


HEADERS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (5, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2**62, 0)}",
    "{'descr': '<U0', 'fortran_order': 0, 'shape': ()}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 0, 9)}",
    "{'descr': [('a', '<f4')]}",
    "{",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,)}",
    "\0",
    "(((",
    "[" * 500,
    "{'shape': 5}",
    "1 if",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}",
    "{'descr': ',', 'fortran_order': False, 'shape': ()}",
    "{'descr': '<U1000000000', 'fortran_order': False, 'shape': ()}",
    "\n\t'",
    "{'descr': 'O', 'shape': (), 'x': 1}",
    "é",
]


def npy(header: str) -> bytes:
    """Return an array file with this header and 80 bytes of values."""
    text = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(80)


def _changed_npz(raw: bytes, draw: Random) -> bytes:
    """The archive with one member's bytes, header or name changed, or its record."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = draw.choice(list(members))
    if draw.random() < 0.5:
        text = str(np.load(io.BytesIO(members["ffn_trace.npy"])))
        np.save(record := io.BytesIO(), np.array(changes.of_json(json.loads(text), draw)))
        members["ffn_trace.npy"] = record.getvalue()
    elif draw.random() < 0.5:
        members[name] = changes.of_bytes(members[name], draw, 0, 130)
    else:
        members[name] = npy(draw.choice(HEADERS))
    if draw.random() < 0.1:
        members[draw.choice(("x/", "../x", "a\x1bb.npy", "weights/x.npy", "tokens/x.npy"))] = members[name]
    with zipfile.ZipFile(out, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return out.getvalue()


@cache
def _saved(kind: str, moe: bool) -> bytes:
    import tempfile

    from ffncli.block.recipe import FFNSpec, MoE
    from tests.run.saved.test_saved import saved as save_trace

    spec = FFNSpec(4, 6, "swiglu", moe=MoE(3, 2) if moe else None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{kind}"
        save_trace(path, spec, inside=None if moe else frozenset())
        return path.read_bytes()


def inputs(draw: Random, folder: Path) -> list[str]:
    """A file with numbers for a block of four: JSON, text, .npy or .safetensors."""
    kind = draw.choice((".json", ".csv", ".txt", ".npy", ".safetensors"))
    values = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.5]]
    path = folder / f"x{kind}"
    if kind == ".json":
        raw = changes.of_json(draw.choice((values, {"x": values})), draw).encode("utf-8", "surrogatepass")
    elif kind in (".csv", ".txt"):
        text = "\n".join(",".join(map(str, row)) for row in values) + "\n"
        raw = changes.of_bytes(text.encode(), draw)
    else:
        if kind == ".npy":
            np.save(out := io.BytesIO(), np.array(values))
            whole = npy(draw.choice(HEADERS)) if draw.random() < 0.3 else out.getvalue()
        else:
            whole = save({"x": torch.tensor(values)})
        raw = changes.of_bytes(whole, draw, 0, 130)
    path.write_bytes(raw)
    return ["trace", "4x8", "--input", str(path), *draw.choice(([], ["--json"], ["--dtype", "bf16"]))]
