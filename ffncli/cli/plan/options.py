"""The options of `ffn plan`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from ffncli.cli.common import values
from ffncli.cli.common.option import COMPUTE, option
from ffncli.cli.common.parsers import numbers, positive, share
from ffncli.dataclass import dataclass
from ffncli.models.counting.cluster import CPU, Assumptions

if TYPE_CHECKING:
    from ffncli.system.hardware import Device

_cluster = partial(option, "Accelerators")
_assume = partial(option, "Assumptions")
_Texts = list[str] | None
_Lists = list[Any] | None
_Share = float | None

Devices = Annotated[
    _Texts,
    _cluster("--device", metavar="NAME,...", values=values.devices, daily=True,
             help="Accelerators, as in h100,mi300x; list shows all that are known. [default: h100]"),
]  # fmt: skip
TensorParallels = Annotated[
    _Lists,
    _cluster("--tp", "--tensor-parallel", metavar="N,...", parser=numbers("--tp"), daily=True,
             help="Split every d_ff over N of them. [default: 1,2,4,8]"),
]  # fmt: skip
ExpertParallels = Annotated[
    _Lists,
    _cluster("--ep", "--expert-parallel", metavar="N,...", parser=numbers("--ep"), daily=True,
             help="Split the experts of a mixture, and the tokens, over N groups of them. [default: 1]"),
]  # fmt: skip
Skew = Annotated[
    str | None,
    _cluster("--skew", metavar="NAME", values=lambda: ("uniform", "zipf:1.2"),
             help="Popularity of the experts of a mixture: uniform, or zipf:1.2. [default: uniform]"),
]  # fmt: skip
Measured = Annotated[
    str | None,
    _assume("--measured", metavar="FILE,...", daily=True,
            help="CSVs of ffn bench --save, in place of the shares of peak and bandwidth; --device cpu needs them."),
]  # fmt: skip
Simulate = Annotated[
    bool,
    _cluster("--simulate", daily=True,
             help="Count the collectives by running the split block on simulated ranks too; exit 1 if they differ."),
]  # fmt: skip
Formats = Annotated[
    _Texts,
    option(COMPUTE, "--dtype", metavar="NAME,...", daily=True, values=values.storage_formats,
           help="Format of the weights: bf16, fp8, q4_0, ... [default: as released or stored]"),
]  # fmt: skip


@dataclass(frozen=True)
class AssumptionOptions:
    """--gemm-efficiency and related options: in place of a device's planning defaults."""

    gemm_efficiency: Annotated[
        _Share,
        _assume("--gemm-efficiency", metavar="X", parser=share("--gemm-efficiency"),
                help="Share of the peak that products reach. [default: 0.80, or the device's own]"),
    ] = None  # fmt: skip
    memory_efficiency: Annotated[
        _Share,
        _assume("--memory-efficiency", metavar="X", parser=share("--memory-efficiency"),
                help="Share of the memory bandwidth that is reached. [default: 0.90]"),
    ] = None  # fmt: skip
    link_efficiency: Annotated[
        _Share,
        _assume("--link-efficiency", metavar="X", parser=share("--link-efficiency"),
                help="Share of a link's bandwidth that a collective reaches. [default: 0.80]"),
    ] = None  # fmt: skip
    usable_memory: Annotated[
        _Share,
        _assume("--usable-memory", metavar="X", parser=share("--usable-memory"),
                help="Share of the memory that weights and activations may take. [default: 0.90]"),
    ] = None  # fmt: skip
    link: Annotated[
        str | None,
        _assume("--link", metavar="NAME", values=values.links,
                help="Link inside a node, as in nvlink4 or pcie5. [default: the device's]"),
    ] = None  # fmt: skip
    network: Annotated[
        str | None,
        _assume("--network", metavar="NAME", values=values.links,
                help="Network between nodes, a port for each device, as in ndr. [default: by device]"),
    ] = None  # fmt: skip
    per_node: Annotated[
        int | None,
        _assume("--per-node", metavar="N", parser=positive("--per-node", 65536),
                help="Devices that the link joins. [default: 8, or the device's own]"),
    ] = None  # fmt: skip

    def assumptions(self) -> Assumptions:
        """The same choices for `models/counting/cluster.py`."""
        return Assumptions(**vars(self))


def devices_of(texts: Sequence[str]) -> tuple[tuple[Device, ...], bool]:
    """(the accelerators of comma-separated lists, whether `cpu` is named too). Raises FFNError for unknown ones."""
    from ffncli.system.hardware import named

    words = [word.strip() for text in texts for word in text.split(",")]
    return tuple(named(word, "--device") for word in words if word.lower() != CPU), any(w.lower() == CPU for w in words)
