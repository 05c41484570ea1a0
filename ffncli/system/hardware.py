"""Known accelerators by the names that torch, nvidia-smi and ROCm give them, from `hardware.toml`. Does not need torch.

Rates are for dense matrix products. Only whole names match: `NVIDIA GeForce RTX 4070 Ti` is not the listed RTX 4070,
and a laptop's RTX 4090 is a different chip.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeVar

from ffncli.errors import FFNError, did_you_mean, shown

_HEADER = re.compile(r"^\[\[(\w+)\]\]\n", re.MULTILINE)
R = TypeVar("R", bound="Device | Link | PlanningDefaults")
_MAKER = re.compile(r"^(nvidia|amd|google)\s+")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. `tflops` maps each class (fp32, tf32, bf16, fp16, fp8, int8, fp4) to TFLOP/s; a GB is 1e9 bytes.
    `memory_gb` are the sizes that were sold; `memory_mib` is the largest as its driver reports it, if known.

    `approx` lists the values that are accurate only to 10 %: rate classes, `memory`, `llc`. `achieved` is the best
    published measurement of a GEMM in TFLOP/s. `link` connects the `per_node` accelerators of a node; `network` is a
    typical network between nodes. Both are names in `links`, or empty if unknown. `units` are the SMs or CUs that
    compute a product's tiles, 0 if unknown; `module` is the module or card that the figures are of. The efficiencies
    are planning defaults for devices without measurements: shares of the peak and of the bandwidth.
    """

    name: str
    kind: Literal["gpu", "tpu"] = "gpu"
    tflops: Mapping[str, float]
    half_accumulate: Mapping[str, float] = field(default_factory=dict)
    gbytes_per_s: float
    memory_gb: tuple[float, ...]
    memory_mib: int | None = None
    llc_mib: float | None = None
    achieved: Mapping[str, float] = field(default_factory=dict)
    approx: frozenset[str]
    source: str
    link: str = ""
    per_node: int = 1
    network: str = ""
    units: int = 0
    module: str = ""
    gemm_efficiency: float
    memory_efficiency: float

    def flops_per_s(self, dtype: str, tf32: bool = False) -> float | None:
        """Return the peak FLOP/s of matmuls in this dtype (TF32's peak for fp32 if `tf32`), or None if unknown."""
        rate = self.tflops.get(dtype)
        if dtype == "fp32" and tf32:
            rate = self.tflops.get("tf32", rate)
        return None if rate is None else rate * 1e12

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of memory, of the largest version: as the driver reports them, else as sold; None if unknown."""
        if self.memory_mib is not None:
            return self.memory_mib << 20
        return round(max(self.memory_gb) * 1e9) if self.memory_gb else None

    @property
    def llc_bytes(self) -> int:
        """Bytes of the last-level cache; 0 if unknown."""
        return round(self.llc_mib * (1 << 20)) if self.llc_mib else 0

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth, B/s."""
        return self.gbytes_per_s * 1e9

    @property
    def link_gbytes_per_s(self) -> float | None:
        """The link's GB/s in one direction, to all other accelerators together; None if unknown."""
        return next((link.gbytes_per_s for link in links() if link.name == self.link), None)


@dataclass(frozen=True)
class Link:
    """One interconnect: the GB/s (of 1e9 bytes) that one accelerator sends in one direction, to all others together.

    `title` is the printed name, `name` is the name as typed. `kind`: a link within a node (over PCIe or another link),
    or a network between nodes. `peers`: the number of other accelerators that are each reached by a wire of their own;
    the wires share the bandwidth. It is 0 for a switch, which can direct all of the bandwidth to any accelerator.
    """

    name: str
    title: str
    gbytes_per_s: float
    kind: Literal["node", "pcie", "network"]
    source: str
    peers: int = 0

    def bytes_per_s(self, ranks: int) -> float:
        """Return the B/s that each of `ranks` accelerators sends to the other `ranks` - 1, in one direction."""
        share = min(1.0, (ranks - 1) / self.peers) if self.peers else 1.0
        return self.gbytes_per_s * 1e9 * share


@dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL: the share of a link's bandwidth that it can use, and its latencies in microseconds.

    `collective_us` is the cost of any collective, `step_us` maps kinds of links to the cost of one step of a ring; the
    protocol is not used over other kinds of links.
    """

    name: str
    bandwidth: float
    collective_us: float
    step_us: Mapping[str, float]


@dataclass(frozen=True)
class PlanningDefaults:
    """The efficiencies expected without measurements: shares of the peak rate and of memory and link bandwidth."""

    gemm_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    source: str


@cache
def _sections(name: str = "hardware.toml") -> tuple[str, Mapping[str, Sequence[str]]]:
    """Return the part of a file before the first row, and the unparsed rows by kind: parsing all takes 20 ms."""
    text = files("ffncli.system").joinpath(name).read_text("utf-8")
    headers = list(_HEADER.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    rows: dict[str, list[str]] = {}
    for header, end in zip(headers, ends, strict=True):
        rows.setdefault(header[1], []).append(text[header.end() : end])
    return text[: headers[0].start()], rows


@cache
def _head() -> Mapping[str, Any]:
    """Return the tables before the rows: sources, planning, short."""
    return tomllib.loads(_sections()[0])


def _rows(kind: str) -> Iterator[Mapping[str, Any]]:
    return map(tomllib.loads, _sections()[1][kind])


@cache
def table() -> Mapping[str, Any]:
    """Return the whole file: sources, planning defaults, short names, and rows (devices, cpus, links, protocols)."""
    return {**_head(), **{kind: list(_rows(kind)) for kind in _sections()[1]}}


@cache
def _devices_by_name() -> Mapping[str, str]:
    """Return a mapping from every accelerator's name to its unparsed row."""
    return {json.loads(text.split("=", 1)[1].split("\n", 1)[0]): text for text in _sections()[1]["devices"]}


@cache
def _device_of(name: str) -> Device:
    planning, row = planning_defaults(), tomllib.loads(_devices_by_name()[name])
    shares = {"gemm_efficiency": planning.gemm_efficiency, "memory_efficiency": planning.memory_efficiency}
    approx, memory = frozenset(row.get("approx", ())), tuple(row.get("memory_gb", ()))
    return _record(Device, shares | row, approx=approx, memory_gb=memory, units=_units(row))


def _units(row: Mapping[str, Any]) -> int:
    """Return the number of units, of the device named by `like` if the row has no derivation; 0 if unknown."""
    if "derive" in row:
        return int(row["derive"]["units"])
    return _units(tomllib.loads(_devices_by_name()[row["like"]])) if "like" in row else 0


@cache
def devices() -> tuple[Device, ...]:
    """Return every accelerator, in the file's order."""
    return tuple(map(_device_of, _devices_by_name()))


@cache
def fitted_rows() -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return the head of `times.toml`, and its unparsed rows by the names of the devices that they are for."""
    head, rows = _sections("times.toml")
    named_rows: dict[str, str] = {}
    for text in rows["fitted"]:
        lines = [json.loads(line.split("=", 1)[1]) for line in text.split("\n", 2)[:2]]
        named_rows |= dict.fromkeys((lines[0], *lines[1]), text)
    return tomllib.loads(head), named_rows


@cache
def links() -> tuple[Link, ...]:
    """Return every interconnect."""
    return tuple(_record(Link, row) for row in _rows("links"))


@cache
def planning_defaults() -> PlanningDefaults:
    """Return the efficiencies that a plan uses if nothing was measured."""
    return _record(PlanningDefaults, _head()["planning"])


@cache
def protocols() -> tuple[Protocol, ...]:
    """Return NCCL's protocols, ordered from small to large messages."""
    return tuple(Protocol(**row) for row in _rows("protocols"))


def link_named(text: str, field: str) -> Link:
    """Return the link that `text` names. Raises FFNError with the nearest names; `field` is the option."""
    known = {_letters(link.name): link for link in links()}
    if (key := _letters(text)) in known:
        return known[key]
    names = [link.name for link in links()]
    raise FFNError(f"{field}: unknown link {shown(text)}", did_you_mean(text, names, "known: " + ", ".join(names)))


def find(device_name: str) -> Device | None:
    """Return the device with this name, or None if no name matches. Case and the maker's name do not matter."""
    return _names().get(_key(device_name))


def named(text: str, field: str) -> Device:
    """Return the device that a user means: `text` is its name, a short name (`h100`), or a prefix of only one device's
    name.

    Case, spaces and hyphens do not matter. Raises FFNError with the nearest names; `field` is the option.
    """
    key, typed = _letters(text), _names_by_typed()
    names = {_letters(name): full for name, full in typed.items()}
    if key in names:
        return _device_of(names[key])
    begin = [name for name in _devices_by_name() if key and _letters(name).startswith(key)]
    if len(begin) == 1:
        return _device_of(begin[0])
    if begin:
        listed = ", ".join(begin[:4]) + (" ..." if len(begin) > 4 else "")
        raise FFNError(f"{field}: {shown(text)} is the beginning of {listed}", "type a longer part of the name")
    otherwise = f"for example h100, mi300x, rtx-4090 or tpu-v5e; {field} list shows all"
    raise FFNError(f"{field}: unknown device {shown(text)}", did_you_mean(text, [*typed], otherwise))


def typed_names() -> Mapping[str, Device]:
    """Return a mapping from typed name to device: the short names, then all names in lower case with hyphens."""
    return {typed: _device_of(name) for typed, name in _names_by_typed().items()}


def _names_by_typed() -> dict[str, str]:
    every = {re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"): name for name in _devices_by_name()}
    return {**_head()["short"], **every}


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@cache
def _names() -> Mapping[str, Device]:
    pairs = zip(_rows("devices"), devices(), strict=True)
    return {_key(name): device for row, device in pairs for name in row["names"]}


def _key(name: str) -> str:
    return _MAKER.sub("", " ".join(name.lower().split()))


def _record(kind: type[R], row: Mapping[str, Any], **others: Any) -> R:
    """Create a record from the fields that its row contains, with the source written out; `others` take precedence."""
    known = {field.name: row[field.name] for field in fields(kind) if field.name in row}
    return kind(**known | {"source": _head()["sources"][row["source"]]} | others)
