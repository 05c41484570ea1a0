"""Charts over the layers of a model: of the JSON of `ffn trace --layer all` or `--prompts`, and of `ffn experts`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ffncli.pages.precision import finite_number, layer_name
from ffncli.show.page.charts import ChartLine, lines
from ffncli.show.page.document import Child, element

# Charts: the title, the unit of the y axis, and the keys; each key is drawn as one line, if it is in the rows.
_FRAMES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Norms of a token", "mean L2 norm", ("input_norm", "output_norm")),
    ("Shares", "share", ("zero_share", "near_zero_share", "active_share", "dead_share", "busiest_share")),
    ("Minimum and maximum after the activation", "value", ("min", "max")),
    ("Entropy of the experts' load", "bits", ("entropy_bits", "max_entropy_bits")),
    ("Difference from the model's own FFN", "relative error", ("relative_error",)),
)
_MOST_SLOTS = 64  # drawn sizes of a cache
_Rows = Sequence[Mapping[str, Any]]
Maps = dict[str, Any]


def layer_charts(rows: _Rows, name: str, data: Maps) -> Iterator[Child]:
    """Yield curves over the layers, and for layers with experts maps and curves; the maps' cells go into `data`."""
    drawn = []
    for row in rows:  # add the figures of the layer's routing, and the layer's share of dead units
        routing, units, dead = row.get("routing"), finite_number(row.get("units")), finite_number(row.get("dead_units"))
        more = {**routing} if isinstance(routing, Mapping) else {}
        if units and dead is not None:
            more["dead_share"] = dead / units
        drawn.append({**row, **more})
    for title, up, keys in _FRAMES:
        if len(rows) > 1 and (series := _series(drawn, keys)):
            positive = all(y > 0 for one in series for _, y in one.points)
            yield element("h3", title)
            yield lines(series, "layer", up, log_x=False, log_y=positive and up in ("mean L2 norm", "relative error"))
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


def _series(rows: _Rows, keys: Iterable[str]) -> list[ChartLine]:
    """Return a line for each key and stack."""
    stacks = list(dict.fromkeys(str(row.get("stack", "")) for row in rows))
    out = []
    for key in keys:
        for stack in stacks:
            some = [row for row in rows if str(row.get("stack", "")) == stack]
            points = [(float(row["layer"]), y) for row in some if (y := finite_number(row.get(key))) is not None]
            name = key.replace("_", " ") + (f", {stack}" if len(stacks) > 1 else "")
            if points and (key not in ("relative_error", "near_zero_share") or any(y for _, y in points)):
                out.append(ChartLine(name, points, labels=[f"{name}, layer" for _ in points]))
    return out


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
