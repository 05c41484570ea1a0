"""Routes as data: what `ffn experts --save-routes` writes, and what vLLM, SGLang and llama.cpp record.

.safetensors   ours: for each layer the chosen experts, their weights and the router's logits; or a saved trace
.npy, .npz     vLLM's `routed_experts`, one array of integers [tokens, layers, top_k] for each request
.pt            SGLang's expert distribution recorder: choices of each token (`per_token`), or counts for each pass
.csv           llama.cpp's traces: a row for each choice (layer, expert, ...), or token (pos, layer, e0, ...)
"""

import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ffncli.block import steps as ops
from ffncli.errors import FFNError, option, shown, shown_path
from ffncli.models.files.json_records import Count, Positive, known_fields
from ffncli.run.engine.execute import route
from ffncli.run.saved.containers import open_container, write
from ffncli.run.saved.saved import open_saved
from ffncli.system.files import open_to_read, read_whole, written_whole

MOST_BYTES = 1 << 31  # of one array, or of a CSV
MOST_CHOICES = 1 << 48  # of one tensor of counts: the counts of thousands can be added
MOST_EXPERTS = 4096  # pairs of experts are counted
STACK = "decoder"  # of formats that do not say it
_KEY = "routes"


@dataclass(frozen=True)
class RouterRule:
    """How a layer's router turns the logits of the chosen experts into weights; `replays` if these logits suffice."""

    score: str
    order: str
    renormalise: bool
    scale: float
    eps: float
    score_dtype: str
    replays: bool


@dataclass(frozen=True)
class LayerRoutes:
    """The routes of one layer.

    `ids` [tokens, top_k] are each token's experts, the heaviest first, -1 for none; ids from `experts` on are identity
    experts. `weights` are their weights, shaped alike; `logits` [tokens, experts] are the router's. `counts` [passes,
    experts] if only the choices of each pass were counted: then there are no ids.
    """

    stack: str
    index: int
    experts: int
    ids: Tensor
    weights: Tensor | None = None
    logits: Tensor | None = None
    counts: Tensor | None = None
    rule: RouterRule | None = None

    @property
    def columns(self) -> int:
        """The number of experts that the router chooses among, identity experts included."""
        return self.experts if self.logits is None else self.logits.shape[-1]

    def weights_of(self, ids: Tensor) -> Tensor | None:
        """Return the weights [tokens, top_k] that this router gives other experts; None if its file does not say."""
        rule = self.rule
        if rule is None or not rule.replays or self.logits is None or int(ids.max()) >= self.logits.shape[-1]:
            return None
        given = {name: value for name, value in asdict(rule).items() if name != "replays"}
        op = ops.Route(ops.Axis("experts", self.logits.shape[-1]), ids.shape[-1], lookup=ops.Axis("vocab", 1), **given)
        at = torch.arange(len(ids))[:, None]
        return route(op, {"lookup": ids.clamp_min(0)}, self.logits, at).gather(-1, ids.clamp_min(0))


@dataclass(frozen=True)
class Routes:
    """All routes of a file: `text` [tokens] is each token's text, None if unknown; `notes` say what was inferred.

    `named` is the number of experts that are named, if the file does not say how many there are.
    """

    where: str
    kind: str
    layers: tuple[LayerRoutes, ...]
    text: Tensor | None = None
    notes: tuple[str, ...] = ()
    named: int | None = None


def chosen_of(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ids, their weights), both [tokens, most choices], of router weights [tokens, experts], heaviest first."""
    size = weights.double().abs()
    most = int((weights != 0).sum(-1).max()) if len(weights) else 0
    ids = size.argsort(dim=-1, descending=True, stable=True)[:, :most]
    values = weights.gather(-1, ids)
    return ids.masked_fill(values == 0, -1), values


# --- ours -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SavedLayer:
    stack: str
    index: Count
    experts: Positive
    rule: RouterRule | None


@dataclass(frozen=True)
class _SavedRoutes:
    model: str
    layers: tuple[_SavedLayer, ...]


def save_routes(path: Path, model: str, layers: Sequence[LayerRoutes], text: Tensor) -> None:
    """Write routes with their weights and logits."""
    tensors = {"text": text.long()}
    for layer in layers:
        name = f"{layer.stack}.{layer.index}"
        given = {"ids": layer.ids.long(), "weights": layer.weights, "logits": layer.logits}
        tensors |= {f"{name}/{key}": value.contiguous() for key, value in given.items() if value is not None}
    saved = [_SavedLayer(one.stack, one.index, one.experts, one.rule) for one in layers]
    with written_whole(path) as file:
        write(file, ".safetensors", tensors, {_KEY: asdict(_SavedRoutes(model, tuple(saved)))})


def _ours(path: Path) -> Routes:
    where, container = shown_path(path), open_container(path, ".safetensors")
    if _KEY not in container.record:
        return _traced(path)
    record: _SavedRoutes = known_fields(_SavedRoutes, container.record[_KEY], where)
    layers = []
    for one in record.layers:
        name = f"{one.stack}.{one.index}"
        given = {key: container.tensor(f"{name}/{key}") for key in ("ids", "weights", "logits")
                 if f"{name}/{key}" in container.shapes}  # fmt: skip
        if "ids" not in given:
            raise FFNError(f"{where} has no routes of {shown(name, 120)}")
        given["ids"] = _integers(given["ids"], 2, f"{where}: {shown(name, 120)}/ids")
        if any(tensor.dim() != 2 for tensor in given.values()):
            raise FFNError(f"{where}: the weights or logits of {shown(name, 120)} do not have 2 axes")
        layers.append(LayerRoutes(one.stack, one.index, one.experts, rule=one.rule, **given))
    text = _integers(container.tensor("text"), 1, f"{where}: text") if "text" in container.shapes else None
    tokens = {len(one.ids) for one in layers} | ({len(text)} if text is not None else set())
    if len(tokens) > 1 or (text is not None and not 0 <= int(text.min()) <= int(text.max()) < 1 << 32):
        raise FFNError(f"{where}: its layers or its texts do not fit its tokens")
    return Routes(where, "ffn", tuple(layers), text)


def _traced(path: Path) -> Routes:
    """Return the routes of the layer of a saved trace."""
    saved = open_saved(path)
    if not any(step.name == "route" for step in saved.steps):
        raise FFNError(f"{saved.where} has no tensor route", "give a trace of a mixture of experts")
    weights = saved.tensor("route").flatten(0, -2)
    ids, values = chosen_of(weights)
    names = {step.name for step in saved.steps}
    logits = saved.tensor("router").flatten(0, -2) if "router" in names else None
    stack, index = saved.block.get("stack"), saved.block.get("layer")
    layer = LayerRoutes(
        str(stack or STACK), index if isinstance(index, int) else 0, weights.shape[-1], ids, values, logits
    )
    return Routes(saved.where, "trace", (layer,))


# --- vLLM -------------------------------------------------------------------------------------------------------------


def _vllm(path: Path) -> Routes:
    where = shown_path(path)
    arrays = []
    if path.suffix.lower() == ".npy":
        with open_to_read(path) as file:
            arrays.append(_array(file, path.stat().st_size, where))
    else:
        try:
            with open_to_read(path) as raw, zipfile.ZipFile(raw) as archive:
                if "ffn_trace.npy" in archive.namelist():
                    return _traced(path)
                for member in archive.infolist():
                    with archive.open(member) as file:
                        arrays.append(_array(file, member.file_size, f"{where}: {shown(member.filename, 120)}"))  # type: ignore[arg-type]
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise FFNError(f"{where} is not a .npz file: {str(error)[:60]}") from None
    if not arrays or len({one.shape[1:] for one in arrays}) > 1:
        raise FFNError(f"{where}: its arrays have other layers or another top_k", "each is [tokens, layers, top_k]")
    ids = torch.cat(arrays).transpose(0, 1)
    text = torch.arange(len(arrays)).repeat_interleave(torch.tensor([len(one) for one in arrays]))
    return Routes(where, "vLLM", tuple(LayerRoutes(STACK, at, 0, one) for at, one in enumerate(ids)), text)


def _array(file: BinaryIO, size: int, where: str) -> Tensor:
    """Return the integers [tokens, layers, top_k] of an open array."""
    import numpy

    try:
        reader = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}
        shape, fortran, dtype = reader[numpy.lib.format.read_magic(file)](file)
    except Exception as error:  # numpy raises a dozen kinds of exceptions for a malformed header
        raise FFNError(f"{where} is not an array: {str(error)[:60]}") from None
    if len(shape) != 3 or dtype.kind not in "iu" or fortran or 0 in shape:
        raise FFNError(
            f"{where} holds {dtype} {shown(list(shape))}", "routed_experts are integers [tokens, layers, top_k]"
        )
    if size > MOST_BYTES or len(raw := file.read(size)) != prod(shape) * dtype.itemsize:
        raise FFNError(f"{where} is cut, or has over {MOST_BYTES:,} bytes")
    return torch.from_numpy(numpy.frombuffer(raw, dtype).astype("int64").reshape(shape))


# --- SGLang -----------------------------------------------------------------------------------------------------------


def _sglang(path: Path) -> Routes:
    where = shown_path(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of protocols that it may not read
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle can raise anything
        raise FFNError(f"{where} cannot be read: {str(error).partition(chr(10))[0][:120]}") from None
    if isinstance(content, Mapping) and "logical_count" in content:
        counts = _counts(content["logical_count"], 3, f"{where}: logical_count")
        return Routes(where, "SGLang", _counted(counts[counts.flatten(1).any(1)]))
    records = content.get("records") if isinstance(content, Mapping) else None
    if not isinstance(records, list) or not records or not all(isinstance(one, Mapping) for one in records):
        raise FFNError(f"{where} has no records", "make it with SGLang's expert distribution recorder")
    logical = _integers(content.get("last_physical_to_logical_map"), 2, f"{where}: last_physical_to_logical_map")
    if not 0 <= int(logical.min()) <= (most := int(logical.max())) < MOST_EXPERTS:
        raise FFNError(f"{where}: last_physical_to_logical_map names experts outside 0 to {MOST_EXPERTS - 1:,}")
    if "topk_ids_of_layer" not in records[0]:
        passes = [_counts(one.get("global_physical_count"), 2, f"{where}: global_physical_count") for one in records]
        if any(one.shape != logical.shape for one in passes):
            raise FFNError(f"{where}: global_physical_count has another shape than last_physical_to_logical_map")
        counts = torch.stack(passes)
        into = torch.zeros(*counts.shape[:2], most + 1, dtype=torch.int64)
        return Routes(where, "SGLang", _counted(into.scatter_add_(-1, logical.expand_as(counts), counts)))
    taken = [_integers(one.get("topk_ids_of_layer"), 3, f"{where}: topk_ids_of_layer") for one in records]
    if any(len(one) != len(logical) or one.shape[-1] != taken[0].shape[-1] or int(one.max()) >= logical.shape[1]
           for one in taken):  # fmt: skip
        raise FFNError(f"{where}: topk_ids_of_layer does not fit last_physical_to_logical_map")
    ids = torch.cat(taken, 1)
    experts = logical.gather(1, ids.clamp_min(0).flatten(1)).view_as(ids).masked_fill(ids < 0, -1)
    text = torch.arange(len(taken)).repeat_interleave(torch.tensor([one.shape[1] for one in taken]))
    return Routes(where, "SGLang", tuple(LayerRoutes(STACK, at, most + 1, one) for at, one in enumerate(experts)), text)


def _counted(counts: Tensor) -> tuple[LayerRoutes, ...]:
    none = torch.zeros(0, 0, dtype=torch.int64)
    layers = enumerate(counts.transpose(0, 1))
    return tuple(LayerRoutes(STACK, at, one.shape[-1], none, counts=one) for at, one in layers if bool(one.any()))


def _integers(value: Any, axes: int, where: str) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() != axes or value.is_floating_point() or 0 in value.shape:
        raise FFNError(f"{where} is not a tensor of integers with {axes} axes")
    if not value.is_contiguous():  # an expanded tensor may be larger than any file
        raise FFNError(f"{where} is not contiguous")
    return value.long()


def _counts(value: Any, axes: int, where: str) -> Tensor:
    counts = _integers(value, axes, where)
    if bool((counts < 0).any()) or float(counts.double().sum()) > MOST_CHOICES:
        raise FFNError(f"{where} has a negative count, or over {MOST_CHOICES:,} choices")
    return counts


# --- llama.cpp --------------------------------------------------------------------------------------------------------

_COLUMNS = {"layer": r"layer(_?id)?", "token": r"token|pos(ition)?|row|step", "expert": r"expert(_?id)?", "weight":
            r"weight|score|prob", "many": r"(e|expert_?|id)\d+"}  # fmt: skip


def _csv(path: Path, top_k: int | None) -> Routes:
    import numpy

    where = shown_path(path)
    try:
        lines = read_whole(path, MOST_BYTES).decode("ascii", "replace").splitlines()
    except OSError as error:
        raise FFNError(f"cannot read {where}: {error.strerror or error}") from None
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    head = [name.strip().lower() for name in lines[0].split(",")] if lines else []
    if all(re.fullmatch(r"-?\d+", name) for name in head):  # no names: layer, expert, or pos, layer, e0, e1, ...
        head = ["layer", "expert"] if len(head) == 2 else ["pos", "layer", *(f"e{at}" for at in range(len(head) - 2))]
    else:
        lines = [line for line in lines if line != lines[0]]  # traces put together with `cat` repeat the names
    at = {key: [i for i, name in enumerate(head) if re.fullmatch(p, name)] for key, p in _COLUMNS.items()}
    one, many = at["expert"][:1], at["many"]
    if not at["layer"] or not (one or many) or not lines:
        raise FFNError(f"{where} has no columns of layers and experts", "its first line names them: layer,expert")
    wanted = [*at["layer"][:1], *at["token"][:1], *(one or many), *(at["weight"][:1] if one else ())]
    try:
        table = torch.from_numpy(numpy.loadtxt(lines, delimiter=",", usecols=wanted, ndmin=2))
    except ValueError as error:
        raise FFNError(f"{where} is not a table of numbers: {str(error).partition(chr(10))[0][:120]}") from None
    whole = table[:, : len(wanted) - bool(one and at["weight"])]
    if not bool(((whole == whole.trunc()) & (whole.abs() < 1 << 53)).all()) or bool((whole[:, 0] < 0).any()):
        raise FFNError(f"{where} has a layer, token or expert that is not a whole number from 0 to 2^53")
    tokens = table[:, 1] if at["token"] else None
    ids = table[:, (1 + bool(at["token"])) :].long()
    weights = None
    if one and at["weight"]:
        weights, ids = table[:, -1], ids[:, :1]
    layer_of, notes = table[:, 0].long(), list[str]()
    numbers = sorted({*layer_of.tolist()})
    if one and tokens is None:
        top_k = top_k or _top_k([ids[layer_of == number, 0] for number in numbers])
        notes.append(f"{where} does not separate tokens: every {top_k} rows of a layer count as a token")
    layers = []
    for number in numbers:
        here = layer_of == number
        mine, heavy = ids[here], None if weights is None else weights[here]
        if one:
            ends = torch.arange(len(mine)) // (top_k or 1) if tokens is None else _runs(tokens[here])
            mine, heavy = _rows(mine[:, 0], ends), None if heavy is None else _rows(heavy, ends)
        layers.append(LayerRoutes(STACK, number, 0, mine, heavy))
    return Routes(where, "llama.cpp", tuple(layers), notes=tuple(notes))


def _runs(tokens: Tensor) -> Tensor:
    """Return the index of the run of equal values that each value is in."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), (tokens[1:] != tokens[:-1]).cumsum(0)])


def _rows(values: Tensor, row: Tensor) -> Tensor:
    """Return the values of each row [rows, most values], filled up with -1."""
    count = torch.bincount(row)
    column = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    return torch.full((len(count), int(count.max())), -1, dtype=values.dtype).index_put((row, column), values)


def _top_k(layers: Sequence[Tensor]) -> int:
    """Return the largest number of choices per token for which no token of any layer chooses an expert twice."""
    shortest = min(len(ids) for ids in layers)
    for size in range(min(shortest, 256), 1, -1):
        if all(len(ids) % size == 0 for ids in layers) and not any(
            _repeats(ids.view(-1, size)).any() for ids in layers
        ):
            return size
    return 1


def _repeats(ids: Tensor) -> Tensor:
    """Return which tokens [tokens, top_k] choose an expert twice."""
    ordered = ids.sort(-1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)


# --- any --------------------------------------------------------------------------------------------------------------

_READERS: Mapping[str, Callable[[Path], Routes]] = {
    ".safetensors": _ours, ".json": _traced, ".npy": _vllm, ".npz": _vllm, ".pt": _sglang,
}  # fmt: skip


def read_routes(path: Path, experts: int | None = None, top_k: int | None = None) -> Routes:
    """Read a file of routes; `experts` is their number where the file does not say it, `top_k` the choices per token.

    Padding, a token whose choices are all the same expert, becomes -1; layers of padding alone are left out. Raises
    FFNError for any other file, and for choices that no router makes.
    """
    reader = _READERS.get(path.suffix.lower(), partial(_csv, top_k=top_k))
    try:
        routes: Routes = reader(path)
    except OSError as error:
        raise FFNError(f"cannot read {shown_path(path)}: {error.strerror or error}") from None
    layers, notes, padding = [], list(routes.notes), 0
    for layer in routes.layers:
        if layer.counts is not None:
            layers.append(_checked(layer, routes.where, experts))
            continue
        same = (layer.ids == layer.ids[:, :1]).all(-1) & (layer.ids[:, 0] >= 0) & (layer.ids.shape[-1] > 1)
        ids = layer.ids.masked_fill(same[:, None], -1)
        if bool((ids >= 0).any()):
            padding += int(same.sum())
            layers.append(_checked(replace(layer, ids=ids), routes.where, experts))
    if padding:
        notes.append(f"{routes.where}: {padding:,} rows name one expert for all choices; they count as padding")
    if not layers:
        raise FFNError(f"{routes.where} has no routes")
    most, unsaid = max(layer.experts for layer in layers), None
    if any(not one.experts for one in routes.layers) and experts is None:
        layers = [replace(layer, experts=most) for layer in layers]
        unsaid = most
    return replace(routes, layers=tuple(layers), notes=tuple(notes), named=unsaid)


def _checked(layer: LayerRoutes, where: str, experts: int | None) -> LayerRoutes:
    """Return the layer with its number of experts; refuse choices that no router makes."""
    name, ids = f"{where}: layer {layer.index}", layer.ids
    if (
        size := max(layer.experts, layer.columns, int(ids.max()) + 1 if ids.numel() else 0, experts or 0)
    ) > MOST_EXPERTS:
        raise FFNError(f"{name} has {size:,} experts", f"at most {MOST_EXPERTS:,} are counted")
    if layer.counts is not None:
        return layer
    least, most = int(ids.min()), int(ids.max())
    if experts and layer.experts not in (0, experts):
        raise FFNError(f"{name} has {layer.experts} experts, not {experts}", f"leave {option('recorded_experts')} out")
    count = experts or layer.experts or most + 1
    if least < -1 or most >= max(count, layer.columns):
        raise FFNError(f"{name} names expert {least if least < -1 else most}, but there are {count}")
    if bool((twice := _repeats(ids)).any()):
        raise FFNError(f"{name}: token {int(twice.byte().argmax())} chooses an expert twice")
    shapes = [t.shape for t in (layer.weights, layer.logits) if t is not None]
    if (
        any(len(shape) != 2 or shape[0] != len(ids) for shape in shapes)
        or (layer.weights is not None and layer.weights.shape != ids.shape)
        or (layer.logits is not None and layer.columns < count)
    ):
        raise FFNError(f"{name}: its weights or logits have other shapes than its choices")
    return replace(layer, experts=count)
