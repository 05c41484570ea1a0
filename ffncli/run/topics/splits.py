"""A block over several devices: tensor and expert parallelism, on a small block whose ranks run here."""

from __future__ import annotations

from ffncli.block import dtypes
from ffncli.block.ranks import Ranks
from ffncli.models.counting.expert_parallel import exchange
from ffncli.models.counting.tensor_parallel import split
from ffncli.run.topics.tiny import TinyRun, catalog_model, routes, tiny_run
from ffncli.run.topics.topic import NumberTable, Topic, TopicLine, Value, fixed

_RANKS = 8  # of the sentences about a model of the catalog


def tensor_parallel_topic(line: TopicLine) -> Topic:
    """What tensor parallelism is."""
    source, ranks = "4x8:swiglu", Ranks(tp=2)
    tiny = tiny_run(source, tokens=1)
    sums, total = _partial_sums(tiny, ranks)
    model = catalog_model("llama-2-7b").model
    share = split(model, _RANKS, dtypes.dtype("bf16"))
    rows: list[tuple[Value, ...]] = [(f"rank {rank}", *values) for rank, values in enumerate(sums)]
    return line.explained(
        (
            "Tensor parallelism (TP) splits every block over n devices, called ranks: each computes d_ff / n of the "
            "hidden units.",
            "A rank has its units' columns of W1 and W3 (column-parallel) and their rows of W2 (row-parallel), so "
            "before the output no rank needs another.",
            "Each rank's output sums over its units only; one all-reduce adds these partial sums and gives every rank "
            "the result.",
            f"Below, out 0 is {fixed(sums[0][0])} from rank 0 and {fixed(sums[1][0])} from rank 1, together "
            f"{fixed(total[0])}, as without a split.",
            f"On {_RANKS} ranks each has {share.rank_0_params_total / 1e9:.2f} of llama-2-7b's "
            f"{share.whole_params_total / 1e9:.2f} billion FFN parameters, and sends "
            f"{share.ring_all_reduce_bytes_per_token:,.0f} bytes per token and layer (a ring, bf16).",
            "That needs fast links, so TP is mostly used inside one machine (Narayanan et al. 2021).",
        ),
        NumberTable(
            f"ffn trace {source} --tokens 1 --tp {ranks.tp}",
            ("down", *(f"out {i}" for i in range(len(total)))),
            (*rows, ("sum", *total), ("without a split", *tiny["down"].values[0])),
        ),
        "ffn plan llama-2-70b --tp 1,2,4,8",
        ("Shoeybi et al. 2019, arXiv:1909.08053", "Narayanan et al. 2021, arXiv:2104.04473"),
    )


def expert_parallel_topic(line: TopicLine) -> Topic:
    """What expert parallelism is."""
    source, experts, tokens, ranks = "4x8:swiglu", 6, 6, 2
    each = experts // ranks
    rows = _journeys(tiny_run(source, tokens=tokens, experts=experts), ranks, each)
    sent = sum(row[-1] for row in rows)
    choices = sum(len(row[2].split(",")) for row in rows)
    mixtral = exchange(catalog_model("mixtral-8x7b").model, _RANKS, dtypes.dtype("bf16"))
    return line.explained(
        (
            "Expert parallelism (EP) spreads the experts of a mixture over n ranks: each has whole experts, a share "
            "of the tokens, and a copy of the router.",
            "A token's vector goes to the ranks of the experts that it chose (dispatch) and their results come back "
            "(combine): two all-to-alls a layer.",
            f"Below, rank 0 has experts 0-{each - 1} and rank 1 has {each}-{experts - 1}: {sent} of {choices} chosen "
            "experts are on the other rank, so a vector is sent to each and one comes back.",
            "If all experts are equally likely, (n - 1) / n of the choices leave a rank: in mixtral-8x7b on "
            f"{_RANKS} ranks {mixtral.dispatch_bytes_per_token:,.0f} bytes per token and layer (bf16).",
            "A layer waits for the rank whose experts got most tokens, so training also rewards an even spread "
            "(Lepikhin et al. 2020).",
        ),
        NumberTable(
            f"ffn trace {source} --experts {experts} --tokens {tokens} --ep {ranks}",
            ("token", "on rank", "experts", "on ranks", "sent"),
            tuple(rows),
        ),
        "ffn plan mixtral-8x7b --ep 1,2,4,8",
        ("Lepikhin et al. 2020, arXiv:2006.16668",),
    )


def _partial_sums(tiny: TinyRun, ranks: Ranks) -> tuple[list[list[float]], list[float]]:
    """(each rank's part of the first token's output, their sum), as the ranks compute them."""
    import torch

    from ffncli.run.engine.sharded import execute_ranks

    ready = tiny.prepared
    with torch.no_grad():
        *_, last = execute_ranks(ready.steps, ready.weights, ready.inputs, ranks)
    return [part[0].tolist() for part in last.parts], last.tensors[0][0].tolist()


def _journeys(tiny: TinyRun, ranks: int, each: int) -> list[tuple[int, int, str, str, int]]:
    """(token, its rank, its experts, their ranks, the vectors that it sends), the heaviest expert first."""
    import torch

    from ffncli.run.engine.sharded import tokens_of_rank

    chosen = routes(tiny)
    numbers = torch.arange(len(chosen))[:, None]
    homes = {int(token): place for place in range(ranks) for token in tokens_of_rank(numbers, place, ranks)}
    rows = []
    for token, experts, _ in chosen:
        places = [int(expert) // each for expert in experts.split(", ")]
        away = sum(place != homes[token] for place in places)
        rows.append((token, homes[token], experts, ", ".join(map(str, places)), away))
    return rows
