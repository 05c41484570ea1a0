"""This process as one of several ranks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ffncli.block.ranks import Ranks
from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run, which of them this process is, and their mesh with the dimensions `ep` and `tp`."""

    ranks: Ranks
    rank: int
    device: torch.device
    mesh: DeviceMesh
