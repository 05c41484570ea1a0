"""Charts over the layers of a model: of the JSON of `ffn trace --layer all` or `--prompts`, and of `ffn experts`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffncli.pages.precision import layer_name
from ffncli.show.page.charts import ChartLine, lines
from ffncli.show.page.document import Child, element
from ffncli.show.plots.layers import finite_number, layer_plots

_MOST_SLOTS = 64  # drawn sizes of a cache
_Rows = Sequence[Mapping[str, Any]]
Maps = dict[str, Any]


def layer_charts(rows: _Rows, name: str, data: Maps) -> Iterator[Child]:
    """Yield curves over the layers, and for layers with experts maps and curves; the maps' cells go into `data`."""
    for plot in layer_plots(rows):
        series = [
            ChartLine(one.name, one.points, labels=[f"{one.name}, layer"] * len(one.points)) for one in plot.lines
        ]
        yield element("h3", plot.title)
        yield lines(series, plot.x, plot.y, log_x=False, log_y=plot.log_y)
    yield from _map("Tokens per expert", "tokens", f"{name}-load", [(row, _loads(row)) for row in rows], data)
    for title, key in (
        ("What each expert is worth: mean KL divergence of the next token without it, in nats", "divergence"),
        ("What each expert adds: its share of a token's output", "output_change"),
    ):
        figures = [(row, [finite_number(one.get(key)) or 0.0 for one in _experts(row)]) for row in rows]
        if any(any(some) for _, some in figures):
            yield from _map(title, key, f"{name}-{key}", figures, data)
            break
    yield from _caches(rows)


def _experts(row: Mapping[str, Any]) -> _Rows:
    experts = row.get("experts")
    return [one for one in experts if isinstance(one, Mapping)] if isinstance(experts, list) else []


def _loads(row: Mapping[str, Any]) -> list[float]:
    """Return the number of tokens that each routed expert of a layer receives."""
    routing = row.get("routing")
    loads = routing.get("tokens_per_expert") if isinstance(routing, Mapping) else None
    if not isinstance(loads, list):
        loads = [one.get("tokens") for one in _experts(row)]
    return [number for load in loads if (number := finite_number(load)) is not None]


def _map(title: str, name: str, key: str, figures: Sequence[tuple[Any, list[float]]], data: Maps) -> Iterator[Child]:
    """Yield a heat map with a column per expert and a row per layer; layers whose number of experts differs from the
    first layer's are left out."""
    figures = [(row, some) for row, some in figures if some]
    if not figures:
        return
    import torch

    from ffncli.pages.traces import heat_data

    alike = [(row, some) for row, some in figures if len(some) == len(figures[0][1])]
    cells = heat_data(name, torch.tensor([some for _, some in alike], dtype=torch.float64))
    data[key] = {**cells, "rows": [layer_name(row) for row, _ in alike], "across": "expert"}
    yield element("h3", title)
    yield element("div", data_heat=key)


def _caches(rows: _Rows) -> Iterator[Child]:
    """Yield the share of choices that caches of each size serve, over the choices of all layers."""
    hits: dict[str, dict[int, float]] = {}
    total = sum(finite_number(row.get("choices")) or 0.0 for row in rows)
    for row in rows:
        caches, rates = row.get("caches"), row.get("hit_rates")
        known = [(one.get("policy"), one.get("slots"), one.get("hit_rate"))
                 for one in caches if isinstance(one, Mapping)] if isinstance(caches, list) else []  # fmt: skip
        if not known and isinstance(rates, list):
            known = [("lru", size, rate) for size, rate in enumerate(rates[:_MOST_SLOTS], 1)]
        for policy, slots, rate in known:
            size, share = finite_number(slots), finite_number(rate)
            if size and share is not None and total:
                sizes = hits.setdefault(str(policy), {})
                sizes[int(size)] = sizes.get(int(size), 0.0) + share * (finite_number(row.get("choices")) or 0) / total
    if hits:
        yield element("h3", "Choices that a cache of some of a layer's experts would serve")
        series = [ChartLine(policy, [(float(size), share) for size, share in sorted(sizes.items())])
                  for policy, sizes in hits.items()]  # fmt: skip
        yield lines(series, "experts in the cache", "share of the choices", log_x=False, log_y=False)
