"""One rank: every case through `ParallelBlock`, and what came out into a file. It judges nothing.

`python -m tests.ranks.worker FOLDER RANK WORLD_SIZE`: cases from FOLDER/cases.pt, answers into FOLDER/RANK.pt.
"""

import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from ffncli.block.shard import Ranks
from ffncli.run.ranks.parallel import ParallelBlock
from ffncli.run.ranks.simulate import Exchanges
from ffncli.run.ranks.store import RankGroup
from tests.ranks.cases import Answer, RankCase

LIMIT_S = 60  # a rank that waits longer for another ends with an error


def counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(name).rpartition(".")[2]: count for name, count in mode.get_comm_counts().items()}


def answer(case: RankCase, group: RankGroup) -> Answer:
    place = group.ranks.place(group.rank)[0]
    entered = {name: tensor.split(case.tokens)[place] for name, tensor in case.inputs.items()}
    block = ParallelBlock(case.steps, case.weights, group)
    with Exchanges() as forward, torch.no_grad():
        output = block(*entered.values())
    block.requires_grad_()
    x = entered["x"].clone().requires_grad_()
    with CommDebugMode() as both:
        block(*{**entered, "x": x}.values()).backward(case.upstream.split(case.tokens)[place])
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in block.parts.named_parameters()}
    local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    assert x.grad is not None
    return Answer("", output, x.grad, block.local_weights, local, counts(forward), counts(both), forward.done)


def main(folder: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    cases = torch.load(folder / "cases.pt", weights_only=False)
    store = distributed.FileStore(str(folder / "store"), world_size)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT_S)
    )
    meshes: dict[Ranks, DeviceMesh] = {}
    answers: dict[str, Answer] = {}
    for case in cases:
        ranks = case.ranks
        if ranks not in meshes:
            meshes[ranks] = init_device_mesh("cpu", (ranks.ep, ranks.tp), mesh_dim_names=("ep", "tp"))
        try:
            answers[case.name] = answer(case, RankGroup(ranks, rank, torch.device("cpu"), meshes[ranks]))
        except Exception:
            answers[case.name] = Answer(traceback.format_exc())
            break  # the others may be in a collective that this rank left
    torch.save(answers, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
