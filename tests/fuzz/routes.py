"""Cases of files of routes: ours, and as vLLM, SGLang and llama.cpp write them, read by `ffn experts` and `compare`."""

import io
import json
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import torch

from ffncli.run.corpus.routes import LayerRoutes, RouterRule, save_routes
from tests.fuzz import changes
from tests.fuzz.models import altered
from tests.fuzz.results import CELLS
from tests.fuzz.tensors import HEADERS, npy
from tests.oracles.checkpoints import raw_safetensors

TOKENS, LAYERS, EXPERTS, TOP_K = 6, 2, 5, 2
OPTIONS = (
    [], [], ["--json"], ["--ep", "5"], ["--ep", "2", "--redundant", "1"], ["--cache", "lru,lfu,pin,best"], ["-l", "1"],
    ["--slots", "1,9"], ["--experts", "7"], ["--top-k", "3"], ["--experts", "1"], ["--ep", "1", "--csv"],
)  # fmt: skip


def routes(draw: Random, folder: Path) -> list[str]:
    """A file of routes that was changed, alone or compared with another as it should be."""
    kind = draw.choice((".safetensors", ".npy", ".npz", ".pt", ".csv"))
    ids = _choices(draw)
    path, base = folder / f"new{kind}", folder / "base.npy"
    path.write_bytes(_WRITERS[kind](ids, draw))
    if draw.random() < 0.3:
        path.write_bytes(changes.of_bytes(path.read_bytes(), draw, 0, draw.choice((130, None))))
    if draw.random() < 0.4:
        np.save(base, _choices(draw).numpy())
        both = draw.sample([str(base), str(path)], 2)
        return ["compare", *both, *draw.choice(([], ["--json"], ["--csv"]))]
    return ["experts", str(path), *draw.choice(OPTIONS)]


def _choices(draw: Random) -> torch.Tensor:
    """Choices [tokens, layers, top_k], now and then with padding or with a choice that no router makes."""
    ids = torch.tensor([[draw.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)] for _ in range(TOKENS)])
    if draw.random() < 0.2:
        ids[draw.randrange(TOKENS)] = draw.choice((0, -1))
    if draw.random() < 0.2:
        place = (draw.randrange(TOKENS), draw.randrange(LAYERS), draw.randrange(TOP_K))
        ids[place] = draw.choice((-2, 0, 1, EXPERTS, 2**31, 2**62, -(2**63)))
    return ids


def _altered(tensor: torch.Tensor, draw: Random) -> torch.Tensor:
    """Another shape, dtype or values, of those that we write."""
    new = altered(tensor, draw)
    return new if new.dtype in (torch.float32, torch.float16, torch.int64) else new.long()


def _ours(ids: torch.Tensor, draw: Random) -> bytes:
    rule = draw.choice((None, RouterRule("softmax", "score_first", True, 1.0, 0.0, "fp32", replays=True)))
    layers = []
    for at, one in enumerate(ids.transpose(0, 1)):
        tensors = {"ids": one, "weights": torch.rand(TOKENS, TOP_K), "logits": torch.randn(TOKENS, EXPERTS)}
        for name in draw.sample(sorted(tensors), draw.choice((0, 0, 1, 2))):
            tensors[name] = _altered(tensors[name], draw)
        layers.append(LayerRoutes("decoder", at, EXPERTS, **tensors, rule=rule))
    with tempfile.TemporaryDirectory() as folder:
        path, text = Path(folder) / "r.safetensors", torch.arange(TOKENS) // 2
        save_routes(path, "m", layers, _altered(text, draw) if draw.random() < 0.2 else text)
        raw = path.read_bytes()
    if draw.random() < 0.6:
        return raw
    length = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:length])
    record = json.loads(header["__metadata__"]["ffn_trace"])
    header["__metadata__"]["ffn_trace"] = changes.of_json(record, draw)
    return raw_safetensors(header, raw[length:])


def _array(ids: torch.Tensor, draw: Random) -> bytes:
    if draw.random() < 0.2:
        return npy(draw.choice([*HEADERS, "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 2**40, 2)}"]))
    some = altered(ids, draw) if draw.random() < 0.3 else ids
    np.save(out := io.BytesIO(), some.numpy().astype(draw.choice(("int16", "int32", "int64", "uint8", "float32"))))
    return out.getvalue()


def _archive(ids: torch.Tensor, draw: Random) -> bytes:
    parts = [altered(part, draw) if draw.random() < 0.2 else part for part in ids.split(4)]
    np.savez(out := io.BytesIO(), **{f"r{at}": part.numpy() for at, part in enumerate(parts)})
    return out.getvalue()


def _pickle(ids: torch.Tensor, draw: Random) -> bytes:
    chosen = ids.transpose(0, 1).contiguous()
    count = torch.stack([torch.bincount(one.clamp(0, EXPERTS).flatten(), minlength=EXPERTS + 1) for one in chosen])
    record: dict[str, object] = {"topk_ids_of_layer": chosen, "global_physical_count": count}
    kept = draw.choice(("topk_ids_of_layer", "global_physical_count", None))
    records = [{name: value for name, value in record.items() if kept in (None, name)} for _ in range(2)]
    logical = torch.tensor([[*range(EXPERTS), 0]] * LAYERS)
    content: dict[str, object] = {"records": records, "last_physical_to_logical_map": logical}
    if draw.random() < 0.3:
        content = {"logical_count": count[None].repeat(2, 1, 1)}
    for _ in range(draw.choice((0, 1, 2))):
        part = draw.choice([content, *(records if "records" in content else [])])
        name = draw.choice(sorted(part))
        value = part[name]
        part[name] = altered(value, draw) if isinstance(value, torch.Tensor) else changes.value(draw)
    torch.save(content, out := io.BytesIO())
    return out.getvalue()


def _csv(ids: torch.Tensor, draw: Random) -> bytes:
    pairs = [(token, layer, ids[token, layer].tolist()) for token in range(TOKENS) for layer in range(LAYERS)]
    kind = draw.randrange(3)
    rows: list[list[object]] = (
        [["pos", "layer", "e0", "e1"], *([token, layer, *both] for token, layer, both in pairs)] if kind == 0
        else [["layer", "expert"], *([layer, one] for _, layer, both in pairs for one in both)] if kind == 1
        else [["token", "layer", "expert", "weight"],
              *([token, layer, one, 0.5] for token, layer, both in pairs for one in both)]
    )  # fmt: skip
    if draw.random() < 0.2:
        del rows[0]
    for _ in range(draw.choice((0, 1, 1, 3))):
        row = draw.choice(rows)
        if draw.random() < 0.2:
            del row[draw.randrange(len(row)) :]
        if row:
            row[draw.randrange(len(row))] = draw.choice([*CELLS, "1.5", "1e30", "-1", "1_0", "0x1"])
    return "\n".join(",".join(map(str, row)) for row in rows).encode("utf-8", "surrogatepass")


_WRITERS = {".safetensors": _ours, ".npy": _array, ".npz": _archive, ".pt": _pickle, ".csv": _csv}
