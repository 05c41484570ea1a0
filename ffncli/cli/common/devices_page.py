"""`ffn params --ridge list`, `ffn plan --device list`: the known accelerators, by the names that both take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ffncli.show.parts import Answer, Line, Table
from ffncli.system.hardware import devices, typed_names

_CLASSES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")


def devices_answer(command: str) -> Answer:
    """A row for each accelerator, named as it is typed; `devices` in JSON."""
    records = list(_records())
    lines = [{**one, **{f"{name}_tflops": one["tflops"].get(name) for name in _CLASSES}} for one in records]
    columns = [name for name in lines[0] if name != "tflops"]
    flat = Table(tuple(columns), [tuple(line[name] for name in columns) for line in lines])
    rows = [(one["device"], _half(one), one["gbytes_per_s"], _sizes(one), _ridge(one)) for one in records]
    table = Table(("device", "TFLOP/s", "GB/s", "GB", "FLOPs/byte"), rows, labels=1)
    note = Line("TFLOP/s: dense, in bf16, or fp16 if bf16 is missing; FLOPs/byte: the ridge", quiet=True)
    return Answer(command, {"rows": [], "devices": records}, flat, [table, note], {})


def _records() -> Iterator[dict[str, Any]]:
    """Every accelerator in the table's order, under the first of its names that a shell completes."""
    typed: dict[str, str] = {}
    for name, device in typed_names().items():
        typed.setdefault(device.name, name)
    for device in devices():
        yield {
            "device": typed[device.name],
            "name": device.name,
            "tflops": dict(device.tflops),
            "gbytes_per_s": device.gbytes_per_s,
            "memory_gb": list(device.memory_gb),
            "approximate": sorted(device.approx),
            "source": device.source,
            "link": device.link or None,
            "per_node": device.per_node,
            "network": device.network or None,
        }


def _half(record: Mapping[str, Any]) -> float:
    return float(record["tflops"].get("bf16") or record["tflops"]["fp16"])


def _sizes(record: Mapping[str, Any]) -> str:
    return "/".join(f"{size:g}" for size in record["memory_gb"])


def _ridge(record: Mapping[str, Any]) -> int:
    return round(_half(record) * 1e3 / float(record["gbytes_per_s"]))
